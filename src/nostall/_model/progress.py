"""Which saves of this process are under way, and how far they are.

>>> import nostall
>>> for save in nostall.status():
...     print(save)  # save to /checkpoints/1000: writing, 340.1 of 512.0 MB after 0.2 s
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from nostall._model.lifecycle import State


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStatus:
    """How far one save of this process is."""

    path: str
    """Where it goes: the checkpoint directory, or the file."""
    rank: int
    state: str
    """``queued`` (planned), ``staging``, ``staged`` (its writer has not begun), ``writing``, or ``written``: this rank is
    done, and other ranks or the commit are not."""
    nbytes: int
    """Bytes of this rank's files; 0 as long as they are not laid out."""
    written_nbytes: int
    """How many of them storage has taken; those that a retry writes anew count again only then."""
    seconds: float
    """Since it was planned."""
    quiet_s: float
    """Since anything of the above has changed."""

    def __str__(self) -> str:
        text = (
            f"save to {self.path}: {self.state}, {self.written_nbytes / 1e6:.1f} of {self.nbytes / 1e6:.1f} MB"
            f" after {self.seconds:.1f} s"
        )
        return text + (f", nothing for {self.quiet_s:.0f} s" if self.quiet_s >= 1 else "")


class Progress:
    """What is known of a save's way; written by whoever moves it on, in any thread."""

    def __init__(self, *, path: str, rank: int) -> None:
        self.path = path
        self._rank = rank
        self._state = State.QUEUED
        self._nbytes = 0
        self._written: dict[str, int] = {}
        self.created: set[str] = set()
        """Paths of the files that the save has made."""
        self._is_over = False
        self._began_s = self._moved_s = time.monotonic()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Callable[..., Progress], tuple[str, int]]:
        # Another process has a save of its own.
        return _begin, (self.path, self._rank)

    def expect(self, nbytes: int) -> None:
        """Learn how large the rank's files are."""
        self._nbytes = nbytes

    def to(self, state: State) -> None:
        """Note that the save has come to a state."""
        with self._lock:
            self._state = state
            self._moved_s = time.monotonic()
            if state is State.WRITTEN:  # of which the last word was not told
                self._written = {"": self._nbytes}

    def wrote(self, part: str, nbytes: int) -> None:
        """Note how much of a part of the save storage has taken by now."""
        with self._lock:
            self._state = State.WRITING
            self._written[part] = nbytes
            self._moved_s = time.monotonic()

    def end(self) -> None:
        """Note that there is nothing more to come, for good or ill. Idempotent."""
        self._is_over = True

    def status(self) -> SaveStatus | None:
        """What it is now; ``None`` when it is over."""
        now_s = time.monotonic()
        with self._lock:
            if self._is_over:
                return None
            return SaveStatus(
                path=self.path,
                rank=self._rank,
                state=self._state.value,
                nbytes=self._nbytes,
                written_nbytes=sum(self._written.values()),
                seconds=now_s - self._began_s,
                quiet_s=now_s - self._moved_s,
            )


def _begin(path: str, rank: int) -> Progress:
    return Progress(path=path, rank=rank)


class UnderWay:
    """The saves of one engine, for as long as somebody else holds what they are; thread-safe."""

    def __init__(self) -> None:
        self._by_job: WeakValueDictionary[str, Progress] = WeakValueDictionary()
        self._lock = threading.Lock()

    def begin(self, job: str, *, path: str, rank: int) -> Progress:
        """Enter a save."""
        progress = Progress(path=path, rank=rank)
        with self._lock:
            self._by_job[job] = progress
        return progress

    def created(self, part: str, path: str) -> None:
        """Pass on which file a writer process has made; for a save that is forgotten, the process itself removes it."""
        progress = self._by_job.get(part.partition("/")[0])
        if progress is not None:
            progress.created.add(path)

    def wrote(self, part: str, nbytes: int) -> None:
        """Pass on what a writer process says of its part; that of a save that is forgotten is dropped."""
        progress = self._by_job.get(part.partition("/")[0])
        if progress is not None:
            progress.wrote(part, nbytes)

    def statuses(self) -> tuple[SaveStatus, ...]:
        """Those that are not over, the oldest first."""
        with self._lock:
            known = list(self._by_job.values())
        found = [progress.status() for progress in known]
        there = [status for status in found if status is not None]
        return tuple(sorted(there, key=lambda status: -status.seconds))
