"""SIGTERM: finish what is scheduled, then end.

A signal arrives anywhere, also between two lines of this library, and on each rank somewhere else. It is therefore only noted
when it arrives. What it asks for is done where it can be: at once if nothing is pending; at the end of the call if one of a
queue's methods is running; and, where other ranks have to take part, when they next poll together, in whose reduction every
rank tells whether it was asked.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nostall.errors import OptionError

_log = logging.getLogger("nostall")

STATUS = 128 + signal.SIGTERM
"""What shells report for a process that SIGTERM has ended."""


class Preemption:
    """Whether this process was asked to end, and by when."""

    def __init__(self) -> None:
        self._depth = 0
        self._deadline: float | None = None
        self._timer: threading.Timer | None = None
        self._previous: Any = signal.SIG_DFL
        self._drain: Callable[[float], bool] = lambda _timeout_s: True

    @property
    def asked(self) -> bool:
        """Whether SIGTERM has arrived and what it asks for is not done."""
        return self._deadline is not None

    def install(
        self, grace_s: float, *, drain: Callable[[float], bool], abandon: Callable[[], object]
    ) -> None:
        """Handle SIGTERM from now on.

        Args:
            grace_s: Seconds between the signal and the end of the process, come what may.
            drain: Finishes what can be finished without other ranks within so many seconds; whether that was everything.
            abandon: Ends what would outlive this process when it ends with something unfinished.
        """
        if threading.current_thread() is not threading.main_thread():
            raise OptionError(
                "signals can be handled by the main thread only",
                hint="call drain_on_sigterm() from the main thread, before training starts",
            )
        if not 0 < grace_s <= threading.TIMEOUT_MAX:
            raise OptionError(f"grace_s={grace_s!r} is not possible", hint="use seconds > 0")
        self._drain = drain

        def handle(_number: int, frame: FrameType | None) -> None:
            if self._deadline is not None:
                return  # it is known
            _log.warning("SIGTERM: finishing what is scheduled within %g s", grace_s)
            self._deadline = time.monotonic() + grace_s
            self._timer = threading.Timer(grace_s, _give_up, [abandon])
            self._timer.daemon = True
            self._timer.start()
            if not self._depth:
                self._go_on(frame)

        previous = signal.signal(signal.SIGTERM, handle)
        if getattr(previous, "__qualname__", "") != handle.__qualname__:
            self._previous = previous

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """While inside, a signal is only noted; afterwards it is acted upon, if that can be done without other ranks."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if not self._depth and self._deadline is not None:
            self._go_on(None)

    def _go_on(self, frame: FrameType | None) -> None:
        assert self._deadline is not None
        self._depth += 1  # what drains is a queue's method, too
        try:
            everything = self._drain(self._deadline - time.monotonic())
        finally:
            self._depth -= 1
        if not everything:
            return  # other ranks have to take part
        if self._timer is not None:
            self._timer.cancel()
        self._deadline = None
        if callable(self._previous):
            self._previous(signal.SIGTERM, frame)
        elif self._previous is not signal.SIG_IGN:
            raise SystemExit(STATUS)


def _give_up(abandon: Callable[[], object]) -> None:
    _log.error("SIGTERM: what is scheduled could not be finished in time; it is lost")
    try:
        abandon()
    finally:
        os._exit(STATUS)
