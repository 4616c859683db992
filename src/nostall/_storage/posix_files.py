"""The files of a checkpoint on a POSIX file system: it is a directory.

The writer process imports this module. :mod:`nostall._storage.posix_storage` publishes.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress

from nostall._storage.port import Stat, Version
from nostall._storage.posix import (
    ImageFile,
    make_directory,
    remove_file,
    sync_directory,
)
from nostall.errors import ReadError

_READ_ONLY = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class PosixFiles:
    """A checkpoint directory; :class:`~nostall._storage.port.Files`.

    Args:
        directory: The checkpoint directory.
        sync: Whether to fsync what is put, removed and published.
        direct: Whether to put files past the page cache.
    """

    def __init__(self, directory: str, *, sync: bool = True, direct: bool = False) -> None:
        self._directory = directory
        self._sync = sync
        self._direct = direct

    def where(self, name: str = "") -> str:
        return os.path.join(self._directory, name) if name else self._directory

    def make_place(self) -> None:
        make_directory(self._directory)

    def least_part(self, nbytes: int) -> int:
        del nbytes
        return mmap.PAGESIZE

    def put(self, name: str, nbytes: int, *, on_created: Callable[[str], None]) -> ImageFile:
        path = self.where(name)
        make_directory(os.path.dirname(path))
        return ImageFile(
            path,
            nbytes,
            root=self._directory,
            direct=self._direct,
            sync=self._sync,
            on_created=on_created,
        )

    def flush(self) -> None:
        if self._sync:
            with suppress(FileNotFoundError):
                sync_directory(self._directory)

    def open(self, name: str) -> PosixSource:
        return PosixSource(self.where(name))

    def stat(self, name: str) -> Stat:
        path = self.where(name)
        return _stat_of(os.stat(path), path)

    def list(self) -> list[str]:
        return os.listdir(self._directory)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            remove_file(self.where(name))


def _is_listed(path: str) -> bool:
    directory, name = os.path.split(path)
    with suppress(OSError):
        return name in os.listdir(directory)
    return False


class PosixSource:
    """A regular file, opened for reading.

    Raises:
        ReadError: The path is something else: a pipe would block, a device may have no end.
        OSError: It cannot be opened.
    """

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, _READ_ONLY)
        except FileNotFoundError:
            # With NFS a host that has looked before another one made the file remembers for up to a
            # minute that there is none. A listing asks the server.
            if not _is_listed(path):
                raise
            self._fd = os.open(path, _READ_ONLY)
        try:
            self.stat = _stat_of(os.fstat(self._fd), path)
        except BaseException:  # passed on; no caller gets an object to close
            self.close()
            raise

    def read_into(self, offset: int, *memories: memoryview) -> int:
        total, done = sum(map(len, memories)), 0
        while done < total:
            left = between(memories, done, total) if done else memories
            nbytes = os.preadv(self._fd, left, offset + done)
            if not nbytes:
                break
            done += nbytes
        return done

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def between(memories: Iterable[memoryview], begin: int, end: int) -> list[memoryview]:
    """Pieces of memory from one of their bytes to another, as if they were one."""
    found = []
    for memory in memories:
        if part := memory[max(0, begin) : max(0, end)]:
            found.append(part)
        begin, end = begin - len(memory), end - len(memory)
    return found


def _stat_of(status: os.stat_result, path: str) -> Stat:
    if not stat.S_ISREG(status.st_mode):
        raise ReadError("not a regular file", errno=errno.EINVAL, phase="read", path=path)
    version = Version(f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}")
    changed_s = max(status.st_mtime, status.st_ctime)
    return Stat(status.st_size, version, status.st_mtime, changed_s)
