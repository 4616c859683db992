"""One rank's share of one split save, from the snapshot to DCP's results."""

from __future__ import annotations

from concurrent.futures import Future

from torch.distributed.checkpoint.storage import WriteResult

from nostall import _save, _taking, _writing
from nostall._background import BackgroundSave
from nostall._failures import failure_of
from nostall._pipeline.snapshot import Snapshot
from nostall._staging import Guard
from nostall._storage.posix import remove_files
from nostall._values import FileReceipt, RankFailed, RankReport, RankWritten
from nostall.errors import SaveAbortedError


class RankSave(BackgroundSave):
    """One rank's share of one split save: what ``AsyncCallsQueue`` schedules, or a framework calls by hand."""

    def __init__(self, prepared: _save.PreparedSave) -> None:
        super().__init__(rank=prepared.rank, job=prepared.target.job)
        self.prepared = prepared
        self._was_staged = self._was_collected = False
        self._guard: Guard | None = None
        self.receipts: tuple[FileReceipt, ...] = ()
        """What was written, once :meth:`results` has returned."""

    @property
    def pending(self) -> bool:
        """Whether a snapshot was taken and it is still to be collected what became of it."""
        return self._was_staged and not self._was_collected and self.failure() is None

    def stage(self) -> Snapshot | Future[Snapshot]:
        """Take the snapshot, once: the ``preload_fn``. When it returns, tensors may be changed, and none is held here.

        With overlapped staging it returns at once, and tensors may be changed when :meth:`wait_staged` has returned.
        """
        snapshot: Snapshot | Future[Snapshot]
        if self.prepared.target.options.staging == "overlapped":
            snapshot, self._guard = _taking.stage_in_background(
                self.prepared, self.engine, is_aborted=lambda: self.aborted
            )
        else:
            snapshot = _taking.stage(self.prepared, self.engine)
        self._was_staged = True
        self.prepared = _taking.without_sources(self.prepared)
        return snapshot

    def wait_staged(self, timeout: float | None) -> None:
        """Return when the snapshot is taken."""
        if self._guard is not None:
            self._guard.wait(timeout)

    def write(self, snapshot: Snapshot | Future[Snapshot]) -> RankReport:
        """Write a snapshot here and now, waiting for it if need be."""
        if isinstance(snapshot, Future):
            snapshot = snapshot.result()
        return _writing.write_here(snapshot, self.prepared.target, self.engine)

    def submit(self, snapshot: Snapshot | Future[Snapshot]) -> Future[RankReport]:
        """Let writer processes write a snapshot as soon as it is taken."""
        if isinstance(snapshot, Snapshot):
            return _writing.write_in_background(snapshot, self.prepared.target, self.engine)
        return self._submit_when_staged(snapshot)

    def _submit_when_staged(self, staging: Future[Snapshot]) -> Future[RankReport]:
        report: Future[RankReport] = Future()

        def go_on(staged: Future[Snapshot]) -> None:
            try:
                snapshot = staged.result()
                if self.aborted:
                    _taking.give_up(snapshot, self.prepared.target, self.engine)
                    raise SaveAbortedError("the save was aborted", phase="stage")
                written = _writing.write_in_background(snapshot, self.prepared.target, self.engine)
            except BaseException as error:  # whoever waits must hear of it
                failure = failure_of(error, phase="stage")
                report.set_result(RankFailed(rank=self.rank, failure=failure))
                return
            written.add_done_callback(lambda done: report.set_result(done.result()))

        staging.add_done_callback(go_on)
        return report

    def discard(self) -> None:
        """Remove this rank's files of a save that will not be committed."""
        remove_files(_save.partial_files(self.prepared))

    def results(self) -> list[WriteResult]:
        """DCP's write results, waiting for the report if need be.

        Raises:
            SaveError: The rank failed.
        """
        report = self.await_report()
        self._was_collected = True
        self.receipts = report.receipts if isinstance(report, RankWritten) else ()
        return _save.write_results(self.prepared, report)
