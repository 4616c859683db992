"""Ranks that send each other messages of all lengths, and ranks that cannot leave word."""

from __future__ import annotations

import errno
import logging
import logging.handlers
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from nostall import _torch
from nostall._ranks.group import TorchGroup
from nostall.core import AsyncCallsQueue
from programs.entry_points import loaded_wrong
from programs.planning import collectives, make_state
from support.faults import Fault, inject
from support.states import schedule

LENGTHS = (0, 1, 1000, 1_000_000)


def message(rank: int, length: int) -> bytes:
    """That rank's message; no two ranks' are alike anywhere."""
    return bytes((7 * rank + position) % 251 for position in range(length))


STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def ranks_whose_store_has_gone_still_save(out: Path) -> dict[str, Any]:
    """Two saves of ranks whose store has been killed."""
    server = subprocess.Popen(
        [sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
    server.kill()
    server.communicate()
    _torch.default_store = lambda: store
    with AsyncCallsQueue() as queue:
        for number in (1, 2):
            schedule(queue, out / str(number), make_state(number))
            queue.wait()
    try:
        store.set("anything", "")
    except RuntimeError:
        gone = True
    else:
        gone = False
    return {"gone": gone, "wrong": loaded_wrong(out / "2", make_state(2), make_state(0))}


def ranks_without_numpy_save(out: Path) -> dict[str, Any]:
    """A save, and one that fails on rank 1, where torch has no NumPy."""
    numpy, failed = torch.Tensor.numpy, [-1]
    heard = logging.handlers.BufferingHandler(1000)
    logging.getLogger("nostall").addHandler(heard)

    def unavailable(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("Numpy is not available")

    torch.Tensor.numpy = unavailable  # type: ignore[method-assign]  # as torch does without it
    try:
        with AsyncCallsQueue() as queue:
            schedule(queue, out / "1", make_state(1))
            queue.wait()
            with inject(Fault.errno("chunk", errno.ENOSPC, file="__1_")):
                schedule(queue, out / "2", make_state(2))
                try:
                    queue.wait()
                except CheckpointException as error:
                    failed = sorted(error.failures)
    finally:
        torch.Tensor.numpy = numpy  # type: ignore[method-assign]  # dcp.load needs it
    return {
        "wrong": loaded_wrong(out / "1", make_state(1), make_state(0)),
        "failed ranks": failed,
        "warning": " ".join(
            each.getMessage() for each in heard.buffer if each.levelname == "WARNING"
        ),
    }


def messages_of_all_lengths_arrive(out: Path) -> dict[str, Any]:
    """Messages that arrive wrong, and collectives used, if one rank's message is longer or none is.

    In a group of two of three ranks, too.
    """
    del out
    here, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 2])
    groups = [TorchGroup(None, 1)]
    if here != 1:
        groups.append(TorchGroup(pair, 1))
    wrong: list[Any] = []
    rounds: list[dict[str, int]] = []
    for length in LENGTHS:
        for longer in (None, *range(size)):
            for group in groups:
                expected = [
                    message(rank, length if longer in (None, rank) else min(length, 5))
                    for rank in range(group.world_size)
                ]
                mine = expected[group.rank]
                with collectives() as seen:
                    gathered = group.gather(mine)
                    told = group.broadcast(mine if group.rank == 1 else b"not mine to say")
                    given = group.scatter(expected if group.rank == 1 else None)
                    everything = group.all_gather(mine)
                if gathered != (expected if group.is_coordinator else None) or (
                    told,
                    given,
                    everything,
                ) != (expected[1], mine, expected):
                    wrong.append([length, longer, group.world_size])
                rounds.append(dict(seen))
    return {"wrong": wrong, "rounds": rounds}
