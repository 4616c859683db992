"""What the reads of one load share."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed.checkpoint.planner import LoadPlanner

from nostall._memory.uploads import Uploads
from nostall._read.items.archives import Archives
from nostall._read.items.workers import Workers
from nostall._read.plan import REGION_NBYTES


class Buffers:
    """Memory for small items, one piece for each thread that reads some: new memory is slow."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self, nbytes: int) -> bytearray:
        """Memory of at least this length, with any content; for one thread until it gives it."""
        if nbytes > REGION_NBYTES:
            return bytearray(nbytes)
        try:
            return self._free.pop()
        except IndexError:
            return bytearray(REGION_NBYTES)

    def give(self, memory: bytearray) -> None:
        """Take memory back for the next one; what is larger than most is freed."""
        if len(memory) == REGION_NBYTES:
            self._free.append(memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The planner, the threads, and what they know and use again."""

    planner: LoadPlanner
    """Called on the caller's thread only."""
    workers: Workers
    archives: Archives
    uploads: Uploads
    buffers: Buffers = field(default_factory=Buffers)
