"""The images of a job's files and its position, shared by the threads that write it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol


class Window(NamedTuple):
    """Bytes one thread may change: a chunk, and the rest of containers whose payload ends in it."""

    memory: memoryview
    """Page-aligned, and padded to whole pages."""
    origin: int
    """Its offset in the file."""


class Image(Protocol):
    """The bytes of one file to be written."""

    def window(self, begin: int, end: int, *, thread: int) -> Window:
        """The chunk from ``begin`` to ``end``, unsealed; this thread's until its next call."""

    def hand_over(self, window: Window, end: int) -> None:
        """Record that the chunk ending at ``end`` is sealed; called in file order."""


class WholeImage:
    """An image that is entirely in memory; containers are sealed in place."""

    def __init__(self, memory: memoryview) -> None:
        self._window = Window(memory, 0)

    def window(self, begin: int, end: int, *, thread: int) -> Window:
        """The whole image, for every chunk."""
        del begin, end, thread
        return self._window

    def hand_over(self, window: Window, end: int) -> None:
        """Does nothing."""


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
