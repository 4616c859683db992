"""File images as the writing threads see them: windows, each sealed and written by one thread."""

from __future__ import annotations

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
