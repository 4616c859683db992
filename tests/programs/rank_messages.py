"""Ranks that send each other messages of all lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nostall._rank_messages import ROOM_NBYTES, broadcast_message, gather_messages
from programs.planning import collectives

LENGTHS = (0, 1, ROOM_NBYTES - 1, ROOM_NBYTES, ROOM_NBYTES + 1, 3 * ROOM_NBYTES, 1_000_000)
CPU = torch.device("cpu")


def message(rank: int, length: int) -> bytes:
    """That rank's message; no two ranks' are alike anywhere."""
    return bytes((7 * rank + position) % 251 for position in range(length))


def everything(out: Path) -> dict[str, Any]:
    """What arrives, of how many collectives, if all are of one length and if one rank's is longer; in a group of two of three
    ranks, too."""
    del out
    here, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 2])
    found: dict[str, Any] = {"wrong": [], "rounds": {}}
    for length in LENGTHS:
        for longer in (None, *range(size)):
            lengths = [length if rank == longer else min(length, 5) for rank in range(size)]
            if longer is None:
                lengths = [length] * size
            with collectives(by_message=False) as seen:
                gathered = gather_messages(
                    message(here, lengths[here]), to=1, group=None, device=CPU
                )
                told = broadcast_message(
                    message(1, lengths[1]) if here == 1 else b"not mine to say",
                    source=1,
                    group=None,
                    device=CPU,
                )
            expected = [message(rank, each) for rank, each in enumerate(lengths)]
            if gathered != (expected if here == 1 else None) or told != expected[1]:
                found["wrong"].append([length, longer])
            found["rounds"][f"{length} {longer}"] = dict(seen)
    if here != 1:
        own = dist.get_rank(pair)
        gathered = gather_messages(message(here, 2000), to=1, group=pair, device=CPU)
        told = broadcast_message(message(here, 2000), source=1, group=pair, device=CPU)
        members = dist.get_process_group_ranks(pair)
        if gathered != ([message(rank, 2000) for rank in members] if own == 1 else None):
            found["wrong"].append("gathered in a pair")
        if told != message(members[1], 2000):
            found["wrong"].append("told in a pair")
    return found
