"""Constant bytes that another process can write to a file: it needs a descriptor, and no copy."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from nostall._model import checksum
from nostall._model.crc import combine

Piece: TypeAlias = "bytes | memoryview"
"""A part of a content. It does not change."""
PlacedPiece: TypeAlias = "tuple[int, Piece]"
"""A piece and, before it, its offset in a file."""

LONG_NBYTES = 64 << 10
"""Shorter pieces are copied and joined: that costs less than a call for each."""


class SharedPart(NamedTuple):
    """A part of shared memory, and where it belongs in a file."""

    at: int
    """Offset in the file."""
    begin: int
    """Offset in the memory."""
    nbytes: int


class _Known(NamedTuple):
    """A long part of shared memory."""

    piece: memoryview
    """Kept, so that no other object gets its identity."""
    begin: int
    crc32: int


class SharedBytes:
    """Bytes in memory behind a descriptor.

    Args:
        pieces: The bytes.

    Raises:
        OSError: The system has no memory for them, or no descriptor.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        # Forked children close snapshot memory, which they know by its names; these they may need.
        self.fd = os.memfd_create("constant-nostall", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd).atexit = False
        with open(self.fd, "wb", closefd=False) as stream:
            stream.writelines(pieces)
        self.nbytes = os.fstat(self.fd).st_size
        self._memory = memoryview(mmap.mmap(self.fd, self.nbytes, prot=mmap.PROT_READ))
        self._known: dict[int, _Known] = {}
        """By the identity of the piece."""

    def piece(self, begin: int, end: int) -> Piece:
        """A part; a copy of it if it is short."""
        piece = self._memory[begin:end]
        if len(piece) < LONG_NBYTES:
            return bytes(piece)
        self._known[id(piece)] = _Known(piece, begin, checksum.crc32(piece))
        return piece

    def divided(self, pieces: Iterable[PlacedPiece]) -> tuple[list[SharedPart], list[PlacedPiece]]:
        """The long parts from :meth:`piece` among pieces of a file, and the other pieces."""
        parts, others = [], []
        for at, piece in pieces:
            known = self._known.get(id(piece))
            if known is None:
                others.append((at, piece))
            else:
                parts.append(SharedPart(at, known.begin, len(piece)))
        return parts, others

    def crc32(self, piece: Piece, before: int) -> int:
        """CRC-32 of a piece after other bytes; does not look at long parts again.

        Args:
            piece: A part, or other bytes.
            before: CRC-32 of the bytes before it.
        """
        known = self._known.get(id(piece))
        if known is None:
            return checksum.crc32(piece, before)
        return combine(before, known.crc32, len(piece))
