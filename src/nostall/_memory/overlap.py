"""A snapshot that is taken while the trainer goes on, and what keeps the trainer from spoiling it.

Three lines of defence, of which the first two need nobody's help:

1. What forward changes (running statistics, counters, averages) is small: small tensors, and those without a version counter,
   are copied before the call returns.
2. What is left is changed by optimizers. No ``step()`` of the process begins before all copies are made: torch calls
   :func:`_before_step` first, whatever the optimizer and the implementation.
3. A tensor that is changed elsewhere without :meth:`SnapshotFence.wait` is noticed by its version counter, and the save fails instead of
   committing a torn snapshot. Changes that go past the counter (through ``.data``, NumPy, ``Tensor.apply_``, or code outside of
   torch) cannot be seen; replacing a parameter's ``data`` does no harm, as the copy is of what was there.

torch counts an operation when it is over, so one that was at work during the copy may not be counted when the copy ends. The
counters are therefore kept, without the memory, until the trainer itself comes to finalise: by then it has finished what it
had begun. Where it does not come (``dcp.async_save`` finalises on a thread of its own), the snapshot is looked at a second
time after as long as copying has taken, but a tenth of a second at most, and only then is it safe to change tensors.
"""

from __future__ import annotations

import atexit
import logging
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
from nostall._memory.copying import Copies, Source, detach_all
from nostall.errors import SaveTimeoutError, StagingError

_log = logging.getLogger("nostall")

T = TypeVar("T")

Marks = Mapping[torch.device, Any]
"""Per accelerator, how far its stream had been told to go when the save was asked for."""

_under_way: set[SnapshotFence] = set()
"""Of all snapshots that are being taken, whatever engine they belong to."""
_under_way_lock = threading.Lock()


class _Process:
    """What all snapshots of the process share, besides ``_under_way``."""

    waited_s = 0.0
    """When somebody last began to wait for all snapshots who has waited since."""
    is_hooked = False
    """Whether optimizers wait. Once they do, they always do: a hook that is removed while some optimizer goes through all hooks can
    end that optimizer's step with an error. Where nothing is under way it costs a step one or two microseconds."""


_process = _Process()
_THREAD_NAME = "nostall-staging"
_SECOND_LOOK_S = 0.1
"""An operation on one tensor is over in this time; those who wait for the snapshot wait for it, too."""
_AT_EXIT_TIMEOUT_S = 20.0
"""A hundred gigabytes and more are copied in this time; who waits for memory so long need not be waited for."""


class SnapshotFence:
    """What has to be waited for before tensors may change. Holds none of them itself.

    Args:
        timeout_s: How long an optimizer's step waits for it.
    """

    def __init__(self, timeout_s: float = 0.0) -> None:
        self._timeout_s = timeout_s
        self._moved = threading.Condition()
        self._is_safe = False
        self._lost: str | None = None
        self._copies: Copies | None = None
        self._waiting = 0
        """How many have waited, or wait."""
        self._entered_s = 0.0
        self._changed: Callable[[], list[str]] | None = None
        """What was changed since the snapshot was asked for; refers to counters, not to tensors."""
        self.failure: str | None = None
        """Why there is no snapshot; no exception, whose traceback would hold the tensors."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the tensors may be changed; at once if the snapshot has failed, which finalising reports.

        The host does not wait for an accelerator: what the current stream is told from here on happens after the copy.

        Raises:
            SaveTimeoutError: It is not safe yet after ``timeout`` seconds.
        """
        with self._moved:
            # Counted before waiting: who is told that it is safe may change tensors that very moment.
            self._waiting += 1
            self._moved.notify_all()
            if not self._moved.wait_for(lambda: self._is_safe, timeout):
                self._waiting -= 1
                raise SaveTimeoutError(
                    f"the snapshot is still being taken after {timeout:g} s",
                    phase="stage",
                    hint="wait again before changing any tensor",
                )
            copies = self._copies
        if copies is not None:
            copies.precede_what_follows()

    def wait_or_lose(self) -> None:
        """As :meth:`wait`, for somebody who goes on in any case: when its time is up, the save fails instead."""
        try:
            self.wait(self._timeout_s)
        except SaveTimeoutError:
            with self._moved:
                if not self._is_safe:
                    self._lost = f"an optimizer's step has waited {self._timeout_s:g} s for the snapshot and gone on without it"
                    self._let_go()

    def wait_awaited(self, timeout: float) -> None:
        """Return when somebody waits, or the time is up."""
        with self._moved:
            self._moved.wait_for(lambda: self._waiting > 0, timeout)

    def open(self, copies: Copies) -> None:
        """Let whoever waits change tensors, after copies that an accelerator has yet to make.

        Raises:
            SaveTimeoutError: Somebody has given up waiting before, and may have changed them.
        """
        with self._moved:
            if self._lost is not None:
                raise SaveTimeoutError(
                    self._lost,
                    phase="stage",
                    hint="earlier saves may hold all snapshot memory, or EngineOptions.save_timeout_s is too short",
                )
            self._copies = copies
            self._let_go()

    def _let_go(self) -> None:
        self._is_safe = True
        self._moved.notify_all()

    def close(self, changed: Callable[[], list[str]]) -> list[str]:
        """The copies are made; what was changed until now although nobody has waited for them."""
        with self._moved:  # who comes to wait now does so until this look is over
            self._copies = None
            return [] if self._waiting else changed()

    def keep_watch(self, changed: Callable[[], list[str]]) -> None:
        """Let :meth:`changed_unseen` look again later."""
        self._changed = changed

    def changed_unseen(self) -> list[str]:
        """What was changed although nobody ever waited; for the thread that changes tensors, when it comes to finalise.

        Also what was changed when the snapshot was complete: nobody can tell, who does not wait.
        """
        if self._changed is None or self._waiting or _process.waited_s >= self._entered_s:
            return []
        return self._changed()

    def end(self, failure: str | None = None) -> None:
        """The snapshot is complete, or lost because of ``failure``: the tensors are the trainer's."""
        with self._moved:
            self.failure = failure
            self._copies = None
            self._let_go()

    def enter(self) -> None:
        """From now on the snapshot is under way, and optimizers wait; see :func:`any_under_way`."""
        self._entered_s = time.monotonic()
        with _under_way_lock:
            _under_way.add(self)
            if not _process.is_hooked:
                register_optimizer_step_pre_hook(_before_step)
                _process.is_hooked = True

    def leave(self) -> None:
        """What becomes of the snapshot is somebody else's business now. Idempotent."""
        with _under_way_lock:
            _under_way.discard(self)

    def abandon_after_fork(self) -> None:
        """In a forked child, which does not have the thread: there is nothing to wait for."""
        self._moved = threading.Condition()
        self._copies = None
        self._is_safe = True


def any_under_way() -> bool:
    """Whether a snapshot of this process is being taken, or has yet to be handed on."""
    with _under_way_lock:
        return bool(_under_way)


def wait_for_all(timeout: float | None) -> None:
    """Wait for every snapshot of this process that is being taken.

    Args:
        timeout: Seconds, for all of them together; ``None`` for as long as it takes.

    Raises:
        SaveTimeoutError: One of them is not done yet.
    """
    deadline_s = None if timeout is None else time.monotonic() + timeout
    _wait_for_all(
        lambda fence: fence.wait(
            None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        )
    )


def _before_step(*_: object) -> None:
    """Keep an optimizer from changing what has yet to be copied; torch calls this before every step of the process."""
    _wait_for_all(SnapshotFence.wait_or_lose)


def _wait_for_all(wait: Callable[[SnapshotFence], None]) -> None:
    called_s = time.monotonic()
    with _under_way_lock:
        fences = list(_under_way)
    for fence in fences:
        wait(fence)
    _process.waited_s = max(_process.waited_s, called_s)


def _after_fork_in_child() -> None:
    global _under_way, _under_way_lock
    # The threads that would end them are the parent's; and another thread may have held any of the locks.
    fences, _under_way, _under_way_lock = _under_way, set(), threading.Lock()
    for fence in fences:
        fence.abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _finish_at_exit() -> None:
    """Wait for threads that copy: one that comes back from torch's code to an interpreter that is gone aborts it."""
    threads = [thread for thread in threading.enumerate() if thread.name == _THREAD_NAME]
    deadline_s = time.monotonic() + _AT_EXIT_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        _log.warning("a snapshot is still being taken %g s after the end", _AT_EXIT_TIMEOUT_S)


atexit.register(_finish_at_exit)


def changed_too_early(names: Sequence[str]) -> StagingError:
    """What a save fails with whose tensors were changed before anybody had waited for its snapshot."""
    return StagingError(
        f"{len(names)} tensors were changed while the snapshot was taken, or without waiting for it: {names[:3]}",
        phase="stage",
        hint="what an optimizer's step does not change and is large has to wait: call wait_staged() before changing it, "
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
    """Take a snapshot on a thread of its own.

    Args:
        sources: The live tensors, and bytes between them.
        names: What they are called, for messages.
        begin: Makes the copies of what it is given in the place of ``sources``, ordered after the marks it is given, and what they
            are copies for.
        discard: Gives up what ``begin`` has made, if it cannot be used.
        is_watched: Whether the trainer is going to ask for :meth:`SnapshotFence.changed_unseen`.
        timeout_s: How long an optimizer's step waits for it.

    Returns:
        What the snapshot is, once it is complete; and what to wait for before changing tensors.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()
    detached, live = detach_all(sources)
    counted: list[Any] = [detached[at] for at in live]
    names = [names[at] for at in live]
    before = _torch.changes_of(counted)
    tensors = [each for each in detached if isinstance(each, torch.Tensor)]
    marks, devices = _torch.stream_marks(tensors), _torch.current_devices(tensors)
    fence = SnapshotFence(timeout_s)
    is_wanted = threading.Event()

    def changed() -> list[str]:
        now = _torch.changes_of(counted)
        return [] if now == before else list(compress(names, map(ne, now, before)))

    def take() -> T:
        with _torch.on_devices(devices):
            began_s = time.monotonic()
            made, copies = begin(detached, marks)
            try:
                if not is_watched:
                    fence.wait_awaited(min(time.monotonic() - began_s, _SECOND_LOOK_S))
                spoiled = changed()  # before anybody may change them
                fence.open(copies)
                copies.wait()
                spoiled = spoiled or fence.close(changed)
                if spoiled:
                    raise changed_too_early(spoiled)
                if is_watched:
                    _torch.empty_all(counted)
                    fence.keep_watch(changed)
            except BaseException:
                discard(made)
                raise
        return made

    def run() -> None:
        # Lets go of the interpreter lock at once; else the caller gets it back only after the switch interval of 5 ms.
        is_wanted.wait()
        try:
            made = take()
        except BaseException as error:  # whoever waits must hear of it
            fence.end(str(error))
            done.set_exception(error)
        else:
            fence.end()
            done.set_result(made)
        finally:
            fence.leave()

    fence.enter()
    try:
        threading.Thread(target=run, name=_THREAD_NAME, daemon=True).start()
    except RuntimeError:  # the system has no thread to give
        is_wanted.set()
        run()
    except BaseException:
        # Nobody gets to know of this snapshot; a thread that has begun ends by itself.
        fence.end()
        fence.leave()
        raise
    finally:
        is_wanted.set()
    return done, fence
