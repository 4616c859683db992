"""Trainers that end with saves that are not finalised, in one way or another."""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import errno
import os
import random
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._engine import Engine
from nostall._queue import ending
from nostall._queue.ending import finish_all_at_exit
from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from support.ending import end
from support.faults import Fault, Hold, inject
from support.interrupts import interrupt_the_wait
from support.states import schedule, small_state
from support.waiting import wait_until


def ends(out: Path, how: str, fault: str = "") -> None:
    """Schedule two saves and let the script end; the queue is let go of before."""
    nostall.configure(EngineOptions(exit_timeout_s=1.0 if fault == "hangs" else 60.0))
    faults = {
        "fails": [Fault.errno("open", 28, file="first/")],
        "hangs": [Fault.kill("chunk", signal.SIGSTOP)],
        "dies": [Fault.kill("chunk", signal.SIGKILL)],
        "": [],
    }[fault]

    def save() -> None:
        queue = AsyncCallsQueue()
        schedule(queue, out / "first", small_state(1))
        if fault != "hangs":
            schedule(queue, out / "second", small_state(2))

    with inject(*faults):
        save()
    print("the last line", flush=False)
    if how == "raises":
        raise ValueError("the error in the body")
    if how == "exits":
        sys.exit(3)


def ends_on_ranks(out: Path, how: str) -> None:
    """Schedule a save on two ranks and let the script end, or let rank 1 exit at once."""
    nostall.configure(EngineOptions(exit_timeout_s=2.0))
    _save_on_ranks(out)
    if how == "one without the others" and dist.get_rank() == 1:
        os._exit(0)


def ends_in_dcp(out: Path, how: str) -> None:
    """Leave a failing save to ``dcp.async_save``, whose thread the interpreter waits for."""

    def full(*_: Any, **__: Any) -> Any:
        if how == "too late to ask":
            # By the thread that waits for this one.
            wait_until(lambda: bool(concurrent.futures.thread._shutdown))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = FileSystemWriterAsync(out / "save", open_file=full)
    saving: Any = dcp.async_save(small_state(), storage_writer=writer, no_dist=True)
    if how == "asked":
        print(type(saving.exception(60)).__name__, flush=True)


def gets_sigterm(out: Path, how: str) -> None:
    """Be asked to end, at some moment, with something to do or not."""
    handled: list[int] = []
    if how == "with a handler":
        signal.signal(signal.SIGTERM, lambda number, _: handled.append(int(number)))
    nostall.drain_on_sigterm({"without a poll": 4.0, "after a failure": 8.0}.get(how, 60.0))
    queue = AsyncCallsQueue()
    if how == "in a synchronous save":
        writer = FileSystemWriterAsync(out / "save")
        with inject(Fault.kill("chunk", signal.SIGTERM)):  # which is this process
            dcp.save(small_state(), storage_writer=writer, no_dist=True)
    elif how == "with nothing to do":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        with Hold("chunk") as hold:
            hold.stop(schedule, queue, out / "save", small_state())
            os.kill(os.getpid(), signal.SIGTERM)
            hold.release()
    print("training goes on", flush=True)
    with nullcontext() if how in ("returns", "exits", "raises") else queue:
        match how:
            case "raises" | "raises in a block":
                raise ValueError("a worker got the signal, too")
            case "exits":
                sys.exit(0)
            case "from another thread":
                thread = threading.Thread(target=queue.wait)
                thread.start()
                thread.join()
                print("finished", queue.pending, flush=True)
            case "after a failure":
                with inject(Fault.errno("open", errno.ENOSPC)):
                    schedule(queue, out / "lost", small_state())
        if how not in ("returns", "at a poll", "with a handler"):
            _train_for_ever()
    print("handled", handled, flush=True)


def gets_sigterm_too_late(out: Path, how: str) -> None:
    """Be asked to end while the writer stands still, in training or in a wait for two saves."""
    waits = how in ("several are pending", "asked twice")
    if how == "asked twice":
        signal.signal(signal.SIGTERM, lambda *_: None)
    nostall.drain_on_sigterm(grace_s=2.0)
    if waits or how == "slow to give up":
        give_up = Engine.abort

        def abort(self: Engine, reason: str) -> None:
            give_up(self, reason)
            threading.Event().wait(30)

        Engine.abort = abort  # type: ignore[method-assign]  # slower than the grace time
    if how == "asked twice":
        os.kill(os.getpid(), signal.SIGTERM)  # and again before its watch looks
    queue = AsyncCallsQueue()
    with nullcontext() if waits or how == "at exit" else queue:
        with inject(Fault.kill("chunk", signal.SIGSTOP)):
            for name in ("save", "behind")[: 1 + waits]:
                schedule(queue, out / name, small_state())
        os.kill(os.getpid(), signal.SIGTERM)
        if waits:
            queue.wait()
        _train_for_ever()


def gets_sigterm_at(out: Path, first: str, moments: str, step: str) -> None:
    """Fork a trainer per moment, and signal it that many calls after its close() begins.

    Later moments are at the interpreter's end. Every second trainer leaves a save to that.
    """
    for number in range(int(moments)):
        moment = int(first) + number // 2 * int(step)
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            print(number, os.waitstatus_to_exitcode(status), flush=True)
            continue
        _close_and_end(out / f"{number}", moment, leaves_one=number % 2 == 1)


def _close_and_end(path: Path, moment: int, *, leaves_one: bool) -> None:
    """Close a queue with a save, and leave another one to the end of the interpreter."""
    count = 0

    def look(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        if event in ("call", "c_return"):
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGTERM)

    status = 0
    nostall.drain_on_sigterm(grace_s=60.0)
    left = AsyncCallsQueue()
    if leaves_one:
        schedule(left, path / "left", small_state(2))
    queue = AsyncCallsQueue()
    schedule(queue, path / "closed", small_state(1))
    try:
        sys.setprofile(look)
        queue.close()
    except SystemExit as error:
        status = int(str(error))
    finally:
        # A fork that came from elsewhere than the interpreter's main loop does not end as a script.
        end(status)


def _train_for_ever() -> None:
    while True:
        time.sleep(0.01)  # a step, after which the main thread looks for signals


def _save_on_ranks(out: Path) -> AsyncCallsQueue:
    """A queue with a save in progress."""
    queue = AsyncCallsQueue()
    schedule(queue, out / "save", {f"rank{dist.get_rank()}": torch.ones(1000)})
    return queue


def is_interrupted(out: Path) -> None:
    """Ctrl-C in a synchronous save, repeated until it hits its threads at work, then a save."""
    # Ignored, if these tests were started in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nostall.configure(EngineOptions(chunk_nbytes=64 << 10, io_threads=4))
    state = {"t": torch.arange(4 << 20)}
    interrupted = 0
    for number in range(20):
        writer = FileSystemWriterAsync(out / "save")
        with inject(
            Fault({"point": "chunk", "do": "kill", "signal": signal.SIGINT, "after": number})
        ):
            try:
                dcp.save(state, storage_writer=writer, no_dist=True)
            except (CheckpointException, KeyboardInterrupt):
                interrupted += 1
        # One whose start was interrupted finds out that it is too late, and touches neither memory
        # nor files.
        for thread in threading.enumerate():
            # One whose start was interrupted even earlier never begins, and cannot be waited for.
            if thread.name.startswith("nostall-io") and thread._started.wait(1):  # type: ignore[attr-defined]  # of threading
                thread.join(60)
                assert not thread.is_alive(), thread.name
        files = sorted(path.name for path in (out / "save").glob("*"))
        assert not files or (out / "save" / ".metadata").exists(), files
        state["t"] += 1
    dcp.save(state, storage_writer=FileSystemWriterAsync(out / "save"), no_dist=True)
    print("interrupted" if interrupted else "never interrupted", int(state["t"][0]))


def forks_when_asked(out: Path) -> None:
    """A child that is forked between the signal and the next poll is a process like any other."""
    nostall.drain_on_sigterm(grace_s=60.0)
    with Hold("chunk") as hold:
        queue = AsyncCallsQueue()
        hold.stop(schedule, queue, out / "save", small_state())
        os.kill(os.getpid(), signal.SIGTERM)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, b"here")
            signal.pause()
            os._exit(0)
        os.read(reading, 4)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        hold.release()
        queue.close()


def queues_are_finished_in_the_same_order_on_all_ranks(out: Path) -> None:
    """Two queues with a save each, at other addresses on each rank, are left to the exit."""
    kept = [bytes(random.randrange(1, 5000)) for _ in range(random.randrange(200))]
    queues = [AsyncCallsQueue() for _ in range(6)]
    for number, queue in enumerate(queues):
        schedule(
            queue, out / f"{number}", {f"rank{dist.get_rank()}": torch.full((9,), float(number))}
        )
    del queues, kept
    # As in a script that forgets it; but not to the very end, where threads of a group that is
    # still there may abort the process (see rank_main.py). What is registered last runs first.
    destroy, dist.destroy_process_group = dist.destroy_process_group, lambda *_: None
    atexit.unregister(finish_all_at_exit)
    atexit.register(destroy)
    atexit.register(finish_all_at_exit)


def sigterm_on_one_rank_lets_all_finish_within_two_polls(out: Path) -> dict[str, Any]:
    """Only rank 1 is asked to end; both poll once a step."""
    nostall.drain_on_sigterm(grace_s=60.0)
    ended = None
    polls = 0
    with Hold("chunk") as hold:
        queue = hold.stop(_save_on_ranks, out)
        queue.poll()
        assert queue.pending == 1
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        hold.release()
        try:
            while queue.pending:
                polls += 1
                queue.poll()
        except SystemExit as error:
            ended = error.code
    ok = nostall.verify(out / "save").ok
    return {"ended": ended, "polls": polls, "pending": queue.pending, "ok": ok}


def a_poll_does_not_wait_for_ranks_that_poll_later(out: Path) -> bool:
    """Rank 1 polls only when rank 0's poll has returned."""
    store = dist.distributed_c10d._get_default_store()
    queue = _save_on_ranks(out)
    if dist.get_rank() == 0:
        assert queue.poll() == []
        store.set("rank 0 has polled", "")
    else:
        store.wait(["rank 0 has polled"])
        assert queue.poll() == []
    while queue.pending:
        queue.poll()
    return nostall.verify(out / "save").ok


def a_second_ctrl_c_leaves_the_wait_for_other_ranks(out: Path) -> str:
    """Rank 0 waits for rank 1, which goes on only when that has been interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = dist.distributed_c10d._get_default_store()
    queue = _save_on_ranks(out)
    left = "nothing"
    if dist.get_rank() == 0:
        interrupting = interrupt_the_wait(2)
        try:
            queue.wait()
        except KeyboardInterrupt:
            left = "the wait"
        interrupting.join()
        store.set("rank 0 has left", "")
    else:
        store.wait(["rank 0 has left"])
    queue.close(abort=True)
    return left


def one_raises_after_a_poll_while_the_other_hangs(out: Path) -> None:
    """torch would wait for rank 1 before it ends the process of rank 0."""
    ending.LEAVING_S = 0.5
    with _save_on_ranks(out) as queue:
        if dist.get_rank() == 0:
            queue.poll()
            raise ValueError("the error in the loop")
        threading.Event().wait()


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
