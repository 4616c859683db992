"""The storage port: what saving, verifying and removing a checkpoint need of storage.

One :class:`Storage` holds the files of one checkpoint, by name. There is no rename or fsync in it:
an object store has neither. A file counts only once metadata names it, so an
unfinished one may be visible. ``tests/support/storage_contract.py`` checks an implementation. What
works with any of them follows it: looking for files, and reading one as a stream.

Methods raise ``OSError`` if storage refuses, ``FileNotFoundError`` for a name that does not exist.
They may be called from several threads at once.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, BinaryIO, NamedTuple, NewType, Protocol

from nostall.errors import NotDurableError, ReadError

MOST_METADATA_NBYTES = 2 << 30
"""Limit on metadata that is read: some hundred bytes per item, so millions of items."""

Version = NewType("Version", str)
"""Identifies one content of a name: an ETag, or inode, modification time and length."""
ABSENT = Version("")
"""The version of a name that does not exist."""


class Conflict(OSError):
    """A name has another version than expected; nothing was published."""

    def __init__(self, where: str) -> None:
        super().__init__(errno.ESTALE, "another process has published meanwhile", where)

    def __reduce__(self) -> tuple[type[Conflict], tuple[str]]:
        return Conflict, (self.filename,)


class Stat(NamedTuple):
    """Length, version and age of a file."""

    nbytes: int
    version: Version
    modified_s: float
    """When its content was written, in seconds since the epoch, by the clock of storage."""
    changed_s: float
    """``modified_s``, or when it got a name, if that was later: a hard link's content is old."""


def version_of(stat: Callable[[str], Stat], name: str) -> Version:
    """The present version of a name; ``stat`` is storage's."""
    try:
        return stat(name).version
    except FileNotFoundError:
        return ABSENT


class Source(Protocol):
    """One version of a file, opened for reading; fails if storage does not have it any more."""

    stat: Stat
    """Its length and version."""

    def read_into(self, offset: int, *memories: memoryview) -> int:
        """Fill memory with what follows an offset.

        Args:
            offset: First byte of the file.
            memories: Pieces that are filled one after the other, by as few requests as possible; at
                most 16, some of which may be empty.

        Returns:
            The number of bytes read; fewer than there is memory only at the end of the file.
        """

    def close(self) -> None:
        """Release it. Idempotent."""


class Upload(Protocol):
    """A new file, written in parts from memory that stays unchanged until the file is finished."""

    name: str
    """Its name: the requested one, or in a file system a similar one if that was taken."""

    @property
    def any_order(self) -> bool:
        """Whether several threads may write parts in any order; otherwise from front to back."""

    def write(self, memory: memoryview, begin: int, end: int, *, origin: int = 0) -> None:
        """Write the bytes of the file from ``begin`` to ``end``.

        Args:
            memory: Memory that contains them, page-aligned and padded to whole pages.
            begin: First byte, a multiple of the page size.
            end: One past the last byte; a multiple of the page size or the file's length. Parts
                that do not end with the file have :meth:`Files.least_part` bytes, or more.
            origin: Offset in the file of the first byte of ``memory``.
        """

    def finish(self) -> None:
        """Complete the file; all parts are written."""

    def close(self) -> None:
        """Remove what was written, unless the file is finished; never raises. Idempotent."""


class ReadableFiles(Protocol):
    """The files of one checkpoint, as loading needs them."""

    def where(self, name: str = "") -> str:
        """Path or address of a file, or of the checkpoint, for errors and logs."""

    def open(self, name: str) -> Source:
        """Open a file for reading.

        Raises:
            ReadError: Something that is not a file has the name.
        """


class Files(ReadableFiles, Protocol):
    """The files of one checkpoint, as the writer process needs them: it publishes nothing."""

    def make_place(self) -> None:
        """Make the directory, if it is one. Idempotent."""

    def least_part(self, nbytes: int) -> int:
        """Length of the shortest part of a file of ``nbytes``; a multiple of the page size."""

    def put(self, name: str, nbytes: int, *, on_created: Callable[[str], None]) -> Upload:
        """Begin a new file. Existing files stay.

        Args:
            name: The requested name; in an object store it is unique.
            nbytes: The file's length.
            on_created: Called with its name before the first part, so that the file can be removed
                if this process dies.
        """

    def flush(self) -> None:
        """Make finished files and removals durable, where they are not yet."""

    def stat(self, name: str) -> Stat:
        """Length, version and age of a file; raises as :meth:`open`."""

    def list(self) -> list[str]:
        """All names, in any order; also of unfinished files but those of an object store."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, in this order until one is refused; absent ones are no error."""


class Storage(Files, Protocol):
    """The files of one checkpoint, and the content that makes them one."""

    publishes_conditionally: bool
    """Whether :meth:`publish` compares the expected version at the very instant."""

    def publish(
        self,
        name: str,
        content: Sequence[bytes],
        *,
        expected: Version | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Replace a content, or make a first one, durably and at one instant.

        Args:
            name: Its name.
            content: The whole content, in pieces.
            expected: Publish only if the name has this version; ``None`` for any.
            before: Called right before the instant; publishes nothing if it raises.

        Raises:
            Conflict: The name has another version.
            NotDurableError: The content is or may be published, but may not last.
            OSError: Storage refused; nothing is published.
        """


# --- what works with any storage ------------------------------------------------------------------


_TRANSIENT = {
    getattr(errno, name)
    for name in (
        *("EIO", "EREMOTEIO", "EAGAIN", "EBUSY", "ENOLINK", "ESTALE", "ETIMEDOUT", "ECONNABORTED"),
        *("ECONNRESET", "ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH"),
    )
}
"""Errors of network file systems whose server is away, which are retried; no others are."""


def is_transient(error: Exception) -> bool:
    """Whether the same operation may succeed when retried."""
    return isinstance(error, OSError) and error.errno in _TRANSIENT


_DENIED = {errno.EACCES, errno.EPERM, errno.ELIBACC}
"""Access to the file, or to a module that reads it."""


def leaves_open(error: Exception) -> bool:
    """Whether an error says nothing about what is stored: storage is away, or denies access."""
    return is_transient(error) or (isinstance(error, OSError) and error.errno in _DENIED)


def reason(error: Exception) -> str:
    """Description of an error, without its place."""
    return error.strerror if isinstance(error, OSError) and error.strerror else repr(error)


def unknown_outcome(path: str, what: str, *errors: Exception) -> NotDurableError:
    """The error that something may have got its name or not; ``errors`` are storage's answers."""
    return NotDurableError(
        f"cannot determine whether {what} was published: "
        + ", and then ".join(dict.fromkeys(map(reason, errors))),
        errno=errors[0].errno if isinstance(errors[0], OSError) else None,
        phase="commit",
        path=path,
        hint="look there when storage answers again; another process may save to it",
    )


def how_to_read(error: OSError) -> str:
    """The next step after storage refused to be read."""
    if isinstance(error, PermissionError):
        return "give this user the right to read it"
    if isinstance(error, FileNotFoundError):
        return "check that it exists and may be listed"
    return "try again when storage answers"


def between(memories: Iterable[memoryview], begin: int, end: int) -> list[memoryview]:
    """Pieces of memory from one of their bytes to another, as if they were one."""
    found = []
    for memory in memories:
        if part := memory[max(0, begin) : max(0, end)]:
            found.append(part)
        begin, end = begin - len(memory), end - len(memory)
    return found


class InMemory:
    """Pieces of memory, one after the other, as a :class:`Source`."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces = [memoryview(piece) for piece in pieces]
        self.stat = Stat(sum(map(len, self._pieces)), ABSENT, 0.0, 0.0)

    def read_into(self, offset: int, *memories: memoryview) -> int:
        at = offset
        for memory in memories:
            left = memory
            for piece in between(self._pieces, at, at + len(memory)):
                left[: len(piece)] = piece
                left = left[len(piece) :]
            at += len(memory) - len(left)
        return at - offset

    def close(self) -> None:
        """Do nothing; the memory is the caller's."""


def may_have(files: Files, name: str) -> bool:
    """Whether a file exists; also true if storage cannot tell."""
    try:
        files.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def require_file(files: Files, name: str, nbytes: int) -> None:
    """Raise ``OSError`` if a file does not exist, or has another size than it was written with."""
    found = files.stat(name).nbytes
    if found != nbytes:
        what = f"the file has {found} bytes instead of {nbytes}"
        raise OSError(errno.EIO, what, files.where(name))


@contextmanager
def open_to_read(files: Files, name: str) -> Iterator[BinaryIO]:
    """A file as a stream; raises as ``files.open``."""
    with closing(files.open(name)) as source:
        yield as_stream(source)


def as_stream(source: Source) -> BinaryIO:
    """An open file as a stream."""
    return PartStream(source, 0, source.stat.nbytes)


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


class PartStream(io.BufferedReader):
    """Part of an open file as a stream; ``read`` copies nothing."""

    def __init__(self, source: Source, offset: int, nbytes: int) -> None:
        super().__init__(_Part(source, offset, nbytes))
        self._nbytes = nbytes

    def read(self, nbytes: int | None = -1) -> bytes:
        """At most the rest: memory for all requested bytes is allocated first."""
        left = max(0, self._nbytes - self.tell())
        return super().read(left if nbytes is None or nbytes < 0 else min(nbytes, left))
