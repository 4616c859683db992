"""The items to read, and which of them one read brings. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import ReadItem

SMALL_NBYTES = 256 << 10
"""Items up to this length are read together with their neighbours."""
_GAP_NBYTES = 64 << 10
"""Bytes between two items that are read rather than skipped."""
_REGION_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An item to read."""

    item: ReadItem
    file: str
    offset: int
    """Where its archive begins in the file."""
    nbytes: int
    """Length of the archive."""

    @property
    def end(self) -> int:
        """Where its archive ends."""
        return self.offset + self.nbytes

    @property
    def name(self) -> str:
        """Its name, for errors."""
        return str(self.item.storage_index.fqn)


def regions(ordered: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Items in the order of their offsets, small neighbours together, large ones alone."""
    region: list[Wanted] = []
    for each in ordered:
        is_near = (
            region
            and each.nbytes <= SMALL_NBYTES
            and each.offset - region[-1].end <= _GAP_NBYTES
            and each.end - region[0].offset <= _REGION_NBYTES
            and region[-1].nbytes <= SMALL_NBYTES
        )
        if region and not is_near:
            yield region
            region = []
        region.append(each)
    if region:
        yield region
