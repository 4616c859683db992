"""How requests end: finalised on all ranks; or lost when a block, the interpreter or process ends.

Ranks agree that a request is done, and then run its finalize functions, or raise its failure.

Requests that are not finalised when a block or the interpreter ends are finalised then, together
with other ranks, within a time limit. If a save is lost at the interpreter's end, the process logs
it and ends with exit status 1, or with that of SIGTERM after a SIGTERM: a job scheduler must not
count a run as a success if its last checkpoint is missing.
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.api import CheckpointException

from nostall._engine import default_engine
from nostall._model.jobs import Failure
from nostall._model.names import counted
from nostall._model.threads import is_done
from nostall._queue.callers import Call, committed_by
from nostall._queue.sigterm import STATUS, is_interpreter_ending, preemption
from nostall._ranks.agreement import PATIENCE_S, Question, Scheduled, View, leaving, share_failure
from nostall._ranks.failures import raise_everywhere
from nostall._ranks.group import Coordination, coordination_for
from nostall.errors import SaveAbortedError, SaveTimeoutError

if TYPE_CHECKING:
    from nostall.core import AsyncCallsQueue

_log = logging.getLogger("nostall")

LEAVING_S = 5.0
"""Longest time by which another rank may exit with an exception later than this one."""
_LOOK_AGAIN_S = 0.02

live_queues: weakref.WeakSet[AsyncCallsQueue] = weakref.WeakSet()
unfinished_queues: dict[AsyncCallsQueue, None] = {}
"""Queues with requests that are not finalised; a strong reference, so that a dropped queue does not
lose saves. Ordered by their first request, which is the same order on all ranks; finalising needs
it."""

scheduled = Scheduled()
"""Requests that this process has scheduled, whose number ranks compare."""

_lost_at_exit: list[str] = []
"""Paths of saves that failed while the interpreter waited for the threads that made them."""

# --- one request ----------------------------------------------------------------------------------


def fail_late(call: Call, limit_s: float) -> None:
    """Let a request fail with a timeout, unless its report comes first."""
    late = Failure(
        kind="SaveTimeoutError",
        message=f"request {call.request.call_idx} did not finish within {limit_s:.4g} s"
        f"{_how_far([call])}",
        phase="write",
    )
    call.late = late  # before the abort settles it: the error has to name the deadline
    if call.native is None:
        call.settle(late)
        return
    call.native.abort(late)
    call.settle(call.native.failure())  # none if the report has come first


class Asking:
    """A queue's question to the other ranks about its first request, until the next poll."""

    def __init__(self) -> None:
        self._asked: tuple[Call, Question] | None = None

    def view_of(
        self, call: Call, mine: View, coordination: Coordination, *, now: bool, timeout_s: float
    ) -> View | None:
        """The view over all ranks of the first request; ``None`` if the next poll has it.

        Unless it is wanted ``now``, a poll does not depend on ranks that poll later: it asks, and
        the next one has the answer.
        """
        if self._asked is not None and self._asked[0] is not call:
            self.drop()
        if self._asked is not None:
            (_, question), self._asked = self._asked, None
            answer = question.answer(scheduled, timeout_s=timeout_s)
            if answer.is_done or (answer.hurry and not mine.waits):
                return answer
        question = Question(mine, coordination)
        if now or coordination.world_size == 1:
            return question.answer(scheduled, timeout_s=timeout_s)
        self._asked = (call, question)
        return None

    def drop(self) -> None:
        """Do not wait for the answer, but remember at the end of the process that it is to come."""
        asked, self._asked = self._asked, None
        if asked is not None:
            waiting = [each for each in scheduled.unanswered if not each.is_answered()]
            scheduled.unanswered = [*waiting, asked[1]]


def look_at(call: Call, first_index: int, last_index: int, *, waits: bool) -> View:
    """This rank's view of the next request to finalise, and whether it ``waits`` for that.

    The indices are of the first request since the queue was created or aborted, and of the last
    scheduled one.
    """
    alive, early = not is_done(call.outcome), call.early
    return View(
        alive=alive,
        failed=not alive and call.outcome.result() is not None,
        hurry=preemption.asked,
        committing=early is not None and early.is_committing,
        committed=0 if early is None else early.committed,
        save=early.identity if early is not None and early.is_allowed else 0,
        # A commit raises on all ranks or on none.
        shares=not all(map(committed_by, call.request.finalize_fns)),
        waits=waits,
        number=call.request.call_idx - first_index,
        last=last_index - first_index,
    )


def late(calls: Sequence[Call], timeout_s: float, *, hint: str) -> SaveTimeoutError:
    """The error for requests that are still scheduled after a wait."""
    unfinished = sum(not is_done(call.outcome) for call in calls)
    others = "" if unfinished else "; another rank has not finished"
    return SaveTimeoutError(
        f"timed out after {timeout_s:g} s with {unfinished} of {counted(len(calls), 'request')}"
        f" unfinished on this rank{others}{_how_far(calls)}",
        rank=coordination_for(None).rank,
        phase="write",
        hint=hint,
    )


def finalize_call(call: Call, coordination: Coordination, agreed: View, *, no_dist: bool) -> None:
    """Run the finalize functions of a request that is done on all ranks, or raise its failure.

    Collective unless ``no_dist``, which raises this rank's errors only. Raises what a function
    raised on this rank; ``CheckpointException`` if the request, or a function on another rank,
    failed; ``RankLostError`` or ``SaveTimeoutError`` if another rank has ended or its functions
    have not returned.
    """
    if agreed.failed:
        _raise_failure(call, coordination, no_dist=no_dist)
    if agreed.committed and call.early is not None:
        call.early.note_committed(agreed.committed)
    sharing = together(coordination) if agreed.shares and not no_dist else nullcontext()
    with sharing:
        call.request.execute_finalize_fns(validate_matching_call_idx=False)


@contextmanager
def together(coordination: Coordination) -> Iterator[None]:
    """After the block, raise an error of one rank on all ranks. Collective.

    Another rank's exception is a ``CheckpointException`` here. ``RankLostError`` if another rank
    has ended; ``SaveTimeoutError`` if its block has not.
    """
    failure: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException, SystemExit) as error:  # also of user's functions
        failure = error  # raised below; after an interrupt this rank joins no collective
    timeout_s = default_engine().options.save_timeout_s + PATIENCE_S
    share_failure(failure, coordination, timeout_s=timeout_s)


def _raise_failure(call: Call, coordination: Coordination, *, no_dist: bool) -> None:
    if no_dist and call.native is not None:
        # Other ranks finalise, too; there all ranks learn of this rank's failure.
        call.request.execute_finalize_fns(validate_matching_call_idx=False)
    call.discard()
    raise_everywhere(call.outcome.result(), coordination, only_here=no_dist)


def aborted_by_another_thread(call: Call) -> SaveAbortedError:
    """The error for a thread that waits for a request which another thread has aborted."""
    return SaveAbortedError(
        f"request {call.request.call_idx} was aborted by another thread while this one waited for"
        " it",
        rank=coordination_for(None).rank,
        phase="write",
        hint="it may be committed: call nostall.is_complete(path); the queue can be used again",
    )


def _how_far(calls: Iterable[Call]) -> str:
    """Progress of the saves of these requests, for a message."""
    found = [call.native.progress.status() for call in calls if call.native is not None]
    return "".join(f"; {status}" for status in found if status is not None)


# --- the last requests of a block, of the interpreter and of the process --------------------------


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


abort_nvrx_checkpoint = abort_all
""":func:`abort_all`, under the name that frameworks use."""


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

    Other ranks participate only if all of them leave with an exception. After a
    ``SaveTimeoutError`` this does not wait for files.
    """
    before, timeout_s = queue.pending, _timeout_s()
    waits = timeout_s > 0 and not isinstance(error, SaveTimeoutError)
    with preemption.deferred(then_end=False):  # the error is raised in any case
        deadline_s = time.monotonic() + (timeout_s if waits else 0)
        is_alone = coordination.world_size == 1
        with nullcontext("") if is_alone else leaving(coordination, LEAVING_S) as why:
            if waits and not why:
                _log.warning(
                    "exception raised: waiting up to %g s for %s (Ctrl-C, twice if needed, gives"
                    " up)",
                    timeout_s,
                    counted(before, "request"),
                )
            lost = why or _complete(queue, deadline_s)
    if lost:
        add_note(error, f"requests were lost (pending: {before}): {lost}")


def add_note(error: BaseException, note: str) -> None:
    """Log a note, and add it to an exception that is about to be raised."""
    _log.error("after an exception: %s", note)
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(note)


def finish_all_at_exit() -> None:
    """At the interpreter's end, finalise all that is pending; the exit status reports a loss."""
    unfinished = [queue for queue in unfinished_queues if queue.pending]
    timeout_s, is_lost = _timeout_s(), bool(_lost_at_exit)
    awaited = sum(queue.pending for queue in unfinished if not _is_left_alone(queue))
    if awaited and timeout_s:
        _log.warning(
            "exiting with %s not committed yet; committing takes up to %g s (Ctrl-C, twice if"
            " needed, gives up). To commit earlier, close the queue or manager",
            counted(awaited, "save"),
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
    while not all(each.is_answered() for each in scheduled.unanswered):
        if time.monotonic() > deadline_s:
            end_with_a_loss()
        time.sleep(_LOOK_AGAIN_S)


def _timeout_s() -> float:
    return min(default_engine().options.exit_timeout_s, preemption.left_s)


def _ends_with_an_exception() -> bool:
    return getattr(sys, "last_value", None) is not None


def _is_left_alone(queue: AsyncCallsQueue) -> bool:
    """Whether this rank exits with an exception, and the other ranks do not participate."""
    return queue.is_distributed and _ends_with_an_exception()


def _finish(queue: AsyncCallsQueue, deadline_s: float) -> bool:
    """Whether all pending requests are committed; the others are given up."""
    before = queue.pending
    if _is_left_alone(queue):
        why = "this rank exits with an exception, so the other ranks do not participate"
    else:
        why = _complete(queue, deadline_s)
    if not why:
        return True
    _log.error("requests were lost at exit (pending: %d): %s", before, why)
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
    end_process(STATUS if preemption.asked else 1)


def end_process(status: int) -> None:
    """End with this exit status; a handler that runs at exit cannot set it in another way."""
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # what Python would run next
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed or missing
            stream.flush()
    os._exit(status)


def _after_fork_in_child() -> None:
    scheduled.forget_after_fork()
    preemption.forget_after_fork()
    for live in list(live_queues):
        live._abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(finish_all_at_exit)
