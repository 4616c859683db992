"""A save that is written in the background: the queue schedules it without a Python worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from nostall._engine import Engine, default_engine
from nostall._model.interrupts import is_done, uninterrupted
from nostall._model.jobs import Failure, RankFailed, RankReport
from nostall._model.progress import Progress, State
from nostall._ranks.failures import failure_of
from nostall._ranks.reports import await_report
from nostall.errors import OptionError, StagingError


class BackgroundSave(ABC):
    """One rank's share of one save and, once it has ended, its report."""

    def __init__(self, *, rank: int, job: str, progress: Progress) -> None:
        self.rank = rank
        self.job = job
        self.progress = progress
        self.engine: Engine = default_engine()
        self._report: Future[RankReport] = Future()
        self._was_started = False

    @abstractmethod
    def stage(self) -> Any:
        """Take the snapshot: the ``preload_fn``. When it returns, tensors may be changed."""

    @abstractmethod
    def submit(self, snapshot: Any) -> Future[RankReport]:
        """Send a snapshot to the writer process; it is released when the future is done."""

    def write(self, snapshot: Any) -> RankReport:
        """Write a snapshot while the caller waits; releases it."""
        return self._in_time(self.submit(snapshot))

    def discard(self) -> None:  # noqa: B027  # a hook; a failed write removes its own files
        """Remove the files of a save that will not be committed; does nothing by default."""

    def __call__(self, _rank: int, snapshot: Any, _results: object = None) -> None:
        """Write while the caller waits: the ``save_fn``; argument index 1 is the snapshot."""
        self._begin(snapshot)
        with uninterrupted():
            try:
                report = self.write(snapshot)
            except BaseException as error:  # reported to the other ranks if this one finalises
                self.fail(error, phase="write")
                raise
            self._settle(report)

    def start(self, snapshot: Any) -> Future[RankReport]:
        """Write in the background; the future always ends with a report."""
        self._begin(snapshot)
        self.submit(snapshot).add_done_callback(lambda done: self._settle(done.result()))
        return self._report

    def fail(self, error: BaseException, *, phase: str) -> None:
        """Record that this rank failed, to be reported when the save is finalised."""
        self._settle(self.failed(error, phase=phase))

    def failed(self, error: BaseException, *, phase: str) -> RankFailed:
        """An error as this rank's report, with at least the path of the checkpoint."""
        failure = failure_of(error, phase=phase)
        path = failure.path or self.progress.path
        return RankFailed(rank=self.rank, failure=failure._replace(path=path))

    def abort(self, failure: Failure | None = None) -> None:
        """Cancel the save, within a bounded time; no effect on a save that is over.

        Args:
            failure: Why; that it was aborted, by default.
        """
        self.progress.to(State.ABORTED)  # a snapshot still being taken is not written then
        self.engine.cancel(self.job, self._report if self._was_started else None)
        failure = failure or Failure(
            kind="SaveAbortedError", message="the save was aborted", phase="write"
        )
        self._settle(RankFailed(rank=self.rank, failure=failure))

    @property
    def is_aborted(self) -> bool:
        """Whether the save was aborted before its files were written."""
        return self.progress.state is State.ABORTED

    def await_report(self) -> RankReport:
        """The report, once it is there; after ``save_timeout_s``, a failed one."""
        if not self._was_started and not is_done(self._report):
            failure = Failure(
                kind="SaveError",
                message="the save was planned, but nothing was scheduled to write it",
                phase="write",
                hint="schedule what get_save_function_and_args() returns before finalising",
            )
            return RankFailed(rank=self.rank, failure=failure)
        return self._in_time(self._report)

    def _in_time(self, report: Future[RankReport]) -> RankReport:
        return await_report(
            report,
            rank=self.rank,
            path=self.progress.path,
            timeout_s=self.engine.options.save_timeout_s,
            give_up=self.abort,
        )

    def failure(self) -> Failure | None:
        """Why the save failed; ``None`` if it did not or is not over."""
        report = self._report.result() if is_done(self._report) else None
        return report.failure if isinstance(report, RankFailed) else None

    def _begin(self, snapshot: Any) -> None:
        if snapshot is None:
            raise OptionError(
                "the save function received no snapshot to write",
                rank=self.rank,
                hint="pass preload_fn to the request, or its result as argument index 1",
            )
        if self._was_started:
            raise StagingError(
                "this snapshot was already written, and its memory may hold another save now",
                rank=self.rank,
                phase="write",
                job=self.job,
                hint="plan again to retry",
            )
        self._was_started = True

    def _settle(self, report: RankReport) -> None:
        # An abort and an answer may coincide; the first one counts.
        with suppress(InvalidStateError):
            self._report.set_result(report)

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a nostall save function cannot be sent to another process: schedule it with nostall's"
            " AsyncCallsQueue, which sends the snapshot to the writer process, or call it yourself"
        )
