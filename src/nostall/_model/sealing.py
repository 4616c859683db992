"""Sealing: put into a container what depends on its payload, once that one's CRC-32 is known.

``nostall._plan.container`` says what that is, and finds out where it stands; the writer process does the rest.
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
    """The bytes to put into a container once its payload's CRC-32 is known, with their places in it."""
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
    """Seals containers of one form, doing per container only what depends on its payload.

    It writes what :func:`seal_patches` says, which is the same in fewer words; a job may have tens of thousands of
    containers, and then every call and every copy counts.

    Args:
        payload_offset: Where the payload begins in the container.
        payload_nbytes: Its length.
        seal: What depends on it.
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
        # From the payload's first byte, in the order in which seal_patches() has them.
        self._fields_at = tuple(
            at - payload_offset
            for at in (*seal.payload_crc_at, seal.id_at + ID_DIGITS, *seal.id_crc_at)
        )
        self._id_names_crc = checksum.crc32(seal.id_names)
        # The sums in combine_hash() are taken modulo 2**64, so all but the CRC can be added up, or shifted, beforehand.
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
            slots: Which slots they are in.
            payloads_at: Where their payloads begin in the image.
            crc32_of_slot: Where to put the payloads' CRCs.
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
