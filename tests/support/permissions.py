"""Permissions that count for root, too."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VERSION_3 = 0x20080522
_DAC_OVERRIDE = 1 << 1
_DAC_READ_SEARCH = 1 << 2


@contextmanager
def without_permission(path: Path, mode_inside: int = 0) -> Iterator[None]:
    """A block in which a path has another mode, for this thread and those that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice

    def call(function: str) -> None:
        if getattr(libc, function)(header, sets) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    call("capget")
    effective, mode = sets[0], stat.S_IMODE(path.stat().st_mode)
    path.chmod(mode_inside)
    # Without root's capabilities to ignore modes.
    sets[0] = effective & ~(_DAC_OVERRIDE | _DAC_READ_SEARCH)
    try:
        call("capset")
        yield
    finally:
        sets[0] = effective
        call("capset")
        path.chmod(mode)
