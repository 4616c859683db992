"""The states that a crash can leave of a save of two ranks, whichever of them was ahead.

Each rank's operations are recorded by themselves. They may interleave in any way, but for two
things: what lies in a directory comes after the directory, and the coordinator publishes after the
other rank is done. The latter is not assumed but looked up in the recording, in which the second
rank was slow: :meth:`Recording.coordinator_waited`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from support.crashes import Disk, Operation


@dataclass(frozen=True)
class Recording:
    disk: bytes
    """The disk before the save, pickled."""
    ranks: tuple[list[Operation], list[Operation]]
    """Operations of the coordinator and of the other rank."""

    @classmethod
    def read(cls, here: Path) -> Recording:
        """Load the recording that ``programs/recording.py`` has left in a directory."""
        first, second = (
            pickle.loads((here / f"rank-{rank}.pickle").read_bytes()) for rank in range(2)
        )
        return cls((here / "before.pickle").read_bytes(), (first, second))

    @cached_property
    def publishing(self) -> int:
        """The coordinator's first operation on anything but shard files and their directory."""
        of_shards = [each.path for each in self.ranks[0] if each.path.endswith(".distcp")]
        of_shards += [os.path.dirname(path) for path in of_shards]
        return next(n for n, each in enumerate(self.ranks[0]) if each.path not in of_shards)

    @property
    def coordinator_waited(self) -> bool:
        """Whether the second rank was done, its directory synced, before anything was published."""
        last = self.ranks[1][-1]
        is_synced = last.name == "fsync" and not last.path.endswith(".distcp")
        return is_synced and last.at_ns < self.ranks[0][self.publishing].at_ns

    def waits_for(self, rank: int, number: int) -> int:
        """How many operations of the other rank have happened whenever this one has."""
        others, path = self.ranks[1 - rank], self.ranks[rank][number].path
        if rank == 0 and number >= self.publishing:
            return len(others)
        made = [
            before
            for before, each in enumerate(others, 1)
            if each.name == "mkdir" and f"{path}/".startswith(f"{each.path}/")
        ]
        return max(made, default=0)

    def moments(self) -> Iterator[tuple[int, int]]:
        """All pairs of how far the ranks may have come when there is a crash."""
        for first in range(len(self.ranks[0]) + 1):
            for second in range(len(self.ranks[1]) + 1):
                if all(self.waits_for(0, number) <= second for number in range(first)) and all(
                    self.waits_for(1, number) <= first for number in range(second)
                ):
                    yield first, second

    def disks(self, moment: tuple[int, int]) -> Iterator[Disk]:
        """The disk at a moment, if the one rank or the other has run ahead as far as it could.

        The order among ranks matters where one syncs the directory in which both make names.
        """
        for ahead in range(2):
            disk: Disk = pickle.loads(self.disk)
            for operation in self._merged(moment, ahead):
                disk.apply(operation)
            yield disk

    def _merged(self, moment: tuple[int, int], ahead: int) -> Iterator[Operation]:
        done = [0, 0]
        while (done[0], done[1]) != moment:
            for rank in (ahead, 1 - ahead):
                at = done[rank]
                if at < moment[rank] and self.waits_for(rank, at) <= done[1 - rank]:
                    yield self.ranks[rank][at]
                    done[rank] += 1
                    break


def relative(left: dict[str, bytes | None], root: Path) -> tuple[tuple[str, bytes | None], ...]:
    """The remaining files by relative path, in a form to compare and to look up."""
    return tuple(sorted((os.path.relpath(path, root), content) for path, content in left.items()))
