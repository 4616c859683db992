"""CRC-32 of ZIP containers, by the fastest implementation available.

With the package ``isal`` installed (the extra ``fast``) this is Intel's ISA-L, otherwise zlib. Both
give the same sums. On the machine of docs/benchmarks.md zlib takes 0.4 s of a core for 1 GiB, as
long as the disk takes to write it; ISA-L takes a quarter of that.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable

Crc32 = Callable[..., int]
"""Arguments: the bytes, and optionally the CRC-32 of the bytes before them."""

crc32: Crc32 = zlib.crc32


def use_fastest() -> str | None:
    """Set :data:`crc32` to the fastest implementation that can be imported.

    Returns:
        The directory from which another process of the same interpreter can import it; ``None`` for
        zlib.
    """
    global crc32
    try:
        from isal import isal_zlib
    except Exception:  # missing or broken; zlib is only slower
        crc32 = zlib.crc32
        return None
    crc32 = isal_zlib.crc32
    return os.path.dirname(os.path.dirname(isal_zlib.__file__))


def use_fastest_from(directory: str) -> None:
    """As :func:`use_fastest`, for a process that imports nothing else from site-packages."""
    sys.path.append(directory)
    try:
        use_fastest()
    finally:
        sys.path.remove(directory)
