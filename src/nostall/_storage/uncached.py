"""Reads of shard files past the page cache, unless they are in it.

The kernel reads what is not in the page cache in steps, and then copies it; ``O_DIRECT`` reads into
the reader's memory. Pages that are in the cache are faster than storage, so each piece is read in
the way that suits most of its pages.

``O_DIRECT`` requires aligned memory, offsets and lengths. So whole pages of the file are read into
memory beside the target, and copied from there. That costs less than it saves: this memory is huge
pages, and storage fills a few large stretches faster than many scattered pages of 4 KiB, of which
tensors consist (512 MiB of a virtual disk, by eight threads: in 0.22 s instead of 0.39 s, copies
included). Nothing but reads changes it, so a fork harms nothing: where it makes pages
copy-on-write, a page that is changed while it is read into could lose what is read (``open(2)``).

The kernel writes changed pages of the range back before it reads past them, on local file systems,
NFS and FUSE alike.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

from nostall._storage.port import between
from nostall._storage.posix import PosixSource, PosixStorage

_PAGE_NBYTES = mmap.PAGESIZE
_LEAST_NBYTES = 256 << 10
"""Shorter reads go through the page cache: they wait for storage rather than for a copy."""
_PIECE_NBYTES = 4 << 20
"""Read by one call: two huge pages. Half of it takes 10 % longer."""
_HUGE_NBYTES = 2 << 20
_SPARE_NBYTES = 64 << 10
"""By which the last piece of a range may be longer, rather than be followed by a short one: a
checksum, and the rest of pages at both ends."""
_REFUSED = frozenset({errno.EINVAL, errno.ENOTSUP})
"""The file system does not do direct reads."""
_CACHESTAT = 451
"""Number of the system call, of Linux 6.5, on all machines that torch has builds for."""
_MAP_FAILED = ctypes.c_void_p(-1).value

_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_libc = ctypes.CDLL(None)
_libc.mmap.argtypes = (_pointer, _size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.mmap.restype = _pointer
_libc.mincore.argtypes = (_pointer, _size, _pointer)
_libc.munmap.argtypes = (_pointer, _size)

# Holds the interpreter lock: releasing and reacquiring it takes longer than the call.
_syscall = ctypes.PyDLL(None).syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_int, _pointer, _pointer, ctypes.c_uint)
_syscall.restype = ctypes.c_long


class UncachedFiles(PosixStorage):
    """A checkpoint directory whose files are read by one process of this host, and once.

    What several processes read is better read through the page cache: one of them fills it. Memory
    that was read into is kept for the next piece, of any file: 4 to 6 MiB for each thread that
    reads.
    """

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._free: list[memoryview] = []

    def open(self, name: str) -> UncachedSource:
        return UncachedSource(self.where(name), self._free)


class UncachedSource(PosixSource):
    """A regular file, opened for reading past the page cache; raises as :class:`PosixSource`.

    A second descriptor is opened for the first piece that is not in the page cache. If ``O_DIRECT``
    is refused, then or later, all of the file is read through the page cache. ``free`` is memory to
    read into, which no thread uses; what is allocated is added to it.
    """

    def __init__(self, path: str, free: list[memoryview]) -> None:
        self._lock = threading.Lock()
        self._direct: int | None = None
        self._is_refused = False
        self._free = free
        super().__init__(path)

    def read_into(self, offset: int, *memories: memoryview) -> int:
        total = sum(map(len, memories))
        if total < _LEAST_NBYTES:
            return super().read_into(offset, *memories)
        done = 0
        for nbytes in _pieces(offset, total):
            piece = memories if nbytes == total else between(memories, done, done + nbytes)
            read = self._read_past_cache(offset + done, piece, nbytes)
            if read < nbytes:  # also after a short read: this finds the file's end, or the error
                left = between(piece, read, nbytes) if read else piece
                read += super().read_into(offset + done + read, *left)
            done += read
            if read < nbytes:
                break
        return done

    def close(self) -> None:
        fd, self._direct = self._direct, None
        if fd is not None:
            os.close(fd)
        super().close()

    def _read_past_cache(self, offset: int, memories: Sequence[memoryview], nbytes: int) -> int:
        """Read a piece, unless most of it is in the page cache, or the file system refuses."""
        if self._is_refused or is_cached(self._fd, offset, offset + nbytes):
            return 0
        with self._lock:
            if self._direct is None:
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
                try:  # the same file, whatever its path is by now
                    self._direct = os.open(f"/proc/self/fd/{self._fd}", flags)
                except OSError:  # of any kind: the file is open, and can be read without it
                    self._is_refused = True
                    return 0
        try:
            scratch = self._free.pop()
        except IndexError:
            try:
                scratch = _huge_pages()
            except OSError:  # no memory; the page cache needs none
                return 0
        try:
            return _read_pages(self._direct, offset, memories, nbytes, scratch)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._is_refused = True
            return 0
        finally:
            self._free.append(scratch)


def _pieces(offset: int, nbytes: int) -> Iterator[int]:
    """Lengths of the pieces of a range; all but the first begin at a page of the file."""
    while nbytes:
        piece = _PIECE_NBYTES - offset % _PAGE_NBYTES
        if nbytes <= piece + _SPARE_NBYTES - _PAGE_NBYTES:
            piece = nbytes
        yield piece
        offset, nbytes = offset + piece, nbytes - piece


def _huge_pages() -> memoryview:
    """Memory for one piece, of huge pages where the system has some; ``OSError`` if it has none."""
    nbytes = _PIECE_NBYTES + _SPARE_NBYTES
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, _HUGE_NBYTES + nbytes, flags=private)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -_address_of(memory) % _HUGE_NBYTES
    return memoryview(memory)[begin : begin + nbytes]


def _address_of(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _read_pages(
    fd: int, offset: int, memories: Sequence[memoryview], nbytes: int, scratch: memoryview
) -> int:
    """Fill pieces of memory, ``nbytes`` in all, through a descriptor with ``O_DIRECT``.

    ``scratch`` has as many whole pages as the range of the file touches, or more. Returns the
    number of bytes read; fewer than requested at the end of the file, and possibly elsewhere.
    """
    unwanted = offset % _PAGE_NBYTES
    pages = -(-(unwanted + nbytes) // _PAGE_NBYTES)
    read = os.preadv(fd, [scratch[: pages * _PAGE_NBYTES]], offset - unwanted)
    nbytes = max(0, min(read - unwanted, nbytes))
    at = _address_of(scratch) + unwanted
    for memory in between(memories, 0, nbytes):
        ctypes.memmove(_address_of(memory), at, len(memory))  # releases the interpreter lock
        at += len(memory)
    return nbytes


def is_cached(fd: int, begin: int, end: int) -> bool:
    """Whether half of a range of a file or more is in the page cache; true if that is unknown.

    Every page counts: a few of them say little, as heads of tensors are read before the rest. The
    kernel tells only processes that could write to the file; to others it says that it does not
    tell, or that all pages are cached.
    """
    begin -= begin % _PAGE_NBYTES
    nbytes = end - begin
    # 2 us, whatever the length; mincore() takes 70 to 110 us for 8 MiB.
    counts = (ctypes.c_uint64 * 5)()  # cached, dirty, being written back, evicted, evicted recently
    if _syscall(_CACHESTAT, fd, (ctypes.c_uint64 * 2)(begin, nbytes), counts, 0) == 0:
        return 2 * counts[0] * _PAGE_NBYTES >= nbytes
    address = _libc.mmap(None, nbytes, 0, mmap.MAP_SHARED, fd, begin)
    if address == _MAP_FAILED:
        return True
    try:
        pages = ctypes.create_string_buffer(-(-nbytes // _PAGE_NBYTES))
        if _libc.mincore(address, nbytes, pages):
            return True
        return 2 * pages.raw.count(1) * _PAGE_NBYTES >= nbytes
    finally:
        _libc.munmap(address, nbytes)
