"""Saves of a known structure by two ranks, whose metadata the coordinator writes ahead."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall import _ahead
from nostall._storage.posix import UnfinishedFile
from nostall.core import AsyncCallsQueue
from nostall.state_dict_saver import CheckpointMetadataCache
from nostall.testing import Fault, inject
from states import schedule


def saves(out: Path) -> dict[str, Any]:
    """Four saves to learn the structure, then three: one that works, one that fails on rank 1, and one that works."""
    _ahead.WORTH_IT_NBYTES = 0
    rank, cache = dist.get_rank(), CheckpointMetadataCache()
    taken: list[UnfinishedFile | None] = []
    take = _ahead.WrittenAhead.take

    def noted(*args: Any, **options: Any) -> UnfinishedFile | None:
        taken.append(take(*args, **options))
        return taken[-1]

    _ahead.WrittenAhead.take = noted  # type: ignore[method-assign]  # to see what becomes of it
    state = {f"rank {rank}, {n}": torch.full((100,), float(n)) for n in range(5)}
    failure = ""
    with AsyncCallsQueue() as queue:
        for number in range(7):
            fails = number == 5
            with ExitStack() as faults:
                if fails and rank == 1:
                    faults.enter_context(inject(Fault.errno("chunk", errno.ENOSPC)))
                schedule(queue, out / str(number), state, cache=cache)
            try:
                queue.maybe_finalize_async_calls(blocking=True)
            except CheckpointException as error:
                assert fails
                failure = str(error)
    dist.barrier()
    return {
        "was written ahead": bool(taken) and taken[0] is not None,
        "whole": [nostall.is_complete(out / str(number), deep=True) for number in (4, 5, 6)],
        "failure": failure,
        "left": [str(path) for path in out.rglob("*.tmp")],
    }
