"""The life of a save, and the progress of the saves and loads of this process.

>>> import nostall
>>> for save in nostall.status():
...     print(save)  # save to /checkpoints/1000: writing, 340.1 of 512.0 MB after 0.2 s
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from weakref import WeakSet

# --- saves ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStatus:
    """Progress of one save of this process."""

    path: str
    """The checkpoint directory, or the file."""
    rank: int
    state: str
    """``planned``, ``staging``, ``staged`` (its writer has not begun), ``writing``, or ``written``:
    this rank has finished; other ranks or the commit have not."""
    nbytes: int
    """Bytes of this rank's files; 0 before they are laid out."""
    written_nbytes: int
    """Bytes that storage has accepted; a retry starts its file again at 0."""
    seconds: float
    """Time since the save was planned."""
    quiet_s: float
    """Time since the last change of any field above."""

    def __str__(self) -> str:
        text = (
            f"save to {self.path}: {self.state}, {self.written_nbytes / 1e6:.1f} of"
            f" {self.nbytes / 1e6:.1f} MB after {self.seconds:.1f} s"
        )
        return text + (f", nothing for {self.quiet_s:.0f} s" if self.quiet_s >= 1 else "")


class SaveState(str, Enum):
    """How far one rank's part of a save has got."""

    PLANNED = "planned"
    STAGING = "staging"
    STAGED = "staged"
    WRITING = "writing"
    WRITTEN = "written"
    COMMITTED = "committed"
    FAILED = "failed"
    ABORTED = "aborted"


_LOST = frozenset({SaveState.FAILED, SaveState.ABORTED})
TRANSITIONS: dict[SaveState, frozenset[SaveState]] = {
    SaveState.PLANNED: frozenset(
        {SaveState.STAGING, SaveState.STAGED, SaveState.WRITING, SaveState.WRITTEN}
    )
    | _LOST,
    SaveState.STAGING: frozenset({SaveState.STAGED, SaveState.WRITING, SaveState.WRITTEN}) | _LOST,
    SaveState.STAGED: frozenset({SaveState.WRITING, SaveState.WRITTEN}) | _LOST,
    SaveState.WRITING: frozenset({SaveState.WRITTEN}) | _LOST,
    SaveState.WRITTEN: frozenset({SaveState.COMMITTED, SaveState.FAILED}),
    SaveState.COMMITTED: frozenset(),
    SaveState.FAILED: frozenset(),
    SaveState.ABORTED: frozenset({SaveState.WRITTEN, SaveState.FAILED}),
}
"""The states that may follow each state.

A save whose files are all written can no longer be aborted: it fails if it is given up. A report
that crosses an abort counts, so an aborted save may turn out to be written; else it fails when its
files are removed."""


class Progress:
    """State and byte count of one rank's part of one save.

    All threads consult the state; :meth:`to` decides which of them was first.
    """

    def __init__(self, *, path: str, rank: int) -> None:
        self.path = path
        self._rank = rank
        self.state = SaveState.PLANNED
        self.nbytes = 0
        """Size of the rank's files, once it is known."""
        self._written: dict[str, int] = {}
        self.created: set[str] = set()
        """Paths of the files that the save has created."""
        self._began_s = self._moved_s = time.monotonic()
        self._lock = threading.Lock()

    def to(self, state: SaveState) -> bool:
        """Enter a state, and return whether :data:`TRANSITIONS` lets it follow the present one."""
        with self._lock:
            if state not in TRANSITIONS[self.state]:
                return False
            self.state = state
            self._moved_s = time.monotonic()
            if state is SaveState.WRITTEN:  # the last chunks are not reported
                self._written = {"": self.nbytes}
            return True

    def wrote(self, part: str, nbytes: int) -> None:
        """Record how many bytes of a part storage has accepted so far."""
        self.to(SaveState.WRITING)
        with self._lock:
            if self.state is SaveState.WRITING:  # not over, or written, meanwhile
                self._written[part] = nbytes
                self._moved_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether it is committed, failed or aborted."""
        return self.state in (SaveState.COMMITTED, SaveState.FAILED, SaveState.ABORTED)

    def status(self) -> SaveStatus | None:
        """The present status; ``None`` after the end."""
        now_s = time.monotonic()
        with self._lock:
            if self.is_over:
                return None
            return SaveStatus(
                path=self.path,
                rank=self._rank,
                state=self.state.value,
                nbytes=self.nbytes,
                written_nbytes=sum(self._written.values()),
                seconds=now_s - self._began_s,
                quiet_s=now_s - self._moved_s,
            )


class SavesInProgress:
    """The saves of one engine, by weak references: who writes a save keeps it. Thread-safe."""

    def __init__(self) -> None:
        self._saves: WeakSet[Progress] = WeakSet()
        self._lock = threading.Lock()

    def begin(self, *, path: str, rank: int) -> Progress:
        """Add a save."""
        progress = Progress(path=path, rank=rank)
        with self._lock:
            self._saves.add(progress)
        return progress

    def statuses(self) -> tuple[SaveStatus, ...]:
        """The saves that have not ended, oldest first."""
        with self._lock:
            known = list(self._saves)
        found = [status for each in known if (status := each.status()) is not None]
        return tuple(sorted(found, key=lambda status: -status.seconds))


# --- loads ----------------------------------------------------------------------------------------


class ReadCounter:
    """Counts the bytes that several threads have read.

    ``report`` is called with the bytes read so far and ``total``, by one thread at a time.
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


_loads: dict[object, Callable[[], LoadStatus]] = {}
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

    _loads[key] = status
    try:
        yield
    finally:
        _loads.pop(key, None)  # a forked child has none


def load_statuses() -> tuple[LoadStatus, ...]:
    """The loads of this process that read, oldest first."""
    return tuple(status() for status in list(_loads.values()))


os.register_at_fork(after_in_child=_loads.clear)
