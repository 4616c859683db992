"""How far a job is, and how it is told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Cancelled(Exception):
    """The trainer gave the job up."""


class Position:
    """Where the first failing thread was, as later failures are consequences; and what is made and written."""

    def __init__(
        self,
        *,
        phase: str,
        path: str,
        on_progress: Callable[[int], None],
        on_created: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.phase = phase
        self.path = path
        self.created: set[str] = set()
        """Paths of the files that the job has made, and may remove."""
        self._on_progress = on_progress
        self._on_created = on_created
        self._written_nbytes = 0
        self._lock = threading.Lock()

    def move(self, phase: str, path: str) -> None:
        self.phase, self.path = phase, path

    def create(self, path: str) -> None:
        """Note that a file of the job's is there now."""
        self.created.add(path)
        self._on_created(path)

    def wrote(self, nbytes: int) -> None:
        """Count bytes that storage has taken; fewer than none, if a file has to be written anew."""
        with self._lock:
            self._written_nbytes += nbytes
            written_nbytes = self._written_nbytes
        self._on_progress(written_nbytes)
