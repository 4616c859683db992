"""Reads that are under way, and what they bring in the order in which they were begun."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from typing_extensions import Self

_MOST_IN_FLIGHT = 256
_IN_FLIGHT_NBYTES = 256 << 20
"""Limit on what is being read ahead of the planner, except for a single larger item."""

Begun = tuple[int, Callable[[], None]]
"""Bytes that are being read, and what hands them over."""


class Readable(Protocol):
    """A file whose items are read."""

    def reads(self) -> Iterator[Begun]:
        """Begin one read after the other."""

    def close(self) -> None:
        """Close the file. Idempotent."""


class Ahead:
    """Reads that are under way, oldest first; as a context manager it closes what is left open."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[int, Callable[[], None]]] = deque()
        self._nbytes = 0
        self._open: set[Readable] = set()

    def read(self, file: Readable) -> None:
        """Begin to read a file; hand over what is read, so that memory and files are bounded."""
        self._open.add(file)
        for nbytes, finish in file.reads():
            self._add(nbytes, finish)
        self._add(0, partial(self._close, file))

    def finish_all(self) -> None:
        """Hand over everything."""
        while self._under_way:
            self._finish_oldest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open:
            file.close()

    def _add(self, nbytes: int, finish: Callable[[], None]) -> None:
        self._under_way.append((nbytes, finish))
        self._nbytes += nbytes
        while self._nbytes > _IN_FLIGHT_NBYTES or len(self._under_way) > _MOST_IN_FLIGHT:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        nbytes, finish = self._under_way.popleft()
        finish()
        self._nbytes -= nbytes

    def _close(self, file: Readable) -> None:
        file.close()
        self._open.discard(file)
