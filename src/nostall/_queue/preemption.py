"""SIGTERM: finish the scheduled requests, then end.

A signal may arrive on any line, even while this library holds a lock, and on each rank at another
place. So the handler does not wait and takes no lock. It records the signal, and ends the process
by an exception in the main thread if no save is pending or in progress. Otherwise

* the poll after the next finishes the pending requests: the reduction of the next one tells all
  ranks of the signal;
* the handler runs again every second, for saves that end without a poll (synchronous ones);
* after half of the grace period the main thread gets the exception in any case, and the pending
  requests are finished when the interpreter ends;
* at the end of the grace period the process ends.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nostall._model.interrupts import start
from nostall.errors import OptionError
from nostall.options import is_possible_wait

_log = logging.getLogger("nostall")

STATUS = 128 + signal.SIGTERM
"""Exit status that shells report for a process ended by SIGTERM."""
_LOOK_AGAIN_S = 1.0
_SETTLED_S = 2.0
"""Quiet time after which a synchronous save counts as over: it consists of several calls."""
_ABANDON_S = 5.0


class Preemption:
    """Whether and when SIGTERM has arrived, and the deadline."""

    def __init__(self) -> None:
        self._forget()
        self._previous: Any = signal.SIG_DFL
        self._is_installed = False
        self._is_anything_pending: Callable[[], bool] = lambda: False

    def _forget(self) -> None:
        self._sections = 0
        self._lock = threading.Lock()  # never taken by the handler
        self._last_section_s = 0.0
        self._asked_at_s: float | None = None
        self._grace_s = 0.0
        self._is_overdue = False
        self._is_reminder = False
        """Whether this process has sent the next signal itself."""
        self.is_ending = False
        """Whether the process ends already, so that the signal raises nothing."""

    @property
    def asked(self) -> bool:
        """Whether SIGTERM has arrived."""
        return self._asked_at_s is not None

    @property
    def left_s(self) -> float:
        """Seconds until the process ends; infinite without a signal."""
        asked_at_s = self._asked_at_s
        return (
            math.inf
            if asked_at_s is None
            else max(0.0, asked_at_s + self._grace_s - time.monotonic())
        )

    @property
    def is_too_late(self) -> bool:
        """Whether the grace period is over; saves then fail because they are aborted."""
        return self.left_s <= 0

    def install(
        self,
        grace_s: float,
        *,
        is_anything_pending: Callable[[], bool],
        abandon: Callable[[], object],
    ) -> None:
        """Handle SIGTERM from now on.

        Args:
            grace_s: Longest time between the signal and the end of the process, in seconds.
            is_anything_pending: Whether there are requests to finalise; called by the handler, so
                it must not wait.
            abandon: Called at the deadline; ends processes that would outlive this one.
        """
        if threading.current_thread() is not threading.main_thread():
            raise OptionError(
                "signals can be handled by the main thread only",
                hint="call drain_on_sigterm() from the main thread, before training starts",
            )
        if not is_possible_wait(grace_s) or grace_s == 0:
            raise OptionError(f"grace_s={grace_s!r} is not possible", hint="use seconds > 0")
        self._grace_s = grace_s
        self._is_anything_pending = is_anything_pending

        # A handler must not start a thread or set an event: the main thread may hold their locks.
        asked, wake = os.pipe()
        watch = threading.Thread(
            target=self._watch, args=(asked, grace_s, abandon), name="nostall-sigterm", daemon=True
        )
        start(watch)

        def handle(_number: int, frame: FrameType | None) -> None:
            is_reminder, self._is_reminder = self._is_reminder, False
            if self._asked_at_s is None:
                if is_reminder:
                    return  # its signal is already handled
                self._asked_at_s = time.monotonic()
                os.write(wake, b"1")
            if not self._sections and (self._is_overdue or self._is_idle()):
                self._end(frame)

        previous = signal.signal(signal.SIGTERM, handle)
        if not self._is_installed:
            self._previous, self._is_installed = previous, True

    @contextmanager
    def deferred(self, *, then_end: bool = True) -> Iterator[None]:
        """The process does not end inside the block; after it, on SIGTERM with nothing pending.

        Args:
            then_end: False for a part of a save whose caller continues with it.
        """
        with self._lock:
            self._sections += 1
        try:
            yield
        finally:
            with self._lock:
                self._sections -= 1
            if not then_end:
                self._last_section_s = time.monotonic()
        if not then_end or not self.asked or self._sections or self._is_anything_pending():
            return
        if threading.current_thread() is threading.main_thread():
            self._end(None)  # on other threads the handler does it within a second

    def forget_after_fork(self) -> None:
        """In a forked child: forget the parent's signal, and restore the previous handler."""
        if not self._is_installed:
            return
        self._forget()
        self._is_installed = False
        signal.signal(signal.SIGTERM, self._previous)

    def _is_idle(self) -> bool:
        settled = time.monotonic() - self._last_section_s >= _SETTLED_S
        return settled and not self._is_anything_pending()

    def _end(self, frame: FrameType | None) -> None:
        """Run the previous handler, or raise ``SystemExit``."""
        if self.is_ending:
            return
        self.is_ending = True
        if callable(self._previous):
            self._previous(signal.SIGTERM, frame)
        elif self._previous is not signal.SIG_IGN:
            raise SystemExit(STATUS)
        # The process continues, and the next signal is a new one.
        self._is_overdue = self.is_ending = False
        self._asked_at_s = None

    def _watch(self, asked: int, grace_s: float, abandon: Callable[[], object]) -> None:
        """Wait for a signal, and for the next one if the process continues."""
        while os.read(asked, 1):
            if self.asked:  # not a signal that was handled during the last wait
                _log.warning("SIGTERM: finishing scheduled saves within %g s", grace_s)
                self._see_to_the_end(grace_s, abandon)

    def _see_to_the_end(self, grace_s: float, abandon: Callable[[], object]) -> None:
        """Run the handler again from time to time, and end the process at the deadline."""
        while (left_s := self.left_s) > 0:  # of the last signal; earlier ones may be handled
            time.sleep(min(_LOOK_AGAIN_S, grace_s / 4, left_s))
            if not self.asked:
                return
            self._is_overdue = self.left_s < grace_s / 2
            self._is_reminder = True
            os.kill(os.getpid(), signal.SIGTERM)
        if self._is_anything_pending():
            _log.error("SIGTERM: scheduled saves were not finished in time and are lost")
        # In a separate thread, as it may wait for a lock that the main thread holds.
        helper = threading.Thread(target=abandon, name="nostall-abandon", daemon=True)
        helper.start()
        helper.join(_ABANDON_S)
        os._exit(STATUS)


preemption = Preemption()
