"""Free memory that is really there, before each turn and for everybody.

Under free page reporting, a feature of the virtio balloon, a virtual machine tells its hypervisor
within a few seconds which pages are free. The hypervisor takes them, and brings in fresh ones when
they are touched again. Whoever then needs memory pays for that: stock ``dcp.save`` of 1 GiB, which
goes through the page cache, takes three to four times as long. What a contender pays would depend
on who saved before it, so every turn begins right after free memory was used.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from nostall._bench.contender import sync

_CHUNK = memoryview(bytes(8 << 20))
_MADV_POPULATE_WRITE = 23
"""From ``linux/mman.h``; Python has no name for it."""
_PER_BYTE_SAVED = 2
"""A copy of the state and the page cache of its file: what the contender that needs most needs."""


def warm_free_memory(
    directory: Path, nbytes: int, *, rank: int, barrier: Callable[[], None]
) -> None:
    """Make free memory available for this rank's save by a file that is removed. Collective.

    It is written through the page cache and synced. Anonymous memory that is mapped and unmapped
    does not do: the page cache is not given the same pages. The files of all ranks are there at the
    same time, as their copies will be: a rank that removes its file early leaves the same pages to
    the next rank's.

    Raises:
        OSError: The file cannot be written. Other ranks do not wait for this one then.
    """
    path = directory / f"scratch-{rank}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        rest = nbytes * _PER_BYTE_SAVED
        while rest > 0:
            rest -= os.write(descriptor, _CHUNK[:rest])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        barrier()
        os.unlink(path)
    sync(directory)  # what deleting costs the file system is paid here


def fresh_memory_s(nbytes: int) -> float:
    """Seconds to reserve and map as much new memory as a snapshot of ``nbytes`` bytes needs."""
    started = time.perf_counter()
    descriptor = os.memfd_create("bench-fresh")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        with mmap.mmap(descriptor, nbytes) as pages:
            pages.madvise(_MADV_POPULATE_WRITE)
    finally:
        os.close(descriptor)
    return time.perf_counter() - started
