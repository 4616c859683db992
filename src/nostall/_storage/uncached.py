"""Reads of shard files past the page cache, unless they are in it.

The kernel reads what is not in the page cache in steps, and then copies it; ``O_DIRECT`` reads into
the reader's memory. Pages that are in the cache are faster than storage, so each piece is read in
the way that suits most of its pages.

``O_DIRECT`` requires aligned memory, offsets and lengths. One call reads whole pages of the file
into those pages that lie in the target entirely, and the pages at both ends beside it. Then the
bytes are moved by less than a page to where they belong. So neither a copy of the size of the
target is needed, nor does a page that is being read into hold anything else: where a fork makes
pages copy-on-write, such a page could lose what is read (``open(2)``).

The kernel writes changed pages of the range back before it reads past them, on local file systems,
NFS and FUSE alike.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from nostall._storage.posix import close_all
from nostall._storage.posix_files import PosixFiles, PosixSource

_PAGE_NBYTES = mmap.PAGESIZE
_LEAST_NBYTES = 256 << 10
"""Shorter reads go through the page cache; they wait for storage rather than for a copy."""
_PIECE_NBYTES = 2 << 20
"""From 1 to 8 MiB make no difference; smaller pieces take more calls."""
_PAGES_AT_ENDS = 3
"""At most one before the target's pages, and two after them."""
_REFUSED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EFAULT})
"""The file system, or this memory, does not do direct reads."""
_CACHESTAT = 451
"""Number of the system call, of Linux 6.5, on all machines that torch has builds for."""
_MAP_FAILED = ctypes.c_void_p(-1).value


class UncachedFiles(PosixFiles):
    """A checkpoint directory whose files are read by one process of this host, and once.

    What several processes read is better read through the page cache: one of them fills it.
    """

    def open(self, name: str) -> UncachedSource:
        return UncachedSource(self.where(name))


class UncachedSource(PosixSource):
    """A regular file, opened for reading past the page cache; raises as :class:`PosixSource`.

    A second descriptor is opened for the first piece that is not in the page cache. If ``O_DIRECT``
    is refused, then or later, all of the file is read through the page cache.
    """

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._direct: list[int] = []
        self._is_refused = False
        super().__init__(path)

    def read_into(self, offset: int, memory: memoryview) -> int:
        done = 0
        for nbytes in _pieces(offset, len(memory)):
            read = self._read_piece(offset + done, memory[done : done + nbytes])
            done += read
            if read < nbytes:
                break
        return done

    def close(self) -> None:
        close_all(self._direct)
        super().close()

    def _read_piece(self, offset: int, memory: memoryview) -> int:
        done = 0
        if not self._is_refused and _suits(self._fd, offset, len(memory)):
            done = self._read_past_cache(offset, memory)
        if done < len(memory):  # also after a short read: this finds the file's end, or the error
            done += super().read_into(offset + done, memory[done:])
        return done

    def _read_past_cache(self, offset: int, memory: memoryview) -> int:
        try:
            with self._lock:
                if not self._direct:
                    self._direct.append(self._reopened())
            return _read_pages(self._direct[0], offset, memory)
        except _Refused:
            self._is_refused = True
            return 0

    def _reopened(self) -> int:
        try:  # the same file, whatever its path is by now
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:  # of any kind: the file is open, and can be read without it
            raise _Refused from error


class _Refused(Exception):
    """A file cannot be read past the page cache."""


def _pieces(offset: int, nbytes: int) -> Iterator[int]:
    """Lengths of the pieces of a range; all but the first begin at a page of the file."""
    while nbytes >= 2 * _PIECE_NBYTES:
        piece = _PIECE_NBYTES - offset % _PAGE_NBYTES
        yield piece
        offset, nbytes = offset + piece, nbytes - piece
    yield nbytes


def _suits(fd: int, offset: int, nbytes: int) -> bool:
    """Whether a piece of a file is better read past the page cache."""
    return nbytes >= _LEAST_NBYTES and not is_cached(fd, offset, offset + nbytes)


def _read_pages(fd: int, offset: int, memory: memoryview) -> int:
    """Fill memory through a descriptor with ``O_DIRECT``.

    Args:
        fd: The descriptor.
        offset: First byte of the file, of any alignment.
        memory: At least a page, at any address.

    Returns:
        The number of bytes read; fewer than requested at the end of the file, and possibly
        elsewhere. The rest of the memory holds anything then.

    Raises:
        _Refused: The file system does not do this.
        OSError: Storage refused.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # In the file: bytes of the first page that are not wanted; pages.
    unwanted = offset % _PAGE_NBYTES
    pages = -(-(unwanted + len(memory)) // _PAGE_NBYTES)
    # In memory: where its first whole page begins; pages that are read there.
    begin = -address % _PAGE_NBYTES
    before = 1 if unwanted else 0
    inside = min((len(memory) - begin) // _PAGE_NBYTES, pages - before)
    after = pages - before - inside
    ends = memoryview(mmap.mmap(-1, _PAGES_AT_ENDS * _PAGE_NBYTES))
    first = ends[: before * _PAGE_NBYTES]
    middle = memory[begin : begin + inside * _PAGE_NBYTES]
    last = ends[len(first) : len(first) + after * _PAGE_NBYTES]
    try:
        read = os.preadv(fd, [each for each in (first, middle, last) if each], offset - unwanted)
    except OSError as error:
        if error.errno in _REFUSED:
            raise _Refused from error
        raise
    belongs_at = len(first) - unwanted
    end = min(belongs_at + len(middle), len(memory))
    if belongs_at != begin:
        _libc().memmove(address + belongs_at, address + begin, end - belongs_at)
    memory[:belongs_at] = first[unwanted:]
    memory[end:] = last[: len(memory) - end]
    return max(0, min(read - unwanted, len(memory)))


def is_cached(fd: int, begin: int, end: int) -> bool:
    """Whether half of a range of a file or more is in the page cache; true if that is unknown.

    Every page counts: a few of them say little, as heads of tensors are read before the rest. The
    kernel tells only processes that could write to the file; to others it says that it does not
    tell, or that all pages are cached.
    """
    begin -= begin % _PAGE_NBYTES
    cached = _cached_pages(fd, begin, end - begin)
    return cached is None or 2 * cached * _PAGE_NBYTES >= end - begin


def _cached_pages(fd: int, begin: int, nbytes: int) -> int | None:
    # 2 us, whatever the length; mincore() takes 70 to 110 us for 8 MiB.
    counts = (ctypes.c_uint64 * 5)()  # cached, dirty, being written back, evicted, evicted recently
    if _syscall()(_CACHESTAT, fd, (ctypes.c_uint64 * 2)(begin, nbytes), counts, 0) == 0:
        return counts[0]
    address = _libc().mmap(None, nbytes, 0, mmap.MAP_SHARED, fd, begin)
    if address == _MAP_FAILED:
        return None
    try:
        pages = ctypes.create_string_buffer(-(-nbytes // _PAGE_NBYTES))
        if _libc().mincore(address, nbytes, pages):
            return None
        return pages.raw.count(1)
    finally:
        _libc().munmap(address, nbytes)


@lru_cache(maxsize=1)
def _syscall() -> Any:
    """Holds the interpreter lock: releasing and reacquiring it takes longer than the call."""
    syscall = ctypes.PyDLL(None).syscall
    pointer = ctypes.c_void_p
    syscall.argtypes = (ctypes.c_long, ctypes.c_int, pointer, pointer, ctypes.c_uint)
    syscall.restype = ctypes.c_long
    return syscall


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    """Functions that release the interpreter lock."""
    libc = ctypes.CDLL(None)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.memmove.argtypes = (pointer, pointer, size)
    libc.memmove.restype = None
    libc.mmap.argtypes = (pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    libc.mmap.restype = pointer
    libc.mincore.argtypes = (pointer, size, pointer)
    libc.munmap.argtypes = (pointer, size)
    return libc
