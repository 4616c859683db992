"""One rank's part of one save, from its plan to its end: what a writer owns while it saves.

A save is in one of four states: unplanned, failed before anything was written, split (a framework
schedules what writes it), or written while the caller waited. The facades ask this object for
results and figures; nothing about a save is kept elsewhere.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as DCPSavePlanner

from nostall import _torch
from nostall._commit.columns import Results, ResultsReference, in_columns
from nostall._engine import default_engine
from nostall._model.jobs import FileReceipt, RankFailed, RankReport, RankWritten
from nostall._model.progress import SaveState
from nostall._model.values import RankFiles
from nostall._plan.planner import vouched
from nostall._plan.structure import OPENERS
from nostall._ranks.group import Coordination
from nostall._save.early_commit import EarlyCommit
from nostall._save.planner_by_name import SavePlanner
from nostall._save.plans_by_name import NamedGlobalPlan
from nostall._save.prepared import (
    KnownSave,
    PreparedSave,
    SaveTarget,
    WriterSettings,
    WrittenItems,
    as_known,
    as_written,
    learn,
    prepare,
    prepare_known,
    write_results,
    written_files,
)
from nostall._save.publish import files_of
from nostall._save.split_save import SplitSave
from nostall._save.stage_and_write import wait_for, write_in_background
from nostall._save.stager import Staging, stage_for_later, take_over
from nostall._save.write_directly import write_directly
from nostall._storage.deadlines import call_with_deadline, make_ready, remove_with_deadline
from nostall._storage.directories import Visit, has_failed_in
from nostall._storage.locations import is_address, storage_at
from nostall.errors import NostallError, OptionError
from nostall.stats import SaveStats, Timeline

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unplanned:
    """Nothing is planned yet."""

    visit: None = None
    receipts: tuple[()] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """This rank could not plan; the other ranks learn it when the save is finalised."""

    error: NostallError
    visit: None = None
    receipts: tuple[()] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousSave:
    """All files are complete, written while the caller waited."""

    visit: Visit
    receipts: tuple[FileReceipt, ...]


class RankSave:
    """One rank's part of one save, after its ``staging``, if any."""

    def __init__(self, settings: WriterSettings, staging: Staging | None = None) -> None:
        self.settings = settings
        """Without this rank's role until DCP has set that up."""
        self.timeline = Timeline()
        self._staging = staging
        self.staged_for_next: Staging | None = None
        """The staging of this save, for the one that the writer's ``reset`` begins:
        ``dcp.async_save`` resets the writer between staging and writing."""
        self.state: Unplanned | Failed | SplitSave | SynchronousSave = Unplanned()
        self.slowest_rank: int | None = None
        """The rank whose files were durable last, once it is known."""
        self._may_replace: bool | None = None
        self.named_plan: NamedGlobalPlan | None = None
        """On the coordinator, if ``SavePlanner`` has made or found it."""
        self.write_extras: Callable[[], None] | None = None
        """On the coordinator, makes what belongs to the checkpoint beside the files of ranks, when
        all have written, on any thread. If it raises, nothing is committed."""

    def __reduce__(self) -> tuple[type[RankSave], tuple[WriterSettings]]:
        """In another process, a new save: this one belongs to this process."""
        return RankSave, (self.settings,)

    # --- planning and writing -------------------------------------------------------------------

    def stage(self, state_dict: Mapping[str, Any], ranks: Coordination) -> Any:
        """Copy a state dict, passed to ``dcp.async_save``, into snapshot memory, as
        :func:`~nostall._save.stager.stage_for_later`.
        """
        self.staged_for_next = None
        copied, self._staging = stage_for_later(state_dict, default_engine(), self.settings, ranks)
        self.staged_for_next = self._staging
        return copied

    def make_ready(self) -> None:
        """Make the directory; ``CheckpointExistsError`` if it has a checkpoint not to be replaced.

        ``WriteError`` if it cannot be made; ``SaveTimeoutError`` if storage hangs.
        """
        settings = self.settings
        self._may_replace = make_ready(
            settings.directory,
            settings.metadata_name,
            [settings.other_metadata_name],
            overwrite=settings.overwrite,
            rank=settings.rank,
            timeout_s=default_engine().options.save_timeout_s,
        )

    def prepare(self, plan: SavePlan, planner: DCPSavePlanner) -> None:
        """Resolve and lay out a split save's final plan; ``StagingError`` if an item cannot be."""
        with self._target(plan) as target:
            prepared = prepare(plan, planner, target)
        self.state = SplitSave(prepared)

    def prepare_known(self, known: KnownSave, sources: list[torch.Tensor | bytes]) -> None:
        """Prepare a split save of a structure that was saved before.

        ``sources`` has one entry per item of the plan: the live tensor, or the bytes.
        """
        # Looked up a moment ago on the coordinator: one thread for storage less.
        with self._target(known.share.plan, replaces=self._may_replace) as target:
            self.state = SplitSave(prepare_known(known, sources, target))

    def learn(
        self, state_dict: dict[str, Any], planner: DCPSavePlanner, last: KnownSave | None
    ) -> KnownSave | None:
        """The reusable part of the prepared save, before staging; ``None`` if nothing is safe.

        This save then sends its results with a token, to which the next one may refer. ``last`` is
        the reusable part of the save before.
        """
        split = self.split
        if split is None:
            return None
        learned = known = as_known(split.prepared, last).known
        voucher = vouched(planner)
        if known is None or voucher:  # a structure that was not recognised is learned anew
            flat = vars(planner).get("state_dict") if voucher else None
            openers = voucher.openers if voucher else OPENERS
            learned = learn(split.prepared, state_dict, flat, openers)
            if learned is not None and known is not None:
                learned = replace(learned, token=known.token)
        split.prepared = as_known(split.prepared, learned)
        return learned

    def write_now(self, plan: SavePlan, planner: DCPSavePlanner) -> WrittenItems:
        """Plan and write this rank's share while the caller waits; ``SaveError`` if that fails."""
        self._take_staging()
        named = planner if isinstance(planner, SavePlanner) else None
        self.named_plan = None if named is None else named.named_plan
        try:
            with self._target(plan) as target:
                if named is None:
                    prepared = prepare(plan, planner, target)
                else:
                    prepared = named.prepare(plan, target)
        finally:
            if named is not None:
                named.forget_state()
        try:
            report = _write(prepared)
            prepared = as_written(prepared, report)
            results = write_results(prepared, report)
            target.visit.hand_over()
        except BaseException:  # passed on; this save leaves its directory
            target.progress.to(SaveState.FAILED)
            target.visit.end(committed=False)
            raise
        target.progress.to(SaveState.WRITTEN)
        receipts = report.receipts if isinstance(report, RankWritten) else ()
        self.state = SynchronousSave(visit=target.visit, receipts=receipts)
        written = written_files(prepared, report)
        self.after_write(written)
        if prepared.known is None:  # the metadata is another planner's, which may read the list
            return WrittenItems(results, written)
        token, files = prepared.known.token, prepared.files
        if named is not None and token == named.sent_token:
            return WrittenItems((), written, ResultsReference(token=token, files=files))
        outcome = Results(items=in_columns(results), files=files, token=token)
        return WrittenItems((), written, outcome)

    def _take_staging(self) -> None:
        """Adopt the staging's figures, and refuse a copy that failed (``StagingError``).

        Also if the planner replaced every tensor, so that none leads back to the staged copy.
        ``RankLostError`` if the process group was destroyed: each rank would save as if alone.
        """
        staging, self._staging, self.staged_for_next = self._staging, None, None
        if staging is None:
            return
        self.timeline = staging.timeline
        if staging.ranks.are_gone():
            raise staging.ranks.lost(
                self.settings.directory,
                hint="wait for the future of dcp.async_save before destroy_process_group()",
            )
        if staging.fence is not None and staging.fence.failure is not None:
            error = copy(staging.fence.failure)
            error.rank, error.path = self.settings.rank, self.settings.directory
            raise error

    @contextmanager
    def _target(self, plan: SavePlan, *, replaces: bool | None = None) -> Iterator[SaveTarget]:
        """The target of a new save, which has failed if the block cannot prepare it.

        ``replaces`` says whether the directory may contain a checkpoint; ``None`` to look, unless
        names are unique. ``SaveTimeoutError`` if storage hangs.
        """
        settings, engine, job = self.settings, default_engine(), uuid.uuid4().hex
        directory = settings.directory
        # A reader of the previous checkpoint's metadata must not find new files under its names.
        is_replacing = getattr(plan.storage_data, "replaced_directory", None) == directory
        if replaces is None and not settings.has_unique_names:
            replaces = is_replacing or settings.may_replace()
        suffix = ""
        if replaces or settings.has_unique_names or has_failed_in(directory):
            # A file system refuses a second file of a name. A store replaces the first one.
            suffix = f"-{job[:8]}-{job[-8:]}" if is_address(settings.final_path) else f"-{job[:8]}"
        prefix = getattr(plan.storage_data, "prefix", None) or f"__{settings.rank}_"
        progress = engine.in_progress.begin(path=directory, rank=settings.rank)
        try:
            yield SaveTarget(
                job=job,
                settings=settings,
                naming=settings.naming(prefix, suffix),
                visit=Visit(directory, progress.created),
                engine=engine,
                timeline=self.timeline,
                progress=progress,
                faults=engine.faults,
            )
        except BaseException:  # passed on
            progress.to(SaveState.FAILED)
            raise

    def wait_staged(self, timeout: float | None) -> None:
        """Return when tensors may be changed; ``SaveTimeoutError`` after ``timeout`` seconds."""
        staging, state = self._staging, self.state  # the thread that saves replaces them
        if staging is not None and staging.fence is not None:
            staging.fence.wait(timeout)
        if isinstance(state, SplitSave):
            state.wait_staged(timeout)

    # --- what became of it ----------------------------------------------------------------------

    @property
    def split(self) -> SplitSave | None:
        """The planned split save, if it is one."""
        return self.state if isinstance(self.state, SplitSave) else None

    @property
    def early(self) -> EarlyCommit | None:
        """Its early commit, until it is over; ``None`` if it cannot be committed early."""
        return None if self.split is None else self.split.early

    def require_over(self) -> None:
        """Raise ``OptionError`` if a split save is not finalised yet: its writer begins no other
        save.
        """
        split = self.split
        if split is None or not split.has_to_run or split.prepared.planned.sources:
            return  # no snapshot was taken
        is_over = split.is_retrieved or split.progress.state is SaveState.COMMITTED
        if not is_over and split.failure() is None:
            raise OptionError(
                "this writer's last save is not finalised yet",
                path=self.settings.directory,
                hint="make a new writer for every checkpoint; writers share memory and processes",
            )

    def retrieve(
        self, read: Callable[[PreparedSave, RankReport], list[T]]
    ) -> list[T] | _torch.WrappedException:
        """Wait for this rank's report and ``read`` it, or return its failure as DCP wraps it; empty
        if nothing is planned.
        """
        try:
            if isinstance(self.state, Failed):
                raise self.state.error
            split = self.split
            if split is None:
                return []
            report = split.checked_report()
            split.is_retrieved = True
            found = read(split.prepared, report)
            self.after_write(self.written_files)
        except Exception as error:  # finalising reports it to every rank
            return _torch.wrap_exception(error)
        return found

    @property
    def written_files(self) -> RankFiles:
        """The files that this rank wrote, once its report is checked."""
        if isinstance(self.state, SplitSave):
            return written_files(self.state.prepared, self.state.final_report)
        return RankFiles(
            directory=self.settings.directory, files=(), final_path=self.settings.final_path
        )

    def is_named(self) -> bool:
        """Whether the checkpoint in the directory has this rank's files, once they are written;
        ``SaveTimeoutError`` if storage hangs.
        """
        names = set() if self.split is None else set(self.split.prepared.files)
        directory, name = self.settings.directory, self.settings.metadata_name
        found = call_with_deadline(
            lambda: files_of(storage_at(directory), name),
            timeout_s=default_engine().options.save_timeout_s,
            doing="looking for the checkpoint",
            phase="collect",
            path=os.path.join(directory, name),
            rank=self.settings.rank,
        )
        return bool(names) and names <= found

    @property
    def stats(self) -> SaveStats | None:
        """Timings of this save on this rank; ``None`` before its files are written."""
        receipts = self.state.receipts
        if not receipts:
            return None
        return self.timeline.stats(
            rank=self.settings.rank,
            path=self.settings.directory,
            receipts=receipts,
            slowest_rank=self.slowest_rank,
        )

    # --- its end --------------------------------------------------------------------------------

    def after_write(self, written: RankFiles) -> None:
        """Do nothing; a subclass may use this rank's files, which are complete."""

    def end(self, *, committed: bool) -> None:
        """End a split save; any other has ended with its write."""
        if self.split is not None:
            self.split.end(committed=committed)

    def before_commit(self, written: Sequence[RankFiles | None]) -> None:  # noqa: ARG002  # a subclass looks at them
        """Call :attr:`write_extras`; a subclass may refuse all ranks' files. On the coordinator."""
        if self.write_extras is not None:
            self.write_extras()

    def after_commit(self) -> None:
        """Do nothing; a subclass may use what was just committed. On the coordinator."""


def _write(prepared: PreparedSave) -> RankReport:
    """Write a staged copy in the background; write other tensors directly."""
    target, staged = prepared.target, take_over(prepared)
    if staged is not None:
        return wait_for(write_in_background(staged, target), target)
    try:
        report = write_directly(prepared)
    except BaseException:  # passed on; the writing threads have removed what they made
        target.engine.stop_threads(target.job)
        remove_with_deadline(sorted(target.progress.created))
        raise
    if isinstance(report, RankFailed):
        remove_with_deadline(sorted(target.progress.created))
    return report
