"""Progress of a job, and its cancellation."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Cancelled(Exception):
    """The trainer cancelled the job."""

    def __init__(self) -> None:
        super().__init__("the save was aborted")


class Position:
    """Where the first failure occurred (others are consequences), files made, bytes written."""

    def __init__(
        self,
        path: str,
        *,
        cancelled: threading.Event,
        on_progress: Callable[[int], None],
        on_created: Callable[[str], None],
    ) -> None:
        self.phase = "open"
        self.path = path
        self.cancelled = cancelled
        self.created: set[str] = set()
        """Paths of the files that the job has made, and may remove."""
        self._on_progress = on_progress
        self._on_created = on_created
        self._written_nbytes = 0
        self._lock = threading.Lock()

    def move(self, phase: str, path: str) -> None:
        self.phase, self.path = phase, path

    def raise_if_cancelled(self) -> None:
        """Called between two chunks."""
        if self.cancelled.is_set():
            raise Cancelled

    def create(self, path: str) -> None:
        """Record a new file of the job."""
        self.created.add(path)
        self._on_created(path)

    def wrote(self, nbytes: int) -> None:
        """Add to the bytes written; negative if a file has to be written anew."""
        with self._lock:
            self._written_nbytes += nbytes
            written_nbytes = self._written_nbytes
        self._on_progress(written_nbytes)
