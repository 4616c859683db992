"""Ctrl-C: its exception waits for the end of a section that must not be cut in two.

An exception between two lines of a section, such as "start the save" and "note that it is
started", would leave a save that nobody commits. The sections are short. A second Ctrl-C interrupts
:func:`uninterrupted` at once, but not :func:`uninterruptible`.

Python's own locks are not safe either. An exception after ``Condition.__enter__`` has acquired its
lock, and before the block begins, leaves the lock taken, and every other thread that needs it waits
for ever. Events, futures and ``Thread.start`` are built on conditions. So where the main thread
uses one, it acquires the condition's lock directly (``with lock`` is safe), or calls
:func:`is_done`, :func:`on_done`, :func:`result_of` or :func:`start`.

All of this is about SIGINT. A handler of another signal must not raise in the middle of a save.
"""

from __future__ import annotations

# A save has some twenty sections. The functions of ``signal`` turn handlers into members of enums
# and back, so that a section takes 17 µs with them, and 2 µs with the functions behind them.
import _signal  # type: ignore[import-not-found]  # has no stub
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from signal import SIGINT
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # the writer process needs none; their import loads logging, too
    from concurrent.futures import Future

T = TypeVar("T")

_OVERSLEPT_S = 0.1
"""A wait that ends this much too late was suspended: it goes on for as long, once."""


class _Later:
    """A handler of SIGINT that runs the previous one at the end of the section."""

    def __init__(self, previous: Callable[[int, FrameType | None], Any]) -> None:
        self.previous = previous
        self.is_asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            self.previous(number, frame)
        self.is_asked = True


class _OnlyLater(_Later):
    """One that waits for the end of the section however often it is asked."""

    def __call__(self, *_: object) -> None:
        self.is_asked = True


class _Section:
    """A block that SIGINT interrupts at its end; see :func:`uninterrupted`."""

    __slots__ = ("_kind", "_later")

    def __init__(self, kind: type[_Later]) -> None:
        self._kind = kind
        self._later: _Later | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        previous = _signal.getsignal(SIGINT)
        if callable(previous) and not isinstance(previous, self._kind):
            self._later = self._kind(previous)
            _signal.signal(SIGINT, self._later)

    def __exit__(self, *_: object) -> None:
        later, self._later = self._later, None
        if later is None:
            return
        if _signal.getsignal(SIGINT) is later:
            _signal.signal(SIGINT, later.previous)
        if later.is_asked:
            later.previous(SIGINT, None)


def uninterrupted() -> AbstractContextManager[None]:
    """A section that SIGINT interrupts at its end only; nested ones at the end of the outermost.

    Without effect on other threads, which Python never interrupts, and where SIGINT ends the
    process or is ignored.
    """
    return _Section(_Later)


def uninterruptible() -> AbstractContextManager[None]:
    """As :func:`uninterrupted`, however often SIGINT comes: for what has to be completed."""
    return _Section(_OnlyLater)


def start(thread: threading.Thread) -> None:
    """Start a thread. An interrupt is raised after it has started, or before it exists.

    ``Thread.start`` waits for the new thread: in between, one of the two could wait for ever.

    Raises:
        RuntimeError: The system cannot start a thread.
    """
    with uninterruptible():
        thread.start()


def on_done(future: Future[T], function: Callable[[Future[T]], object]) -> None:
    """Call a function when a future is done: if it is, here and now, where it may raise."""
    with uninterruptible():
        if not future.done():
            future.add_done_callback(function)
            return
    function(future)


def result_of(future: Future[T]) -> T:
    """The result of a future that is done, or its exception."""
    with uninterruptible():
        return future.result(0)


def is_done(future: Future[Any], timeout_s: float = 0.0) -> bool:
    """Whether a future is done within this time; Ctrl-C interrupts the wait and harms nothing.

    ``result(timeout_s)`` cannot tell: before Python 3.11 its timeout is not the built-in error, and
    the future itself may have ended with a timeout error.
    """
    ended = threading.Lock()
    with uninterruptible():  # no lock of the future is waited for
        if future.done() or timeout_s <= 0:
            return future.done()
        ended.acquire()
        future.add_done_callback(lambda _: ended.release())
    # Nobody else waits for this lock.
    wait_s = min(timeout_s, threading.TIMEOUT_MAX)
    end_s = time.monotonic() + wait_s
    if ended.acquire(timeout=wait_s):
        return True
    # After a suspension (SIGSTOP, a frozen container) the answer may be there, but not received.
    # No longer than it was late: a busy machine must not double every deadline.
    late_s = time.monotonic() - end_s
    return late_s > _OVERSLEPT_S and ended.acquire(timeout=min(wait_s, late_s))
