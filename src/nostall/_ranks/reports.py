"""Pending reports: joined into one, and awaited with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from nostall._model.jobs import Failure, FileReceipt, RankFailed, RankReport, RankWritten
from nostall._model.threads import is_done
from nostall._ranks.failures import failure_of

CANCEL_TIMEOUT_S = 4.0
"""A writer drops a cancelled job between two chunks, well within this time, or is killed."""


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
    hint = "the storage is slower than EngineOptions.save_timeout_s allows, or it is stuck"
    if not is_done(future):
        hint += "; the files are removed when it answers, or stay"
    failure = Failure(
        kind="SaveTimeoutError",
        message=f"the files were not written within {timeout_s:g} s",
        phase="write",
        path=path,
        hint=hint,
    )
    return RankFailed(rank=rank, failure=failure)
