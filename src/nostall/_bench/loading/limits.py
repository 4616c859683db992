"""What the machine can do at best: copy as many bytes, and read the file that has them."""

from __future__ import annotations

import errno
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from nostall._bench.limits import by_chunks, fast_pages, least_s, rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSetting:
    """One way to read a file from several threads."""

    threads: int
    direct: bool
    """Past the page cache."""

    def __str__(self) -> str:
        return f"{self.threads} threads, {'O_DIRECT' if self.direct else 'page cache'}"


COLD_READS = tuple(
    ReadSetting(threads=threads, direct=direct)
    for threads in (1, 2, 4, 8)
    for direct in (False, True)
)
WARM_READS = tuple(setting for setting in COLD_READS if not setting.direct)


class LoadLimits:
    """Memory of the size of the file, warm, and what can be done with it at most."""

    def __init__(self, file: Path, nbytes: int) -> None:
        self.file = file
        self._file_nbytes = file.stat().st_size
        self._pages = fast_pages(rounded(max(self._file_nbytes, nbytes), mmap.PAGESIZE))
        self._source = torch.frombuffer(self._pages, dtype=torch.uint8)[:nbytes]
        self._copy = torch.zeros(nbytes, dtype=torch.uint8)
        # Fresh memory is no measure of reading or copying.
        self.read_s(WARM_READS[0])
        self.memcpy_s()

    def memcpy_s(self) -> float:
        """Seconds of one flat copy of the tensors' bytes with torch's threads; best of a few."""
        return least_s(lambda: self._copy.copy_(self._source))

    def read_s(self, setting: ReadSetting) -> float | None:
        """Seconds of reading the file in chunks of 8 MiB into page-aligned memory.

        ``None`` if the file system refuses ``O_DIRECT``.
        """
        started = time.perf_counter()
        try:
            self._read(setting)
        except OSError as error:
            if error.errno != errno.EINVAL or not setting.direct:
                raise
            return None
        return time.perf_counter() - started

    def _read(self, setting: ReadSetting) -> None:
        memory = memoryview(self._pages)
        descriptor = os.open(self.file, os.O_RDONLY | (os.O_DIRECT if setting.direct else 0))

        def read(offset: int, end: int) -> None:
            # Chunks are whole pages, as O_DIRECT requires; only the last one meets the file's end.
            while offset < min(end, self._file_nbytes):
                offset += os.preadv(descriptor, [memory[offset:end]], offset)

        try:
            by_chunks(read, rounded(self._file_nbytes, mmap.PAGESIZE), setting.threads)
        finally:
            os.close(descriptor)
