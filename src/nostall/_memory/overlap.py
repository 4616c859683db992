"""A snapshot taken while training goes on, and the protection of its tensors until they are copied.

Three defences; the first two need no cooperation from the trainer:

1. Tensors changed by a forward pass (running statistics, counters, averages) are small. Small
   tensors, and tensors without a version counter, are copied before the call returns.
2. All other tensors are changed by optimizers. No ``step()`` in the process begins before all
   copies are made, whatever the optimizer and its implementation: torch calls
   :func:`_before_step` before each.
3. A tensor that is changed elsewhere without :meth:`SnapshotFence.wait` is detected by its version
   counter, and the save fails instead of committing a torn snapshot. Changes that bypass the
   counter (through ``.data``, NumPy, ``Tensor.apply_``, or code outside of torch) are not detected.
   Replacing a parameter's ``data`` is harmless, as the old memory is copied.

torch counts an operation when it ends, so an operation that ran during the copy may be uncounted
when the copy ends. The counters are therefore kept, without the tensors' memory, until the trainer
finalises the save: by then its operations have ended. Where the trainer does not finalise
(``dcp.async_save`` does so on its own thread), the counters are compared a second time, after as
long as the copy took and 0.1 s at most; only then may tensors change.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import compress
from operator import ne
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nostall import _torch
from nostall._memory import devices
from nostall._memory.copying import Copies, Source, detach_all
from nostall._model.names import counted
from nostall._model.threads import is_done, spawn_in_torch, uninterrupted
from nostall.errors import NostallError, SaveTimeoutError, StagingError

T = TypeVar("T")

Marks = Mapping[torch.device, Any]
"""Per accelerator: the position of its stream when the save was requested."""

_LOOK_AGAIN_S = 0.001
_SECOND_LOOK_S = 0.1
"""An operation on one tensor ends within this time; waits for the snapshot include it."""
_HEAD_START_S = 0.0005
"""The caller's: this thread would keep the interpreter lock for 5 ms, and the call not return."""

# --- the fence ------------------------------------------------------------------------------------


class _Process:
    """State shared by all snapshots of the process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.in_progress: set[SnapshotFence] = set()
        """All snapshots that are being taken, whatever engine they belong to."""
        self.waited_s = 0.0
        """Start of the latest wait for all snapshots that has succeeded."""
        self.is_hooked = False
        """Whether optimizers wait. The hook is never removed: removing it while an optimizer
        iterates over all hooks can fail that optimizer's step. It costs a step 1 to 2 µs if no
        snapshot is in progress."""


_process = _Process()


class SnapshotFence:
    """Blocks changes of tensors until they are copied; holds no tensor.

    An optimizer's step waits for up to ``timeout_s`` seconds; then it continues, and the save
    fails.
    """

    def __init__(self, timeout_s: float = 0.0) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._safe: Future[None] = Future()
        """Done when tensors may be changed."""
        self._lost: str | None = None
        self._copies = Copies()
        self._waiters: set[object] = set()
        """Waits in progress, and successful ones. Not a count: Ctrl-C may come before one is added,
        or after it was discarded."""
        self._entered_s = 0.0
        self.changed: Callable[[], list[str]] | None = None
        """Names of tensors changed since the snapshot was requested; holds counters, no tensors."""
        self.failure: StagingError | None = None
        """Why the copy cannot be used. A copy of it is raised: a traceback would hold tensors."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the tensors may be changed; at once if the snapshot failed.

        The failure is raised when the save is finalised. The host does not wait for an accelerator:
        work queued on the current stream from now on runs after the copy. ``SaveTimeoutError`` if
        the tensors may not be changed yet after ``timeout`` seconds.
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
        """Wait before an optimizer's step; after the timeout the save fails."""
        try:
            self.wait(self._timeout_s)
        except SaveTimeoutError:
            with uninterrupted(), self._lock:
                if not self._safe.done():
                    self._lost = (
                        f"an optimizer's step waited {self._timeout_s:g} s for the snapshot,"
                        " then continued without it"
                    )
                    self._safe.set_result(None)

    def wait_awaited(self, timeout: float) -> None:
        """Return when a thread waits for this fence, or after ``timeout`` seconds."""
        end_s = time.monotonic() + timeout
        while not self._waiters and time.monotonic() < end_s:
            time.sleep(_LOOK_AGAIN_S)

    def open(self, copies: Copies) -> None:
        """Let waiting threads change tensors, after copies that an accelerator has yet to make.

        ``SaveTimeoutError`` if a thread gave up waiting before, and may have changed tensors.
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

    def fail(self, error: BaseException) -> None:
        """The snapshot failed with this error; tensors may change."""
        ours = error if isinstance(error, NostallError) else None
        with self._lock:
            self.failure = StagingError(
                f"the staged copy cannot be used: {ours.message if ours else error}",
                phase="stage",
                hint=ours.hint if ours else None,
            )
            self._copies = Copies()
            if not self._safe.done():
                self._safe.set_result(None)

    def enter(self) -> None:
        """Register the snapshot as in progress: optimizers' steps wait."""
        self._entered_s = time.monotonic()
        with _process.lock:
            _process.in_progress.add(self)
            if not _process.is_hooked:
                register_optimizer_step_pre_hook(_before_step)
                _process.is_hooked = True

    def leave(self) -> None:
        """Undo :meth:`enter`. Idempotent."""
        with _process.lock:
            _process.in_progress.discard(self)

    def abandon_after_fork(self) -> None:
        """Open the fence in a forked child, which does not have the copying thread."""
        self._lock = threading.RLock()
        self._copies = Copies()
        self._safe = Future()
        self._safe.set_result(None)


def any_snapshot_in_progress() -> bool:
    """Whether a snapshot of this process is being taken, or has yet to be handed on."""
    with _process.lock:
        return bool(_process.in_progress)


def wait_staged(timeout: float | None = None) -> None:
    """Return when all snapshots of saves with ``staging="overlapped"`` are taken.

    Tensors may be changed then. On accelerators the host does not wait: later work of the current
    streams is ordered after the copies.

    Args:
        timeout: Seconds to wait at most; ``None`` for no limit.

    Raises:
        SaveTimeoutError: A snapshot is still being taken.
    """
    deadline_s = time.monotonic() + (math.inf if timeout is None else timeout)
    _wait_for_all(lambda fence: fence.wait(max(0.0, deadline_s - time.monotonic())))


def _before_step(*_: object) -> None:
    """Called by torch before every optimizer step."""
    _wait_for_all(SnapshotFence.wait_or_lose)


def _wait_for_all(wait: Callable[[SnapshotFence], None]) -> None:
    called_s = time.monotonic()
    with _process.lock:
        fences = list(_process.in_progress)
    for fence in fences:
        wait(fence)
    _process.waited_s = max(_process.waited_s, called_s)


def _after_fork_in_child() -> None:
    # The parent's threads would end them, and may have held any of the locks during the fork.
    _process.lock = threading.Lock()
    fences, _process.in_progress = _process.in_progress, set()
    for fence in fences:
        fence.abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


# --- the snapshot ---------------------------------------------------------------------------------


def changed_too_early(names: Sequence[str]) -> StagingError:
    """The error of a save whose tensors were changed before any wait for its snapshot."""
    return StagingError(
        f"{counted(len(names), 'tensor')} changed while the snapshot was taken,"
        f" or without waiting for it: {names[:3]}",
        phase="stage",
        hint="call wait_staged() before changing a large tensor outside an optimizer's step, "
        'or use staging="blocking"',
    )


def stage_behind(
    sources: Sequence[Source],
    names: Sequence[str],
    begin: Callable[[list[Source], Marks], tuple[T, Copies]],
    discard: Callable[[T], None],
    *,
    is_watched: bool,
    timeout_s: float,
) -> tuple[Future[T], SnapshotFence]:
    """Take a snapshot on a separate thread.

    Returns its future, and the fence to wait for before changing tensors.

    Args:
        begin: Starts copying the sources passed to it, which replace ``sources``, ordered after the
            marks passed to it. Returns the snapshot and the copies.
        discard: Releases what ``begin`` returned, if it cannot be used.
        is_watched: Whether the trainer will call :meth:`SnapshotFence.changed_unseen`.
        timeout_s: How long an optimizer's step waits.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()
    detached, live = detach_all(sources)
    watched: list[Any] = [detached[at] for at in live]
    watched_names, before = [names[at] for at in live], _torch.changes_of(watched)

    def changed() -> list[str]:
        """Names of the tensors that have changed since the call."""
        now = _torch.changes_of(watched)
        return [] if now == before else list(compress(watched_names, map(ne, now, before)))

    tensors = [each for each in detached if isinstance(each, torch.Tensor)]
    marks, current = devices.stream_marks(tensors), devices.current_devices(tensors)
    fence = SnapshotFence(timeout_s)

    def take() -> T:
        with devices.on_devices(current):
            began_s = time.monotonic()
            made, copies = begin(detached, marks)
            try:
                if not is_watched:
                    fence.wait_awaited(min(time.monotonic() - began_s, _SECOND_LOOK_S))
                too_early = changed()  # before tensors may change
                fence.open(copies)
                copies.wait()
                too_early = too_early or fence.close(changed)
                if too_early:
                    raise changed_too_early(too_early)
                if is_watched:
                    _torch.empty_all(watched)
                    fence.changed = changed
            except BaseException:  # passed on; the snapshot has no other owner yet
                discard(made)
                raise
        return made

    def run() -> None:
        time.sleep(_HEAD_START_S)
        try:
            made = take()
        except BaseException as error:  # reported to the waiting threads
            fence.fail(error)
            done.set_exception(error)
        else:
            done.set_result(made)
        finally:
            fence.leave()

    fence.enter()
    try:
        spawn_in_torch("nostall-staging", run)
    except RuntimeError:  # no more threads
        run()
    return done, fence
