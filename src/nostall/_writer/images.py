"""File images as the writing threads see them: in windows, each of which is sealed and written by one thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes of a file image that one thread may change: a chunk, and the rest of a container whose payload ends in it."""

    memory: memoryview
    """Page-aligned, and padded to whole pages."""
    origin: int
    """Where in the file it begins."""


class Image(Protocol):
    """One file's bytes on their way to storage."""

    def window(self, begin: int, end: int, *, thread: int) -> Window:
        """The chunk from ``begin`` to ``end``, unsealed; it is this thread's until the thread asks for the next one."""

    def hand_over(self, window: Window, end: int) -> None:
        """Take note that a chunk, which ends at ``end``, is sealed; called for one chunk after the other, in file order."""


class WholeImage:
    """An image that is in memory from end to end: whatever is sealed in it is at its place."""

    def __init__(self, memory: memoryview) -> None:
        self._window = Window(memory, 0)

    def window(self, begin: int, end: int, *, thread: int) -> Window:
        """The same for all chunks."""
        del begin, end, thread
        return self._window

    def hand_over(self, window: Window, end: int) -> None:
        """Nothing to do."""
