"""The threads that read."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from typing_extensions import Self

from nostall._model.interrupts import uninterruptible


class Stopped(Exception):  # ends a task whose result nobody waits for
    """The load has ended."""


class Task:
    """Something that a thread does.

    Args:
        run: Does it.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.is_done = False
        self.error: BaseException | None = None


class Workers:
    """Threads for reads; when the context ends, none of them reads or writes any more.

    Ctrl-C interrupts :meth:`wait`, and never leaves a lock that a thread or the interpreter's exit
    waits for: nothing but a ``SimpleQueue`` is waited for, which an exception leaves as it was. The
    end of the context waits for the piece that each thread reads. So does Ctrl-C then, however
    often it comes: a thread of an ended load would write to tensors in use.

    Args:
        threads: The most that run; they are started when there is something to do.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._started: list[Thread] = []
        self._ended: list[None] = []
        """One entry for each thread that has done its last task."""
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._news: SimpleQueue[None] = SimpleQueue()
        """One entry for each task and each thread that has ended; what it is about is looked up."""
        self._is_stopping = False

    def submit(self, run: Callable[[], None]) -> Task:
        """Run something on one of the threads."""
        if len(self._started) < self.threads:
            with uninterruptible():
                thread = Thread(target=self._work, name=f"nostall-read_{len(self._started)}")
                thread.start()
                self._started.append(thread)
        task = Task(run)
        self._tasks.put(task)
        return task

    def wait(self, task: Task) -> None:
        """Return when a task is complete; raises its error."""
        while not task.is_done:
            self._news.get()
        if task.error is not None:
            raise task.error

    def require_running(self) -> None:
        """End a task between two pieces once the load has ended.

        Raises:
            Stopped: It has.
        """
        if self._is_stopping:
            raise Stopped

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task.run()
            except BaseException as error:  # raised by wait()
                task.error = error
            task.is_done = True
            self._news.put(None)
        self._ended.append(None)
        self._news.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        raised: BaseException | None = None
        while True:
            try:
                with uninterruptible():
                    self._end()
                    break
            except BaseException as error:  # of a signal's handler: raised once all threads ended
                raised = error
        if raised is not None:
            raise raised

    def _end(self) -> None:
        for _ in self._started:
            self._tasks.put(None)
        while len(self._ended) < len(self._started):
            self._news.get()
        for thread in self._started:  # not before: interrupted, join() may take it for ended
            thread.join()
