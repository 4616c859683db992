"""The end of one request: its deadline, what ranks agree on, its finalize functions, its errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from nostall._engine import default_engine
from nostall._model.jobs import Failure
from nostall._model.threads import is_done
from nostall._queue.callers import Call
from nostall._queue.ending import scheduled, unanswered
from nostall._queue.sigterm import preemption
from nostall._ranks.agreement import PATIENCE_S, Question, View, share_failure
from nostall._ranks.failures import raise_everywhere
from nostall._ranks.group import Coordination, SingleProcess, coordination_for
from nostall.errors import SaveAbortedError, SaveTimeoutError


def fail_late(call: Call, limit_s: float) -> None:
    """Let a request fail with a timeout, unless its report comes first."""
    late = Failure(
        kind="SaveTimeoutError",
        message=f"request {call.request.call_idx} was not done within {limit_s:.4g} s"
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
        asked = self._asked
        if asked is not None and asked[0] is call:
            self._asked = None
            answer = _answer(asked[1], timeout_s)
            if answer.is_done or (answer.hurry and not mine.waits):
                return answer
        self.drop()
        question = Question(mine, coordination)
        if now or coordination.world_size == 1:
            return _answer(question, timeout_s)
        self._asked = (call, question)
        return None

    def drop(self) -> None:
        """Do not wait for the answer, but remember at the end of the process that it is to come."""
        asked, self._asked = self._asked, None
        if asked is not None:
            unanswered[:] = [each for each in unanswered if not each.is_answered()]
            unanswered.append(asked[1])

    def forget_after_fork(self) -> None:
        """In a forked child: the parent has asked."""
        self._asked = None


def _answer(question: Question, timeout_s: float) -> View:
    try:
        return question.answer(scheduled, timeout_s=timeout_s)
    except KeyboardInterrupt:  # torch would wait for it at the end of the process
        unanswered.append(question)
        raise


def look_at(call: Call, first_index: int, last_index: int, *, waits: bool) -> View:
    """This rank's view of the next request to finalise.

    Args:
        call: The request.
        first_index: Index of the first request since the queue was created or aborted.
        last_index: That of the last scheduled request.
        waits: Whether this rank waits until it is finalised.
    """
    alive, early = not is_done(call.outcome), call.early
    return View(
        alive=alive,
        failed=not alive and call.failure() is not None,
        hurry=preemption.asked,
        committing=early is not None and early.is_committing,
        committed=0 if early is None else early.committed,
        save=0 if early is None else early.identity,
        shares=not call.request.raises_on_all_ranks,
        waits=waits,
        index=call.request.call_idx - first_index,
        last=last_index - first_index,
    )


def late(calls: Sequence[Call], timeout_s: float, *, hint: str) -> SaveTimeoutError:
    """The error for requests that are still scheduled after a wait."""
    unfinished = sum(not is_done(call.outcome) for call in calls)
    others = "" if unfinished else "; another rank is not done"
    return SaveTimeoutError(
        f"{unfinished} of {len(calls)} requests are not done on this rank after"
        f" {timeout_s:g} s{others}{_how_far(calls)}",
        rank=coordination_for(None).rank,
        phase="write",
        hint=hint,
    )


def finalize(call: Call, coordination: Coordination, agreed: View, *, no_dist: bool) -> None:
    """Run a request's finalize functions, or raise its failure; on all ranks unless ``no_dist``.

    Args:
        call: The request, done on all ranks.
        coordination: The ranks.
        agreed: The view of all ranks.
        no_dist: Whether this rank raises its own errors only.

    Raises:
        CheckpointException: The request, or a finalize function, failed on some rank.
        RankLostError: Another rank has ended.
        SaveTimeoutError: The finalize functions of another rank have not returned.
        BaseException: What a finalize function of this rank raised.
    """
    if agreed.failed:
        _raise_failure(call, coordination, no_dist=no_dist)
    if agreed.committed and call.early is not None:
        call.early.note_committed(agreed.committed)
    error: BaseException | None = None
    try:
        call.request.execute_finalize_fns(validate_matching_call_idx=False)
    except (Exception, CheckpointException, SystemExit) as raised:  # of user's functions
        error = raised  # after an interrupt this rank joins no collective
    share_failure(
        error,
        coordination if agreed.shares and not no_dist else SingleProcess(),
        timeout_s=default_engine().options.save_timeout_s + PATIENCE_S,
    )


@contextmanager
def together(coordination: Coordination) -> Iterator[None]:
    """After the block, raise an error of one rank on all ranks. Collective.

    Raises:
        CheckpointException: The block raised on another rank.
        RankLostError: Another rank has ended.
        SaveTimeoutError: The block of another rank has not ended.
        Exception: That of the block.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # raised below, as the other ranks wait there
        failure = error
    timeout_s = default_engine().options.save_timeout_s + PATIENCE_S
    share_failure(failure, coordination, timeout_s=timeout_s)


def _raise_failure(call: Call, coordination: Coordination, *, no_dist: bool) -> None:
    if no_dist and call.native is not None:
        # Other ranks finalise, too; there all ranks learn of this rank's failure.
        call.request.execute_finalize_fns(validate_matching_call_idx=False)
    call.discard()
    raise_everywhere(call.failure(), coordination, only_here=no_dist)


def aborted_by_another_thread(call: Call) -> SaveAbortedError:
    """The error for a thread that waits for a request which another thread has aborted."""
    return SaveAbortedError(
        f"request {call.request.call_idx} was aborted by another thread while this one waited for"
        " it",
        rank=coordination_for(None).rank,
        phase="write",
        hint="it may be committed: ask nostall.is_complete; the queue can be used again",
    )


def _how_far(calls: Iterable[Call]) -> str:
    """Progress of the saves of these requests, for a message."""
    found = [call.native.progress.status() for call in calls if call.native is not None]
    return "".join(f"; {status}" for status in found if status is not None)
