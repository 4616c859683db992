"""Checksum the payloads of a file image piece by piece, and seal their containers."""

from __future__ import annotations

import zlib
from bisect import bisect_right

from nostall._pipeline.container import seal_patches
from nostall._values import SealTable
from nostall._writer.crc import combine


class Payloads:
    """The payloads of one image cut at chunk bounds, and the seals they lead to.

    Different chunks may be summed by different threads at once; who seals sees to it that the chunks it needs are summed.

    Args:
        seals: The image's slots.
        bounds: Where chunks begin, and where the last one ends, in bytes.
    """

    def __init__(self, seals: SealTable, bounds: list[int]) -> None:
        self._seals = seals
        self._bounds = bounds
        self._pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(len(bounds) - 1)]
        self._ending: list[list[tuple[int, int]]] = [[] for _ in range(len(bounds) - 1)]
        self._crc_of_piece: dict[tuple[int, int], int] = {}
        self.crc32 = [0] * len(seals.blob_offsets)
        for slot, (blob, template) in enumerate(
            zip(seals.blob_offsets, seals.template_of_slot, strict=True)
        ):
            offset, nbytes, seal = seals.templates[template]
            if seal is not None and nbytes:
                self._cut(slot, blob + offset, nbytes)

    def sum_pieces(self, memory: memoryview, chunk: int) -> None:
        """Checksum the pieces of payloads that lie in a chunk."""
        crcs = self._crc_of_piece
        for slot, begin, end in self._pieces[chunk]:
            crcs[slot, chunk] = zlib.crc32(memory[begin:end])

    def first_chunk_needed(self, chunk: int) -> int:
        """The first chunk that has to be summed before the containers ending in ``chunk`` can be sealed."""
        return min((first for _, first in self._ending[chunk]), default=chunk)

    def seal_ending_in(self, memory: memoryview, chunk: int) -> None:
        """Seal the containers whose payload ends in a chunk."""
        for slot, first in self._ending[chunk]:
            blob = self._seals.blob_offsets[slot]
            seal = self._seals.templates[self._seals.template_of_slot[slot]][2]
            assert seal is not None  # only sealed slots are cut into pieces
            crc32 = self._crc_of_piece[slot, first]
            for later in range(first + 1, chunk + 1):
                length = self._piece_nbytes(slot, later)
                crc32 = combine(crc32, self._crc_of_piece[slot, later], length)
            self.crc32[slot] = crc32
            for at, patch in seal_patches(seal, crc32):
                memory[blob + at : blob + at + len(patch)] = patch

    def _cut(self, slot: int, begin: int, nbytes: int) -> None:
        end = begin + nbytes
        chunk = first = bisect_right(self._bounds, begin) - 1
        while begin < end:
            stop = min(end, self._bounds[chunk + 1])
            self._pieces[chunk].append((slot, begin, stop))
            begin = stop
            chunk += 1
        self._ending[chunk - 1].append((slot, first))

    def _piece_nbytes(self, slot: int, chunk: int) -> int:
        offset, nbytes, _ = self._seals.templates[self._seals.template_of_slot[slot]]
        begin = self._seals.blob_offsets[slot] + offset
        return min(begin + nbytes, self._bounds[chunk + 1]) - max(begin, self._bounds[chunk])
