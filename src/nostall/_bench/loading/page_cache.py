"""The page cache: files are brought into it, or dropped from it, and what is there is counted."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

_CHUNK = bytearray(8 << 20)


def files_below(path: Path) -> list[Path]:
    """All files of a directory and of those in it."""
    return sorted(file for file in path.rglob("*") if file.is_file())


def bring_in(files: Sequence[Path]) -> None:
    """Read files to their ends, through the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            while os.readv(descriptor, [_CHUNK]):
                pass
        finally:
            os.close(descriptor)


def drop(files: Sequence[Path]) -> None:
    """Tell the kernel that nobody needs the pages of these files.

    It keeps pages that are not on storage yet, and those that a process maps. What a hypervisor has
    cached stays.
    """
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_share(files: Sequence[Path]) -> float:
    """The share of their pages that is in the page cache; 0 for empty files."""
    pages = [cached for file in files for cached in cached_pages(file)]
    return sum(pages) / len(pages) if pages else 0.0


def cached_pages(file: Path) -> list[bool]:
    """Whether each page of a file is in the page cache. Reads none of them."""
    nbytes = file.stat().st_size
    if not nbytes:
        return []
    count = -(-nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    with file.open("rb") as stream:
        # Writable but private: only memory that could be written to has an address in Python.
        mapped = mmap.mmap(stream.fileno(), nbytes, access=mmap.ACCESS_COPY)
    first = ctypes.c_char.from_buffer(mapped)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(first))
        if libc.mincore(address, ctypes.c_size_t(nbytes), found):
            raise OSError(ctypes.get_errno(), "mincore failed", os.fspath(file))
    finally:
        del first  # a mapping with a pointer into it cannot be closed
        mapped.close()
    return [bool(page & 1) for page in found]
