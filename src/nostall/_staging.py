"""A snapshot that is taken while the trainer goes on, and what keeps the trainer from spoiling it.

The trainer may compute with its tensors but must not change them until :meth:`Guard.wait` has returned. Where it changes
one all the same, the tensor's version counter tells, and the save fails instead of committing a torn snapshot. Changes
that go past the version counter (through NumPy, ``Tensor.apply_``, or code outside of torch) cannot be seen; replacing a
parameter's ``data`` does no harm, as the copy is of what was there.

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

from nostall import _torch
from nostall._copying import Copies
from nostall.errors import SaveTimeoutError, StagingError

_log = logging.getLogger("nostall")

T = TypeVar("T")

Marks = Mapping[torch.device, Any]
"""Per accelerator, how far its stream had been told to go when the save was asked for."""

_under_way: set[Guard] = set()
"""Of all snapshots that are being taken, whatever engine they belong to."""
_under_way_lock = threading.Lock()


class _Waits:
    """When :func:`wait_for_all` was last called that has returned."""

    last_s = 0.0


_waits = _Waits()
_THREAD_NAME = "nostall-staging"
_SECOND_LOOK_S = 0.1
"""An operation on one tensor is over in this time; those who wait for the snapshot wait for it, too."""
_AT_EXIT_TIMEOUT_S = 20.0
"""A hundred gigabytes and more are copied in this time; who waits for memory so long need not be waited for."""


class Guard:
    """What has to be waited for before tensors may change. Holds none of them itself."""

    def __init__(self) -> None:
        self._is_safe = threading.Event()
        self._lock = threading.Lock()
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
        # Counted before waiting: who is told that it is safe may change tensors that very moment.
        with self._lock:
            self._waiting += 1
        if not self._is_safe.wait(timeout):
            with self._lock:
                self._waiting -= 1
            raise SaveTimeoutError(
                f"the snapshot is still being taken after {timeout:g} s",
                phase="stage",
                hint="wait again before changing any tensor",
            )
        copies = self._copies
        if copies is not None:
            copies.precede_what_follows()

    def open(self, copies: Copies) -> None:
        """Let whoever waits change tensors, after copies that an accelerator has yet to make."""
        self._copies = copies
        self._is_safe.set()

    def close(self, changed: Callable[[], list[str]]) -> list[str]:
        """The copies are made; what was changed until now although nobody has waited for them."""
        with self._lock:  # who comes to wait now does so until this look is over
            self._copies = None
            return [] if self._waiting else changed()

    def keep_watch(self, changed: Callable[[], list[str]]) -> None:
        """Let :meth:`changed_unseen` look again later."""
        self._changed = changed

    def changed_unseen(self) -> list[str]:
        """What was changed although nobody ever waited; for the thread that changes tensors, when it comes to finalise.

        Also what was changed when the snapshot was complete: nobody can tell, who does not wait.
        """
        if self._changed is None or self._waiting or _waits.last_s >= self._entered_s:
            return []
        return self._changed()

    def end(self, failure: str | None = None) -> None:
        """The snapshot is complete, or lost because of ``failure``: the tensors are the trainer's."""
        self.failure = failure
        self._copies = None
        self._is_safe.set()

    def enter(self) -> None:
        """From now on the snapshot is under way; see :func:`any_under_way`."""
        self._entered_s = time.monotonic()
        with _under_way_lock:
            _under_way.add(self)

    def leave(self) -> None:
        """What becomes of the snapshot is somebody else's business now. Idempotent."""
        with _under_way_lock:
            _under_way.discard(self)

    def abandon_after_fork(self) -> None:
        """In a forked child, which does not have the thread: there is nothing to wait for."""
        self._lock = threading.Lock()
        self._copies = None
        self._is_safe = threading.Event()
        self._is_safe.set()


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
    called_s = time.monotonic()
    with _under_way_lock:
        guards = list(_under_way)
    deadline_s = None if timeout is None else called_s + timeout
    for guard in guards:
        guard.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
    _waits.last_s = max(_waits.last_s, called_s)


def _after_fork_in_child() -> None:
    global _under_way, _under_way_lock
    # The threads that would end them are the parent's; and another thread may have held any of the locks.
    guards, _under_way, _under_way_lock = _under_way, set(), threading.Lock()
    for guard in guards:
        guard.abandon_after_fork()


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
        hint="call wait_staged() before changing tensors, for example as a hook of the optimizer",
    )


def stage_behind(
    sources: Sequence[torch.Tensor],
    names: Sequence[str],
    begin: Callable[[Marks], tuple[T, Copies]],
    discard: Callable[[T], None],
    *,
    is_watched: bool,
) -> tuple[Future[T], Guard]:
    """Take a snapshot on a thread of its own.

    Args:
        sources: The live tensors.
        names: What they are called, for messages.
        begin: Makes the copies, ordered after the marks it is given, and what they are copies for.
        discard: Gives up what ``begin`` has made, if it cannot be used.
        is_watched: Whether the trainer is going to ask for :meth:`Guard.changed_unseen`. Sources are emptied then: they have
            to be nobody else's.

    Returns:
        What the snapshot is, once it is complete; and what to wait for before changing tensors.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()
    which = _torch.which_count(sources)
    counted = list(compress(sources, which))
    before = _torch.changes_of(counted)
    marks, devices = _torch.stream_marks(sources), _torch.current_devices(sources)
    guard = Guard()
    is_wanted = threading.Event()

    def changed() -> list[str]:
        now = _torch.changes_of(counted)
        if now == before:
            return []
        return list(compress(compress(names, which), map(ne, now, before)))

    def take() -> T:
        with _torch.on_devices(devices):
            began_s = time.monotonic()
            made, copies = begin(marks)
            try:
                if not is_watched:
                    time.sleep(min(time.monotonic() - began_s, _SECOND_LOOK_S))
                spoiled = changed()  # before anybody may change them
                guard.open(copies)
                copies.wait()
                spoiled = spoiled or guard.close(changed)
                if is_watched:
                    _torch.empty_all(counted)
                    guard.keep_watch(changed)
            except BaseException:
                discard(made)
                raise
        if spoiled:
            discard(made)
            raise changed_too_early(spoiled)
        return made

    def run() -> None:
        # Lets go of the interpreter lock at once; else the caller gets it back only after the switch interval of 5 ms.
        is_wanted.wait()
        try:
            made = take()
        except BaseException as error:  # whoever waits must hear of it
            guard.end(str(error))
            done.set_exception(error)
        else:
            guard.end()
            done.set_result(made)
        finally:
            guard.leave()

    guard.enter()
    try:
        threading.Thread(target=run, name=_THREAD_NAME, daemon=True).start()
    except RuntimeError:  # the system has no thread to give
        is_wanted.set()
        run()
    except BaseException:
        # Nobody gets to know of this snapshot; a thread that has begun ends by itself.
        guard.end()
        guard.leave()
        raise
    finally:
        is_wanted.set()
    return done, guard
