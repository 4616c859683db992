"""The end of one request: its deadline, its finalize functions, its errors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from nostall._engine import default_engine
from nostall._model.interrupts import is_done
from nostall._model.jobs import Failure
from nostall._model.lifecycle import State
from nostall._queue.callers import Call
from nostall._queue.preemption import preemption
from nostall._ranks.agreement import PATIENCE_S, Scheduled, View, share_failure
from nostall._ranks.failures import raise_everywhere
from nostall._ranks.group import Coordination, SingleProcess, coordination_for
from nostall.errors import SaveAbortedError, SaveTimeoutError


def await_or_fail(call: Call, *, longest_s: float) -> None:
    """Wait until a request is done; after ``longest_s`` seconds it fails with a timeout."""
    if is_done(call.outcome, longest_s):
        return
    timeout_s = default_engine().options.save_timeout_s
    late = Failure(
        kind="SaveTimeoutError",
        message=f"request {call.request.call_idx} was not done within {timeout_s:g} s"
        f"{_how_far([call])}",
        phase="write",
    )
    call.late = late  # before the abort settles it: the error has to name the deadline
    if call.native is None:
        call.settle(late)
        return
    call.native.abort(late)
    call.settle(call.native.failure())  # none if the report has come first


def require_scheduled(calls: Iterable[Call], scheduled: Collection[Call]) -> None:
    """Check that requests are still scheduled.

    Raises:
        SaveAbortedError: Another thread has aborted them.
    """
    for call in calls:
        if call not in scheduled:
            raise aborted_by_another_thread(call)


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


def require_done(
    calls: Sequence[Call],
    unfinished: int,
    coordination: Coordination,
    scheduled: Scheduled,
    *,
    timeout_s: float,
    hint: str,
) -> None:
    """Check after a wait that requests are done on all ranks. Collective.

    Args:
        calls: The requests.
        unfinished: How many of them are not done on this rank.
        coordination: The ranks.
        scheduled: Names the missing ranks.
        timeout_s: How long each rank has waited.
        hint: That of the error.

    Raises:
        SaveTimeoutError: Some rank is not done, or does not call this.
    """
    (most,) = scheduled.maximum([unfinished], coordination, timeout_s=timeout_s)
    if most:
        raise SaveTimeoutError(
            f"{unfinished} of {len(calls)} requests are not done on this rank after"
            f" {timeout_s:g} s, and up to {most} on others{_how_far(calls)}",
            rank=coordination.rank,
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
    call.life.to(State.WRITTEN)
    if agreed.committed and call.early is not None:
        call.early.note_committed(agreed.committed)
    error: BaseException | None = None
    try:
        try:
            call.request.execute_finalize_fns(validate_matching_call_idx=False)
        except (Exception, CheckpointException, SystemExit) as raised:  # of user's functions
            error = raised
        share_failure(
            error,
            coordination if agreed.shares and not no_dist else SingleProcess(),
            timeout_s=default_engine().options.save_timeout_s + PATIENCE_S,
        )
    except BaseException:  # passed on; after an interrupt this rank joins no collective
        call.life.to(State.FAILED)
        raise
    call.life.to(State.FINALIZED)


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
    if not call.life.over:
        call.life.to(State.FAILED)
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
