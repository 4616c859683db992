"""Threads, and Ctrl-C: its exception is raised where nothing is half done.

Python raises ``KeyboardInterrupt`` between any two instructions of the main thread, also after
``Condition.__enter__`` has acquired its lock and before the block begins: every other thread that
needs the lock waits for ever. Events, futures and ``Thread.start`` are built on conditions.

So each call of this library that changes something is an :func:`uninterrupted` block. Within it the
exception is raised by :func:`is_done`, by which the main thread waits, in :func:`interruptible`
parts, which are a user's functions, or at the end of the block. All of this is about SIGINT. A
handler of another signal must not raise in the middle of a save.

Threads are daemons: storage may hang, and the interpreter has to exit. A thread of ours that comes
back from torch, such as from its stores, and takes the lock of an ended interpreter aborts the
process, with exit status -6: an ending interpreter waits for threads of :func:`spawn_in_torch`.

:func:`gc_paused` is here because garbage collection belongs to all threads of a process.

The writer process imports this module, so ``logging`` and what loads it wait until they are needed.
"""

from __future__ import annotations

# The functions of ``signal`` turn handlers into members of enums and back, so that a block takes
# 17 µs with them, and 2 µs with the functions behind them.
import _signal  # type: ignore[import-not-found]  # has no stub
import atexit
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from signal import SIGINT
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future

_OVERSLEPT_S = 0.1
"""A wait that ends this much too late was suspended: it goes on for as long, once."""
_AT_EXIT_TIMEOUT_S = 20.0
"""Enough to copy 100 GB and more; a thread that waits for something else is left behind then."""

# --- Ctrl-C ---------------------------------------------------------------------------------------


class _Deferral:
    """The handler of SIGINT in a block, and what the main thread does there."""

    def __init__(self) -> None:
        self.previous: Callable[[int, FrameType | None], Any] = lambda *_: None
        """The handler outside of blocks."""
        self.asked = 0
        """How often SIGINT has come since the block began, or since the last exception."""
        self.patience = 1
        """How often it must come to interrupt a wait."""
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


class uninterrupted:  # noqa: N801  # used as a function is, such as contextlib.suppress
    """A block in which SIGINT raises its exception in waits only, or at the end.

    Nested ones end with the outermost. Without effect on other threads, which Python never
    interrupts, and where SIGINT ends the process or is ignored. A wait is interrupted when SIGINT
    has come ``patience`` times; 2 for what should be completed, such as a commit.
    """

    __slots__ = ("_outer", "_patience", "_previous")

    def __init__(self, *, patience: int = 1) -> None:
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
            # After a suspension (SIGSTOP, a frozen container) the answer may have arrived unread.
            # No longer than it was late: a busy machine must not double every deadline.
            late_s = time.monotonic() - end_s
            return late_s > _OVERSLEPT_S and ended.acquire(timeout=min(wait_s, late_s))


# --- threads --------------------------------------------------------------------------------------


class _InTorch(threading.Thread):
    """A thread that an ending interpreter waits for."""


def spawn(
    name: str, work: Callable[[], object], kind: type[threading.Thread] = threading.Thread
) -> threading.Thread:
    """Run ``work`` on a new daemon thread; returns at once.

    ``RuntimeError`` if the system cannot start one, or the interpreter is ending.
    """
    thread = kind(target=work, name=name, daemon=True)
    with uninterrupted():
        thread.start()
    return thread


def spawn_or_run(name: str, work: Callable[[], object]) -> None:
    """Run ``work`` on a new daemon thread, or here if none can be started, as at exit."""
    try:
        spawn(name, work)
    except RuntimeError:
        work()


def work_together(
    work: Callable[[int], None],
    count: int,
    *,
    give_up: Callable[[], None],
    name: str = "nostall-io",
) -> None:
    """Call ``work(0)`` on this thread and ``work(1)``, ... on others; returns when all have ended.

    ``work`` returns if nothing is left to do. If the system allows fewer than ``count`` threads,
    those do the work. ``give_up`` is called after an error of this thread, and makes all return
    soon. An error of another thread is not passed on.
    """
    threads: list[threading.Thread] = []
    try:
        for number in range(1, count):
            try:
                threads.append(spawn(f"{name}-{number}", partial(work, number)))
            except RuntimeError:  # no more threads: those running do the work
                break
        work(0)
    except BaseException:  # passed on
        give_up()
        raise
    finally:
        for thread in threads:  # their memory is freed next
            thread.join()


def spawn_in_torch(name: str, work: Callable[[], object]) -> Future[None]:
    """Run ``work`` on a daemon thread; an ending interpreter waits for its end, 20 s at most.

    The future is done when the work has ended and references to it are dropped. ``RuntimeError`` if
    the system cannot start a thread.
    """
    from concurrent.futures import Future

    ended: Future[None] = Future()
    only = [work]  # dropped when it is called: its tensors are freed before the end is known
    del work

    def run() -> None:
        try:
            only.pop()()
        finally:
            ended.set_result(None)

    spawn(name, run, _InTorch)
    return ended


def _finish_at_exit() -> None:
    deadline_s = time.monotonic() + _AT_EXIT_TIMEOUT_S
    threads = [each for each in threading.enumerate() if isinstance(each, _InTorch)]
    for thread in threads:
        if thread.is_alive():  # one that another thread is starting cannot be joined
            thread.join(max(0.0, deadline_s - time.monotonic()))
    left = sorted(each.name for each in threads if each.is_alive())
    if left:
        import logging

        log = logging.getLogger("nostall")
        log.warning("threads are still running %g s after exit began: %s", _AT_EXIT_TIMEOUT_S, left)


# Before the hooks of other modules, which import this: hooks run in reverse order.
atexit.register(_finish_at_exit)

# --- the garbage collector ------------------------------------------------------------------------


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection while many objects are made that all stay.

    It looks at each of them again and again as their number grows: planning 50,000 items of 512
    ranks takes twice as long with it. Concurrent threads may resume it for each other, which is
    harmless.
    """
    was_enabled = gc.isenabled()
    if was_enabled:
        _pauses.append(None)
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
            _pauses.pop()


_pauses: list[None] = []
"""One entry per thread that has disabled garbage collection and will enable it."""


def _after_fork_in_child() -> None:
    if _pauses:  # by threads that the child does not have
        _pauses.clear()
        gc.enable()


os.register_at_fork(after_in_child=_after_fork_in_child)
