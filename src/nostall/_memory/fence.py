"""Let optimizers, and other code that changes tensors, wait until a snapshot's copies are made.

torch calls :func:`_before_step` before every optimizer's step in the process. Other code calls
:meth:`SnapshotFence.wait`; a change without it is detected, see ``_memory.overlap``.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from torch.optim.optimizer import register_optimizer_step_pre_hook

from nostall._memory.copying import Copies
from nostall._model.threads import is_done, uninterrupted
from nostall.errors import SaveTimeoutError

_LOOK_AGAIN_S = 0.001


class _Process:
    """State shared by all snapshots of the process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.under_way: set[SnapshotFence] = set()
        """All snapshots that are being taken, whatever engine they belong to."""
        self.waited_s = 0.0
        """Start of the latest wait for all snapshots that has succeeded."""
        self.is_hooked = False
        """Whether optimizers wait. The hook is never removed: removing it while an optimizer
        iterates over all hooks can fail that optimizer's step. It costs a step 1 to 2 µs if no
        snapshot is under way."""


_process = _Process()


class SnapshotFence:
    """Blocks changes of tensors until they are copied. Holds no tensor.

    Args:
        timeout_s: How long an optimizer's step waits.
    """

    def __init__(self, timeout_s: float = 0.0) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._safe: Future[None] = Future()
        """Done when tensors may be changed."""
        self._lost: str | None = None
        self._copies = Copies()
        self._waiters: set[object] = set()
        """Waits under way, and those that succeeded. Not a count: Ctrl-C may come before one is
        added, or after it was discarded."""
        self._entered_s = 0.0
        self.changed: Callable[[], list[str]] | None = None
        """Names of tensors changed since the snapshot was requested; holds counters, no tensors."""
        self.failure: str | None = None
        """Why the snapshot failed. Not an exception, whose traceback would hold the tensors."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the tensors may be changed; at once if the snapshot failed.

        The failure is raised when the save is finalised. The host does not wait for an accelerator:
        work queued on the current stream from now on runs after the copy.

        Raises:
            SaveTimeoutError: The tensors may not be changed yet after ``timeout`` seconds.
        """
        waiter = object()
        with uninterrupted():
            try:
                # Counted before the wait: the caller may change tensors the moment it ends.
                with self._lock:
                    self._waiters.add(waiter)
                is_done(self._safe, math.inf if timeout is None else timeout)
                with self._lock:
                    is_safe, copies = self._safe.done(), self._copies
                    if not is_safe:
                        self._waiters.discard(waiter)
                if not is_safe:
                    raise SaveTimeoutError(
                        f"the snapshot is still being taken after {timeout:g} s",
                        phase="stage",
                        hint="wait again before changing any tensor",
                    )
                copies.precede_what_follows()
            except BaseException:  # also Ctrl-C: the caller may not change tensors
                with self._lock:
                    self._waiters.discard(waiter)
                raise

    def wait_or_lose(self) -> None:
        """As :meth:`wait`, for an optimizer's step: after the timeout the save fails."""
        try:
            self.wait(self._timeout_s)
        except SaveTimeoutError:
            with uninterrupted(), self._lock:
                if not self._safe.done():
                    self._lost = (
                        f"an optimizer's step waited {self._timeout_s:g} s for the snapshot,"
                        " then continued without it"
                    )
                    self._let_go()

    def wait_awaited(self, timeout: float) -> None:
        """Return when a thread waits for this fence, or after ``timeout`` seconds."""
        end_s = time.monotonic() + timeout
        while not self._waiters and time.monotonic() < end_s:
            time.sleep(_LOOK_AGAIN_S)

    def open(self, copies: Copies) -> None:
        """Let waiting threads change tensors, after copies that an accelerator has yet to make.

        Raises:
            SaveTimeoutError: A thread gave up waiting before, and may have changed tensors.
        """
        with self._lock:
            if self._lost is not None:
                raise SaveTimeoutError(
                    self._lost,
                    phase="stage",
                    hint="earlier saves may hold all snapshot memory,"
                    " or EngineOptions.save_timeout_s is too short",
                )
            self._copies = copies
            self._let_go()

    def _let_go(self) -> None:
        if not self._safe.done():
            self._safe.set_result(None)

    def close(self, changed: Callable[[], list[str]]) -> list[str]:
        """All copies are made: names of tensors changed so far although no thread waited."""
        with self._lock:  # new waiters block until this comparison ends
            self._copies = Copies()
            return [] if self._waiters else changed()

    def changed_unseen(self) -> list[str]:
        """Names of tensors changed although no thread waited; called when the trainer finalises.

        Includes tensors changed after the snapshot was complete: without a wait the two cannot be
        distinguished.
        """
        if self.changed is None or self._waiters or _process.waited_s >= self._entered_s:
            return []
        return self.changed()

    def end(self, failure: str | None = None) -> None:
        """The snapshot is complete, or failed for the reason given; tensors may change."""
        with self._lock:
            self.failure = failure
            self._copies = Copies()
            self._let_go()

    def enter(self) -> None:
        """Mark the snapshot as under way: optimizers wait. See :func:`any_under_way`."""
        self._entered_s = time.monotonic()
        with _process.lock:
            _process.under_way.add(self)
            if not _process.is_hooked:
                register_optimizer_step_pre_hook(_before_step)
                _process.is_hooked = True

    def leave(self) -> None:
        """Mark the snapshot as no longer under way. Idempotent."""
        with _process.lock:
            _process.under_way.discard(self)

    def abandon_after_fork(self) -> None:
        """Open the fence in a forked child, which does not have the copying thread."""
        self._lock = threading.RLock()
        self._copies = Copies()
        self._safe = Future()
        self._safe.set_result(None)


def any_under_way() -> bool:
    """Whether a snapshot of this process is being taken, or has yet to be handed on."""
    with _process.lock:
        return bool(_process.under_way)


def wait_staged(timeout: float | None = None) -> None:
    """Return when all snapshots of saves with ``staging="overlapped"`` are taken.

    Tensors may be changed then. On accelerators the host does not wait: later work of the current
    streams is ordered after the copies.

    Args:
        timeout: Seconds to wait at most; ``None`` for no limit.

    Raises:
        SaveTimeoutError: A snapshot is still being taken.
    """
    deadline_s = None if timeout is None else time.monotonic() + timeout
    _wait_for_all(
        lambda fence: fence.wait(
            None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        )
    )


def _before_step(*_: object) -> None:
    """Called by torch before every optimizer step: wait until tensors are copied."""
    _wait_for_all(SnapshotFence.wait_or_lose)


def _wait_for_all(wait: Callable[[SnapshotFence], None]) -> None:
    called_s = time.monotonic()
    with _process.lock:
        fences = list(_process.under_way)
    for fence in fences:
        wait(fence)
    _process.waited_s = max(_process.waited_s, called_s)


def _after_fork_in_child() -> None:
    # The parent's threads would end them, and may have held any of the locks during the fork.
    _process.lock = threading.Lock()
    fences, _process.under_way = _process.under_way, set()
    for fence in fences:
        fence.abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
