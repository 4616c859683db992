"""Memory that this process can still take: limited by the host and by its control groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator


def available_nbytes(*, root: str = "/") -> int:
    """Bytes that this process can take without swapping or being killed, as reported by the system.

    The minimum over the host and each control group (v2 or v1) of this process. Reclaimable page
    cache counts as free.

    Args:
        root: Directory that contains ``proc`` and ``sys``; for tests.
    """
    return min([_left_on_host(root), *_left_in_groups(root)])


def _left_on_host(root: str) -> int:
    """Bytes that the host can give; unlimited without ``/proc``."""
    try:
        with open(os.path.join(root, "proc/meminfo")) as stream:
            kib = next(line.split()[1] for line in stream if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return sys.maxsize
    return int(kib) << 10


def _left_in_groups(root: str) -> Iterator[int]:
    """Bytes that each control group of this process, and each group above it, can give."""
    base = os.path.join(root, "sys/fs/cgroup")
    try:
        with open(os.path.join(root, "proc/self/cgroup")) as stream:
            entries = [line.rstrip("\n").split(":", 2) for line in stream]
    except OSError:
        return
    for _, controllers, path in entries:
        if not controllers:
            names, top = ("memory.max", "memory.current"), base
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            top = os.path.join(base, "memory")
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            directory = os.path.join(top, *parts[:depth])
            limit, usage = (_number(os.path.join(directory, name)) for name in names)
            if limit is not None and usage is not None:
                yield max(0, limit - usage + _reclaimable(os.path.join(directory, "memory.stat")))


def _number(path: str) -> int | None:
    """The number in a file; ``None`` if the file holds none, as with ``max``."""
    try:
        with open(path) as stream:
            return int(stream.read())
    except (OSError, ValueError):
        return None


def _reclaimable(stat_path: str) -> int:
    try:
        with open(stat_path) as stream:
            pairs = dict(line.split(maxsplit=1) for line in stream)
            return sum(
                int(pairs.get(name, pairs.get(f"total_{name}", 0)))
                for name in ("active_file", "inactive_file")
            )
    except (OSError, ValueError):
        return 0
