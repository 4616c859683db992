"""What the machine can do at best with the same bytes: copy them, and write them."""

from __future__ import annotations

import errno
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nostall import _torch

_CHUNK_NBYTES = 8 << 20
_ALIGNMENT = 64
_COPIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSetting:
    """One way to write a file from several threads."""

    threads: int
    preallocate: bool

    def __str__(self) -> str:
        return f"{self.threads} threads{', preallocated' if self.preallocate else ''}"


WRITE_SETTINGS = tuple(
    WriteSetting(threads=threads, preallocate=preallocate)
    for threads in (1, 2, 4, 8)
    for preallocate in (False, True)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawWrite:
    """One file written and fsynced."""

    seconds: float
    direct: bool
    """Whether ``O_DIRECT`` was taken; else the page cache was used."""


class Limits:
    """Memory of the size of a state dict, warm, and what can be done with it at most."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._pages = fast_pages(rounded(self.nbytes, mmap.PAGESIZE))
        source = torch.frombuffer(self._pages, dtype=torch.uint8)
        at = 0
        for tensor in tensors:
            source[at : at + tensor.nbytes].copy_(_bytes_of(tensor))
            at += tensor.nbytes
        self._source = source[: self.nbytes]
        room = sum(rounded(tensor.nbytes, _ALIGNMENT) for tensor in tensors)
        copy = torch.zeros(room, dtype=torch.uint8)
        self._copy = copy[: self.nbytes]
        self._copies = _views(copy, self._tensors)
        # Fresh memory is no measure of copying.
        self.memcpy_s()
        self.foreach_copy_s()

    def memcpy_s(self) -> float:
        """Seconds of one flat copy of all bytes with all of torch's threads; the best of a few."""
        return least_s(lambda: self._copy.copy_(self._source))

    def foreach_copy_s(self) -> float:
        """The best seconds of ``torch._foreach_copy_`` of these tensors into warm ones."""
        return least_s(lambda: _torch.copy_each(self._copies, self._tensors))

    def raw_write(self, path: Path, setting: WriteSetting) -> RawWrite:
        """Write all bytes to a new file and fsync it, in 8 MiB chunks from page-aligned memory."""
        started = time.perf_counter()
        descriptor, direct = _create(path)
        try:
            if setting.preallocate:
                os.posix_fallocate(descriptor, 0, len(self._pages))
            direct = self._write(descriptor, setting.threads, path, direct=direct)
            os.ftruncate(descriptor, self.nbytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return RawWrite(seconds=time.perf_counter() - started, direct=direct)

    def _write(self, descriptor: int, threads: int, path: Path, *, direct: bool) -> bool:
        """Write all pages; whether that went past the page cache."""
        try:
            _write_chunks(descriptor, memoryview(self._pages), threads)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            # Some file systems take the flag and refuse the write.
            buffered = os.open(path, os.O_WRONLY)
            try:
                _write_chunks(buffered, memoryview(self._pages), threads)
            finally:
                os.close(buffered)
            return False
        return direct


def fast_pages(nbytes: int) -> mmap.mmap:
    """Page-aligned private memory, in huge pages where the system has them: the fastest target."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def least_s(copy: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs; in the first one threads may still be asleep."""
    least = math.inf
    for _ in range(_COPIES):
        started = time.perf_counter()
        copy()
        least = min(least, time.perf_counter() - started)
    return least


def _create(path: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # Linux makes the file before it looks at the flag
        return os.open(path, flags, 0o666), False


def _write_chunks(descriptor: int, pages: memoryview, threads: int) -> None:
    def write(offset: int, end: int) -> None:
        while offset < end:
            offset += os.pwrite(descriptor, pages[offset:end], offset)

    by_chunks(write, len(pages), threads)


def by_chunks(move: Callable[[int, int], None], nbytes: int, threads: int) -> None:
    """Call ``move(begin, end)`` for chunks of 8 MiB, from several threads.

    Raises:
        OSError: A call has failed; no more are begun then.
    """
    offsets = iter(range(0, nbytes, _CHUNK_NBYTES))
    lock = threading.Lock()
    errors: list[OSError] = []

    def work() -> None:
        while not errors:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            try:
                move(offset, min(offset + _CHUNK_NBYTES, nbytes))
            except OSError as error:
                errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]


def _views(room: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    views, at = [], 0
    for tensor in tensors:
        views.append(room[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        at += rounded(tensor.nbytes, _ALIGNMENT)
    return views


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def rounded(nbytes: int, to: int) -> int:
    """The next multiple of ``to``."""
    return -(-nbytes // to) * to
