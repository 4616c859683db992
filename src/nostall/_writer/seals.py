"""Checksum the payloads of a file image piece by piece, and seal their containers.

Which payload lies where among the chunks of an image follows from the layout alone: :func:`cut` works it out, and
:class:`Cuts` keeps it from job to job. :class:`Payloads` is what comes new with every job, the checksums.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nostall._model import checksum
from nostall._model.jobs import Seal, SealTable
from nostall._model.sealing import Sealer, seal_patches
from nostall._writer.crc import combine
from nostall._writer.images import Window

_WORTH_JOINING_NBYTES = 64 << 10
"""From here on joining the sum of a payload to a file's is quicker than summing its bytes once more."""
_CUTS_KEPT = 16
"""Images, not jobs: with more files than that, every job cuts anew, which costs a fraction of the sealing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Slots of one chunk whose payloads lie in it as a whole and whose containers are of one form."""

    sealer: Sealer
    slots: array[int]
    payloads_at: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a payload that lies in one chunk, if not all of it does."""

    slot: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A payload that lies in several chunks, the last of which is the one that this belongs to."""

    slot: int
    blob: int
    """Where its container begins."""
    seal: Seal
    first_chunk: int
    later_nbytes: tuple[int, ...]
    """Lengths of its pieces in the chunks after the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCut:
    """What there is to checksum and to seal in one chunk."""

    begin: int
    end: int
    runs: tuple[Run, ...]
    pieces: tuple[Piece, ...]
    ending: tuple[Spread, ...]
    large: tuple[Piece, ...]
    """Payloads and pieces, in file order, whose checksums are joined to the file's instead of computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The payloads of one image, by chunk."""

    slot_count: int
    chunks: tuple[ChunkCut, ...]


Cutter: TypeAlias = Callable[[SealTable, Sequence[int]], Cut]


def cut(seals: SealTable, bounds: Sequence[int]) -> Cut:
    """Cut the payloads of an image at chunk bounds.

    Args:
        seals: The image's slots.
        bounds: Where chunks begin, and where the last one ends, in bytes.
    """
    sealers = [
        Sealer(offset, nbytes, seal) if seal is not None and nbytes else None
        for offset, nbytes, seal in seals.templates
    ]
    count = len(bounds) - 1
    runs: list[dict[int, Run]] = [{} for _ in range(count)]
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    ending: list[list[Spread]] = [[] for _ in range(count)]
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
            run = runs[first].get(template)
            if run is None:
                run = runs[first][template] = Run(
                    sealer=sealer, slots=array("Q"), payloads_at=array("Q")
                )
            run.slots.append(slot)
            run.payloads_at.append(begin)
            continue
        spread = _pieces(slot, begin, end, first, bounds)
        for chunk, piece in enumerate(spread, first):
            pieces[chunk].append(piece)
        ending[first + len(spread) - 1].append(
            Spread(
                slot=slot,
                blob=blob,
                seal=sealer.template,
                first_chunk=first,
                later_nbytes=tuple(piece.end - piece.begin for piece in spread[1:]),
            )
        )
    return Cut(
        slot_count=len(seals.blob_offsets),
        chunks=tuple(
            ChunkCut(
                begin=bounds[chunk],
                end=bounds[chunk + 1],
                runs=tuple(runs[chunk].values()),
                pieces=tuple(pieces[chunk]),
                ending=tuple(ending[chunk]),
                large=tuple(_large(runs[chunk].values(), pieces[chunk])),
            )
            for chunk in range(count)
        ),
    )


def _large(runs: Iterable[Run], pieces: Iterable[Piece]) -> list[Piece]:
    whole = [
        Piece(slot=slot, begin=begin, end=begin + run.sealer.payload_nbytes)
        for run in runs
        if run.sealer.payload_nbytes >= _WORTH_JOINING_NBYTES
        for slot, begin in zip(run.slots, run.payloads_at, strict=True)
    ]
    parts = [piece for piece in pieces if piece.end - piece.begin >= _WORTH_JOINING_NBYTES]
    return sorted(whole + parts, key=lambda piece: piece.begin)


def _pieces(slot: int, begin: int, end: int, chunk: int, bounds: Sequence[int]) -> list[Piece]:
    pieces = []
    while begin < end:
        stop = min(end, bounds[chunk + 1])
        pieces.append(Piece(slot=slot, begin=begin, end=stop))
        begin = stop
        chunk += 1
    return pieces


class Cuts:
    """Remembers cuts, so that the saves of one layout share them. Thread-safe.

    A table is recognised by its identity, as comparing two would cost as much as cutting; what is remembered keeps its
    table alive, so no other one can be taken for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, tuple[SealTable, tuple[int, ...], Cut]] = OrderedDict()

    def cut(self, seals: SealTable, bounds: Sequence[int]) -> Cut:
        """As :func:`cut`."""
        key, wanted = id(seals), tuple(bounds)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
        if kept is not None:
            _, kept_bounds, known = kept
            if kept_bounds == wanted:
                return known
        new = cut(seals, wanted)
        with self._lock:
            self._kept[key] = (seals, wanted, new)
            self._kept.move_to_end(key)
            while len(self._kept) > _CUTS_KEPT:
                self._kept.popitem(last=False)
        return new


class Payloads:
    """The checksums of one image's payloads, and the seals they lead to.

    Different chunks may be summed by different threads at once; who seals sees to it that the chunks it needs are summed.
    """

    def __init__(self, cut: Cut) -> None:
        self._chunks = cut.chunks
        self._crc_of_piece: dict[tuple[int, int], int] = {}
        self._crc_of_chunk = [0] * len(cut.chunks)
        self.crc32 = array("I", bytes(4 * cut.slot_count))
        """One per slot; 0 for a slot that is not sealed."""

    def sum_pieces(self, window: Window, chunk: int) -> None:
        """Checksum what lies of payloads in a chunk; where that is a whole one, seal its container."""
        memory, origin = window.memory, window.origin
        for run in self._chunks[chunk].runs:
            places = [at - origin for at in run.payloads_at] if origin else run.payloads_at
            run.sealer.seal(memory, run.slots, places, self.crc32)
        for piece in self._chunks[chunk].pieces:
            crc32 = checksum.crc32(memory[piece.begin - origin : piece.end - origin])
            self._crc_of_piece[piece.slot, chunk] = crc32

    def first_chunk_needed(self, chunk: int) -> int:
        """The first chunk that has to be summed before the containers ending in ``chunk`` can be sealed."""
        return min((spread.first_chunk for spread in self._chunks[chunk].ending), default=chunk)

    def seal_ending_in(self, window: Window, chunk: int) -> None:
        """Seal the containers whose payload lies in several chunks and ends in this one."""
        for spread in self._chunks[chunk].ending:
            crc32 = self._crc_of_piece[spread.slot, spread.first_chunk]
            for later, nbytes in enumerate(spread.later_nbytes, spread.first_chunk + 1):
                crc32 = combine(crc32, self._crc_of_piece[spread.slot, later], nbytes)
            self.crc32[spread.slot] = crc32
            for at, patch in seal_patches(spread.seal, crc32):
                begin = spread.blob + at - window.origin
                window.memory[begin : begin + len(patch)] = patch

    def sum_chunk(self, window: Window, chunk: int) -> None:
        """Checksum a chunk that is sealed from its first byte to its last."""
        memory, origin, cut = window.memory, window.origin, self._chunks[chunk]
        crc32, at = 0, cut.begin
        for piece in cut.large:
            crc32 = checksum.crc32(memory[at - origin : piece.begin - origin], crc32)
            known = self._crc_of_piece.get((piece.slot, chunk), self.crc32[piece.slot])
            crc32 = combine(crc32, known, piece.end - piece.begin)
            at = piece.end
        self._crc_of_chunk[chunk] = checksum.crc32(memory[at - origin : cut.end - origin], crc32)

    @property
    def crc32_of_file(self) -> int:
        """That of the whole image, once all chunks are summed."""
        crc32 = 0
        for cut, crc32_of_chunk in zip(self._chunks, self._crc_of_chunk, strict=True):
            crc32 = combine(crc32, crc32_of_chunk, cut.end - cut.begin)
        return crc32
