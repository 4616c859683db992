"""The threads that read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

from typing_extensions import Self

from nostall._model.interrupts import uninterrupted
from nostall.errors import ReadError

_LOOK_AGAIN_S = 1.0
"""A signal that comes just before a wait does not interrupt it, and is noticed when it ends."""


class Stopped(Exception):  # ends a task whose result nobody waits for
    """The load has ended."""


class Task:
    """Work for one thread.

    Args:
        run: Does it.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.error: BaseException | None = None
        """Set before :attr:`is_done`."""
        self.is_done = False


class Workers:
    """Threads for reads; when the context ends, none of them reads or writes any more.

    Ctrl-C interrupts :meth:`wait`, and never leaves a lock that a thread or the interpreter's exit
    waits for: outside of uninterrupted sections nothing but a ``SimpleQueue`` is waited for,
    which an exception leaves as it was. The end of the context waits for the piece that each thread
    reads. So does Ctrl-C then, however often it comes: a thread of an ended load would write to
    tensors in use.

    Args:
        threads: The most that run; they are started when there is something to do.
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
        """Run something on one of the threads.

        Raises:
            ReadError: The system has no thread for this process, not even one.
        """
        if len(self._started) < self.threads:
            self._start_one()
        task = Task(run)
        self._tasks.put(task)
        return task

    def _start_one(self) -> None:
        # A daemon: Ctrl-C between two lines of the caller can keep the context from being ended,
        # and the interpreter's exit would wait for a thread that waits for a task.
        name = f"nostall-read_{len(self._started)}"
        thread = Thread(target=self._work, name=name, daemon=True)
        try:
            with uninterrupted():
                thread.start()
                self._started.append(thread)
        except RuntimeError as error:
            if not self._started:
                raise ReadError(
                    f"cannot start a thread to read: {error}",
                    phase="read",
                    hint="raise the limit on processes, `ulimit -u`",
                ) from error
            self.threads = len(self._started)

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
        """End a task between two pieces once the load has ended.

        Raises:
            Stopped: It has.
        """
        if self._is_stopping:
            raise Stopped

    def _work(self) -> None:
        self._begun.append(None)
        while (task := self._tasks.get()) is not None:
            try:
                task.run()
            except BaseException as error:  # raised by wait()
                task.error = error
            # A thread that waits keeps nothing of what it has read.
            task.run = _nothing
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


def _nothing() -> None:
    """Replaces a finished task, which would keep memory."""
