"""Reads that are under way, and what they bring in the order in which they were begun."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import Self

from nostall._model.interrupts import uninterrupted
from nostall._read.items.opened import OpenFile
from nostall._read.items.workers import Task, Workers
from nostall._read.plan import Wanted
from nostall._storage.port import ReadableFiles

_MOST_IN_FLIGHT = 128
_MOST_OPEN = 16
"""Files, of which each may have two descriptors; or two files per thread, if that is more."""
_NO_MORE_OPEN = frozenset({errno.EMFILE, errno.ENFILE})
_IN_FLIGHT_NBYTES = 256 << 20
"""Limit on what is being read ahead of the planner, except for a single larger item."""


class Read(Protocol):
    """Some items of one file."""

    @property
    def tasks(self) -> int:
        """How many threads can share the work."""

    @property
    def nbytes(self) -> int:
        """How much is read at most."""

    def run(self) -> None:
        """Read; called once for each task, on the threads that read."""

    def finish(self) -> None:
        """Hand over what was read; called on the caller's thread once all tasks are complete."""


@dataclass(frozen=True, slots=True)
class _Begun:
    read: Read
    tasks: list[Task]
    closes: OpenFile | None
    """The file, if this is the last read of it."""


class Ahead:
    """Reads that are under way, oldest first; as a context manager it closes what is left open."""

    def __init__(self) -> None:
        self._under_way: deque[_Begun] = deque()
        self._nbytes = 0
        self._open: set[OpenFile] = set()

    def open(
        self, files: ReadableFiles, name: str, items: Sequence[Wanted], workers: Workers
    ) -> OpenFile:
        """Open a file to read items of it; arguments and errors are those of :class:`OpenFile`.

        Hands over what is read, so that few files are open: fewer if the process may open no more.
        """
        while len(self._open) >= max(_MOST_OPEN, 2 * workers.threads):
            self._finish_oldest(workers)
        while True:
            try:
                with uninterrupted(patience=2):  # a second Ctrl-C leaves storage that hangs
                    file = OpenFile(files, name, items)
                    self._open.add(file)
            except OSError as error:
                if error.errno not in _NO_MORE_OPEN or not self._under_way:
                    raise
                self._finish_oldest(workers)
            else:
                return file

    def read(self, file: OpenFile, reads: Sequence[Read], workers: Workers) -> None:
        """Begin the reads of a file of :meth:`open`, which is closed after them.

        Hands over what is read, so that memory is bounded.
        """
        for read in reads:
            tasks = [workers.submit(read.run) for _ in range(read.tasks)]
            self._under_way.append(_Begun(read, tasks, file if read is reads[-1] else None))
            self._nbytes += read.nbytes
            while self._nbytes > _IN_FLIGHT_NBYTES or len(self._under_way) > _MOST_IN_FLIGHT:
                self._finish_oldest(workers)

    def finish_all(self, workers: Workers) -> None:
        """Hand over everything."""
        while self._under_way:
            self._finish_oldest(workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with uninterrupted():
            for file in self._open:
                file.close()

    def _finish_oldest(self, workers: Workers) -> None:
        begun = self._under_way.popleft()
        for task in begun.tasks:
            workers.wait(task)
        begun.read.finish()
        self._nbytes -= begun.read.nbytes
        if begun.closes is not None:
            begun.closes.close()
            self._open.discard(begun.closes)
