"""Threads that read, and the reads that are in flight, completed in the order of submission."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple, Protocol

from typing_extensions import Self

from nostall._model.progress import ReadCounter
from nostall._model.threads import interruptible, spawn, uninterrupted
from nostall._read.archives import OpenFile
from nostall._read.plan import Wanted
from nostall._storage.port import ReadableFiles
from nostall.errors import ReadError

_LOOK_AGAIN_S = 1.0
"""A signal that comes just before a wait does not interrupt it, and is noticed when it ends."""
_MOST_IN_FLIGHT = 128
_MOST_OPEN = 16
"""Files, of which each may have two descriptors; or two files per thread, if that is more."""
_NO_MORE_OPEN = frozenset({errno.EMFILE, errno.ENFILE})
_IN_FLIGHT_NBYTES = 256 << 20
"""Limit on what is being read ahead of the planner, except for a single larger item."""


class Stopped(Exception):  # ends a task whose result nobody waits for
    """The load has ended."""


class Task:
    """Work for one thread."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run: Callable[[], None] | None = run
        """``None`` once it is complete: a thread that waits keeps nothing of what it has read."""
        self.error: BaseException | None = None
        """Set before :attr:`is_done`."""
        self.is_done = False


class Workers:
    """At most ``threads`` threads for reads; when the context ends, none of them reads or writes.

    Ctrl-C interrupts :meth:`wait`, and never leaves a lock that a thread or the interpreter's exit
    waits for: outside of uninterrupted sections nothing but a ``SimpleQueue`` is waited for, which
    an exception leaves as it was. The end of the context waits for the piece that each thread
    reads. So does Ctrl-C then, however often it comes: a thread of an ended load would write to
    tensors in use.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._started: list[Thread] = []
        # Counters are lists: threads append at once, where adding is two steps.
        self._begun: list[None] = []
        self._ended: list[None] = []
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        """``None``: no more of them. Whoever takes it puts it back for the next thread."""
        self._news: SimpleQueue[None] = SimpleQueue()
        """One entry for each task and each thread that has ended; what it is about is looked up."""
        self._is_stopping = False

    def submit(self, run: Callable[[], None]) -> Task:
        """Run something on one of the threads, which are started when there is something to do.

        ``ReadError`` if the system has no thread for this process, not even one.
        """
        if len(self._started) < self.threads:
            # A daemon: Ctrl-C between two lines of the caller can keep the context from being
            # ended, and the interpreter's exit would wait for a thread that waits for a task.
            try:
                with uninterrupted():
                    self._started.append(spawn(f"nostall-read_{len(self._started)}", self._work))
            except RuntimeError as error:
                if not self._started:
                    raise ReadError(
                        f"cannot start a thread to read: {error}",
                        phase="read",
                        hint="raise the limit on processes, `ulimit -u`",
                    ) from error
                self.threads = len(self._started)
        task = Task(run)
        self._tasks.put(task)
        return task

    def wait(self, task: Task) -> None:
        """Return when a task is complete; raises its error."""
        while not task.is_done:
            with suppress(Empty):
                self._news.get(timeout=_LOOK_AGAIN_S)
        error, task.error = task.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback has this frame: a cycle would keep what was read

    def require_running(self) -> None:
        """End a task between two pieces, by :class:`Stopped`, once the load has ended."""
        if self._is_stopping:
            raise Stopped

    def _work(self) -> None:
        self._begun.append(None)
        while (task := self._tasks.get()) is not None:
            try:
                assert task.run is not None
                task.run()
            except BaseException as error:  # raised by wait()
                task.error = error
            task.run = None
            task.is_done = True
            del task
            self._news.put(None)
        self._tasks.put(None)
        self._ended.append(None)
        self._news.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        raised: BaseException | None = None
        while True:
            try:
                with uninterrupted():
                    self._end()
                    break
            except BaseException as error:  # of a signal's handler: raised once all threads ended
                raised = error
        if raised is not None:
            raise raised

    def _end(self) -> None:
        self._tasks.put(None)
        # A thread that begins later finds no task; submit() may have been left while starting it.
        while len(self._ended) < len(self._begun):
            self._news.get()
        # Not before: join() takes a thread for ended if it is interrupted (before Python 3.13).
        for thread in self._started:
            thread.join()


class Read(Protocol):
    """Some items of one file."""

    tasks: int
    """How many threads can share the work."""
    nbytes: int
    """How much is read at most."""

    def run(self) -> None:
        """Read; called once for each task, on the threads that read."""

    def finish(self) -> None:
        """Hand over what was read; called on the caller's thread once all tasks are complete."""


class _Submitted(NamedTuple):
    reads: Sequence[Read]
    tasks: list[Task]
    nbytes: int
    closes: OpenFile | None
    """The file, if these are its last reads."""


class InFlight:
    """Reads in flight, oldest first; as a context manager it closes what is left open."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._submitted: deque[_Submitted] = deque()
        self._nbytes = 0
        self._open: set[OpenFile] = set()

    def open(
        self, files: ReadableFiles, name: str, items: Sequence[Wanted], counter: ReadCounter
    ) -> OpenFile:
        """Open a file to read items of it, with the errors of :class:`OpenFile`.

        Hands over what is read, so that few files are open: fewer if the process may open no more.
        """
        while len(self._open) >= max(_MOST_OPEN, 2 * self._workers.threads):
            self._finish_oldest()
        while True:
            try:
                with uninterrupted(patience=2):
                    with interruptible():  # a second Ctrl-C leaves storage that hangs
                        file = OpenFile(files, name, items, counter)
                    self._open.add(file)
            except OSError as error:
                if error.errno not in _NO_MORE_OPEN or not self._submitted:
                    raise
                self._finish_oldest()
            else:
                return file

    def read(self, file: OpenFile, groups: Sequence[Sequence[Read]]) -> None:
        """Submit reads of a file of :meth:`open`, which is closed after them.

        A group is several reads that one thread does in turn, or a single one that several
        threads share. Hands over what is read, so that memory is bounded.
        """
        for reads in groups:
            run, count = partial(_run_each, reads), max(read.tasks for read in reads)
            tasks = [self._workers.submit(run) for _ in range(count)]
            nbytes = sum(read.nbytes for read in reads)
            closes = file if reads is groups[-1] else None
            self._submitted.append(_Submitted(reads, tasks, nbytes, closes))
            self._nbytes += nbytes
            while self._nbytes > _IN_FLIGHT_NBYTES or len(self._submitted) > _MOST_IN_FLIGHT:
                self._finish_oldest()

    def finish_all(self) -> None:
        """Hand over everything."""
        while self._submitted:
            self._finish_oldest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with uninterrupted():
            for file in self._open:
                file.close()

    def _finish_oldest(self) -> None:
        oldest = self._submitted.popleft()
        for task in oldest.tasks:
            self._workers.wait(task)
        for read in oldest.reads:
            read.finish()
        self._nbytes -= oldest.nbytes
        if oldest.closes is not None:
            oldest.closes.close()
            self._open.discard(oldest.closes)


def _run_each(reads: Sequence[Read]) -> None:
    for read in reads:
        read.run()
