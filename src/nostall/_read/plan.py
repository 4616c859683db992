"""The items to read, and which of them one read brings. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from nostall._read.items.forms import Form
from nostall._read.sharing import Span

SMALL_NBYTES = 256 << 10
"""Items up to this length are read together with their neighbours."""
_GAP_NBYTES = 64 << 10
"""Bytes between two items that are read rather than skipped."""
REGION_NBYTES = 4 << 20
"""Most that one read of small items brings."""


class Wanted(NamedTuple):  # made in a quarter of the time of a frozen dataclass
    """An item to read."""

    item: ReadItem
    file: str
    offset: int
    """Where its archive begins in the file."""
    nbytes: int
    """Length of the archive."""
    form: Form | None = None
    """Set if the values are not in an archive, but all that is there, as in safetensors."""

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


def nbytes_by_archive(
    wanted: Iterable[Wanted], rows_of: Callable[[ReadItem], int | None]
) -> dict[Span, int]:
    """How many bytes of which archives are read for items.

    Args:
        wanted: The items.
        rows_of: Rows of an item's stored tensor; ``None`` if all of them are read for any slice.
    """
    found: dict[Span, int] = defaultdict(int)
    for each in wanted:
        archive = Span(each.file, each.offset, each.end)
        found[archive] = min(each.nbytes, found[archive] + nbytes_of(each, rows_of))
    return dict(found)


def nbytes_of_all(wanted: Iterable[Wanted], rows_of: Callable[[ReadItem], int | None]) -> int:
    """How many bytes are read for items; several items of one archive read it once.

    Args:
        wanted: The items.
        rows_of: As of :func:`nbytes_by_archive`, which is slow for many small items.
    """
    small: dict[str, dict[int, int]] = defaultdict(dict)
    large: list[Wanted] = []
    for each in wanted:
        _, file, offset, nbytes, _ = each
        if nbytes <= SMALL_NBYTES:
            small[file][offset] = nbytes
        else:
            large.append(each)
    of_small = sum(sum(each.values()) for each in small.values())
    return of_small + sum(nbytes_by_archive(large, rows_of).values())


def nbytes_of(wanted: Wanted, rows_of: Callable[[ReadItem], int | None]) -> int:
    """How many bytes are read for an item; ``rows_of`` as of :func:`nbytes_by_archive`."""
    item = wanted.item
    is_whole = wanted.nbytes <= SMALL_NBYTES or item.type is LoadItemType.BYTE_IO
    rows = None if is_whole else rows_of(item)
    return wanted.nbytes * item.lengths[0] // rows if rows else wanted.nbytes


def rows_of(stored: Mapping[str, object], item: ReadItem) -> int | None:
    """Rows of an item's stored tensor, of which a slice needs some.

    Args:
        stored: The checkpoint's ``state_dict_metadata``.
        item: The item.

    Returns:
        ``None`` if the tensor has no rows, or metadata do not say where the item is from.
    """
    index, entry = item.storage_index, stored.get(item.storage_index.fqn)
    if not isinstance(entry, TensorStorageMetadata) or index.index is None:
        return None
    for chunk in entry.chunks[index.index : index.index + 1]:
        if chunk.offsets == index.offset and len(chunk.sizes) == len(item.lengths) > 0:
            return chunk.sizes[0]
    return None


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
