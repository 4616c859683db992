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

import concurrent.futures.thread
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

from nostall._model.threads import is_uninterrupted, spawn, uninterrupted
from nostall.errors import OptionError
from nostall.options import is_possible_wait

_log = logging.getLogger("nostall")

STATUS = 128 + signal.SIGTERM
"""Exit status that shells report for a process ended by SIGTERM."""
_LOOK_AGAIN_S = 1.0
_SETTLED_S = 2.0
"""Quiet time after which a synchronous save counts as over: it consists of several calls."""
_ABANDON_S = 5.0


def is_interpreter_ending() -> bool:
    """Whether the main thread has ended, and the interpreter waits for others."""
    # No public name says so.
    return getattr(concurrent.futures.thread, "_shutdown", False)


class Preemption:
    """Whether and when SIGTERM has arrived, and the deadline."""

    def __init__(self) -> None:
        self._previous: Any = signal.SIG_DFL
        self._is_installed = False
        self._grace_s = 0.0
        self._is_anything_pending: Callable[[], bool] = lambda: False
        self._forget()

    def _forget(self) -> None:
        self._asked_at_s: float | None = None
        self._is_reminder = False
        """Whether this process has sent the next signal itself."""
        self._sections: set[object] = set()
        """The calls in progress that save; on any thread, by single operations of the set."""
        self._last_part_s = -math.inf
        """When a part of a synchronous save has ended."""
        self.is_raised = False
        """Whether the process ends by the exception of a signal."""

    @property
    def asked(self) -> bool:
        """Whether SIGTERM has arrived."""
        return self._asked_at_s is not None

    @property
    def left_s(self) -> float:
        """Seconds until the process ends; infinite without a signal, 0 after the grace period."""
        asked_at_s = self._asked_at_s
        if asked_at_s is None:
            return math.inf
        return max(0.0, asked_at_s + self._grace_s - time.monotonic())

    def install(
        self,
        grace_s: float,
        *,
        is_anything_pending: Callable[[], bool],
        abandon: Callable[[], object],
    ) -> None:
        """Handle SIGTERM from now on; pending saves delay the end by ``grace_s`` seconds at most.

        The handler calls ``is_anything_pending`` (are there requests to finalise?), so it must not
        wait. ``abandon`` is called at the deadline, on a thread; it ends processes that would
        outlive this one.
        """
        if threading.current_thread() is not threading.main_thread():
            raise OptionError(
                "signals can be handled by the main thread only",
                hint="call drain_on_sigterm() from the main thread, before training starts",
            )
        if not is_possible_wait(grace_s) or grace_s == 0:
            raise OptionError(f"invalid grace_s={grace_s!r}", hint="use seconds > 0")
        self._grace_s = grace_s
        self._is_anything_pending = is_anything_pending
        # A handler must not start a thread or set an event: the main thread may hold their locks.
        asked, wake = os.pipe()
        spawn("nostall-sigterm", lambda: self._watch(asked, abandon))

        def handle(_number: int, frame: FrameType | None) -> None:
            is_reminder, self._is_reminder = self._is_reminder, False
            if self._asked_at_s is None:
                if is_reminder:
                    return  # its signal is already handled
                self._asked_at_s = time.monotonic()
                os.write(wake, b"1")
            is_settled = time.monotonic() - self._last_part_s >= _SETTLED_S
            is_overdue = self.left_s < self._grace_s / 2
            if not is_uninterrupted() and (is_overdue or is_settled):
                self._end_if_idle(frame, even_if_pending=is_overdue)

        previous = signal.signal(signal.SIGTERM, handle)
        if not self._is_installed:
            self._previous, self._is_installed = previous, True

    @contextmanager
    def deferred(self, *, then_end: bool = True) -> Iterator[None]:
        """No signal interrupts the block; after it, SIGTERM ends the process if nothing is pending.

        ``then_end`` is false for a part of a save whose caller continues with it.
        """
        section = object()
        with uninterrupted():
            self._sections.add(section)
            try:
                yield
            finally:
                if not then_end:
                    self._last_part_s = time.monotonic()
                self._sections.discard(section)
        # On other threads the handler does it within a second.
        if then_end and self.asked and threading.current_thread() is threading.main_thread():
            self._end_if_idle(None)

    def forget_after_fork(self) -> None:
        """In a forked child: forget the parent's signal, and restore the previous handler."""
        self._forget()
        if self._is_installed:
            self._is_installed = False
            signal.signal(signal.SIGTERM, self._previous)

    def _end_if_idle(self, frame: FrameType | None, *, even_if_pending: bool = False) -> None:
        """Run the previous handler, or raise ``SystemExit``, unless a save is in progress."""
        is_pending = self._is_anything_pending() and not even_if_pending
        if self._sections or is_pending or self.is_raised or is_interpreter_ending():
            return
        self.is_raised = True
        if callable(self._previous):
            self._previous(signal.SIGTERM, frame)
        elif self._previous is not signal.SIG_IGN:
            raise SystemExit(STATUS)
        # The process continues, and the next signal is a new one.
        self.is_raised = False
        self._asked_at_s = None

    def _watch(self, asked: int, abandon: Callable[[], object]) -> None:
        """After each signal, run the handler now and then; end the process at the deadline."""
        while os.read(asked, 1):
            # Not for a signal that was handled during the last wait, or finds nothing to finish.
            if self.asked and (self._sections or self._is_anything_pending()):
                _log.warning("SIGTERM: finishing scheduled saves within %g s", self._grace_s)
            while (left_s := self.left_s) > 0 and self.asked:
                time.sleep(min(_LOOK_AGAIN_S, self._grace_s / 4, left_s))
                if self.asked:
                    self._is_reminder = True
                    os.kill(os.getpid(), signal.SIGTERM)
            if not self.asked:
                continue
            if self._is_anything_pending():
                _log.error("SIGTERM: scheduled saves were not finished in time and are lost")
            # In a separate thread, as it may wait for a lock that the main thread holds.
            helper = threading.Thread(target=abandon, name="nostall-abandon", daemon=True)
            helper.start()
            helper.join(_ABANDON_S)
            os._exit(STATUS)


preemption = Preemption()
