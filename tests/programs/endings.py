"""Trainers that end with saves that are not finalised, in one way or another."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nostall
from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.errors import SaveTimeoutError
from nostall.options import EngineOptions
from nostall.testing import Fault, Hold, inject
from states import schedule, small_state


def ends(out: Path, how: str, fault: str = "") -> None:
    """Schedule two saves and let the script end; the queue is let go of before."""
    nostall.configure(EngineOptions(exit_timeout_s=3.0 if fault == "hangs" else 60.0))
    faults = {
        "fails": [Fault.errno("open", 28, file="first/")],
        "hangs": [Fault.kill("chunk", signal.SIGSTOP)],
        "dies": [Fault.kill("chunk", signal.SIGKILL)],
        "": [],
    }[fault]

    def save() -> None:
        queue = AsyncCallsQueue()
        schedule(queue, out / "first", small_state(1))
        schedule(queue, out / "second", small_state(2))

    with inject(*faults):
        save()
    print("the last line", flush=False)
    if how == "raises":
        raise ValueError("the error in the body")
    if how == "exits":
        sys.exit(3)


def ends_on_ranks(out: Path, how: str) -> None:
    """As ``ends``, on two ranks; the process group is still there, or not."""
    nostall.configure(EngineOptions(exit_timeout_s=5.0 if how != "together" else 60.0))
    queue = AsyncCallsQueue()
    schedule(queue, out / "first", {f"rank{dist.get_rank()}": torch.ones(1000)})
    if how == "one without the others" and dist.get_rank() == 1:
        os._exit(0)
    if how == "together":
        dist.destroy_process_group = lambda *_: None  # as in a script that forgets it


def gets_sigterm(out: Path, how: str) -> None:
    """Be asked to end while a save is held up, which goes on when the handler waits for it."""
    handled: list[int] = []
    if how == "with a handler":
        signal.signal(signal.SIGTERM, lambda number, _: handled.append(int(number)))
    nostall.drain_on_sigterm(grace_s=2.0 if how == "too late" else 60.0)
    hold = Hold("chunk")
    with AsyncCallsQueue() as queue:
        if how != "with nothing to do":
            with inject(Fault.kill("chunk", signal.SIGSTOP) if how == "too late" else hold.fault):
                schedule(queue, out / "save", small_state())
        if how not in ("with nothing to do", "too late"):
            hold.wait_reached()
            _release_from_another_process(hold)
        os.kill(os.getpid(), signal.SIGTERM)
        print("training goes on", handled, queue.pending)


def _release_from_another_process(hold: Hold) -> None:
    if os.fork() == 0:
        time.sleep(0.3)  # the signal may come before or after: either is right
        hold.release()
        os._exit(0)


def gets_sigterm_on_ranks(out: Path) -> dict[str, Any]:
    """Only rank 1 is asked to end; both poll once a step."""
    rank = dist.get_rank()
    nostall.drain_on_sigterm(grace_s=60.0)
    ended = None
    polls = 0
    with Hold("chunk") as hold:
        queue = AsyncCallsQueue()
        with inject(hold.fault):
            schedule(queue, out / "save", {f"rank{rank}": torch.ones(1000)})
        hold.wait_reached()
        queue.poll()
        assert queue.pending == 1
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        hold.release()
        try:
            while queue.pending:
                polls += 1
                queue.poll()
        except SystemExit as error:
            ended = error.code
    return {"ended": ended, "polls": polls, "pending": queue.pending}


def does_not_poll(out: Path, scheduled: str) -> str | None:
    """Rank 1 does not take part in a poll, having scheduled a request, or none."""
    nostall.configure(EngineOptions(save_timeout_s=2.0))
    store = dist.distributed_c10d._get_default_store()
    queue = AsyncCallsQueue()
    said = None
    if dist.get_rank() == 0 or scheduled == "1":
        queue.schedule_async_request(AsyncRequest(None, (), []))
    dist.barrier()
    if dist.get_rank() == 0:
        try:
            queue.wait()
        except SaveTimeoutError as error:
            said = str(error)
        store.set("rank 0 is done", "")
    else:
        store.wait(["rank 0 is done"])
    queue.close(abort=True)
    return said


def main() -> None:
    """``python endings.py FUNCTION OUT ARGUMENT...``."""
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])


if __name__ == "__main__":
    main()
