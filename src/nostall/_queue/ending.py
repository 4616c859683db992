"""Requests that are not finalised when a block, the interpreter or the process ends.

They are finalised, together with other ranks, within a time limit. If a save is lost at the
interpreter's end, the process logs it and ends with exit status 1, or with that of SIGTERM after a
SIGTERM: a job scheduler must not count a run as a success if its last checkpoint is missing.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nostall._engine import default_engine
from nostall._model.wording import counted
from nostall._queue.sigterm import STATUS, is_interpreter_ending, preemption
from nostall._ranks.agreement import Question, Scheduled
from nostall._ranks.group import Coordination
from nostall.errors import SaveTimeoutError

if TYPE_CHECKING:
    from nostall.core import AsyncCallsQueue

_log = logging.getLogger("nostall")

FAILURE_STATUS = 1
LEAVING_S = 5.0
"""Longest time by which another rank may exit with an exception later than this one."""
_LOOK_AGAIN_S = 0.02

live_queues: weakref.WeakSet[AsyncCallsQueue] = weakref.WeakSet()
unfinished_queues: dict[AsyncCallsQueue, None] = {}
"""Queues with requests that are not finalised; a strong reference, so that a dropped queue does not
lose saves. Ordered by their first request, which is the same order on all ranks; finalising needs
it."""

scheduled = Scheduled()
"""The number of scheduled requests, which ranks compare."""

unanswered: list[Question] = []
"""Asked about requests that this process has given up since."""

_lost_at_exit: list[str] = []
"""Paths of saves that failed while the interpreter waited for the threads that made them."""


def drain_on_sigterm(grace_s: float = 30.0) -> None:
    """On SIGTERM, the signal of pre-emption, finish the scheduled saves, then end the process.

    If any rank gets the signal, all ranks finish the pending requests together within two polls;
    ranks without a signal then continue. Without a poll, the requests are finished when the
    interpreter ends, which begins after half of the grace period. The process ends by the previous
    handler or, without one, by ``SystemExit(143)`` in the main thread. Call it once, in the main
    thread.

    Args:
        grace_s: Seconds after which the process ends with status 143, and unfinished saves are
            lost. Counted from the first moment when the main thread can run Python code, which it
            cannot in a collective.

    Raises:
        OptionError: This is not the main thread; or ``grace_s`` is not a number of seconds.
    """
    preemption.install(
        grace_s,
        is_anything_pending=lambda: bool(unfinished_queues),
        abandon=lambda: default_engine().abort("the grace period after SIGTERM is over"),
    )


def abort_all() -> None:
    """Abort every live queue: scheduled requests are never finalised; the queues can be used again.

    A save that all ranks have written may be committed nevertheless. May be called from any thread.
    A thread that waits for an aborted request gets a :class:`~nostall.errors.SaveAbortedError`.
    """
    for live in list(live_queues):
        live.close(abort=True)


def abort_nvrx_checkpoint() -> None:
    """:func:`abort_all`, under the name that frameworks use."""
    abort_all()


@contextmanager
def report_loss(path: str) -> Iterator[None]:
    """Log an error of the block on a background thread: its future may never be read.

    If the interpreter is ending, the exit status also reports the error.
    """
    try:
        yield
    except Exception as error:  # raised again
        if threading.current_thread() is not threading.main_thread():
            _log.error("a save has failed: path=%s: %s", path, error)
            if is_interpreter_ending():
                _lost_at_exit.append(path)
        raise


def finish_after(queue: AsyncCallsQueue, error: BaseException, coordination: Coordination) -> None:
    """Finalise the requests that can be, so that an exception in a block costs no checkpoint.

    Other ranks take part only if all of them leave with an exception. After a ``SaveTimeoutError``
    no file is waited for.
    """
    before, timeout_s = queue.pending, _timeout_s()
    _log.warning(
        "an exception was raised with %s not finalised; waiting up to %g s",
        counted(before, "request"),
        timeout_s,
    )
    with preemption.deferred(then_end=False):  # the error is raised in any case
        deadline_s = time.monotonic() + (0 if isinstance(error, SaveTimeoutError) else timeout_s)
        lost = ""
        if coordination.world_size > 1:
            lost = scheduled.all_leave(coordination, LEAVING_S)
        lost = lost or _complete(queue, deadline_s)
    if lost:
        add_note(error, f"requests were lost, of {before} that were pending: {lost}")


def add_note(error: BaseException, note: str) -> None:
    """Log a note, and add it to an exception that is about to be raised."""
    _log.error("after an exception: %s", note)
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(note)


def finish_all_at_exit() -> None:
    """Finalise what is pending in any queue; registered to run when the interpreter ends.

    If a request is lost, the process ends with a status that says so.
    """
    unfinished = [queue for queue in unfinished_queues if queue.pending]
    timeout_s, is_lost = _timeout_s(), bool(_lost_at_exit)
    if unfinished:
        _log.warning(
            "the interpreter ends with %s not finalised; waiting up to %g s; close() the queue, or"
            " the manager, to complete them earlier",
            counted(sum(queue.pending for queue in unfinished), "request"),
            timeout_s,
        )
    deadline_s = time.monotonic() + timeout_s
    for queue in unfinished:
        is_lost |= not _finish(queue, deadline_s)
    if is_lost:
        end_with_a_loss()
    await_answers(timeout_s=_timeout_s())
    # The failure of an aborted save may come before the exception that SIGTERM raises.
    if preemption.left_s <= 0:
        end_process(STATUS)


def await_answers(*, timeout_s: float) -> None:
    """Wait until no rank is asked for anything, or end the process as after a loss.

    torch ends a process group, also when the process ends, only when its collectives are over. If
    another rank hangs, that takes as long as the group's deadline.
    """
    if _ends_with_an_exception():  # the other ranks lose this one anyway
        timeout_s = min(timeout_s, LEAVING_S)
    deadline_s = time.monotonic() + timeout_s
    while not all(each.is_answered() for each in unanswered):
        if time.monotonic() > deadline_s:
            end_with_a_loss()
        time.sleep(_LOOK_AGAIN_S)


def _timeout_s() -> float:
    return min(default_engine().options.exit_timeout_s, preemption.left_s)


def _ends_with_an_exception() -> bool:
    return getattr(sys, "last_value", None) is not None


def _finish(queue: AsyncCallsQueue, deadline_s: float) -> bool:
    """Whether all pending requests are committed; the others are given up."""
    before = queue.pending
    if queue.is_distributed and _ends_with_an_exception():
        why = "this rank ends with an exception, so other ranks do not take part"
    else:
        why = _complete(queue, deadline_s)
    if not why:
        return True
    _log.error("requests were lost at exit, of %d that were pending: %s", before, why)
    try:
        queue.close(abort=True)
    except Exception:  # the interpreter ends; the exit status reports the loss
        _log.exception("aborting the lost requests failed")
    return False


def _complete(queue: AsyncCallsQueue, deadline_s: float) -> str:
    """Finalise while that makes progress; why a request was not finalised, empty if all were."""
    why = ""
    while before := queue.pending:
        try:
            queue._finalize(until_s=deadline_s)
        except KeyboardInterrupt:
            return why or "the wait was interrupted"
        except BaseException as error:  # CheckpointException is not an Exception
            why = why or f"{type(error).__name__}: {error}"
        if queue.pending == before:
            # The error does not concern a single request, so later ones would fail, too.
            return why or "other ranks have not written their files yet"
    return why


def end_with_a_loss() -> None:
    """End with status 1, or that of SIGTERM if the signal has arrived."""
    end_process(STATUS if preemption.asked else FAILURE_STATUS)


def end_process(status: int) -> None:
    """End with this exit status; a handler that runs at exit cannot set it in another way."""
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # what Python would run next
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue  # closed or missing
    os._exit(status)


def _after_fork_in_child() -> None:
    scheduled.forget_after_fork()
    unanswered.clear()
    preemption.forget_after_fork()
    for live in list(live_queues):
        live._abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(finish_all_at_exit)
