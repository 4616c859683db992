"""The items to read, how many bytes that takes, which items one read brings; and their targets.

Values go from the file into a target whose memory has the form of the file: contiguous memory.
For any other target they are read into memory beside it, and brought from there (:func:`bring`).
How memory of an accelerator is filled is the business of ``_memory.uploads``.

Values of targets that share memory have to be written one after the other, in the order of the
plan. Parts of one tensor that lie beside each other span the same addresses and still share
nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from nostall import _torch
from nostall._memory.uploads import Uploads
from nostall.errors import OptionError

SMALL_NBYTES = 256 << 10
"""Items up to this length are read together with their neighbours."""
_GAP_NBYTES = 64 << 10
"""Bytes between two items that are read rather than skipped."""
REGION_NBYTES = 4 << 20
"""Most that one read of small items brings."""


class Form(NamedTuple):
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


class FileSpan(NamedTuple):
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


def nbytes_by_archive(
    wanted: Iterable[Wanted], stored: Mapping[str, object]
) -> dict[FileSpan, int]:
    """How many bytes of which archives are read; several items of an archive read it once.

    ``stored`` has tensors by name, of which a slice needs some rows: all, if it has not the tensor,
    if that has no rows, or metadata do not say where an item is from.
    """
    found: dict[FileSpan, int] = {}
    for item, file, offset, nbytes, _ in wanted:
        archive, count = FileSpan(file, offset, offset + nbytes), nbytes
        if nbytes > SMALL_NBYTES and item.type is not LoadItemType.BYTE_IO:
            index = item.storage_index
            chunk = None if index.index is None else chunk_of(stored.get(index.fqn), index)
            sizes: Sequence[int] = () if chunk is None else chunk.sizes
            if len(sizes) == len(item.lengths) > 0 and sizes[0]:
                count = nbytes * item.lengths[0] // sizes[0]
            count = min(nbytes, found.get(archive, 0) + count)
        found[archive] = count
    return found


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


# --- the tensors that values go to: what they must be, and how values get into them ---------------

_MOST_PARTS = 256
"""Parts of one tensor that are compared in pairs; more count as sharing memory."""


def usable(target: torch.Tensor, wanted: Wanted) -> torch.Tensor:
    """A planner's tensor, as one that can be overwritten.

    ``OptionError`` unless it has memory and the item's shape.
    """
    if type(target) is not torch.Tensor or target.requires_grad:
        target = target.detach()
    if target.shape != wanted.item.lengths:
        raise OptionError(
            f"cannot load {wanted.name}: its tensor has the shape {tuple(target.shape)}, the"
            f" checkpoint {tuple(wanted.item.lengths)}",
            phase="read",
            hint="load into a tensor of the shape that was saved",
        )
    if missing_memory := _torch.missing_data(target):
        raise OptionError(f"cannot load {wanted.name}: {missing_memory}", phase="read")
    return target


def span_of(target: torch.Tensor) -> tuple[int, int] | None:
    """The first address of a dense target's values and one past the last; ``None`` for others.

    The values of a dense tensor are bytes in memory, one after the other, on any device.
    """
    if (
        type(target) is torch.Tensor
        and target.layout is torch.strided
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    ):
        begin = target.data_ptr()
        return begin, begin + target.nbytes
    return None


def note_changes(
    targets: Sequence[torch.Tensor], spans: Sequence[tuple[int, int] | None]
) -> list[int]:
    """Tell autograd that dense targets change; call it before the first byte is written.

    Other targets are changed by torch itself, which tells it. Tensors made in inference mode have
    no count of changes.

    Returns the address of each target's values if it is dense and on the CPU, otherwise 0: threads
    that read do not ask torch, which would hand the interpreter lock over.
    """
    both = list(zip(targets, spans, strict=True))
    increment_version([each for each, span in both if span and not each.is_inference()])
    return [span[0] if span and each.is_cpu else 0 for each, span in both]


def overlapping(
    items: Sequence[Wanted],
    targets: Sequence[torch.Tensor],
    spans: Sequence[tuple[int, int] | None],
) -> list[bool]:
    """Whether each target shares memory with another one, or may do so.

    Tensors whose memory is not known, such as a subclass's, may. The planner of these items must
    give the same tensor for the same ``dest_index``.
    """
    found = [False] * len(targets)
    extents: list[tuple[int, int, int]] = []
    for number, target in enumerate(targets):
        addresses = spans[number] or _addresses(target)
        if addresses is None:
            found[number] = True
        elif addresses[0] < addresses[1]:
            extents.append((*addresses, number))
    extents.sort()
    if all(end <= begin for (_, end, _), (begin, _, _) in pairwise(extents)):
        return found
    cluster: list[int] = []
    last = 0
    for begin, end, number in [*extents, (sys.maxsize, sys.maxsize, -1)]:
        if begin >= last:  # the cluster of those before it is complete
            parts = [(items[at].item, targets[at]) for at in cluster]
            if len(parts) > 1 and not _are_apart(parts):
                for at in cluster:
                    found[at] = True
            cluster = []
        cluster.append(number)
        last = max(last, end)
    return found


def _addresses(target: torch.Tensor) -> tuple[int, int] | None:
    """The first address of a target's values and one past the last; ``None`` if unknown."""
    if type(target) is not torch.Tensor or target.layout is not torch.strided:
        return None
    begin = target.data_ptr()
    if not target.numel():
        return 0, 0
    reach = zip(target.shape, target.stride(), strict=True)
    count = 1 + sum((length - 1) * step for length, step in reach)
    return begin, begin + count * target.element_size()


def _overlaps_itself(target: torch.Tensor) -> bool:
    """Whether two elements may have the same memory, also in parts beside this one."""
    reach = 1
    for step, length in sorted(zip(target.stride(), target.shape, strict=True)):
        if step < reach:
            return True
        reach += step * (length - 1)
    return False


def _are_apart(cluster: Sequence[tuple[ReadItem, torch.Tensor]]) -> bool:
    """Whether targets are disjoint parts of one tensor; false if that is not certain."""
    items = [item for item, _ in cluster]
    if len(items) > _MOST_PARTS or any(each.dest_index != items[0].dest_index for each in items):
        return False
    if any(_overlaps_itself(target) for _, target in cluster):
        return False  # nor are parts of an expanded tensor apart, for example
    return all(
        any(
            begin + length <= other_begin or other_begin + other_length <= begin
            for begin, length, other_begin, other_length in zip(
                one.dest_offsets, one.lengths, other.dest_offsets, other.lengths, strict=False
            )
        )
        for one, other in combinations(items, 2)
    )


def bring(
    uploads: Uploads,
    targets: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    items: Sequence[Wanted],
) -> None:
    """Copy values into targets that share no memory; on the thread that called the load.

    ``OptionError`` if torch cannot copy into one of them.
    """
    try:
        _torch.copy_each(targets, uploads.brought_near(values, targets))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        for target, value, wanted in zip(targets, values, items, strict=True):
            try:
                target.copy_(value)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                why = str(error).partition("\n")[0]
                raise OptionError(
                    f"cannot load {wanted.name} into its tensor: {why:.300}",
                    phase="read",
                    hint="load into a dense tensor with memory for each element, such as its"
                    " clone()",
                    cause=error,
                ) from None
