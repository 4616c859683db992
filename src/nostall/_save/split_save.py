"""The functions that a queue or a framework schedules: a save from its snapshot to its report.

:class:`BackgroundSave` is what the queue knows of any save of nostall's, which it schedules without
a Python worker; :class:`SplitSave` is one rank's share of a planned checkpoint.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nostall._engine import Engine, default_engine
from nostall._memory.overlap import SnapshotFence, changed_too_early
from nostall._memory.snapshot import Snapshot
from nostall._model.jobs import Failure, FileReceipt, RankFailed, RankReport, RankWritten
from nostall._model.progress import Progress, SaveState
from nostall._model.threads import is_done, uninterrupted
from nostall._ranks.failures import await_report, failure_of
from nostall._save.early_commit import EarlyCommit
from nostall._save.prepared import PreparedSave, as_written
from nostall._save.stage_and_write import (
    give_up,
    stage,
    stage_in_background,
    write_here,
    write_in_background,
)
from nostall._storage.deadlines import remove_with_deadline
from nostall.errors import OptionError, SaveAbortedError, SaveTimeoutError, StagingError


class BackgroundSave(ABC):
    """One rank's share of one save and, once it has ended, its report."""

    def __init__(self, *, rank: int, job: str, progress: Progress) -> None:
        self.rank = rank
        self.job = job
        self.progress = progress
        self.engine: Engine = default_engine()
        self._report: Future[RankReport] = Future()
        self.was_started = False

    @abstractmethod
    def stage(self) -> Any:
        """Take the snapshot, or begin it with overlapped staging: the ``preload_fn``."""

    @abstractmethod
    def submit(self, snapshot: Any) -> Future[RankReport]:
        """Send a snapshot to the writer process; it is released when the future is done."""

    def write(self, snapshot: Any) -> RankReport:
        """Write a snapshot while the caller waits; releases it."""
        return self.await_report(self.submit(snapshot))

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
        """Cancel the save, within a bounded time; no effect on a save that is over. Without a
        ``failure``, the report says that it was aborted.
        """
        self.progress.to(SaveState.ABORTED)  # a snapshot still being taken is not written then
        self.engine.cancel(self.job, self._report if self.was_started else None)
        failure = failure or Failure(
            kind="SaveAbortedError", message="the save was aborted", phase="write"
        )
        self._settle(RankFailed(rank=self.rank, failure=failure))

    def await_report(self, report: Future[RankReport]) -> RankReport:
        """A report of this save, once it exists; after ``save_timeout_s``, a failed one."""
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
        if self.was_started:
            raise StagingError(
                "this snapshot was already written, and its memory may hold another save now",
                rank=self.rank,
                phase="write",
                job=self.job,
                hint="plan again to retry",
            )
        self.was_started = True

    def _settle(self, report: RankReport) -> None:
        # An abort and an answer may coincide; the first one counts.
        with suppress(InvalidStateError):
            self._report.set_result(report)

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a nostall save function cannot be sent to another process: schedule it with nostall's"
            " AsyncCallsQueue, which sends the snapshot to the writer process, or call it yourself"
        )


class SplitSave(BackgroundSave):
    """One rank's share of a split save; ``AsyncCallsQueue`` or a framework schedules it."""

    def __init__(self, prepared: PreparedSave) -> None:
        target = prepared.target
        super().__init__(rank=target.settings.rank, job=target.job, progress=target.progress)
        self.prepared = prepared
        self.visit = target.visit
        self.has_to_run = bool(prepared.planned.share.plan.items)
        """Whether this rank has something to write."""
        self.early: EarlyCommit | None = None
        """Its early commit, until it is over; ``None`` if it cannot be committed early."""
        self._fence: SnapshotFence | None = None
        self._checking = threading.Lock()
        self.is_retrieved = False
        """Whether somebody has asked for its results."""
        self.final_report: RankReport | None = None
        """Its report, once :meth:`checked_report` has returned it."""
        self.receipts: tuple[FileReceipt, ...] = ()
        """Receipts of the written files, by that report."""
        self._changed: list[str] = []
        """Tensors that were changed without waiting for the snapshot."""
        if not self.has_to_run:
            self._settle(RankWritten(rank=self.rank, receipts=()))

    def stage(self) -> Snapshot | Future[Snapshot]:
        """Take the snapshot, once: the ``preload_fn``.

        When it returns, tensors may be changed, and no reference to them is kept. With overlapped
        staging it returns at once, and tensors may be changed after :meth:`wait_staged`.
        """
        snapshot: Snapshot | Future[Snapshot]
        if self.prepared.layout.files and not self.prepared.planned.sources:
            raise StagingError(
                "the snapshot of this save was already taken",
                rank=self.rank,
                phase="stage",
                job=self.job,
                hint="every save takes one snapshot; plan again to take another",
            )
        # Faults are those set when the save is scheduled.
        target = replace(self.prepared.target, faults=self.engine.faults)
        with uninterrupted():
            try:
                self.prepared = replace(self.prepared, target=target)
                if target.settings.staging == "overlapped":
                    snapshot, self._fence = stage_in_background(self.prepared)
                else:
                    snapshot = stage(self.prepared)
            except BaseException:  # passed on
                self.engine.stop_threads(self.job)
                remove_with_deadline(sorted(self.progress.created))
                raise
            # Its tensors need not be kept.
            planned = replace(self.prepared.planned, sources=())
            self.prepared = replace(self.prepared, planned=planned)
        return snapshot

    def wait_staged(self, timeout: float | None) -> None:
        """Return when the snapshot is taken."""
        if self._fence is not None:
            self._fence.wait(timeout)

    def write(self, snapshot: Snapshot | Future[Snapshot]) -> RankReport:
        """Wait for a snapshot and write it while the caller waits."""
        if isinstance(snapshot, Future):
            snapshot = self._await_snapshot(snapshot)
        return write_here(snapshot, self.prepared.target)

    def _await_snapshot(self, staging: Future[Snapshot]) -> Snapshot:
        timeout_s = self.engine.options.save_timeout_s
        if is_done(staging, timeout_s):
            return staging.result()
        self.progress.to(SaveState.ABORTED)
        staging.add_done_callback(self._give_up)
        raise SaveTimeoutError(
            f"the snapshot was not taken within {timeout_s:g} s",
            rank=self.rank,
            phase="stage",
            job=self.job,
            hint="earlier saves may hold all snapshot memory, or"
            " EngineOptions.save_timeout_s is too short",
        )

    def _give_up(self, staged: Future[Snapshot]) -> None:
        if staged.exception() is None:
            give_up(staged.result(), self.prepared.target)

    def submit(self, snapshot: Snapshot | Future[Snapshot]) -> Future[RankReport]:
        """Send a snapshot to the writer process as soon as it is taken."""
        if isinstance(snapshot, Future):
            return self._submit_when_staged(snapshot)
        try:
            if self.progress.is_over:
                raise SaveAbortedError("the save was aborted", phase="stage")
            written = write_in_background(snapshot, self.prepared.target)
        except BaseException:  # passed on; no write owns the snapshot yet
            give_up(snapshot, self.prepared.target)
            raise
        if self.progress.is_over:  # meanwhile, by a caller that found no job to cancel
            self.engine.cancel(self.job, written)
        return written

    def _submit_when_staged(self, staging: Future[Snapshot]) -> Future[RankReport]:
        report: Future[RankReport] = Future()

        def go_on(staged: Future[Snapshot]) -> None:
            try:
                written = self.submit(staged.result())
            except BaseException as error:  # becomes the report
                written = Future()
                written.set_result(self.failed(error, phase="stage"))
            # The snapshot is the writer's now; before the report, after which nothing may be in
            # progress.
            if self._fence is not None:
                self._fence.leave()
            written.add_done_callback(lambda done: report.set_result(done.result()))

        staging.add_done_callback(go_on)
        return report

    def _settle(self, report: RankReport) -> None:
        try:
            is_written = isinstance(report, RankWritten) and self.progress.to(SaveState.WRITTEN)
            if is_written and (early := self.early) is not None:
                early.begin()  # before the queue asks whether it is in progress
        finally:  # also for lack of memory, say
            super()._settle(report)

    def discard(self, *, is_certain: bool = False) -> None:
        """Remove this rank's files of a save that will not be committed, and end it.

        No effect on a save that has ended. The files stay if the save may have been committed
        early, unless the coordinator has said that it was not: ``is_certain``.
        """
        if self.progress.state in (SaveState.COMMITTED, SaveState.FAILED):
            return
        self.engine.stop_threads(self.job)
        early = self.early
        if early is not None and is_certain:
            early.retire()
        if is_certain or early is None or early.withdraw():
            # Slow removals finish when storage answers; no other save uses these names.
            remove_with_deadline(sorted(self.progress.created))
        self.end(committed=False)

    def end(self, *, committed: bool) -> None:
        """End this save."""
        self.progress.to(SaveState.COMMITTED if committed else SaveState.FAILED)
        early, self.early = self.early, None
        if early is not None:
            early.stop()
            early.is_decided = True
            if committed:
                early.retire()
        self.visit.end(committed=committed)

    def checked_report(self) -> RankReport:
        """Wait for the report, and check that the snapshot is consistent. From any thread.

        The results do not count as retrieved. ``StagingError`` if tensors were changed too early.
        """
        with self._checking:
            if self.final_report is None:
                # Before any error: a lost save uses its names and memory until its report is there.
                if self.was_started or is_done(self._report):
                    report = self.await_report(self._report)
                else:
                    failure = Failure(
                        kind="SaveError",
                        message="the save was planned, but nothing was scheduled to write it",
                        phase="write",
                        hint="schedule what get_save_function_and_args() returns before finalising",
                    )
                    report = RankFailed(rank=self.rank, failure=failure)
                self.prepared = as_written(self.prepared, report)
                self._changed = [] if self._fence is None else self._fence.changed_unseen()
                self.receipts = report.receipts if isinstance(report, RankWritten) else ()
                self.final_report = report
        if self._changed:
            error = changed_too_early(self._changed)
            error.path = self.prepared.target.settings.directory
            raise error
        return self.final_report
