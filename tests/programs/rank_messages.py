"""Ranks that send each other messages of all lengths, and ranks that cannot leave word."""

from __future__ import annotations

import errno
import logging
import logging.handlers
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist

from nostall import _torch
from nostall._ranks.group import TorchGroup
from nostall.core import AsyncCallsQueue
from programs.entry_points import loaded_wrong
from programs.planning import collectives, failure, make_state
from support.faults import Fault, inject
from support.states import schedule

LENGTHS = (0, 1, 1000, 1_000_000)


def message(rank: int, length: int) -> bytes:
    """That rank's message; no two ranks' are alike anywhere."""
    return bytes((7 * rank + position) % 251 for position in range(length))


def ranks_whose_store_has_gone_still_save(out: Path) -> dict[str, Any]:
    """Two saves of ranks whose store has ended."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    with patch.object(_torch, "default_store", lambda: store), AsyncCallsQueue() as queue:
        for number in (1, 2):
            schedule(queue, out / str(number), make_state(number))
            queue.wait()
    gone = False
    try:
        store.set("anything", "")
    except RuntimeError:
        gone = True
    return {"gone": gone, "wrong": loaded_wrong(out / "2", make_state(2), make_state(0))}


def ranks_without_numpy_save(out: Path) -> dict[str, Any]:
    """A save, and one that fails on rank 1, where torch has no NumPy."""
    heard = logging.handlers.BufferingHandler(1000)
    logging.getLogger("nostall").addHandler(heard)
    unavailable = Mock(side_effect=RuntimeError("Numpy is not available"))
    with patch.object(torch.Tensor, "numpy", unavailable), AsyncCallsQueue() as queue:
        schedule(queue, out / "1", make_state(1))
        queue.wait()
        with inject(Fault.errno("chunk", errno.ENOSPC, file="__1_")):
            schedule(queue, out / "2", make_state(2))
            failed = failure(queue.wait)["ranks"]
    said = [each.getMessage() for each in heard.buffer if each.levelname == "WARNING"]
    wrong = loaded_wrong(out / "1", make_state(1), make_state(0))
    return {"wrong": wrong, "failed ranks": failed, "warning": " ".join(said)}


def messages_of_all_lengths_arrive(out: Path) -> dict[str, Any]:
    """Messages of three ranks, and of two of them, that arrive wrong; and the collectives used."""
    del out
    here, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 2])
    groups = [TorchGroup(None, 1)] + ([] if here == 1 else [TorchGroup(pair, 1)])
    wrong: list[Any] = []
    rounds: list[dict[str, int]] = []
    for length, longer, group in product(LENGTHS, (None, *range(size)), groups):
        expected = [
            message(rank, length if longer in (None, rank) else min(length, 5))
            for rank in range(group.world_size)
        ]
        mine = expected[group.rank]
        with collectives() as seen:
            found = [
                group.gather(mine),
                group.broadcast(mine if group.rank == 1 else b"not mine to say"),
                group.scatter(expected if group.rank == 1 else None),
            ]
        if found != [expected if group.is_coordinator else None, expected[1], mine]:
            wrong.append([length, longer, group.world_size])
        rounds.append(dict(seen))
    return {"wrong": wrong, "rounds": rounds}
