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
from nostall._ranks.messages import (
    ROOM_NBYTES,
    broadcast_message,
    gather_messages,
    scatter_messages,
)
from nostall.core import AsyncCallsQueue
from programs.entry_points import loaded_wrong
from programs.planning import collectives, make_state
from support.faults import Fault, inject
from support.states import schedule

LENGTHS = (0, 1, ROOM_NBYTES - 1, ROOM_NBYTES, ROOM_NBYTES + 1, 3 * ROOM_NBYTES, 1_000_000)
CPU = torch.device("cpu")


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


def messages_of_all_lengths_arrive_and_short_ones_in_one_collective(out: Path) -> dict[str, Any]:
    """What arrives, and in how many collectives, if one rank's message is longer or none is.

    In a group of two of three ranks, too.
    """
    del out
    here, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 2])
    found: dict[str, Any] = {"wrong": [], "rounds": {}}
    for length in LENGTHS:
        for longer in (None, *range(size)):
            lengths = [length if rank == longer else min(length, 5) for rank in range(size)]
            if longer is None:
                lengths = [length] * size
            with collectives(long_messages=True) as seen:
                gathered = gather_messages(
                    message(here, lengths[here]), receiver=1, group=None, device=CPU
                )
                told = broadcast_message(
                    message(1, lengths[1]) if here == 1 else b"not mine to say",
                    sender=1,
                    group=None,
                    device=CPU,
                )
            expected = [message(rank, each) for rank, each in enumerate(lengths)]
            sent = expected if here == 1 else None
            scattered = scatter_messages(sent, sender=1, group=None, device=CPU)
            everything = gather_messages(expected[here], receiver=None, group=None, device=CPU)
            if scattered != expected[here] or list(everything or ()) != expected:
                found["wrong"].append([length, longer, "to all ranks"])
            if gathered != (expected if here == 1 else None) or told != expected[1]:
                found["wrong"].append([length, longer])
            found["rounds"][f"{length} {longer}"] = dict(seen)
    if here != 1:
        own = dist.get_rank(pair)
        gathered = gather_messages(message(here, 2000), receiver=2, group=pair, device=CPU)
        told = broadcast_message(message(here, 2000), sender=2, group=pair, device=CPU)
        members = dist.get_process_group_ranks(pair)
        both = [message(rank, 2000 + rank) for rank in members]
        if scatter_messages(both, sender=2, group=pair, device=CPU) != both[own]:
            found["wrong"].append("scattered in a pair")
        if gathered != ([message(rank, 2000) for rank in members] if own == 1 else None):
            found["wrong"].append("gathered in a pair")
        if told != message(members[1], 2000):
            found["wrong"].append("told in a pair")
    return found
