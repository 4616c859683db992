"""Read shard files and metadata back, and compare their checksums."""

from __future__ import annotations

import errno
import io
import os
import stat
import zipfile
from collections.abc import Callable
from typing import IO, BinaryIO

from nostall._model import checksum
from nostall.errors import ReadError

_PIECE_NBYTES = 8 << 20
_BEGIN = b"PK\x03\x04"
_END = b"PK\x05\x06"
_END_NBYTES = 22
"""Length of an archive's last record, without a comment."""
MOST_METADATA_NBYTES = 2 << 30
"""Limit on metadata that is read: some hundred bytes per item, so millions of items."""


class ChecksumMissing(Exception):  # an answer, not an error
    """The archive has no checksums."""


class NoArchive(Exception):
    """Neither the first nor the last bytes are those of an archive."""


def open_to_read(path: str) -> BinaryIO:
    """Open a regular file for reading. A pipe would block, and a device may have no end.

    Raises:
        ReadError: Not a regular file.
        OSError: It cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    is_regular = False
    try:
        is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
    finally:
        if not is_regular:
            os.close(fd)
    if not is_regular:
        raise ReadError("not a regular file", errno=errno.EINVAL, phase="read", path=path)
    return open(fd, "rb")


def read_metadata_file(path: str) -> bytes:
    """The content of a metadata file.

    Raises:
        ReadError: Not a regular file, or too long (:func:`read_metadata`).
        OSError: It cannot be read.
    """
    with open_to_read(path) as stream:
        return read_metadata(stream, path)


def read_metadata(stream: BinaryIO, path: str) -> bytes:
    """As :func:`read_metadata_file`, for an open file.

    Raises:
        ReadError: Longer than :data:`MOST_METADATA_NBYTES`, or than the available memory.
        OSError: It cannot be read.
    """
    nbytes = os.fstat(stream.fileno()).st_size
    if nbytes > MOST_METADATA_NBYTES:
        what = f"it has {nbytes} bytes; the limit for metadata is {MOST_METADATA_NBYTES}"
        raise ReadError(what, errno=errno.EFBIG, phase="read", path=path)
    stream.seek(0)
    try:
        return stream.read(nbytes)  # not more, even if the file grows
    except MemoryError as error:
        what = f"not enough memory for its {nbytes} bytes"
        raise ReadError(what, errno=errno.ENOMEM, phase="read", path=path) from error


def crc32_of_file(path: str, progress: Callable[[int], object]) -> int:
    """The CRC-32 of a file; ``progress`` is called with the length of each piece read.

    Raises:
        OSError: It cannot be read.
    """
    crc32 = 0
    with open(path, "rb", buffering=0) as stream:
        piece = bytearray(_PIECE_NBYTES)
        while nbytes := stream.readinto(piece):
            crc32 = checksum.crc32(memoryview(piece)[:nbytes], crc32)
            progress(nbytes)
    return crc32


def damage_of_container(stream: IO[bytes], offset: int, nbytes: int) -> str | None:
    """A description of the damage to a ``torch.save`` archive in a file; ``None`` if it is intact.

    Raises:
        ChecksumMissing: The archive has no checksums to compare.
        NoArchive: The bytes are not an archive.
        OSError: It cannot be read.
    """
    part = _Part(stream, offset, nbytes)
    begin = part.read(len(_BEGIN))
    part.seek(max(0, nbytes - _END_NBYTES))
    if begin != _BEGIN and _END not in part.read():
        raise NoArchive
    part.seek(0)
    try:
        return _damage_of_records(part, nbytes)
    except (ChecksumMissing, OSError):
        raise
    except Exception as error:  # a damaged archive can raise any exception
        return f"an archive in it cannot be read: {type(error).__name__}: {error!s:.200}"


def _damage_of_records(part: _Part, nbytes: int) -> str | None:
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


class _Part(io.RawIOBase):
    """Part of a file, as a file object."""

    def __init__(self, stream: IO[bytes], offset: int, nbytes: int) -> None:
        self._stream, self._offset, self._nbytes = stream, offset, nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, nbytes: int = -1) -> bytes:
        left = max(0, self._nbytes - self._at)
        self._stream.seek(self._offset + self._at)
        piece = self._stream.read(left if nbytes < 0 else min(nbytes, left))
        self._at += len(piece)
        return piece
