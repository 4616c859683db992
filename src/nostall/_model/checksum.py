"""CRC-32 as ZIP containers have it, by the fastest code at hand.

Where the package ``isal`` is installed (the extra ``fast``) that is Intel's ISA-L, else zlib. Both give the same sums; on
the machine of docs/benchmarks.md zlib takes 0.4 s of a core for 1 GiB, which is what its disk takes to write it, and ISA-L
a quarter of that.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable

Crc32 = Callable[..., int]
"""Called with what to sum and, to go on with an earlier sum, with that."""

crc32: Crc32 = zlib.crc32


def use_fastest() -> str | None:
    """Let :data:`crc32` be the fastest one that can be imported.

    Returns:
        The directory that another process of the same interpreter can import it from; ``None`` if it is zlib's.
    """
    global crc32
    try:
        from isal import isal_zlib
    except Exception:  # not there, or half of it: it is only faster
        crc32 = zlib.crc32
        return None
    crc32 = isal_zlib.crc32
    return os.path.dirname(os.path.dirname(isal_zlib.__file__))


def use_fastest_from(directory: str) -> None:
    """As :func:`use_fastest`, for a process that does not look into site-packages for anything else."""
    sys.path.append(directory)
    try:
        use_fastest()
    finally:
        sys.path.remove(directory)
