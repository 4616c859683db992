"""Ctrl-C anywhere in a save: it takes nothing that the next one needs, such as a lock or memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall import AsyncCallsQueue, FileSystemWriterAsync
from nostall._engine import default_engine
from nostall._memory.fence import any_under_way
from nostall.options import EngineOptions
from support.interrupts import calls, interrupted, takes_a_lock
from support.states import schedule
from support.waiting import wait_until

pytestmark = [
    pytest.mark.usefixtures("python_handles_ctrl_c"),
    # Where Ctrl-C comes in a finalizer, the interpreter reports it and goes on.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Save = Callable[[Path], None]
_PLACES = 40
"""So many of all the places, evenly spread, in each run."""


def state() -> dict[str, Any]:
    """More than fits into the ring of a save that takes no snapshot."""
    return {"large": torch.arange(1 << 16), "small": torch.ones(3)}


def synchronous(path: Path) -> None:
    dcp.save(state(), storage_writer=FileSystemWriterAsync(path), no_dist=True)


def split(path: Path, **options: Any) -> None:
    queue = AsyncCallsQueue()
    try:
        schedule(queue, path, state(), **options)
        nostall.wait_staged()
        queue.maybe_finalize_async_calls(blocking=True)
    finally:
        queue.close(abort=True)


def through_tier(path: Path) -> None:
    tier = path.parent / "tier"
    writer = FileSystemWriterAsync(path, local_staging_dir=tier, local_staging_limit=1)
    dcp.save(state(), storage_writer=writer, no_dist=True)


def held() -> list[str]:
    """What interrupted saves still hold, but for what the next save would collect."""
    gc.collect()
    arena = default_engine().arena
    names = [thread.name for thread in threading.enumerate()]
    found = [name for name in names if name.startswith(("nostall-writer", "nostall-staging"))]
    found += ["a lease"] * len(arena._leased) + ["a block that is made"] * len(arena._makers)
    return found + ["a snapshot under way"] * any_under_way()


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("happens", [takes_a_lock, calls])
@pytest.mark.parametrize(
    ("save", "waves"),
    [
        (synchronous, None),
        (split, None),
        (split, 64 << 10),
        (partial(split, staging="overlapped"), None),
        (through_tier, None),
    ],
    ids=["sync", "split", "waves", "overlapped", "tier"],
)
def test_a_save_after_an_interrupted_one_is_committed(
    tmp_path: Path,
    save: Save,
    waves: int | None,
    happens: Callable[[FrameType, str], bool],
    times: int,
) -> None:
    """Wherever the main thread was, and if Ctrl-C was pressed once more at once."""
    options = EngineOptions(
        chunk_nbytes=64 << 10, io_threads=2, save_timeout_s=20.0, max_staging_bytes=waves
    )
    nostall.configure(options)
    path = tmp_path / "save"
    save(path)
    with interrupted(0, happens) as passed:
        save(path)
    step = max(1, passed[0] // _PLACES)
    for at in range(1, passed[0] + 1, step):
        errors = suppress(KeyboardInterrupt, CheckpointException)
        with errors, interrupted(at, happens, times=times):
            save(path)
        # The old checkpoint or the new one; in a tier, it is brought to its path meanwhile.
        assert save is through_tier or nostall.verify(path).ok
    wait_until(lambda: not held())
    save(path)
    wait_until(lambda: nostall.verify(path).ok)
