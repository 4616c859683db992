"""Damage to shard files: they are read back, and their checksums are compared."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import closing
from typing import BinaryIO

from nostall._model import checksum
from nostall._storage.port import Files
from nostall.errors import ReadError

_PIECE_NBYTES = 8 << 20
_BEGIN = b"PK\x03\x04"
_END = b"PK\x05\x06"
_END_NBYTES = 22
"""Length of an archive's last record, without a comment."""


class ChecksumMissing(Exception):  # an answer, not an error
    """The archive has no checksums."""


class NoArchive(Exception):
    """Neither the first nor the last bytes are an archive's."""


def crc32_of_file(files: Files, name: str, progress: Callable[[int], object]) -> int:
    """The CRC-32 of a file; ``progress`` is called with the length of each piece read."""
    crc32 = offset = 0
    piece = memoryview(bytearray(_PIECE_NBYTES))
    with closing(files.open(name)) as source:
        while nbytes := source.read_into(offset, piece):
            crc32 = checksum.crc32(piece[:nbytes], crc32)
            offset += nbytes
            progress(nbytes)
    return crc32


def damage_of_container(part: BinaryIO) -> str | None:
    """A description of the damage to a ``torch.save`` archive; ``None`` if it is intact.

    Raises :class:`ChecksumMissing` or :class:`NoArchive` if there is nothing to compare, and
    ``ReadError`` if this Python cannot read archives.
    """
    nbytes = part.seek(0, os.SEEK_END)
    part.seek(0)
    begin = part.read(len(_BEGIN))
    part.seek(max(0, nbytes - _END_NBYTES))
    if begin != _BEGIN and _END not in part.read():
        raise NoArchive
    part.seek(0)
    try:
        return _damage_of_records(part, nbytes)
    except (ChecksumMissing, OSError, MemoryError):
        raise
    except ImportError as error:
        raise ReadError(
            f"archives cannot be read here: {error}",
            errno=errno.ELIBACC,
            phase="read",
            hint="repair the Python installation",
        ) from error
    except Exception as error:  # a damaged archive can raise any exception
        return f"an archive in it cannot be read: {type(error).__name__}: {error!s:.200}"


def is_to_blame(part: BinaryIO, error: Exception) -> bool:
    """Whether the bytes of an archive are the reason that it cannot be loaded.

    If they match their checksums, the reason is the environment: a module or a class that is
    missing, or another version of one.
    """
    try:
        return damage_of_container(part) is not None
    except (ChecksumMissing, NoArchive):
        return not isinstance(error, ImportError | AttributeError)


def _damage_of_records(part: BinaryIO, nbytes: int) -> str | None:
    import zipfile  # here, as it delays the start of the writer process by 7 ms

    with zipfile.ZipFile(part) as archive:
        entries = archive.infolist()
        # torch.save compresses nothing and stores each record once; others may take any time to
        # read.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            return "an archive in it has compressed records"
        if sum(entry.file_size for entry in entries) > nbytes:
            return "an archive in it has longer records than its own length"
        if any(entry.file_size and not entry.CRC for entry in entries):
            raise ChecksumMissing
        damaged = archive.testzip()
    if damaged is not None:
        return f"record {damaged:.200} of an archive in it does not match its CRC-32"
    return None
