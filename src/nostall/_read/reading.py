"""Read the items of a load plan: few large reads, into the tensors themselves if possible.

The planner is called on one thread, as stock's reader calls it; only reads and checksums happen on
others. Stock's planner, and that of ``nostall.load``, are asked for all tensors first. So it is
known which of them share memory; all others can be read at the same time, in any order. Tensors
that share memory, and all tensors of any other planner, which may use one buffer for all of them,
are read one after the other in stock's order.
"""

from __future__ import annotations

import ctypes
import io
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.planner import LoadPlanner as DCPLoadPlanner

from nostall._memory.copying import copy_bytes
from nostall._memory.uploads import Uploads
from nostall._model import checksum
from nostall._model.checksum import combine
from nostall._model.progress import ReadCounter
from nostall._read.archives import DESCRIPTOR, HEAD_NBYTES, Archives, OpenFile, is_whole, sliced
from nostall._read.inflight import InFlight, Read, Workers
from nostall._read.plan import (
    REGION_NBYTES,
    SMALL_NBYTES,
    Wanted,
    bring,
    note_changes,
    overlapping,
    regions,
    rotated,
    span_of,
    usable,
)
from nostall._read.planner import LoadPlanner
from nostall._storage.port import PartStream, ReadableFiles

_OF_TENSORS = ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")
"""Methods that a planner is called with for each tensor."""
PIECE_NBYTES = 4 << 20
"""Read by one thread before it looks whether the load goes on, into memory of the CPU."""


def read_items(
    wanted: Iterable[Wanted],
    files: ReadableFiles,
    *,
    planner: DCPLoadPlanner,
    threads: int,
    verify: bool,
    counter: ReadCounter,
    rank: int,
    world_size: int,
) -> None:
    """Read items and hand them to a planner; returns when it has all of them.

    The planner is called on this thread only. Items are in the order of the plan, and have no
    transforms. ``verify`` compares whole tensors with the checksums in their archives. Each of
    ``world_size`` ranks that read at the same time begins with another file.

    ``DamagedCheckpointError`` if a file is missing or shorter than expected, or an item in it is
    damaged: targets, also of other items, may hold some of the values then. ``OptionError`` if an
    item cannot be loaded into its tensor.
    """
    if verify:
        checksum.use_fastest()
    items, workers = list(wanted), Workers(threads)
    # In this order: nothing reads from a closed file, or into memory that was released.
    with InFlight(workers) as in_flight, Uploads(threads) as uploads, workers:
        load = _Load(planner, workers, Archives(verify=verify), uploads, [])
        known, in_turn = _with_targets(items, planner)
        uploads.prepare(target for _, target, _ in known if target is not None)
        by_file = _by_file(known)
        for name in rotated(sorted(by_file), rank, world_size):
            in_order = sorted(by_file[name], key=lambda each: each[0].offset)
            file = in_flight.open(files, name, [each[0] for each in in_order], counter)
            in_flight.read(file, list(_reads(load, file, in_order)))
        in_flight.finish_all()
        in_turn_of = _by_file(in_turn)
        # Stock reads files in the order in which they appear first.
        for name in dict.fromkeys(wanted.file for wanted in items):
            if of_file := in_turn_of.get(name):
                file = in_flight.open(files, name, [each[0] for each in of_file], counter)
                in_flight.read(file, list(_reads(load, file, of_file)))
        in_flight.finish_all()


def _gives_every_item_its_own_tensor(planner: DCPLoadPlanner) -> bool:
    """Whether a planner's methods for tensors are stock's or ours, which only look tensors up."""
    of_class, of_instance = type(planner), vars(planner)
    return all(
        name not in of_instance
        and getattr(of_class, name, None)
        in (getattr(DefaultLoadPlanner, name, ()), getattr(LoadPlanner, name, ()))
        for name in _OF_TENSORS
    )


_Item: TypeAlias = "tuple[Wanted, torch.Tensor | None, int]"
"""An item; its tensor, ``None`` for an object and for a tensor that the planner is asked for in
turn; the address of its values, 0 unless the tensor is dense and on the CPU."""


def _with_targets(
    items: Sequence[Wanted], planner: DCPLoadPlanner
) -> tuple[list[_Item], list[_Item]]:
    """Items to read in any order, and items to read in the order of the plan; reads nothing."""
    if not _gives_every_item_its_own_tensor(planner):
        return [], [(wanted, None, 0) for wanted in items]
    objects = [wanted for wanted in items if wanted.item.type is LoadItemType.BYTE_IO]
    known: list[_Item] = [(wanted, None, 0) for wanted in objects]
    in_turn: list[_Item] = []
    of = [wanted for wanted in items if wanted.item.type is not LoadItemType.BYTE_IO]
    tensors = [usable(planner.resolve_tensor(wanted.item), wanted) for wanted in of]
    spans = [span_of(target) for target in tensors]
    shared, addresses = overlapping(of, tensors, spans), note_changes(tensors, spans)
    for wanted, target, address, is_shared in zip(of, tensors, addresses, shared, strict=True):
        if is_shared:
            in_turn.append((wanted, None, 0))
        else:
            known.append((wanted, target, address))
    return known, in_turn


def _by_file(known: Iterable[_Item]) -> dict[str, list[_Item]]:
    by_file: dict[str, list[_Item]] = {}
    for each in known:
        by_file.setdefault(each[0].file, []).append(each)
    return by_file


def _reads(load: _Load, file: OpenFile, known: Sequence[_Item]) -> Iterator[Sequence[Read]]:
    """Reads of items in their order; of large ones, together at least a piece."""
    few: list[LargeRead] = []
    for region in regions([wanted for wanted, _, _ in known]):
        first, target, _ = known[region.start]
        if first.nbytes <= SMALL_NBYTES or first.item.type is LoadItemType.BYTE_IO:
            yield [SmallRead(load, file, known[region])]
            continue
        read = LargeRead(load, file, first, target)
        if read.tasks != 1:
            yield [read]
            continue
        few.append(read)
        if sum(each.nbytes for each in few) >= PIECE_NBYTES:
            yield few
            few = []
    if few:
        yield few


class _Load(NamedTuple):
    """Objects that the reads of one load share."""

    planner: DCPLoadPlanner
    """Called on the caller's thread only."""
    workers: Workers
    archives: Archives
    uploads: Uploads
    free: list[bytearray]
    """Memory for regions, which no thread uses: new memory is slow."""

    def target_in_turn(self, wanted: Wanted) -> torch.Tensor:
        """The tensor of an item, once all items before it were committed."""
        target = usable(self.planner.resolve_tensor(wanted.item), wanted)
        note_changes([target], [span_of(target)])
        self.uploads.prepare([target])
        return target


class SmallRead:
    """Small items that lie close together, or one object: read at once, and copied from there.

    Items are handed over in the order of ``known``. Autograd knows already that dense targets
    change. The planner is asked for a tensor that is not known after the one before it was
    committed.
    """

    tasks = 1

    def __init__(self, load: _Load, file: OpenFile, known: Sequence[_Item]) -> None:
        self._load = load
        self._file = file
        self._known = known
        self._begin = min(each.offset for each, _, _ in known)
        self.nbytes = max(each.end for each, _, _ in known) - self._begin
        self._brought: list[bytes | torch.Tensor | None] = []
        """By item: an object, the values of a tensor, or ``None`` for those in their target."""

    def run(self) -> None:
        """Read all items, and copy those whose targets are known and plain."""
        free = self._load.free
        self._load.workers.require_running()
        try:
            content = free.pop() if self.nbytes <= REGION_NBYTES else bytearray(self.nbytes)
        except IndexError:
            content = bytearray(REGION_NBYTES)
        items = [wanted for wanted, _, _ in self._known]
        self._file.fill(self._begin, items, memoryview(content)[: self.nbytes])
        address = ctypes.addressof(ctypes.c_char.from_buffer(content))
        self._brought = [self._bring(content, address, each) for each in self._known]
        if len(content) == REGION_NBYTES:
            free.append(content)

    def _bring(self, content: bytearray, address: int, item: _Item) -> bytes | torch.Tensor | None:
        wanted, target, to = item
        at, archives = wanted.offset - self._begin, self._load.archives
        if wanted.item.type is LoadItemType.BYTE_IO:
            return bytes(memoryview(content)[at : at + wanted.nbytes])

        def archive() -> io.BytesIO:
            return io.BytesIO(memoryview(content)[at : at + wanted.nbytes])

        form = archives.form_of(content, at, archive, self._file, wanted)
        if form is None:
            return archives.loaded_by_torch(archive(), self._file, wanted)
        begin = at + form.begin
        if archives.verify and form.nbytes and form.has_checksum:
            view = memoryview(content)
            end = begin + form.nbytes
            found = checksum.crc32(view[begin:end])
            archives.require_intact(found, view[end : end + DESCRIPTOR.size], self._file, wanted)
        if (
            to
            and target is not None
            and target.dtype is form.dtype
            and is_whole(form.shape, wanted)
        ):
            copy_bytes(to, address + begin, form.nbytes)
            return None
        # Archives begin at any byte; torch needs the alignment of the dtype.
        stored = torch.empty(form.shape, dtype=form.dtype, device="cpu")
        if form.nbytes:
            copy_bytes(stored.data_ptr(), address + begin, form.nbytes)
        return sliced(stored, wanted.item.storage_offsets, wanted.item.lengths)

    def finish(self) -> None:
        """Hand over all items; tensors whose targets are known after one copy for all of them."""
        planner, uploads = self._load.planner, self._load.uploads
        tensors: list[tuple[Wanted, torch.Tensor]] = []
        values: list[torch.Tensor] = []
        into: list[torch.Tensor] = []
        of: list[Wanted] = []
        for (wanted, target, _), brought in zip(self._known, self._brought, strict=True):
            if isinstance(brought, bytes):
                planner.load_bytes(wanted.item, io.BytesIO(brought))
            elif target is None:
                assert brought is not None
                in_turn = self._load.target_in_turn(wanted)
                bring(uploads, [in_turn], [brought], [wanted])
                planner.commit_tensor(wanted.item, in_turn)
            else:
                tensors.append((wanted, target))
                if brought is not None:
                    values.append(brought)
                    into.append(target)
                    of.append(wanted)
        if into:
            bring(uploads, into, values, of)
        for wanted, target in tensors:
            planner.commit_tensor(wanted.item, target)


class LargeRead:
    """One large tensor: read in pieces by several threads, into the target where possible.

    Autograd knows already that a dense target changes. If the target is ``None``, the planner is
    asked for it, and it is read, once all items before it are committed.
    """

    def __init__(
        self, load: _Load, file: OpenFile, wanted: Wanted, target: torch.Tensor | None
    ) -> None:
        self._load = load
        self._file = file
        self._wanted = wanted
        self._target = target
        self.nbytes = 0 if target is None else wanted.nbytes
        self.tasks = 0 if target is None else self._tasks_for(target)
        self._lock = threading.Lock()
        """Held while the form is found."""
        self._memory: torch.Tensor | None = None
        """Filled by pieces; ``None`` if torch has loaded the tensor."""
        self._stored: torch.Tensor | None = None
        """The values, if they are not in the target."""
        self._begin = 0
        """Where the values that are read begin in the file."""
        self._left: deque[tuple[int, int]] | None = None
        """Begin and end of the pieces no thread reads yet; ``None`` until the form is found."""
        self._sums: dict[int, tuple[int, int]] | None = None
        """Checksum and length of each piece that was read, by where it begins; if compared."""
        self._descriptor = memoryview(bytearray(DESCRIPTOR.size))

    def _tasks_for(self, target: torch.Tensor) -> int:
        pieces = -(-(self._wanted.nbytes - HEAD_NBYTES) // self._piece_nbytes(target))  # about
        return min(self._load.workers.threads, max(1, pieces))

    def _piece_nbytes(self, memory: torch.Tensor) -> int:
        """Length of one read; for memory of a device, also of the copy that sends it there."""
        return PIECE_NBYTES if memory.is_cpu else self._load.uploads.buffer_nbytes

    def run(self) -> None:
        """Read pieces until none is left; several threads may do so."""
        self._load.workers.require_running()
        with self._lock:
            if self._left is None:
                self._left = self._prepare()
        memory, left = self._memory, self._left
        while memory is not None:
            self._load.workers.require_running()
            try:
                begin, end = left.popleft()
            except IndexError:
                return
            tail = [self._descriptor] if self._sums is not None and end == memory.nbytes else []
            with self._load.uploads.part(memory, begin, end) as piece:
                self._file.fill(self._begin + begin, [self._wanted], piece, *tail)
                if self._sums is not None:
                    self._sums[begin] = checksum.crc32(piece), end - begin

    def _prepare(self) -> deque[tuple[int, int]]:
        """Find out what is stored; choose the rows that are read, their memory, and the pieces."""
        wanted, archives, target = self._wanted, self._load.archives, self._target
        item, uploads = wanted.item, self._load.uploads
        assert target is not None
        head = bytearray(min(wanted.nbytes, HEAD_NBYTES) if wanted.form is None else 0)
        self._file.fill(wanted.offset, [wanted], memoryview(head))
        archive = partial(PartStream, self._file, wanted.offset, wanted.nbytes)
        form = archives.form_of(head, 0, archive, self._file, wanted)
        if form is None:
            self._stored = archives.loaded_by_torch(archive(), self._file, wanted)
            return deque()
        verify = archives.verify and form.nbytes > 0 and form.has_checksum
        shape, offsets, first = form.shape, list(item.storage_offsets), 0
        if shape and not verify:
            first, offsets[0] = offsets[0], 0
            shape = (item.lengths[0], *shape[1:])
        row_nbytes = math.prod(form.shape[1:]) * form.dtype.itemsize
        is_alike = shape == item.lengths and target.dtype is form.dtype
        memory = target
        if not (is_alike and span_of(target) and uploads.can_fill(target.device, form.dtype)):
            memory = uploads.scratch_for(target, shape, form.dtype)
            self._stored = sliced(memory, offsets, item.lengths)
        uploads.begin(memory)
        self._memory = memory
        self._begin = wanted.offset + form.begin + first * row_nbytes
        self._sums = {} if verify else None
        return deque(_pieces(self._begin, memory.nbytes, self._piece_nbytes(memory)))

    def finish(self) -> None:
        """Compare the checksum, and hand over the tensor."""
        wanted, workers = self._wanted, self._load.workers
        if self._target is None:
            self._target = self._load.target_in_turn(wanted)
            count = self._tasks_for(self._target)
            for task in [workers.submit(self.run) for _ in range(count)]:
                workers.wait(task)
        if self._sums is not None:
            crc32 = 0
            for _, (of_piece, nbytes) in sorted(self._sums.items()):
                crc32 = combine(crc32, of_piece, nbytes)
            self._load.archives.require_intact(crc32, self._descriptor, self._file, wanted)
        if self._memory is not None:
            self._load.uploads.finish(self._memory)
        if self._stored is not None:
            bring(self._load.uploads, [self._target], [self._stored], [wanted])
        self._memory = self._stored = None
        self._load.planner.commit_tensor(wanted.item, self._target)


def _pieces(offset: int, nbytes: int, piece_nbytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each piece of values that lie at this offset of a file.

    If there are several, all but the first begin at a multiple of ``piece_nbytes`` in the file, so
    that no two of them need the same page.
    """
    if nbytes <= piece_nbytes:
        offset = 0
    begin = 0
    while begin < nbytes:
        end = min(nbytes, begin + piece_nbytes - (offset + begin) % piece_nbytes)
        yield begin, end
        begin = end
