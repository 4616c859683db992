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
from nostall._commit import ahead
from nostall._storage.port import Draft
from nostall.core import AsyncCallsQueue
from nostall.state_dict_saver import CheckpointMetadataCache
from nostall.testing import Fault, inject
from support.long_metadata import treat_metadata_as_long
from support.states import schedule


def a_coordinator_writes_ahead_for_all_ranks(out: Path) -> dict[str, Any]:
    """Saves to learn the structure, one that is written ahead, and one that fails on rank 1.

    The same once more, but that rank 1's structure has changed by the last one.
    """
    treat_metadata_as_long()
    rank, cache = dist.get_rank(), CheckpointMetadataCache()
    taken: dict[int, bool] = {}
    take = ahead.WrittenAhead.take

    def noted(*args: Any, **options: Any) -> Draft | None:
        file = take(*args, **options)
        taken[number] = file is not None
        return file

    ahead.WrittenAhead.take = noted  # type: ignore[method-assign]  # to see what becomes of it
    state = {f"rank {rank}, {n}": torch.full((100,), float(n)) for n in range(5)}
    failure = ""
    with AsyncCallsQueue() as queue:
        for number in range(12):
            fails = number == 5
            if number == 11 and rank == 1:
                state["rank 1, 3"] = torch.zeros(7, dtype=torch.float64)
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
        "taken": [n for n, is_taken in taken.items() if is_taken],
        "broken": [n for n in range(12) if not nostall.is_complete(out / str(n), deep=True)],
        "failure": failure,
        "left": [str(path) for path in out.rglob("*.tmp")],
    }
