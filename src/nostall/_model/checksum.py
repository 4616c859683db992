"""Checksums of ZIP containers: the fastest implementation, sums of adjacent parts, and seals.

With the package ``isal`` installed (the extra ``fast``) CRC-32 is Intel's ISA-L, otherwise zlib's.
Both give the same sums. On the machine of docs/benchmarks.md zlib takes 0.4 s of a core for 1 GiB,
as long as the disk takes to write it; ISA-L takes a quarter of that.

The CRC of ``a + b`` is ``crc(a) * x**(8 * len(b)) + crc(b)`` over GF(2) modulo the CRC polynomial,
so that several threads can checksum one tensor. Only the powers of ``x`` are costly, and they
depend on the length alone (zlib's ``crc32_combine`` is the reference).

To seal a container is to fill in the bytes that depend on its payload's CRC-32.
``nostall._plan.formats`` describes and locates them; the writer process fills them in.
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections.abc import Callable, MutableSequence, Sequence
from functools import lru_cache

from nostall._model.jobs import Seal

ID_DIGITS = 20
"""Length of either half of the identifier record."""

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_U64 = (1 << 64) - 1
_HASH_STEP = 0x9E3779B9
_CRC = struct.Struct("<I")
_ID = struct.Struct(f"{ID_DIGITS}s")

crc32: Callable[..., int] = zlib.crc32
"""Arguments: the bytes, and optionally the CRC-32 of the bytes before them."""


def use_fastest() -> str | None:
    """Set :data:`crc32` to the fastest implementation that can be imported.

    Returns the directory from which another process of the same interpreter can import it; ``None``
    for zlib.
    """
    global crc32
    try:
        from isal import isal_zlib
    except Exception:  # missing or broken; zlib is only slower
        crc32 = zlib.crc32
        return None
    crc32 = isal_zlib.crc32
    return os.path.dirname(os.path.dirname(isal_zlib.__file__))


def use_fastest_from(directory: str) -> None:
    """Use the fastest in a process that imports nothing else from site-packages."""
    sys.path.append(directory)
    try:
        use_fastest()
    finally:
        sys.path.remove(directory)


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials modulo the CRC polynomial, lowest power in the highest bit."""
    product = 0
    bit = _ONE
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product


@lru_cache(maxsize=1024)
def _shift(nbytes: int) -> int:
    """``x ** (8 * nbytes)`` by repeated squaring."""
    power, square, exponent = _ONE, _ONE >> 1, 8 * nbytes
    while exponent:
        if exponent & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        exponent >>= 1
    return power


def combine(crc_a: int, crc_b: int, nbytes_b: int) -> int:
    """CRC-32 of two adjacent parts, from that of each and the length of the second in bytes."""
    return _multiply(_shift(nbytes_b), crc_a) ^ crc_b if nbytes_b else crc_a


def combine_hash(state: int, crc: int) -> int:
    """One step of torch's running hash over record checksums."""
    return state ^ ((crc + _HASH_STEP + ((state << 6) & _U64) + (state >> 2)) & _U64)


class Sealer:
    """Seals containers of one form, with only the payload-dependent work per container.

    A job may have tens of thousands of containers, so calls and copies are avoided here.
    """

    def __init__(self, payload_offset: int, payload_nbytes: int, seal: Seal) -> None:
        self.payload_offset, self.payload_nbytes = payload_offset, payload_nbytes
        self._hash_before = seal.hash_before
        # Relative to the payload's first byte.
        self._fields_at = tuple(
            at - payload_offset
            for at in (*seal.payload_crc_at, seal.id_at + ID_DIGITS, *seal.id_crc_at)
        )
        self._id_names_crc = crc32(seal.id_names)
        # The sums in combine_hash() are modulo 2**64, so all but the CRC can be added in advance.
        first = _HASH_STEP + (seal.hash_before << 6) + (seal.hash_before >> 2)
        self._steps = (first, *(_HASH_STEP + after for after in seal.crcs_after))

    def seal(
        self,
        memory: memoryview,
        slots: Sequence[int],
        payloads_at: Sequence[int],
        crc32_of_slot: MutableSequence[int],
    ) -> None:
        """Checksum payloads of a file image, record the CRCs, and seal the containers."""
        nbytes, sum_up, put = self.payload_nbytes, crc32, self.put
        for slot, at in zip(slots, payloads_at, strict=True):
            crc = crc32_of_slot[slot] = sum_up(memory[at : at + nbytes])
            put(memory, at, crc)

    def put(self, memory: memoryview, at: int, crc: int) -> None:
        """Seal the container of the payload at an offset, whose CRC-32 is known."""
        crc32_at, crc32_of, id_at, id_crc_at, id_crc_of = self._fields_at
        first, *steps = self._steps
        state = self._hash_before ^ ((first + crc) & _U64)
        for step in steps:
            state ^= (step + (state << 6) + (state >> 2)) & _U64
        digits = b"%020d" % state
        id_crc = crc32(digits, self._id_names_crc)
        put_crc = _CRC.pack_into
        put_crc(memory, at + crc32_at, crc)
        put_crc(memory, at + crc32_of, crc)
        _ID.pack_into(memory, at + id_at, digits)
        put_crc(memory, at + id_crc_at, id_crc)
        put_crc(memory, at + id_crc_of, id_crc)
