"""Ctrl-C wherever Python's own locks are left taken by it: the next save must not wait for one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall import AsyncCallsQueue, FileSystemWriterAsync
from nostall.options import EngineOptions
from support.interrupts import interrupted, takes_a_lock
from support.states import schedule

pytestmark = pytest.mark.usefixtures("python_handles_ctrl_c")


def state() -> dict[str, Any]:
    """More than fits into the ring of a save that takes no snapshot."""
    return {"large": torch.arange(1 << 16), "small": torch.ones(3)}


def synchronously(path: Path) -> None:
    dcp.save(state(), storage_writer=FileSystemWriterAsync(path), no_dist=True)


def through_a_queue(path: Path, **options: Any) -> None:
    queue = AsyncCallsQueue()
    try:
        schedule(queue, path, state(), **options)
        nostall.wait_staged()
        queue.maybe_finalize_async_calls(blocking=True)
    finally:
        queue.close(abort=True)


def with_stock_async_save(path: Path) -> None:
    writer = FileSystemWriterAsync(path)
    future = dcp.async_save(state(), storage_writer=writer, no_dist=True)
    future.result()  # type: ignore[union-attr]  # of stock's default


@pytest.mark.slow
@pytest.mark.parametrize(
    "save",
    [
        synchronously,
        through_a_queue,
        partial(through_a_queue, staging="overlapped"),
        with_stock_async_save,
    ],
    ids=["sync", "split", "overlapped", "async_save"],
)
def test_a_save_after_one_that_was_interrupted_at_a_lock_is_committed(
    tmp_path: Path, save: Callable[[Path], None]
) -> None:
    """An interrupted save that has left a lock taken would let the next one wait for ever."""
    nostall.configure(EngineOptions(chunk_nbytes=64 << 10, io_threads=2, save_timeout_s=10.0))
    save(tmp_path)
    with interrupted(0, takes_a_lock) as locks:
        save(tmp_path)
    assert locks[0] > 0
    for at in range(1, locks[0] + 1):
        with suppress(KeyboardInterrupt, CheckpointException), interrupted(at, takes_a_lock):
            save(tmp_path)
        save(tmp_path)
        assert nostall.verify(tmp_path).ok
