"""The bytes that seal a container, as a table: what the writer process has to put in."""

from __future__ import annotations

import zlib

from nostall._model.checksum import ID_DIGITS, combine_hash
from nostall._model.jobs import Seal


def seal_patches(seal: Seal, crc32: int) -> tuple[tuple[int, bytes], ...]:
    """Offsets and bytes to put into a container once its payload's CRC-32 is known."""
    state = combine_hash(seal.hash_before, crc32)
    for after in seal.crcs_after:
        state = combine_hash(state, after)
    digits = b"%020d" % state
    payload_crc = crc32.to_bytes(4, "little")
    id_crc = zlib.crc32(digits, zlib.crc32(seal.id_names)).to_bytes(4, "little")
    return (
        (seal.payload_crc_at[0], payload_crc),
        (seal.payload_crc_at[1], payload_crc),
        (seal.id_at + ID_DIGITS, digits),
        (seal.id_crc_at[0], id_crc),
        (seal.id_crc_at[1], id_crc),
    )
