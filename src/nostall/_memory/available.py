"""How much memory this process may still take: what the host has, and what its control groups allow."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil


def available_nbytes(*, root: str = "/") -> int:
    """Bytes that can be taken without swapping or being killed, as far as the system tells.

    The smallest of what the host has available and what each control group (v2 or v1) of this process has left, where
    page cache that is not in use counts as free.

    Args:
        root: Where ``proc`` and ``sys`` are mounted; for tests.
    """
    host: int = psutil.virtual_memory().available
    return min([host, *_left_in_groups(root)])


def _left_in_groups(root: str) -> Iterator[int]:
    for limit_file, usage_file, directory in _groups(root):
        limit, usage = (_number(os.path.join(directory, name)) for name in (limit_file, usage_file))
        if limit is not None and usage is not None:
            yield max(0, limit - usage + _reclaimable(os.path.join(directory, "memory.stat")))


def _groups(root: str) -> Iterator[tuple[str, str, str]]:
    """Names of the files with limit and usage, and the directory they are in: each group and those it is in."""
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
            yield (*names, os.path.join(top, *parts[:depth]))


def _number(path: str) -> int | None:
    """The number in a file; ``None`` if there is none, as for ``max``."""
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
