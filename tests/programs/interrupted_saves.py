"""Ctrl-C at many places of a save, then a save that must be committed.

In a process of its own: an interrupt in one of Python's own locks, such as those of ``logging``,
would stay with the tests that come after it.
"""

from __future__ import annotations

import faulthandler
import gc
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall import AsyncCallsQueue
from nostall._engine import default_engine
from nostall._memory.overlap import any_snapshot_in_progress
from nostall.options import EngineOptions
from support.ending import end
from support.interrupts import calls, interrupted, takes_a_lock
from support.states import save_now, schedule
from support.waiting import wait_until

_PLACES = 80
"""So many of all the places, evenly spread, in each run."""
_LONGEST_S = 80
"""After that the stacks of all threads are printed: a save hangs."""


def state() -> dict[str, Any]:
    """More than fits into the ring of a save that takes no snapshot."""
    return {"large": torch.arange(1 << 16), "small": torch.ones(3)}


def split(path: Path, **options: Any) -> None:
    queue = AsyncCallsQueue()
    try:
        schedule(queue, path, state(), **options)
        nostall.wait_staged()
        queue.maybe_finalize_async_calls(blocking=True)
    finally:
        queue.close(abort=True)


SAVES: dict[str, Callable[[Path], None]] = {
    "sync": lambda path: save_now(path, state()),
    "split": split,
    "waves": split,
    "overlapped": partial(split, staging="overlapped"),
    "tier": lambda path: save_now(
        path, state(), local_staging_dir=path.parent / "tier", local_staging_limit=1
    ),
}
HAPPENS = {"call": calls, "lock": takes_a_lock}


def held() -> list[str]:
    """Resources held by interrupted saves, without those that the next save would collect."""
    gc.collect()
    arena = default_engine().arena
    names = [thread.name for thread in threading.enumerate()]
    found = [name for name in names if name.startswith(("nostall-writer", "nostall-staging"))]
    found += ["a lease"] * len(arena._leased) + ["a block that is made"] * len(arena._makers)
    return found + ["a snapshot in progress"] * any_snapshot_in_progress()


def main(kind: str, happens: str, path: Path, offset: float) -> None:
    """Print how many of the saves were interrupted, at what kind of places.

    ``offset`` is the first place, as a part of the distance between two.
    """
    faulthandler.dump_traceback_later(_LONGEST_S, exit=True)
    save = SAVES[kind]
    options = EngineOptions(
        chunk_nbytes=64 << 10,
        io_threads=2,
        save_timeout_s=20.0,
        max_staging_bytes=64 << 10 if kind == "waves" else None,
    )
    nostall.configure(options)
    save(path)
    with interrupted(0, HAPPENS[happens]) as passed:
        save(path)
    step = max(1, passed[0] // _PLACES)
    interrupts = 0
    for number, at in enumerate(range(1 + int(offset * step), passed[0] + 1, step)):
        try:
            with interrupted(at, HAPPENS[happens], times=1 + number % 2):
                save(path)
        except (KeyboardInterrupt, CheckpointException):
            interrupts += 1
        # The old checkpoint or the new one; in a tier, it is brought to its path meanwhile.
        assert kind == "tier" or nostall.verify(path).ok, at
    wait_until(lambda: not held())
    save(path)
    wait_until(lambda: nostall.verify(path).ok)
    print(interrupts)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
    end()
