"""SIGTERM: finish what is scheduled, then end.

A signal arrives anywhere, also between two lines of this library while it holds a lock, and on each rank somewhere else. So the
handler waits for nothing and takes no lock. It notes the signal, and ends the process by an exception in the main thread if
no save is pending or being worked on. Otherwise

* the next poll finishes what is pending: all ranks tell in its reduction whether they were asked, so they do it together;
* the signal is looked at again every second, for what ended without a poll (a synchronous save);
* half of the grace period later the main thread gets the exception in any case, and what is pending is finished when the
  interpreter ends;
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

from nostall.errors import OptionError
from nostall.options import is_possible_wait

_log = logging.getLogger("nostall")

STATUS = 128 + signal.SIGTERM
"""What shells report for a process that SIGTERM has ended."""
_LOOK_AGAIN_S = 1.0
_SETTLED_S = 2.0
"""How long nothing of ours must have run on behalf of a synchronous save: it consists of several calls."""
_ABANDON_S = 5.0


class Preemption:
    """Whether this process was asked to end, and by when."""

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
        """Whether the next signal comes from ourselves."""
        self.is_ending = False
        """Whether the process ends because of the signal."""

    @property
    def asked(self) -> bool:
        """Whether SIGTERM has arrived."""
        return self._asked_at_s is not None

    @property
    def left_s(self) -> float:
        """Seconds until the process is ended; for ever, if it was not asked to end."""
        asked_at_s = self._asked_at_s
        return (
            math.inf
            if asked_at_s is None
            else max(0.0, asked_at_s + self._grace_s - time.monotonic())
        )

    @property
    def is_too_late(self) -> bool:
        """Whether the grace period is over, and with it the process; saves fail then because they are given up."""
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
            grace_s: Seconds between the signal and the end of the process, come what may.
            is_anything_pending: Whether there are requests to finalise; called by the handler, so it must not wait.
            abandon: Ends what would outlive this process when it ends with something unfinished.
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

        # A handler must neither start a thread nor set an event: the main thread may hold the locks of either.
        asked, wake = os.pipe()
        threading.Thread(
            target=self._watch, args=(asked, grace_s, abandon), name="nostall-sigterm", daemon=True
        ).start()

        def handle(_number: int, frame: FrameType | None) -> None:
            is_reminder, self._is_reminder = self._is_reminder, False
            if self._asked_at_s is None:
                if is_reminder:
                    return  # of a signal that was dealt with meanwhile
                self._asked_at_s = time.monotonic()
                os.write(wake, b"1")
            if not self._sections and (self._is_overdue or self._is_idle()):
                self._end(frame)

        previous = signal.signal(signal.SIGTERM, handle)
        if not self._is_installed:
            self._previous, self._is_installed = previous, True

    @contextmanager
    def deferred(self, *, then_end: bool = True) -> Iterator[None]:
        """While inside, the process is not ended. Afterwards it is if it was asked and nothing is pending.

        Args:
            then_end: False for a part of a save that others call, and go on with afterwards.
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
            self._end(None)  # else the handler will, when it looks again

    def forget_after_fork(self) -> None:
        """In a forked child: its parent was asked, not this one; and it ends as it would without us."""
        if not self._is_installed:
            return
        self._forget()
        self._is_installed = False
        signal.signal(signal.SIGTERM, self._previous)

    def _is_idle(self) -> bool:
        settled = time.monotonic() - self._last_section_s >= _SETTLED_S
        return settled and not self._is_anything_pending()

    def _end(self, frame: FrameType | None) -> None:
        """Do what would have been done without us."""
        if self.is_ending:
            return
        self.is_ending = True
        if callable(self._previous):
            self._previous(signal.SIGTERM, frame)
        elif self._previous is not signal.SIG_IGN:
            raise SystemExit(STATUS)
        # It goes on, and the next signal is a new one.
        self._is_overdue = self.is_ending = False
        self._asked_at_s = None

    def _watch(self, asked: int, grace_s: float, abandon: Callable[[], object]) -> None:
        """Wait until this process is asked to end, and again if it goes on then."""
        while os.read(asked, 1):
            if self.asked:  # and was not before, when this waited for the end of the last time
                _log.warning("SIGTERM: finishing what is scheduled within %g s", grace_s)
                self._see_to_the_end(grace_s, abandon)

    def _see_to_the_end(self, grace_s: float, abandon: Callable[[], object]) -> None:
        """Let the handler look again from time to time, and end the process when there is no time left."""
        while (left_s := self.left_s) > 0:  # of the last signal: an earlier one may be dealt with
            time.sleep(min(_LOOK_AGAIN_S, grace_s / 4, left_s))
            if not self.asked:
                return
            self._is_overdue = self.left_s < grace_s / 2
            self._is_reminder = True
            os.kill(os.getpid(), signal.SIGTERM)
        if self._is_anything_pending():
            _log.error("SIGTERM: what is scheduled could not be finished in time; it is lost")
        # In a thread of its own, as it may wait for a lock that the main thread holds.
        helper = threading.Thread(target=abandon, daemon=True)
        helper.start()
        helper.join(_ABANDON_S)
        os._exit(STATUS)


preemption = Preemption()
