"""The threads that read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from typing_extensions import Self

from nostall._model.interrupts import is_done, uninterruptible


class Stopped(Exception):  # ends a task whose result nobody waits for
    """The load has ended."""


class Workers:
    """Threads for reads; when the context ends, none of them reads or writes any more.

    Ctrl-C interrupts :meth:`wait`, and never leaves a lock that a thread or the interpreter's exit
    waits for. The end of the context waits for the piece that each thread reads. So does Ctrl-C
    then, however often it comes: a thread of an ended load would write to tensors in use.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, "nostall-read")
        self._is_stopping = False

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """Run a task on one of the threads."""
        with uninterruptible():
            return self._pool.submit(task)

    def wait(self, task: Future[None]) -> None:
        """Return when a task is complete; raises its error."""
        while not is_done(task, threading.TIMEOUT_MAX):
            pass
        with uninterruptible():
            task.result()

    def require_running(self) -> None:
        """End a task between two pieces once the load has ended.

        Raises:
            Stopped: It has.
        """
        if self._is_stopping:
            raise Stopped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        raised: BaseException | None = None
        while True:
            try:
                with uninterruptible():
                    self._pool.shutdown(wait=True, cancel_futures=True)
                    break
            except BaseException as error:  # of a signal's handler: raised once all threads ended
                raised = error
        if raised is not None:
            raise raised
