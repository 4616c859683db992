"""Write tensors without a snapshot, through a ring of chunk buffers.

A synchronous save blocks the trainer until its files are complete, so no tensor changes meanwhile.
Each writing thread assembles the next chunk of a file in its own buffer, seals and writes it, then
takes another: copying a chunk overlaps with writing others, and memory for a few chunks is enough
for a save of any size.

An object store's client still sends from memory after it was handed over. So there each chunk has
memory of its own, as much as the client sends at a time.

A container's end may extend from one chunk into the next. It is sealed in the chunk where its
payload ends, in a buffer that is long enough; its last bytes are handed over to the next chunk.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from nostall._memory.arena import address_of
from nostall._memory.copying import copy_bytes, in_payload_order
from nostall._model.jobs import RankReport, WriteJob, page_aligned
from nostall._model.values import FileLayout, ItemShape, Slot
from nostall._save.prepared import PreparedSave
from nostall._save.stage_and_write import in_thread, job_of, lease_for, stage, wait_for, write_here
from nostall._storage.locations import is_address
from nostall._writer.files import perform
from nostall._writer.seals import Window
from nostall.errors import ReservationError, StagingError


def write_directly(prepared: PreparedSave) -> RankReport:
    """Write a rank's share while the caller, and with it the trainer, waits.

    Takes a snapshot if it needs no more memory than the ring, or if chunks cannot be made one by
    one: from tensors on an accelerator, and for the user's own streams. ``SaveTimeoutError`` if
    earlier saves still hold all snapshot memory; ``ReservationError`` if there is not enough host
    memory; ``StagingError`` if a copy failed.
    """
    target, engine = prepared.target, prepared.target.engine
    # Not waited for: the stager's lease, still held if the planner replaced all staged tensors.
    beyond_limit = engine.arena.anything_labelled
    threads, buffer_nbytes = _ring_size(prepared)
    if (
        target.settings.stream is not None
        or prepared.layout.image_nbytes <= threads * buffer_nbytes
        or not all(isinstance(each, bytes) or each.is_cpu for each in prepared.planned.sources)
    ):
        return write_here(stage(prepared, beyond_limit=beyond_limit), target)
    job = job_of(prepared.layout, target)._replace(io_threads=threads)
    if is_address(target.settings.directory):
        write = partial(_write, prepared, job, lambda _: _Buffer.new(buffer_nbytes))
        return wait_for(in_thread(write, target), target)
    nbytes = threads * buffer_nbytes
    try:
        lease = lease_for(target, nbytes, beyond_limit=beyond_limit, as_buffer=True)
    except ReservationError:  # then a block that is prepared for a snapshot has to do
        lease = lease_for(target, nbytes, beyond_limit=beyond_limit)
    lease = engine.arena.adopt(lease)

    def write_in_ring(cancelled: threading.Event) -> RankReport:
        try:
            lease.block.prepared_views = None  # they are written over
            base = address_of(lease.block)
            buffers = [
                _Buffer(memory=lease.block.image(at, buffer_nbytes), address=base + at)
                for at in range(0, nbytes, buffer_nbytes)
            ]
            return _write(prepared, job, buffers.__getitem__, cancelled)
        finally:
            lease.release()

    return wait_for(in_thread(write_in_ring, target), target)


def _ring_size(prepared: PreparedSave) -> tuple[int, int]:
    """Number of buffers, one per thread, and bytes of each: a chunk and the longest suffix."""
    engine = prepared.target.engine
    ends = (len(each.container.suffix) for each in prepared.layout.shapes if each.container)
    chunk_nbytes = prepared.target.settings.chunk_nbytes(prepared.layout, engine)
    buffer_nbytes = page_aligned(chunk_nbytes + max(ends, default=0))
    limit, threads = engine.options.max_wave_nbytes, engine.io_threads
    if limit is not None:
        threads = max(1, min(threads, limit // buffer_nbytes))
    return threads, buffer_nbytes


def _write(
    prepared: PreparedSave,
    job: WriteJob,
    buffer_of: Callable[[int], _Buffer],
    cancelled: threading.Event,
) -> RankReport:
    payloads = _payloads(prepared)
    images = {
        file.name: _LiveImage(file, prepared.layout.shapes, payloads, buffer_of)
        for file in prepared.layout.files
    }
    progress = prepared.target.progress
    return perform(
        job,
        images,
        cancelled=cancelled,
        on_progress=partial(progress.wrote, job.job),
        on_created=progress.created.add,
    )


def _payloads(prepared: PreparedSave) -> list[torch.Tensor | bytes]:
    """The payload of each item, its bytes in file order."""
    share = prepared.planned.share
    payloads: list[torch.Tensor | bytes] = []
    for shape, form, source in zip(
        share.shapes, share.forms, prepared.planned.sources, strict=True
    ):
        if form is None or isinstance(source, bytes):
            payloads.append(source)
            continue
        try:
            payloads.append(in_payload_order(source, form))
        except Exception as error:  # tensor subclasses can raise anything
            raise StagingError(
                f"item {shape.fqn!r} cannot be read: {type(error).__name__}: {error}",
                rank=prepared.target.settings.rank,
                phase="stage",
                job=prepared.target.job,
            ) from error
    return payloads


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffer:
    """Memory for a chunk, and its address."""

    memory: memoryview
    address: int

    @classmethod
    def new(cls, nbytes: int) -> _Buffer:
        """Memory that nothing else uses, as long as somebody refers to it."""
        pages = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        return cls(memory=memoryview(pages), address=address)


class _LiveImage:
    """A file image that exists only as chunks; ``buffer_of(thread)`` is for a thread's next one."""

    def __init__(
        self,
        file: FileLayout,
        shapes: Sequence[ItemShape],
        payloads: Sequence[torch.Tensor | bytes],
        buffer_of: Callable[[int], _Buffer],
    ) -> None:
        self._header = file.header
        self._slots = file.slots
        self._begins = [slot.offset for slot in file.slots]
        self._shapes = shapes
        self._payloads = payloads
        self._buffer_of = buffer_of
        self._reaching_over = b""
        """Sealed bytes that follow the last chunk handed over."""

    def window(self, begin: int, end: int, *, thread: int) -> Window:
        """Assemble a chunk in a buffer for the thread."""
        buffer = self._buffer_of(thread)
        header = memoryview(self._header)[begin:end]
        buffer.memory[: len(header)] = header
        first = max(0, bisect_right(self._begins, begin) - 1)
        for slot in self._slots[first : bisect_left(self._begins, end)]:
            slot_end = slot.offset + slot.length
            upto = slot_end if _is_sealed_in(slot, begin, end) else min(end, slot_end)
            self._put(slot, max(begin, slot.offset), upto, buffer, begin)
        return Window(buffer.memory, begin)

    def hand_over(self, window: Window, end: int) -> None:
        """Insert bytes sealed with earlier chunks, and keep those that extend beyond this one."""
        if not window.origin:
            self._reaching_over = b""  # of a failed attempt
        nbytes = end - window.origin
        inherited, rest = self._reaching_over[:nbytes], self._reaching_over[nbytes:]
        window.memory[: len(inherited)] = inherited
        last = self._slots[bisect_left(self._begins, end) - 1] if nbytes else None
        if last is not None and _is_sealed_in(last, window.origin, end):
            rest = bytes(window.memory[nbytes : last.offset + last.length - window.origin])
        self._reaching_over = rest

    def _put(self, slot: Slot, begin: int, end: int, buffer: _Buffer, origin: int) -> None:
        """Copy file bytes ``begin`` to ``end`` of a slot to a buffer that begins at ``origin``."""
        payload, container = self._payloads[slot.item], self._shapes[slot.item].container
        payload_end = slot.payload_offset + slot.payload_nbytes
        parts = [(slot.payload_offset, payload)] if isinstance(payload, bytes) else []
        if container is not None:
            parts += [(slot.offset, container.prefix), (payload_end, container.suffix)]
        for at, content in parts:
            low, high = max(begin, at), min(end, at + len(content))
            if low < high:
                piece = memoryview(content)[low - at : high - at]
                buffer.memory[low - origin : high - origin] = piece
        low, high = max(begin, slot.payload_offset), min(end, payload_end)
        if isinstance(payload, torch.Tensor) and low < high:
            address = payload.data_ptr() + low - slot.payload_offset
            copy_bytes(buffer.address + low - origin, address, high - low)


def _is_sealed_in(slot: Slot, begin: int, end: int) -> bool:
    """Whether a slot's payload ends in a chunk; its container is sealed there, to its full end."""
    return begin < slot.payload_offset + slot.payload_nbytes <= end
