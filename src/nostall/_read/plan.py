"""The items to read, how many bytes that takes, and which items one read brings. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

SMALL_NBYTES = 256 << 10
"""Items up to this length are read together with their neighbours."""
_GAP_NBYTES = 64 << 10
"""Bytes between two items that are read rather than skipped."""
REGION_NBYTES = 4 << 20
"""Most that one read of small items brings."""

RowsOf: TypeAlias = Callable[[ReadItem], "int | None"]
"""Rows of an item's stored tensor; ``None`` if all of them are read for any slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Common properties of the archives of tensors that differ in their values only."""

    prefix: bytes
    """All bytes before the values."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the values."""
    has_checksum: bool = True
    """Whether a descriptor is after the values, if there are any."""

    @property
    def begin(self) -> int:
        """Where the values begin."""
        return len(self.prefix)


class Span(NamedTuple):
    """Consecutive bytes of a file, such as an archive."""

    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.end - self.begin


class Wanted(NamedTuple):  # made in a quarter of the time of a frozen dataclass
    """An item to read."""

    item: ReadItem
    file: str
    offset: int
    """Where its archive begins in the file."""
    nbytes: int
    """Length of the archive."""
    form: Form | None = None
    """Set if the item's bytes are its values without an archive, as in safetensors."""

    @property
    def end(self) -> int:
        """Where its archive ends."""
        return self.offset + self.nbytes

    @property
    def name(self) -> str:
        """Its name, for errors."""
        return str(self.item.storage_index.fqn)


def regions(items: Sequence[Wanted]) -> Iterator[slice]:
    """Positions of consecutive items that one read brings: small neighbours, or a large one."""
    first, begin, end, is_open = 0, 0, 0, False
    for at, (_, _, offset, nbytes, _) in enumerate(items):
        stop, is_small = offset + nbytes, nbytes <= SMALL_NBYTES
        lowest, highest = min(begin, offset), max(end, stop)
        if (
            is_small
            and is_open
            and offset - end <= _GAP_NBYTES
            and begin - stop <= _GAP_NBYTES
            and highest - lowest <= REGION_NBYTES
        ):
            begin, end = lowest, highest
            continue
        if at > first:
            yield slice(first, at)
        first, begin, end, is_open = at, offset, stop, is_small
    if first < len(items):
        yield slice(first, len(items))


def nbytes_by_archive(wanted: Iterable[Wanted], rows_of: RowsOf) -> dict[Span, int]:
    """How many bytes of which archives are read; several items of an archive read it once."""
    found: dict[Span, int] = {}
    for item, file, offset, nbytes, _ in wanted:
        archive, count = Span(file, offset, offset + nbytes), nbytes
        if nbytes > SMALL_NBYTES and item.type is not LoadItemType.BYTE_IO:
            if rows := rows_of(item):
                count = nbytes * item.lengths[0] // rows
            count = min(nbytes, found.get(archive, 0) + count)
        found[archive] = count
    return found


def rows_of(stored: Mapping[str, object], item: ReadItem) -> int | None:
    """Rows of an item's stored tensor, of which a slice needs some; ``stored`` has it by name.

    ``None`` if the tensor has no rows, or metadata do not say where the item is from.
    """
    index = item.storage_index
    chunk = None if index.index is None else chunk_of(stored.get(index.fqn), index)
    if chunk is None or not len(chunk.sizes) == len(item.lengths) > 0:
        return None
    return chunk.sizes[0]


def chunk_of(entry: object, index: MetadataIndex) -> ChunkStorageMetadata | None:
    """The chunk of a tensor that an item is from, by its number if that is right."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    number = index.index or 0
    likely = entry.chunks[number : number + 1]
    return next((each for each in (*likely, *entry.chunks) if each.offsets == index.offset), None)


def rotated(names: Sequence[str], rank: int, world_size: int) -> list[str]:
    """The names of files in another order on each rank, so that not all begin with the same."""
    first = rank * len(names) // world_size
    return [*names[first:], *names[:first]]
