"""Anonymous memory behind a descriptor, on every build of Python."""

from __future__ import annotations

import ctypes
import os

_MFD_CLOEXEC = 1


def memory_descriptor(name: str) -> int:
    """A new descriptor of anonymous memory, closed when another program is executed.

    Raises:
        OSError: The system refuses it.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_CLOEXEC)
    # Missing in a Python that was built with a glibc before 2.27, such as those of conda and uv.
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.memfd_create(name.encode(), _MFD_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "memfd_create")
    return fd
