"""Read the items of a load plan: few large reads, straight into the tensors where that is possible.

The planner is called on one thread, as stock's reader calls it; only reads and checksums happen on
others. Small items that lie close together are read with one call and copied from there. Large ones
are read into their target, or into memory of their own if the target has another layout, dtype or
device, or wants a slice. Of a slice only the rows from its first to its last are read.
"""

from __future__ import annotations

import io
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from nostall import _torch
from nostall._model import checksum
from nostall._read.ahead import Ahead, Begun
from nostall._read.damage import damaged, missing, too_short
from nostall._read.forms import HEAD_NBYTES, Contradictory, Form, Forms, Unusual
from nostall._read.plan import SMALL_NBYTES, Wanted, regions, rotated
from nostall._read.rows import Rows, is_plain, memory_of, over
from nostall._storage.port import ReadableFiles
from nostall._storage.reading import (
    ChecksumMissing,
    NoArchive,
    damage_of_container,
    part_as_stream,
)
from nostall.errors import DamagedCheckpointError, OptionError

_PIECE_NBYTES = 8 << 20
"""Of a large item, read by one call."""
_CRC32 = struct.Struct("<L")
_CRC32_NBYTES = _CRC32.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What all files of a load share."""

    planner: LoadPlanner
    """Called on one thread only."""
    pool: ThreadPoolExecutor
    verify: bool
    forms: Forms = field(default_factory=Forms)
    filled: list[tuple[int, int]] = field(default_factory=list)
    """Addresses that are read into, from first to end, in order; they do not overlap."""

    def claim(self, memory: torch.Tensor) -> bool:
        """Whether nothing else is read into this memory; then nothing else will be."""
        begin = memory.data_ptr()
        end = begin + memory.nbytes
        at = bisect_right(self.filled, (begin, end))
        before_ends = self.filled[at - 1][1] if at else 0
        next_begins = self.filled[at][0] if at < len(self.filled) else end
        if before_ends > begin or next_begins < end:
            return False
        self.filled.insert(at, (begin, end))
        return True


def read_items(
    wanted: Iterable[Wanted],
    planner: LoadPlanner,
    files: ReadableFiles,
    *,
    threads: int,
    verify: bool,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Read items and hand them to a planner; returns when it has all of them.

    Args:
        wanted: The items, in any order; those with transforms are not for this function.
        planner: Called on this thread only.
        files: The checkpoint's files.
        threads: Number of reads at a time.
        verify: Whether to compare whole tensors with the checksums in their archives.
        rank: Among the ranks that read at the same time: each begins with another file.
        world_size: Number of these ranks.

    Raises:
        DamagedCheckpointError: A file is missing or shorter than expected, or an item in it is
            damaged. Targets, also of other items, may hold some of the values then.
        OSError: A file cannot be read.
    """
    by_file: dict[str, list[Wanted]] = {}
    for each in wanted:
        by_file.setdefault(each.file, []).append(each)
    if verify:
        checksum.use_fastest()
    pool = ThreadPoolExecutor(threads, "nostall-read")
    load = Load(planner=planner, pool=pool, verify=verify)
    with Ahead() as ahead:
        try:
            for name in rotated(sorted(by_file), rank, world_size):
                ahead.read(_File(load, files, name, by_file[name]))
            ahead.finish_all()
        finally:
            # Nothing reads from a closed file, or writes to a target, after this.
            pool.shutdown(wait=True, cancel_futures=True)


class _File:
    """The items of one file.

    Raises:
        DamagedCheckpointError: The file is missing, or ends before an item does.
        OSError: It cannot be opened.
    """

    def __init__(
        self, load: Load, files: ReadableFiles, name: str, items: Sequence[Wanted]
    ) -> None:
        self._load = load
        self._path = files.where(name)
        self._items = sorted(items, key=lambda each: each.offset)
        try:
            self._source = files.open(name)
        except FileNotFoundError as error:
            raise missing(self._path, items) from error
        nbytes = self._source.stat.nbytes
        beyond = [each for each in items if each.end > nbytes]
        if beyond:
            self.close()
            raise too_short(nbytes, self._path, beyond)

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def _damaged(self, what: str, items: Sequence[Wanted]) -> DamagedCheckpointError:
        return damaged(what, self._path, items)

    def reads(self) -> Iterator[Begun]:
        """Begin one read after the other."""
        heads = {
            each: self._read(each.offset, min(each.nbytes, HEAD_NBYTES))
            for each in self._items
            if each.nbytes > SMALL_NBYTES
        }
        for region in regions(self._items):
            first = region[0]
            if first not in heads:
                begin, end = first.offset, max(each.end for each in region)
                read = self._read(begin, end - begin)
                yield end - begin, partial(self._finish_small, read, region)
            elif first.item.type is LoadItemType.BYTE_IO:
                read = self._read(first.offset, first.nbytes)
                yield first.nbytes, partial(self._finish_object, read, first)
            else:
                yield self._begin_large(heads[first].result(), first)

    def _read(self, offset: int, nbytes: int) -> Future[bytearray]:
        def read() -> bytearray:
            content = bytearray(nbytes)
            self._fill(offset, memoryview(content))
            return content

        return self._load.pool.submit(read)

    def _fill(self, offset: int, memory: memoryview) -> None:
        if self._source.read_into(offset, memory) < len(memory):
            raise self._damaged("the file has become shorter", self._items)

    # --- small items --------------------------------------------------------------------------

    def _finish_object(self, read: Future[bytearray], wanted: Wanted) -> None:
        self._load.planner.load_bytes(wanted.item, io.BytesIO(read.result()))

    def _finish_small(self, read: Future[bytearray], region: Sequence[Wanted]) -> None:
        planner, forms = self._load.planner, self._load.forms
        content = read.result()
        whole, begin = memoryview(content), region[0].offset
        tensors: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        for each in region:
            at = each.offset - begin
            archive = whole[at : at + each.nbytes]
            if each.item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(each.item, io.BytesIO(archive))
                continue
            form = forms.known(content, at, each.nbytes) or self._parsed(io.BytesIO(archive), each)
            if form is None:
                stored = self._loaded_by_torch(io.BytesIO(archive), each)
            else:
                self._verify_small(archive, form, each)
                stored = over(content, at + form.begin, form.dtype, form.shape)
            target = planner.resolve_tensor(each.item).detach()
            tensors.append((each.item, target, self._slice(stored, target, each)))
        targets = [target for _, target, _ in tensors]
        if targets and _are_apart(targets):
            _torch.copy_each(targets, [found for _, _, found in tensors])
            for item, target, _ in tensors:
                planner.commit_tensor(item, target)
        else:  # a planner may use the same memory again
            for item, target, found in tensors:
                target.copy_(found)
                planner.commit_tensor(item, target)

    def _verify_small(self, archive: memoryview, form: Form, wanted: Wanted) -> None:
        if self._load.verify and form.crc32_at is not None:
            values = archive[form.begin : form.begin + form.nbytes]
            tail = archive[form.crc32_at : form.crc32_at + _CRC32_NBYTES]
            self._compare(checksum.crc32(values), tail, wanted)

    def _parsed(self, archive: BinaryIO, wanted: Wanted) -> Form | None:
        """The form of an archive; ``None`` if only torch may understand it."""
        try:
            return self._load.forms.parse(archive, wanted.nbytes)
        except Unusual:
            return None
        except Contradictory as error:
            raise self._damaged(f"an item is damaged: {error}", [wanted]) from error

    def _loaded_by_torch(self, archive: BinaryIO, wanted: Wanted) -> torch.Tensor:
        if self._load.verify:
            with suppress(ChecksumMissing, NoArchive):
                damage = damage_of_container(self._source, wanted.offset, wanted.nbytes)
                if damage is not None:
                    raise self._damaged(damage, [wanted])
        try:
            archive.seek(0)
            loaded = torch.load(archive, map_location="cpu", weights_only=True)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # damaged archives and pickles can raise anything
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            raise self._damaged(f"an item cannot be loaded: {why}", [wanted]) from error
        if not isinstance(loaded, torch.Tensor):
            raise self._damaged(
                f"an item is of type {type(loaded).__name__}, not a tensor", [wanted]
            )
        return loaded

    def _slice(self, stored: torch.Tensor, target: torch.Tensor, wanted: Wanted) -> torch.Tensor:
        """The part of a stored tensor that the planner wants."""
        offsets, lengths = wanted.item.storage_offsets, wanted.item.lengths
        if lengths != stored.shape or any(offsets):
            self._require_inside(stored.shape, wanted)
            for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
                stored = stored.narrow(dimension, offset, length)
        self._require_size(target, stored.shape)
        return stored

    def _require_inside(self, shape: Sequence[int], wanted: Wanted) -> None:
        offsets, lengths = wanted.item.storage_offsets, wanted.item.lengths
        fits = len(shape) == len(offsets) == len(lengths) and all(
            offset >= 0 and offset + length <= size
            for size, offset, length in zip(shape, offsets, lengths, strict=True)
        )
        if not fits:
            what = f"an item has the shape {tuple(shape)}, not the one in the metadata"
            raise self._damaged(what, [wanted])

    def _require_size(self, target: torch.Tensor, size: Sequence[int]) -> None:
        if target.shape != torch.Size(size):
            raise AssertionError(f"the planner's tensor has {target.shape}, the item {size}")

    def _compare(self, found: int, tail: memoryview, wanted: Wanted) -> None:
        (expected,) = _CRC32.unpack(tail)
        if found != expected:
            what = f"CRC-32 of the values is {found:08x}, expected {expected:08x}"
            raise self._damaged(what, [wanted])

    # --- large tensors ------------------------------------------------------------------------

    def _begin_large(self, head: bytearray, wanted: Wanted) -> Begun:
        form = self._load.forms.known(head, 0, wanted.nbytes)
        if form is None:
            archive = part_as_stream(self._source, wanted.offset, wanted.nbytes)
            form = self._parsed(archive, wanted)
            if form is None:
                return 0, partial(self._finish_by_torch, archive, wanted)
        self._require_inside(form.shape, wanted)
        target = self._load.planner.resolve_tensor(wanted.item).detach()
        self._require_size(target, wanted.item.lengths)
        if missing_memory := _torch.missing_data(target):
            raise OptionError(f"cannot load {wanted.name}: {missing_memory}", phase="read")
        verify = self._load.verify and form.crc32_at is not None
        rows = Rows.of(form, wanted.item.storage_offsets, wanted.item.lengths, whole=verify)
        is_direct = rows.is_exact and is_plain(target, form.dtype) and self._load.claim(target)
        stored = target if is_direct else None
        memory = target
        if stored is None:
            memory = torch.empty(rows.shape, dtype=form.dtype, device="cpu")
        reads = self._fill_all(memory_of(memory), wanted.offset + rows.begin, in_order=verify)

        def finish() -> None:
            for read in reads:
                read.result()
            if verify:
                assert form.crc32_at is not None
                tail = bytearray(_CRC32_NBYTES)
                self._fill(wanted.offset + form.crc32_at, memoryview(tail))
                self._compare(reads[0].result(), memoryview(tail), wanted)
            if stored is None:
                target.copy_(rows.cut(memory))
            elif not target.is_inference():
                increment_version(target)
            self._load.planner.commit_tensor(wanted.item, target)

        return rows.nbytes, finish

    def _finish_by_torch(self, archive: BinaryIO, wanted: Wanted) -> None:
        stored = self._loaded_by_torch(archive, wanted)
        target = self._load.planner.resolve_tensor(wanted.item).detach()
        target.copy_(self._slice(stored, target, wanted))
        self._load.planner.commit_tensor(wanted.item, target)

    def _fill_all(self, memory: memoryview, offset: int, *, in_order: bool) -> list[Future[int]]:
        """Fill memory from the file; if ``in_order`` one read returns the CRC-32 of all of it."""
        pieces = range(0, len(memory), _PIECE_NBYTES)

        def fill(begin: int) -> int:
            self._fill(offset + begin, memory[begin : begin + _PIECE_NBYTES])
            return 0

        def fill_and_sum() -> int:
            crc32 = 0
            for begin in pieces:
                fill(begin)
                crc32 = checksum.crc32(memory[begin : begin + _PIECE_NBYTES], crc32)
            return crc32

        if in_order:
            return [self._load.pool.submit(fill_and_sum)]
        return [self._load.pool.submit(fill, begin) for begin in pieces]


def _are_apart(targets: Sequence[torch.Tensor]) -> bool:
    """Whether no two tensors begin at the same address."""
    try:
        begins = [target.data_ptr() for target in targets if target.numel()]
    except RuntimeError:  # a subclass without a storage
        return False
    return len(set(begins)) == len(begins)
