"""Combine CRC-32 checksums of adjacent parts, so that several threads can checksum one tensor.

The CRC of ``a + b`` is ``crc(a) * x**(8 * len(b)) + crc(b)`` over GF(2) modulo the CRC polynomial.
Only the powers of ``x`` are costly, and they depend on the length alone (zlib's ``crc32_combine``
is the reference).
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


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
