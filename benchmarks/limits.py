"""The machine's limits: how fast it can copy, write and read the same bytes."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from nostall import _torch

_CHUNK_NBYTES = 8 << 20
_COPIES = 3
_THREADS = (1, 2, 4, 8)


def fast_pages(nbytes: int) -> mmap.mmap:
    """Page-aligned private memory, in huge pages where the system has them: the fastest target."""
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def least_s(action: Callable[[], object], times: int = _COPIES) -> float:
    """Seconds of the fastest of a few runs; in the first one threads may still be asleep."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


class Copies:
    """Copies of as many bytes to memory that was written before; the best of three each time."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._copies = [torch.zeros_like(tensor) for tensor in tensors]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self.pages = fast_pages(nbytes)
        self._source = torch.frombuffer(self.pages, dtype=torch.uint8)[:nbytes]
        self._source.fill_(1)
        self._flat = torch.zeros(nbytes, dtype=torch.uint8)
        self.measure()  # fresh memory is no measure of copying

    def measure(self) -> dict[str, float]:
        """One flat copy with all of torch's threads, and ``_foreach_copy_`` of the tensors."""
        return {
            "memcpy_s": least_s(lambda: self._flat.copy_(self._source)),
            "foreach_copy_s": least_s(lambda: _torch.copy_each(self._copies, self._tensors)),
        }


class RawWrites:
    """A new file of as many bytes, written in chunks of 8 MiB by threads, and fsynced."""

    def __init__(self, pages: mmap.mmap, nbytes: int) -> None:
        self._pages = memoryview(pages)
        self._nbytes = nbytes

    def measure(self, path: Path, barrier: Callable[[], None]) -> dict[str, float]:
        """Seconds of each setting; where ``O_DIRECT`` is refused, through the page cache."""
        found = {}
        for threads in _THREADS:
            for preallocated in (False, True):
                barrier()
                seconds, direct = self.write(path, threads, preallocated=preallocated)
                path.unlink()
                how = f"{threads} threads{', preallocated' if preallocated else ''}"
                found[f"raw write {how}{'' if direct else ', page cache'}_s"] = seconds
        return found

    def write(self, path: Path, threads: int, *, preallocated: bool) -> tuple[float, bool]:
        """Seconds, and whether it went past the page cache."""
        try:
            return self._written_s(path, threads, os.O_DIRECT, preallocated=preallocated), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # Linux makes the file before it looks at the flag
            return self._written_s(path, threads, 0, preallocated=preallocated), False

    def _written_s(self, path: Path, threads: int, flag: int, *, preallocated: bool) -> float:
        started = time.perf_counter()
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag) as descriptor:

            def write(offset: int, end: int) -> None:
                while offset < end:
                    offset += os.pwrite(descriptor, self._pages[offset:end], offset)

            if preallocated:
                os.posix_fallocate(descriptor, 0, len(self._pages))
            by_chunks(write, len(self._pages), threads)
            os.ftruncate(descriptor, self._nbytes)
            os.fsync(descriptor)
        return time.perf_counter() - started


class RawReads:
    """One file, in chunks of 8 MiB by threads, into memory that was written before."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._nbytes = file.stat().st_size
        self._pages = memoryview(fast_pages(self._nbytes))
        self.read_s(1, 0)

    def measure(self, *, cold: bool, prepare: Callable[[], None]) -> dict[str, float]:
        """Seconds of each setting, each after ``prepare``; if cold, also by ``O_DIRECT``."""
        found = {}
        for threads in _THREADS:
            for name, flag in (("page cache", 0), ("O_DIRECT", os.O_DIRECT))[: 1 + cold]:
                prepare()
                with suppress(OSError):  # the file system refuses O_DIRECT
                    temperature = "cold" if cold else "warm"
                    seconds = self.read_s(threads, flag)
                    found[f"{temperature} raw read {threads} threads, {name}_s"] = seconds
        return found

    def read_s(self, threads: int, flag: int) -> float:
        """Seconds of reading the whole file."""
        started = time.perf_counter()
        with opened(self._file, os.O_RDONLY | flag) as descriptor:

            def read(offset: int, end: int) -> None:
                # Whole pages, as O_DIRECT requires; only the last chunk meets the file's end.
                while offset < min(end, self._nbytes):
                    offset += os.preadv(descriptor, [self._pages[offset:end]], offset)

            by_chunks(read, len(self._pages), threads)
        return time.perf_counter() - started


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor while inside."""
    descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def by_chunks(move: Callable[[int, int], None], nbytes: int, threads: int) -> None:
    """Call ``move(begin, end)`` for chunks of 8 MiB, from several threads."""
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(
            lambda at: move(at, min(at + _CHUNK_NBYTES, nbytes)), range(0, nbytes, _CHUNK_NBYTES)
        ):
            pass
