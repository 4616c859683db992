"""Ranks that send each other what they have read; the port is in ``_read/sharing.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from nostall import _torch
from nostall._ranks.group import TorchGroup, require_members
from nostall.errors import OptionError

_BLOCK_NBYTES = 8 << 20
"""How much is sent at a time: the group's deadline is for a block, however long the message."""


def require_cpu_members(group: dist.ProcessGroup) -> None:
    """Raise ``OptionError`` unless this rank is in the group, and the group sends CPU tensors."""
    require_members(group, 0)
    if _torch.device_for_collectives(group).type != "cpu":
        raise OptionError(
            f"process_group has the backend {dist.get_backend(group)}, which cannot send bytes that"
            " are on the CPU",
            hint='use a group that can: torch.distributed.new_group(backend="gloo")',
        )


class GroupPeers:
    """The ranks of a process group with a backend for the CPU, such as gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = TorchGroup(group, 0)
        self.rank = self._ranks.rank
        self.world_size = self._ranks.world_size

    def first_failed(self, *, failed: bool) -> int | None:
        """One all_reduce of an integer."""
        mine = self.world_size - self.rank if failed else 0
        (highest,) = self._ranks.maximum([mine])
        return self.world_size - highest if highest else None

    def exchange(
        self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Sends and receives all at once: no order can make two ranks wait for each other."""
        with self._ranks.together():
            works = [
                dist.irecv(block, group=self._group, group_src=rank)
                for rank, block in _blocks(received)
            ]
            works += [
                dist.isend(block, group=self._group, group_dst=rank)
                for rank, block in _blocks(sent)
            ]
            for work in works:
                assert work is not None  # this rank is in the group
                work.wait()


def _blocks(messages: Iterable[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
    for rank, content in messages:
        for block in content.split(_BLOCK_NBYTES):
            yield rank, block
