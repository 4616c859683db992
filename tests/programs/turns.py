"""Ranks of one host that write a few at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import nostall
from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan


def _in_the_background(state: dict[str, Any], writer: FileSystemWriterAsync) -> None:
    queue = AsyncCallsQueue()
    planned = save_state_dict_async_plan(state, writer)
    save_fn, preload_fn, args = writer.get_save_function_and_args()
    finalize: list[Callable[[], Any]] = [partial(save_state_dict_async_finalize, *planned)]
    queue.schedule_async_request(AsyncRequest(save_fn, args, finalize, {}, preload_fn))
    queue.wait()
    queue.close()


def some_saves(out: Path, way: str) -> list[tuple[float, float]]:
    """When this rank wrote, from its first file to its last, in three saves."""
    nostall.configure(EngineOptions(writers_per_host=1))
    found = []
    for number in range(3):
        state = {f"{dist.get_rank()}/{item}": torch.rand(1 << 18) for item in range(6)}
        writer = FileSystemWriterAsync(out / f"{number}", thread_count=3)
        if way == "split":
            _in_the_background(state, writer)
        else:
            dcp.save(state, storage_writer=writer)
        written = writer._rank_save.receipts
        began_s = min(each.started_s for each in written)
        found.append((began_s, max(each.finished_s for each in written)))
    return found
