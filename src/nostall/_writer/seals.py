"""The images of a job's files: shared by the threads that write it, checksummed, and sealed.

The positions of payloads in the chunks of an image follow from the layout alone:
:func:`plan_chunks` computes them, and keeps them from job to job. :class:`Payloads` has the
checksums, which are new in every job, and seals the containers part by part.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

from nostall._model import checksum
from nostall._model.checksum import Sealer, combine
from nostall._model.jobs import Faults, SealTable, WriteJob


class Window(NamedTuple):
    """Bytes one thread may change: a chunk, and the rest of containers whose payload ends in it."""

    memory: memoryview
    """Page-aligned, and padded to whole pages."""
    origin: int
    """Its offset in the file."""


class Image(Protocol):
    """The bytes of one file to be written."""

    def window(self, begin: int, end: int, *, thread: int) -> Window:
        """The chunk from ``begin`` to ``end``, unsealed; this thread's until its next call."""

    def hand_over(self, window: Window, end: int) -> None:
        """Record that the chunk ending at ``end`` is sealed; called in file order."""


class WholeImage:
    """An image that is entirely in memory; containers are sealed in place."""

    def __init__(self, memory: memoryview) -> None:
        self._window = Window(memory, 0)

    def window(self, begin: int, end: int, *, thread: int) -> Window:
        """The whole image, for every chunk."""
        del begin, end, thread
        return self._window

    def hand_over(self, window: Window, end: int) -> None:
        """Does nothing."""


class Cancelled(Exception):
    """The trainer cancelled the job."""

    def __init__(self) -> None:
        super().__init__("the save was aborted")


class GivenUp(Exception):
    """Another thread or file of the job failed; this thread or file stops."""


class Position:
    """Where the first failure occurred (others are consequences), files made, bytes written."""

    def __init__(
        self,
        job: WriteJob,
        cancelled: threading.Event,
        on_progress: Callable[[int], None],
        on_created: Callable[[str], None],
    ) -> None:
        self.phase, self.path = "open", job.directory
        self.faults = Faults(job.faults)
        self.cancelled = cancelled
        self.created: set[str] = set()
        """Paths of the files that the job has made, and may remove."""
        self._on_progress = on_progress
        self._on_created = on_created
        self._written_nbytes = 0
        self._lock = threading.Lock()

    def move(self, phase: str, path: str) -> None:
        self.phase, self.path = phase, path

    def raise_if_cancelled(self) -> None:
        """Called between two chunks."""
        if self.cancelled.is_set():
            raise Cancelled

    def create(self, path: str) -> None:
        """Record a new file of the job."""
        self.created.add(path)
        self._on_created(path)

    def wrote(self, nbytes: int) -> None:
        """Add to the bytes written; negative if a file has to be written anew."""
        with self._lock:
            self._written_nbytes += nbytes
            written_nbytes = self._written_nbytes
        self._on_progress(written_nbytes)


# --- payloads and their seals ---------------------------------------------------------------------

_WORTH_JOINING_NBYTES = 64 << 10
"""From this size on, combining a payload's CRC is faster than computing it again."""
_PLANS_KEPT = 16
"""Images, not jobs. With more files, every job plans anew, which takes a fraction of sealing."""


class Run(NamedTuple):
    """Slots of one chunk with entire payloads in it and containers of one form."""

    sealer: Sealer
    slots: array[int]
    payloads_at: array[int]


class PayloadPart(NamedTuple):
    """A payload that is entirely in one chunk, or its part in one of several."""

    slot: int
    begin: int
    end: int


class SplitPayload(NamedTuple):
    """A payload in several chunks; belongs to the last of them."""

    sealer: Sealer
    first_chunk: int
    parts: list[PayloadPart]


class ChunkPlan(NamedTuple):
    """The checksums to take, and the archives to seal, in one chunk; jobs share it, unchanged."""

    begin: int
    end: int
    runs: dict[int, Run]
    """By template."""
    parts: list[PayloadPart]
    ending: list[SplitPayload]
    large: list[PayloadPart]
    """Payloads and parts, in file order, whose CRCs are combined, not computed again."""


@lru_cache(maxsize=_PLANS_KEPT)
def plan_chunks(seals: SealTable, bounds: tuple[int, ...]) -> tuple[ChunkPlan, ...]:
    """Split the payloads of an image at chunk bounds: offsets of chunks, and the end of the last.

    Later jobs of a layout have equal tables. Finding their plan by content takes 20 us per 1,000
    slots, making it 300 us.
    """
    sealers = [
        Sealer(offset, nbytes, seal) if seal is not None and nbytes else None
        for offset, nbytes, seal in seals.templates
    ]
    plans = tuple(ChunkPlan(begin, end, {}, [], [], []) for begin, end in pairwise(bounds))
    for slot, (blob, template) in enumerate(
        zip(seals.blob_offsets, seals.template_of_slot, strict=True)
    ):
        sealer = sealers[template]
        if sealer is None:
            continue
        begin = blob + sealer.payload_offset
        end = begin + sealer.payload_nbytes
        first = bisect_right(bounds, begin) - 1
        if end <= bounds[first + 1]:
            run = plans[first].runs.get(template)
            if run is None:
                run = plans[first].runs[template] = Run(sealer, array("Q"), array("Q"))
            run.slots.append(slot)
            run.payloads_at.append(begin)
            if sealer.payload_nbytes >= _WORTH_JOINING_NBYTES:
                plans[first].large.append(PayloadPart(slot, begin, end))
            continue
        after = bisect_left(bounds, end)
        parts = [
            PayloadPart(slot, max(begin, chunk_begin), min(end, chunk_end))
            for chunk_begin, chunk_end in pairwise(bounds[first : after + 1])
        ]
        for plan, part in zip(plans[first:after], parts, strict=True):
            plan.parts.append(part)
            if part.end - part.begin >= _WORTH_JOINING_NBYTES:
                plan.large.append(part)
        plans[after - 1].ending.append(SplitPayload(sealer, first, parts))
    return plans


class Payloads:
    """The checksums of one image's payloads, and the seals made from them; ``bounds`` as above.

    Several threads may checksum different chunks at once. Before sealing, the caller makes sure
    that all earlier chunks are checksummed.
    """

    def __init__(self, seals: SealTable, bounds: tuple[int, ...]) -> None:
        self._chunks = plan_chunks(seals, bounds)
        self._crc_of_part: dict[tuple[int, int], int] = {}
        self._crc_of_chunk = [0] * len(self._chunks)
        self.crc32 = array("I", bytes(4 * len(seals.blob_offsets)))
        """One per slot; 0 for a slot that is not sealed."""

    def sum_parts(self, window: Window, chunk: int) -> None:
        """Checksum the payload parts in a chunk; seal the containers of entire payloads."""
        memory, origin = window.memory, window.origin
        for run in self._chunks[chunk].runs.values():
            places = [at - origin for at in run.payloads_at] if origin else run.payloads_at
            run.sealer.seal(memory, run.slots, places, self.crc32)
        for part in self._chunks[chunk].parts:
            crc32 = checksum.crc32(memory[part.begin - origin : part.end - origin])
            self._crc_of_part[part.slot, chunk] = crc32

    def seal_ending_in(self, window: Window, chunk: int) -> None:
        """Seal the containers whose payload is in several chunks and ends in this one."""
        for split in self._chunks[chunk].ending:
            slot, begin, _ = split.parts[0]
            crc32 = 0
            for of_chunk, part in enumerate(split.parts, split.first_chunk):
                crc32 = combine(crc32, self._crc_of_part[slot, of_chunk], part.end - part.begin)
            self.crc32[slot] = crc32
            split.sealer.put(window.memory, begin - window.origin, crc32)

    def sum_chunk(self, window: Window, chunk: int) -> None:
        """Checksum a chunk that is entirely sealed."""
        memory, origin, plan = window.memory, window.origin, self._chunks[chunk]
        crc32, at = 0, plan.begin
        for part in plan.large:
            crc32 = checksum.crc32(memory[at - origin : part.begin - origin], crc32)
            known = self._crc_of_part.get((part.slot, chunk), self.crc32[part.slot])
            crc32 = combine(crc32, known, part.end - part.begin)
            at = part.end
        self._crc_of_chunk[chunk] = checksum.crc32(memory[at - origin : plan.end - origin], crc32)

    @property
    def crc32_of_file(self) -> int:
        """CRC-32 of the whole image, once all chunks are checksummed."""
        crc32 = 0
        for plan, crc32_of_chunk in zip(self._chunks, self._crc_of_chunk, strict=True):
            crc32 = combine(crc32, crc32_of_chunk, plan.end - plan.begin)
        return crc32
