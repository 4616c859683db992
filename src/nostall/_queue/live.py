"""The queues of this process, and what concerns all of them.

This is the number of scheduled requests, which ranks compare, and abort, SIGTERM, exit and fork.
"""

from __future__ import annotations

import atexit
import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from nostall._engine import default_engine
from nostall._queue.at_exit import (
    Unfinished,
    add_note,
    await_answers,
    end_process,
    finish_after_error,
    finish_at_exit,
    prepare_for_exit,
)
from nostall._queue.preemption import STATUS as PREEMPTED_STATUS
from nostall._queue.preemption import preemption
from nostall._ranks.agreement import Question, Scheduled
from nostall._ranks.group import Coordination
from nostall.errors import SaveTimeoutError


class LiveQueue(Unfinished, Protocol):
    """A queue of this process."""

    def close(self, *, abort: bool) -> None:
        """Close the queue; with ``abort``, give up its requests."""

    def _abandon_after_fork(self) -> None:
        """In a forked child: forget the scheduled requests, which belong to the parent."""


live_queues: weakref.WeakSet[LiveQueue] = weakref.WeakSet()
unfinished_queues: dict[LiveQueue, None] = {}
"""Queues with requests that are not finalised; a strong reference, so that a dropped queue does not
lose saves. Ordered by their first request, which is the same order on all ranks; finalising needs
it."""

scheduled = Scheduled()

unanswered: list[Question] = []
"""Asked about requests that this process has given up since."""


def counted(coordination: Coordination) -> AbstractContextManager[None]:
    """Announce the request that the block schedules to other ranks."""
    if coordination.world_size == 1:
        return nullcontext()
    prepare_for_exit()
    return scheduled.one_more(coordination)


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


def finish_after(queue: Unfinished, error: BaseException, coordination: Coordination) -> None:
    """Commit the requests that can be committed, so that an exception costs no checkpoint."""
    before = queue.pending
    with preemption.deferred(then_end=False):  # the error is raised in any case
        lost = finish_after_error(
            queue,
            timeout_s=min(default_engine().options.exit_timeout_s, preemption.left_s),
            is_to_wait=not isinstance(error, SaveTimeoutError),  # a wait that has already failed
            all_leave=lambda timeout_s: scheduled.all_leave(coordination, timeout_s),
        )
    if lost:
        add_note(error, f"requests were lost, of {before} that were pending: {lost}")


def finish_all_at_exit() -> None:
    """Finalise what is pending in any queue; registered to run when the interpreter ends."""
    if unfinished_queues:
        finish_at_exit(
            list(unfinished_queues),
            timeout_s=min(default_engine().options.exit_timeout_s, preemption.left_s),
        )
    await_answers(
        unanswered, timeout_s=min(default_engine().options.exit_timeout_s, preemption.left_s)
    )
    # The failure of an aborted save may come before the exception that SIGTERM raises.
    if preemption.is_too_late:
        end_process(PREEMPTED_STATUS)


def _after_fork_in_child() -> None:
    scheduled.forget_after_fork()
    unanswered.clear()
    preemption.forget_after_fork()
    for live in list(live_queues):
        live._abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(finish_all_at_exit)
