"""Read shard files and metadata back, and compare their checksums."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, BinaryIO

from nostall._model import checksum
from nostall._storage.port import Files, Source
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


@contextmanager
def open_to_read(files: Files, name: str) -> Iterator[BinaryIO]:
    """A file as a stream; raises as ``files.open``."""
    with closing(files.open(name)) as source:
        yield as_stream(source)


def as_stream(source: Source) -> BinaryIO:
    """An open file as a stream."""
    return _Stream(source, 0, source.stat.nbytes)


def part_as_stream(source: Source, offset: int, nbytes: int) -> BinaryIO:
    """Part of an open file as a stream."""
    return _Stream(source, offset, nbytes)


def read_metadata(stream: BinaryIO, path: str) -> bytes:
    """The content of a metadata file.

    Raises:
        ReadError: Longer than :data:`MOST_METADATA_NBYTES`, or than the available memory.
        OSError: It cannot be read.
    """
    nbytes = stream.seek(0, os.SEEK_END)
    if nbytes > MOST_METADATA_NBYTES:
        raise ReadError(
            f"the file has {nbytes} bytes; the limit for metadata is {MOST_METADATA_NBYTES}",
            errno=errno.EFBIG,
            phase="read",
            path=path,
            hint="it may not be the metadata of a checkpoint",
        )
    stream.seek(0)
    try:
        return stream.read(nbytes)
    except MemoryError as error:
        raise ReadError(
            f"not enough memory for the {nbytes} bytes of the metadata",
            errno=errno.ENOMEM,
            phase="read",
            path=path,
            hint="make memory available",
        ) from error


def crc32_of_file(files: Files, name: str, progress: Callable[[int], object]) -> int:
    """The CRC-32 of a file; ``progress`` is called with the length of each piece read.

    Raises:
        OSError: It cannot be read.
    """
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

    Raises:
        ChecksumMissing: The archive has no checksums to compare.
        NoArchive: The bytes are not an archive.
        OSError: It cannot be read.
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

    Raises:
        OSError: It cannot be read.
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


class _Part(io.RawIOBase):
    """Part of a file, as a file object."""

    def __init__(self, source: Source, offset: int, nbytes: int) -> None:
        self._source, self._offset, self._nbytes = source, offset, nbytes
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

    def readinto(self, buffer: Any) -> int:
        memory = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._at)]
        nbytes = self._source.read_into(self._offset + self._at, memory)
        self._at += nbytes
        return nbytes


class _Stream(io.BufferedReader):
    """A buffered :class:`_Part`; ``read`` copies nothing."""

    def __init__(self, source: Source, offset: int, nbytes: int) -> None:
        super().__init__(_Part(source, offset, nbytes))
        self._nbytes = nbytes

    def read(self, nbytes: int | None = -1) -> bytes:
        """At most the rest: memory for all requested bytes is allocated first."""
        left = max(0, self._nbytes - self.tell())
        return super().read(left if nbytes is None or nbytes < 0 else min(nbytes, left))
