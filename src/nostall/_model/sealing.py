"""Sealing: fill in the bytes of a container that depend on its payload's CRC-32.

``nostall._plan.container`` describes and locates these bytes; the writer process fills them in.
"""

from __future__ import annotations

import struct
from collections.abc import MutableSequence, Sequence

from nostall._model import checksum
from nostall._model.jobs import Seal

ID_DIGITS = 20
"""Length of either half of the identifier record."""

_U64 = (1 << 64) - 1
_HASH_STEP = 0x9E3779B9
_CRC = struct.Struct("<I")
_ID = struct.Struct(f"{ID_DIGITS}s")


def combine_hash(state: int, crc32: int) -> int:
    """One step of torch's running hash over record checksums."""
    return state ^ ((crc32 + _HASH_STEP + ((state << 6) & _U64) + (state >> 2)) & _U64)


class Sealer:
    """Seals containers of one form, with only the payload-dependent work per container.

    A job may have tens of thousands of containers, so calls and copies are avoided here.

    Args:
        payload_offset: Offset of the payload in the container.
        payload_nbytes: Length of the payload.
        seal: The bytes that depend on it.
    """

    __slots__ = (
        "_fields_at",
        "_hash_before",
        "_id_names_crc",
        "_steps",
        "payload_nbytes",
        "payload_offset",
    )

    def __init__(self, payload_offset: int, payload_nbytes: int, seal: Seal) -> None:
        self.payload_offset, self.payload_nbytes = payload_offset, payload_nbytes
        self._hash_before = seal.hash_before
        # Relative to the payload's first byte.
        self._fields_at = tuple(
            at - payload_offset
            for at in (*seal.payload_crc_at, seal.id_at + ID_DIGITS, *seal.id_crc_at)
        )
        self._id_names_crc = checksum.crc32(seal.id_names)
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
        """Checksum payloads and seal their containers.

        Args:
            memory: The file image.
            slots: The slots of the containers.
            payloads_at: Offsets of their payloads in the image.
            crc32_of_slot: Receives the payloads' CRCs.
        """
        nbytes, sum_up, put = self.payload_nbytes, checksum.crc32, self.put
        for slot, at in zip(slots, payloads_at, strict=True):
            crc32 = crc32_of_slot[slot] = sum_up(memory[at : at + nbytes])
            put(memory, at, crc32)

    def put(self, memory: memoryview, at: int, crc32: int) -> None:
        """Seal the container of the payload at an offset, whose CRC-32 is known."""
        crc32_at, crc32_of, id_at, id_crc_at, id_crc_of = self._fields_at
        first, *steps = self._steps
        state = self._hash_before ^ ((first + crc32) & _U64)
        for step in steps:
            state ^= (step + (state << 6) + (state >> 2)) & _U64
        digits = b"%020d" % state
        id_crc = checksum.crc32(digits, self._id_names_crc)
        put_crc = _CRC.pack_into
        put_crc(memory, at + crc32_at, crc32)
        put_crc(memory, at + crc32_of, crc32)
        _ID.pack_into(memory, at + id_at, digits)
        put_crc(memory, at + id_crc_at, id_crc)
        put_crc(memory, at + id_crc_of, id_crc)
