"""SIGINT at a chosen event of the main thread, or while it waits."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from nostall._model.threads import _deferral
from support.waiting import wait_until

OURS = f"{os.sep}nostall{os.sep}"


def calls_ours(frame: FrameType, event: str) -> bool:
    return event == "call" and OURS in frame.f_code.co_filename


def takes_a_lock(frame: FrameType, event: str) -> bool:
    """Whether a future or an event has just taken its lock."""
    return event == "return" and frame.f_code is threading.Condition.__enter__.__code__


def calls(_frame: FrameType, event: str) -> bool:
    """Whether this is one of nearly all the places where CPython runs a handler."""
    return event in ("call", "c_return")


@contextmanager
def interrupted(
    at: int, happens: Callable[[FrameType, str], bool], *, times: int = 1
) -> Iterator[list[int]]:
    """SIGINT when something happens for the ``at``-th time on this thread; how often it has."""
    count = [0]

    def look(frame: FrameType, event: str, _argument: object) -> None:
        if happens(frame, event):
            count[0] += 1
            if count[0] == at:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)

    # What a shell has started in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setprofile(look)
    try:
        yield count
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, before)


def interrupt_the_wait(times: int) -> threading.Thread:
    """SIGINT for the main thread so often, each time once it waits; the last one ends the wait."""

    def has_come(number: int) -> bool:
        return _deferral.asked == number and _main_is_asleep()

    def interrupt() -> None:
        wait_until(lambda: _deferral.is_interruptible and _deferral.patience == times)
        for number in range(times):
            wait_until(partial(has_come, number))
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def _main_is_asleep() -> bool:
    """Whether the main thread is in a system call that waits, and not for the interpreter's lock.

    A signal just before that call would be handled only after the wait. While the state is read,
    the interpreter's lock is free.
    """
    return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[0] == "S"
