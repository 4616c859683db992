"""A failure as plain data, as an exception, and as DCP's ``CheckpointException`` on every rank.

The text names rank, phase, file and cause. On the coordinator it contains ``Worker failure``, which
frameworks search for.

Reports that are pending are joined into one, and awaited with a deadline.
"""

from __future__ import annotations

import pickle
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from typing import NoReturn, TypeVar

from nostall import _torch, errors
from nostall._model.jobs import Failure, FileReceipt, RankFailed, RankReport, RankWritten
from nostall._model.threads import is_done
from nostall._ranks.group import Coordination
from nostall.errors import NostallError, SaveError, WriterDiedError

T = TypeVar("T")

CANCEL_TIMEOUT_S = 4.0
"""A writer drops a cancelled job between two chunks, well within this time, or is killed."""


def sendable(wrapped: _torch.WrappedException) -> _torch.WrappedException:
    """A failure with an exception that can be pickled."""
    error, trace = wrapped
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a user's exception may fail to pickle in any way
        error = SaveError(f"{type(error).__name__}: {error}")
    return error, trace


def exception_for(
    failures: Mapping[int, _torch.WrappedException], *, step: str, on_coordinator: bool
) -> _torch.CheckpointException:
    """The exception to raise on this rank, from failures by rank within the save's group.

    ``step`` is DCP's name of the part of the save that failed.
    """
    named: dict[int, _torch.WrappedException] = {}
    for rank, (error, trace) in failures.items():
        raised = (
            copy(error)
            if isinstance(error, NostallError)
            else SaveError(f"{type(error).__name__}: {error}", rank=rank, phase=step)
        )
        raised.rank = rank
        if on_coordinator:
            raised.message = f"Worker failure: {raised.message}"
        raised.__cause__ = error
        named[rank] = (raised, trace)
    return _torch.CheckpointException(step, named)


def raise_everywhere(
    mine: Failure | None, coordination: Coordination, *, only_here: bool = False
) -> NoReturn:
    """Raise a ``CheckpointException`` of all ranks' failures. Collective unless ``only_here``."""
    wrapped = None
    if mine is not None:
        error = error_of(RankFailed(rank=coordination.rank, failure=mine))
        wrapped = sendable(_torch.wrap_exception(error))
    everyone = {coordination.rank: wrapped}
    if not only_here:
        everyone = dict(enumerate(coordination.broadcast(coordination.gather(wrapped))))
    failures = {rank: failure for rank, failure in everyone.items() if failure is not None}
    raise exception_for(failures, step="write", on_coordinator=coordination.is_coordinator)


_ERROR_KINDS: dict[str, type[NostallError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, NostallError)
}


def error_of(report: RankFailed, *, job: str | None = None) -> NostallError:
    """The exception for a failed rank's report."""
    failure = report.failure
    error = _ERROR_KINDS.get(failure.kind, SaveError)(
        failure.message,
        rank=report.rank,
        phase=failure.phase,
        path=failure.path,
        job=job,
        hint=failure.hint,
    )
    if isinstance(error, OSError):
        error.errno = failure.errno
    elif isinstance(error, WriterDiedError):
        error.exit_code = failure.exit_code
    if failure.traceback:
        # What add_note() does, which Python 3.10 lacks; pickling would lose a cause.
        vars(error)["__notes__"] = [f"Where it happened:\n{failure.traceback.rstrip()}"]
    return error


def _if_of(kind: type[T], value: object) -> T | None:
    """The value, if it has this type: users' exceptions may use the same attribute names."""
    return value if isinstance(value, kind) else None


def failure_of(error: BaseException, *, phase: str) -> Failure:
    """Any exception as plain data."""
    ours = error if isinstance(error, NostallError) else None
    return Failure(
        kind=type(error).__name__,
        message=ours.message if ours else f"{type(error).__name__}: {error}",
        phase=(ours.phase if ours else None) or phase,
        path=ours.path if ours else None,
        errno=_if_of(int, getattr(error, "errno", None)),
        exit_code=_if_of(int, getattr(error, "exit_code", None)),
        hint=_if_of(str, getattr(error, "hint", None)),
        traceback="".join(traceback.format_exception(error)),
    )


# --- pending reports ------------------------------------------------------------------------------


def when_done(
    parts: Sequence[Future[RankReport]], finish: Callable[[list[RankReport]], RankReport]
) -> Future[RankReport]:
    """The result of ``finish`` once all reports have arrived; a failed report if it raises."""
    whole: Future[RankReport] = Future()
    whole.set_running_or_notify_cancel()
    left = len(parts)
    lock = threading.Lock()

    def one_done(_: Future[RankReport]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        reports = [part.result() for part in parts]
        try:
            report = finish(reports)
        except Exception as error:  # becomes the report, as callbacks cannot raise
            report = RankFailed(rank=reports[0].rank, failure=failure_of(error, phase="write"))
        whole.set_result(report)

    for part in parts:
        part.add_done_callback(one_done)
    return whole


def joined(reports: Sequence[RankReport]) -> RankReport:
    """One report for all parts of a rank's share: the first failure or all receipts."""
    receipts: list[FileReceipt] = []
    for report in reports:
        if isinstance(report, RankFailed):
            return report
        receipts += report.receipts
    return RankWritten(rank=reports[0].rank, receipts=tuple(receipts))


def await_report(
    future: Future[RankReport],
    *,
    rank: int,
    path: str,
    timeout_s: float,
    give_up: Callable[[], None],
) -> RankReport:
    """Wait for a rank's report; after the deadline, give up the write and report a failure."""
    if is_done(future, timeout_s):
        return future.result()
    give_up()
    hint = "storage hangs, or EngineOptions.save_timeout_s is too short"
    if not is_done(future):
        hint += "; the files are removed if storage answers, and stay otherwise"
    failure = Failure(
        kind="SaveTimeoutError",
        message=f"the files were not written within {timeout_s:g} s",
        phase="write",
        path=path,
        hint=hint,
    )
    return RankFailed(rank=rank, failure=failure)
