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


def seal_patches(seal: Seal, crc32: int) -> tuple[tuple[int, bytes], ...]:
    """Offsets and bytes to put into a container once its payload's CRC-32 is known."""
    state = combine_hash(seal.hash_before, crc32)
    for after in seal.crcs_after:
        state = combine_hash(state, after)
    digits = b"%020d" % state
    payload_crc = _CRC.pack(crc32)
    id_crc = _CRC.pack(checksum.crc32(digits, checksum.crc32(seal.id_names)))
    return (
        (seal.payload_crc_at[0], payload_crc),
        (seal.payload_crc_at[1], payload_crc),
        (seal.id_at + ID_DIGITS, digits),
        (seal.id_crc_at[0], id_crc),
        (seal.id_crc_at[1], id_crc),
    )


class Sealer:
    """Seals containers of one form, with only the payload-dependent work per container.

    It writes the same bytes as :func:`seal_patches`, the readable version. A job may have tens of
    thousands of containers, so calls and copies are avoided here.

    Args:
        payload_offset: Offset of the payload in the container.
        payload_nbytes: Length of the payload.
        seal: The bytes that depend on it.
    """

    __slots__ = (
        "_fields_at",
        "_id_names_crc",
        "_steps",
        "payload_nbytes",
        "payload_offset",
        "template",
    )

    def __init__(self, payload_offset: int, payload_nbytes: int, seal: Seal) -> None:
        self.payload_offset, self.payload_nbytes = payload_offset, payload_nbytes
        self.template = seal
        # Relative to the payload's first byte, in the order of seal_patches().
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
        crc32_at, crc32_of, id_at, id_crc_at, id_crc_of = self._fields_at
        nbytes, id_names_crc = self.payload_nbytes, self._id_names_crc
        hash_before = self.template.hash_before
        first, *steps = self._steps
        sum_up, put_crc, put_id = checksum.crc32, _CRC.pack_into, _ID.pack_into
        for slot, at in zip(slots, payloads_at, strict=True):
            crc32 = crc32_of_slot[slot] = sum_up(memory[at : at + nbytes])
            state = hash_before ^ ((first + crc32) & _U64)
            for step in steps:
                state ^= (step + (state << 6) + (state >> 2)) & _U64
            digits = b"%020d" % state
            id_crc = sum_up(digits, id_names_crc)
            put_crc(memory, at + crc32_at, crc32)
            put_crc(memory, at + crc32_of, crc32)
            put_id(memory, at + id_at, digits)
            put_crc(memory, at + id_crc_at, id_crc)
            put_crc(memory, at + id_crc_of, id_crc)
