"""How far reads of whole files or checkpoints are: counted by several threads, shown to users."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class ReadCounter:
    """Counts the bytes that several threads have read.

    Args:
        total: Bytes to read.
        report: Called with bytes read and ``total``, by one thread at a time.
    """

    def __init__(self, total: int, report: Callable[[int, int], object] | None = None) -> None:
        self.total = total
        self.nbytes = 0
        self.moved_s = time.monotonic()
        """When this last changed, by the monotonic clock."""
        self._report = report
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes; those beyond the total were read along with others, and do not count."""
        with self._lock:
            self.nbytes = min(self.total, self.nbytes + nbytes)
            self.moved_s = time.monotonic()
            if self._report is not None:
                self._report(self.nbytes, self.total)

    def finish(self) -> None:
        """Count what was not needed after all, such as the ends of archives."""
        if self.nbytes < self.total:
            self.add(self.total - self.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStatus:
    """Progress of one load of this process."""

    path: str
    """The checkpoint directory."""
    rank: int
    state: str = "reading"
    """Always this, as a load is listed while it reads: programs can show saves and loads alike."""
    nbytes: int
    """Bytes that this rank needs of its files."""
    read_nbytes: int
    """Bytes of them that storage, or another rank, has delivered."""
    seconds: float
    """Time since the first read."""
    quiet_s: float
    """Time since the last delivery."""

    def __str__(self) -> str:
        text = (
            f"load from {self.path}: {self.read_nbytes / 1e6:.1f} of {self.nbytes / 1e6:.1f} MB"
            f" after {self.seconds:.1f} s"
        )
        return text + (f", nothing for {self.quiet_s:.0f} s" if self.quiet_s >= 1 else "")


_under_way: dict[object, Callable[[], LoadStatus]] = {}
"""Loads, oldest first; each change of a dictionary is atomic."""


@contextmanager
def listed(path: str, rank: int, counter: ReadCounter) -> Iterator[None]:
    """List a load in :func:`load_statuses` during the block."""
    began_s, key = time.monotonic(), object()

    def status() -> LoadStatus:
        now_s = time.monotonic()
        return LoadStatus(
            path=path,
            rank=rank,
            nbytes=counter.total,
            read_nbytes=counter.nbytes,
            seconds=now_s - began_s,
            quiet_s=now_s - counter.moved_s,
        )

    _under_way[key] = status
    try:
        yield
    finally:
        _under_way.pop(key, None)  # a forked child has none


def load_statuses() -> tuple[LoadStatus, ...]:
    """The loads of this process that read, oldest first."""
    return tuple(status() for status in list(_under_way.values()))


os.register_at_fork(after_in_child=_under_way.clear)
