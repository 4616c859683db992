"""A copy that does not read what it overwrites.

An ordinary store first fetches the cache line that it writes to, so copying 1 GB moves 3 GB: one is
read, one is fetched and one is written back. A non-temporal store moves 2 GB. libc's ``memcpy``
uses such stores from a length on that depends on the cache, tens or hundreds of megabytes per call,
which tensors seldom have; torch's copies never use them. The loop is machine code, because a
compiler may be missing where nostall is installed::

            endbr64
    next:   vmovdqu  ymm0, [rsi]            ; 128 bytes at a time
            vmovdqu  ymm1, [rsi + 32]
            vmovdqu  ymm2, [rsi + 64]
            vmovdqu  ymm3, [rsi + 96]
            vmovntdq [rdi], ymm0            ; past the cache
            vmovntdq [rdi + 32], ymm1
            vmovntdq [rdi + 64], ymm2
            vmovntdq [rdi + 96], ymm3
            sub      rsi, -128
            sub      rdi, -128
            add      rdx, -128
            jnz      next
            sfence                          ; from here on visible to other cores and the writer
            vzeroupper
            ret

The code lies in memory that this process can read and execute, but not write. Callers use
``memcpy`` where the system refuses such memory, on other processors, and with
``EngineOptions(copy_past_caches=False)``. This module does not import torch.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from collections.abc import Callable

from nostall._memory.arena import memory_descriptor

_log = logging.getLogger("nostall")

_CODE = bytes.fromhex(
    "f30f1efa"
    "c5fe6f06 c5fe6f4e20 c5fe6f5640 c5fe6f5e60"
    "c5fde707 c5fde74f20 c5fde75740 c5fde75f60"
    "4883ee80 4883ef80 4883c280 75cc"
    "0faef8 c5f877 c3"
)
_STEP_NBYTES = 128
_ALIGNMENT = 32
"""Required of the address that ``vmovntdq`` stores to."""
_MAP_FAILED = ctypes.c_void_p(-1).value

Copy = Callable[[int, int, int], object]
"""Takes the address to copy to, the address to copy from and the number of bytes."""


def copy_past_caches(memcpy: Copy) -> Copy | None:
    """A copy with non-temporal stores, for a processor with AVX; it releases the interpreter lock.

    ``memcpy`` copies the bytes before the first aligned address and after the last whole step.
    ``None`` on another architecture, or if the system refuses executable memory.
    """
    if platform.machine() != "x86_64":
        return None
    try:
        address = _executable(_CODE)
    except OSError as error:  # a hardened system
        _log.debug("executable memory refused, large snapshots are copied with memcpy: %s", error)
        return None
    loop = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(address)

    def copy(to: int, of: int, nbytes: int) -> None:
        head = min(-to % _ALIGNMENT, nbytes)
        steps = (nbytes - head) // _STEP_NBYTES * _STEP_NBYTES
        done = head + steps
        memcpy(to, of, head)
        if steps:
            loop(to + head, of + head, steps)
        memcpy(to + done, of + done, nbytes - done)

    return copy


def _executable(code: bytes) -> int:
    """The address of an executable mapping of this code, never unmapped; ``OSError`` if refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_int64,
    )
    fd = memory_descriptor("nostall-copy-past-caches")
    try:
        os.pwrite(fd, code, 0)
        address: int | None = libc.mmap(
            None, len(code), mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, fd, 0
        )
        if address is None or address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(fd)
    return address
