"""Ctrl-C: its exception is raised where nothing is half done.

Python raises ``KeyboardInterrupt`` between any two instructions of the main thread, also after
``Condition.__enter__`` has acquired its lock and before the block begins: every other thread that
needs the lock waits for ever. Events, futures and ``Thread.start`` are built on conditions.

So each call of this library that changes something is an :func:`uninterrupted` block. Within it the
exception is raised by :func:`is_done`, by which the main thread waits, in :func:`interruptible`
parts, which are a user's functions, or at the end of the block.

All of this is about SIGINT. A handler of another signal must not raise in the middle of a save.
"""

from __future__ import annotations

# The functions of ``signal`` turn handlers into members of enums and back, so that a block takes
# 17 µs with them, and 2 µs with the functions behind them.
import _signal  # type: ignore[import-not-found]  # has no stub
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from signal import SIGINT
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the writer process needs none; their import loads logging, too
    from concurrent.futures import Future

_OVERSLEPT_S = 0.1
"""A wait that ends this much too late was suspended: it goes on for as long, once."""


class _Deferral:
    """The handler of SIGINT in a block, and what the main thread does there."""

    def __init__(self) -> None:
        self.previous: Callable[[int, FrameType | None], Any] = lambda *_: None
        """The handler outside of blocks."""
        self.asked = 0
        """How often SIGINT has come since the block began, or since the last exception."""
        self.patience = 1
        """So often it has to come to interrupt a wait."""
        self.is_interruptible = False
        self.depth = 0
        """How many blocks the main thread is in."""

    def __call__(self, _number: int, frame: FrameType | None) -> None:
        self.asked += 1
        if self.is_interruptible:
            self.raise_if_due(frame)

    def raise_if_due(self, frame: FrameType | None = None) -> None:
        """Run the handler outside of blocks, if SIGINT has come often enough."""
        if self.asked < self.patience:
            return
        self.is_interruptible, self.asked = False, 0
        self.previous(SIGINT, frame)
        self.is_interruptible = True  # that handler raises nothing


_deferral = _Deferral()


class _Block:
    """See :func:`uninterrupted`."""

    __slots__ = ("_outer", "_patience", "_previous")

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._outer: tuple[int, bool] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        previous = _signal.getsignal(SIGINT)
        outer = _deferral.patience, _deferral.is_interruptible
        _deferral.is_interruptible = False  # before the handler is installed: it raises nothing
        if callable(previous) and previous is not _deferral:
            _deferral.previous, _deferral.asked, _deferral.patience = previous, 0, 1
            _signal.signal(SIGINT, _deferral)
            self._previous = previous
        _deferral.patience = max(_deferral.patience, self._patience)
        _deferral.depth += 1
        self._outer = outer

    def __exit__(self, *_: object) -> None:
        if self._outer is None:
            return
        _deferral.depth -= 1
        _deferral.patience, _deferral.is_interruptible = self._outer
        previous = self._previous
        if previous is None:
            if _deferral.is_interruptible:
                _deferral.raise_if_due()
            return
        if _signal.getsignal(SIGINT) is _deferral:
            _signal.signal(SIGINT, previous)
        if _deferral.asked:
            _deferral.asked = 0
            previous(SIGINT, None)


def uninterrupted(*, patience: int = 1) -> AbstractContextManager[None]:
    """A block in which SIGINT raises its exception in waits only, or at the end.

    Nested ones end with the outermost. Without effect on other threads, which Python never
    interrupts, and where SIGINT ends the process or is ignored.

    Args:
        patience: How often SIGINT comes before it interrupts a wait; 2 for what should be
            completed, such as a commit.
    """
    return _Block(patience)


def is_uninterrupted() -> bool:
    """Whether the main thread is in an :func:`uninterrupted` block; for handlers of signals."""
    return _deferral.depth > 0


@contextmanager
def interruptible() -> Iterator[None]:
    """A part of an :func:`uninterrupted` block that waits, or runs a user's function."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _deferral.is_interruptible = True
    try:
        _deferral.raise_if_due()  # what came before
        yield
    finally:
        _deferral.is_interruptible = False


def is_done(future: Future[Any], timeout_s: float = 0.0) -> bool:
    """Whether a future is done within this time; Ctrl-C interrupts the wait and harms nothing.

    ``result(timeout_s)`` cannot tell: before Python 3.11 its timeout is not the built-in error, and
    the future itself may have ended with a timeout error.
    """
    ended = threading.Lock()
    with uninterrupted():
        if future.done() or timeout_s <= 0:
            return future.done()
        ended.acquire()
        future.add_done_callback(lambda _: ended.release())
        wait_s = min(timeout_s, threading.TIMEOUT_MAX)
        end_s = time.monotonic() + wait_s
        with interruptible():
            if ended.acquire(timeout=wait_s):
                return True
            # After a suspension (SIGSTOP, a frozen container) the answer may be there, but not
            # received. No longer than it was late: a busy machine must not double every deadline.
            late_s = time.monotonic() - end_s
            return late_s > _OVERSLEPT_S and ended.acquire(timeout=min(wait_s, late_s))
