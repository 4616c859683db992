"""Ranks that use names and behaviours of NVRx."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nostall.core import AsyncCallsQueue, AsyncRequest, abort_nvrx_checkpoint
from nostall.errors import SaveAbortedError
from programs.entry_points import State, loaded_wrong
from support.faults import Hold, inject
from support.states import schedule
from support.waiting import stands_in, wait_until

Facts = dict[str, Any]


def _state(seed: int) -> State:
    return {f"own {dist.get_rank()}": torch.full((1000,), float(seed))}


def closed_on_one_rank(out: Path) -> Facts:
    """Rank 1 closes its queue between two requests."""
    del out
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(None, [], []))
    queue.wait()
    if dist.get_rank() == 1:
        queue.close()
    index = queue.schedule_async_request(AsyncRequest(None, [], []))
    finalized = queue.wait() == [index]
    queue.close()
    return {"index": index, "finalized": finalized}


def error_of_a_save_that_a_monitor_aborts(queue: AsyncCallsQueue, path: Path, state: State) -> str:
    """A thread aborts everything while the main thread waits for the save."""

    def monitor() -> None:
        hold.wait_reached()
        waits_in = AsyncCallsQueue.maybe_finalize_async_calls
        wait_until(lambda: stands_in(threading.main_thread(), waits_in))
        abort_nvrx_checkpoint()

    error = "none"
    with Hold("report") as hold:
        with inject(hold.fault):
            schedule(queue, path, state)
        aborting = threading.Thread(target=monitor)
        aborting.start()
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except SaveAbortedError as raised:
            error = type(raised).__name__
        aborting.join()
    return error


def restarted_in_process(out: Path) -> Facts:
    """Abort a save while it is waited for, like after a fault, and save again on these ranks."""
    queue = AsyncCallsQueue()
    error = error_of_a_save_that_a_monitor_aborts(queue, out / "aborted", _state(1))
    dist.barrier()
    left = sorted(path.name for path in (out / "aborted").iterdir())
    schedule(queue, out / "after", _state(2))
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return {
        "error": error,
        "left": left,
        "wrong": loaded_wrong(out / "after", _state(2), _state(0)),
    }


def two_ranks(out: Path) -> dict[str, Facts]:
    """All scenarios for two ranks."""
    return {
        scenario.__name__: scenario(out / scenario.__name__)
        for scenario in (closed_on_one_rank, restarted_in_process)
    }
