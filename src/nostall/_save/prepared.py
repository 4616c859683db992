"""A save before any data is copied, and its results once all is written.

::

    plan -> PlannedSave -> lay_out -> Layout             prepare() here
         -> begin_snapshot -> Snapshot                   stage() in stage_and_write
         -> write -> RankReport                          write_here() and write_in_background()
                                                         in stage_and_write; for synchronous
                                                         saves, write_directly() in write_directly
         -> results                                      write_results() here

The caller chooses where to write: in a writer process, or in this one while it waits. The code that
writes is the same.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._commit.columns import Results, ResultsReference
from nostall._commit.commit import require_one_result_each
from nostall._engine import Engine, default_engine
from nostall._model.jobs import FileReceipt, RankFailed, RankReport
from nostall._model.names import AS_SAFETENSORS, FileFormat
from nostall._model.progress import Progress
from nostall._model.threads import gc_paused
from nostall._model.values import Layout, PlannedSave, RankFiles, Share, WrittenFile
from nostall._plan.items import plan_rank
from nostall._plan.layout import FileNaming, Packing, with_naming
from nostall._plan.structure import OPENERS, KnownStructure, Openers, learn_structure
from nostall._ranks.failures import error_of
from nostall._storage.deadlines import call_with_deadline, may_hold
from nostall._storage.directories import Visit
from nostall._storage.locations import is_address, storage_at
from nostall._storage.port import require_file
from nostall._writer.streams import StreamTarget
from nostall.errors import IncompleteSaveError, OptionError, SaveTimeoutError, WriteError
from nostall.options import StagingMode, require, require_integer, require_switch
from nostall.stats import Timeline

_log = logging.getLogger("nostall")


# --- settings of a writer, and the target of a save -----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """Where and how one writer saves."""

    directory: str
    """The checkpoint is committed in it."""
    rank: int
    is_alone: bool
    """Whether this rank's checkpoint has metadata of its own."""
    thread_count: int
    file_per_item: bool
    sync_files: bool
    overwrite: bool
    separation_hint: str | None
    staging: StagingMode
    file_format: FileFormat
    stream: StreamTarget | None
    transform_descriptors: tuple[str, ...] | None
    """Tells DCP's reader how to undo stream transforms; ``None`` without any."""
    final_path: str
    """Where the checkpoint is to be in the end; the same for all ranks."""
    metadata_name: str
    other_metadata_name: str
    """Name of the other kind of metadata: this rank's own if all save together, or the reverse."""
    is_elsewhere: bool
    """Whether the directory, which other hosts may not see, is not where it belongs."""
    has_unique_names: bool
    """Whether file names are unique, so that an existing checkpoint does not matter to them."""

    def may_replace(self) -> bool:
        """Whether the directory may contain a checkpoint; ``SaveTimeoutError`` if storage hangs."""
        return may_hold(
            self.directory,
            [self.metadata_name, self.other_metadata_name],
            rank=self.rank,
            timeout_s=default_engine().options.save_timeout_s,
        )

    def naming(self, prefix: str = "", suffix: str = "") -> FileNaming:
        """The names of a rank's files."""
        return FileNaming(
            prefix=prefix,
            suffix=suffix,
            separation_hint=self.separation_hint,
            file_format=self.file_format,
        )

    def packing(self, engine: Engine) -> Packing:
        """The number and size of a rank's files."""
        return Packing(
            file_count=self.thread_count,
            file_per_item=self.file_per_item,
            max_file_nbytes=engine.options.max_wave_nbytes,
        )

    def chunk_nbytes(self, layout: Layout, engine: Engine) -> int:
        """Bytes per write, of any file of a layout."""
        longest = max((file.nbytes for file in layout.files), default=0)
        return max(engine.options.chunk_nbytes, storage_at(self.directory).least_part(longest))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTarget:
    """Where and how one rank's files of one save are written."""

    job: str
    settings: WriterSettings
    naming: FileNaming
    visit: Visit
    """Shows other saves of this process that this one is in progress in the directory."""
    engine: Engine
    """Engine with which the save began."""
    timeline: Timeline
    progress: Progress
    faults: bytes
    """Faults that a test injects into this save."""


def settings_of(
    writer: FileSystemWriter,
    *,
    staging: StagingMode,
    separation_hint: str | None,
    open_file: Callable[..., Any],
    directory: str | None = None,
) -> WriterSettings:
    """The settings of a writer, by its attributes at this moment, as subclasses may change them.

    The other arguments are options that stock's writer does not have; with a ``directory``, the
    checkpoint is committed in it instead of the writer's path. ``OptionError`` if two options
    exclude each other, or an option has an impossible value.
    """
    if not callable(open_file):
        raise OptionError(
            f"open_file={open_file!r} is not callable",
            hint="use a callable with the signature of open",
        )
    # This and the switches below are kept in Python's own types.
    thread_count = require_integer("thread_count", writer.thread_count, at_least=1)
    modes = get_args(StagingMode)
    require(staging in modes, f"staging={staging!r}", " or ".join(modes))
    if separation_hint is not None:
        _require_prefix(separation_hint, thread_count)
    wanted = getattr(writer, "serialization_format", SerializationFormat.TORCH_SAVE)
    if not isinstance(wanted, SerializationFormat) or wanted.name not in FileFormat.__members__:
        raise OptionError(
            f"invalid serialization_format={wanted!r}",
            hint="use a member of torch.distributed.checkpoint.filesystem.SerializationFormat",
        )
    file_format = FileFormat[wanted.name]
    transforms = tuple(writer.transforms.extensions)
    has_stream = open_file is not open or transforms
    if has_stream and is_address(writer.path):
        raise OptionError(
            "open_file and stream extensions need a file system",
            path=str(writer.path),
            hint="leave them out, or save to a directory",
        )
    if has_stream and directory is not None:
        raise OptionError(
            "open_file and stream extensions do not support local_staging_dir",
            path=str(writer.path),
            hint="leave one of them out",
        )
    if has_stream and file_format is FileFormat.SAFETENSORS:
        raise OptionError(
            "open_file and stream extensions need SerializationFormat.TORCH_SAVE",
            path=str(writer.path),
            hint="leave them out: a file of safetensors is written as a whole",
        )
    rank, together = writer.rank or 0, _torch.METADATA_NAME
    alone = f"__{rank}{together}"
    return WriterSettings(
        directory=directory or str(writer.path),
        final_path=str(writer.path),
        is_elsewhere=directory is not None,
        has_unique_names=directory is not None or is_address(writer.path),
        rank=rank,
        is_alone=not writer.use_collectives,
        metadata_name=together if writer.use_collectives else alone,
        other_metadata_name=alone if writer.use_collectives else together,
        thread_count=thread_count,
        file_per_item=not require_switch("single_file_per_rank", writer.single_file_per_rank),
        sync_files=require_switch("sync_files", writer.sync_files),
        overwrite=require_switch("overwrite", writer.overwrite),
        separation_hint=separation_hint,
        staging=staging,
        file_format=file_format,
        stream=StreamTarget(open_file=open_file, transforms=transforms) if has_stream else None,
        transform_descriptors=tuple(each.get_descriptor() for each in reversed(transforms)) or None,
    )


def _require_prefix(hint: object, thread_count: int) -> None:
    require(
        thread_count >= 2,
        f"separation_hint={hint!r} with thread_count={thread_count}",
        "thread_count >= 2: each group gets half of the files",
    )
    require(
        isinstance(hint, str) and hint and os.sep not in hint and not hint.startswith("."),
        f"separation_hint={hint!r}",
        "a prefix without a path separator or a leading dot",
    )


@dataclass
class ReplacingPrefix(_torch.StoragePrefix):
    """DCP's prefix of a rank's file names, from a coordinator that found a checkpoint."""

    replaced_directory: str
    """The directory of that checkpoint."""


# --- items with their layout ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSave:
    """A rank's share with its layout, before any data is copied."""

    planned: PlannedSave
    layout: Layout
    target: SaveTarget
    known: KnownSave | None = None
    """The known save with the same results, apart from file names; ``None`` if there is none."""

    @property
    def token(self) -> str | None:
        """Identifies its results, if they are those of the known save."""
        return None if self.known is None else self.known.token

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the rank's files, in layout order."""
        return tuple(file.name for file in self.layout.files)


@gc_paused()
def prepare(plan: SavePlan, planner: SavePlanner, target: SaveTarget) -> PreparedSave:
    """Resolve a final plan and lay it out; ``StagingError`` if an item could not be resolved."""
    settings = target.settings
    planned = plan_rank(
        plan,
        planner,
        rank=settings.rank,
        file_format=settings.file_format,
        path=settings.directory,
    )
    with target.timeline.measure("layout"):
        packing = settings.packing(target.engine)
        layout = target.engine.lay_out(planned.share.shapes, target.naming, packing)
    target.progress.nbytes = layout.nbytes
    return PreparedSave(planned=planned, layout=layout, target=target)


# --- structures that are known from earlier saves -------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KnownSave:
    """The part of a prepared save that the next save with an equal plan can reuse.

    Only a writer whose containers have its format can use it.
    """

    structure: KnownStructure | None
    """Recognises the structure without a planner; ``None`` if only the planner can."""
    share: Share
    layout: Layout
    naming: FileNaming
    packing: Packing
    token: str
    """Identifies these results among all known to ranks."""

    @cached_property
    def runs(self) -> list[int]:
        """Items that are bytes."""
        return [item for item, form in enumerate(self.share.forms) if form is None]

    @cached_property
    def results(self) -> tuple[WriteResult, ...]:
        """DCP's results of a save with this layout."""
        return tuple(expected_results(self.share, self.layout))


@gc_paused()
def learn(
    prepared: PreparedSave,
    state_dict: dict[str, Any],
    flat: dict[str, Any] | None,
    openers: Openers = OPENERS,
) -> KnownSave | None:
    """The reusable part of a prepared save, before staging; ``None`` if nothing is safe.

    ``flat`` is the state dict, flattened by a planner whose plan follows from the structure; else
    ``None``.
    """
    target = prepared.target
    try:
        structure = None
        if flat is not None:
            structure = learn_structure(state_dict, flat, prepared.planned, openers)
        items = prepared.planned.share.plan.items
        require_one_result_each(
            (item.index for item in items),
            (items[slot.item].index for file in prepared.layout.files for slot in file.slots),
            rank=target.settings.rank,
        )
        return KnownSave(
            structure=structure,
            share=prepared.planned.share,
            layout=prepared.layout,
            naming=target.naming,
            packing=target.settings.packing(target.engine),
            token=uuid.uuid4().hex,
        )
    except Exception:  # this save is not affected; the next one is planned
        _log.debug("the structure was not learned", exc_info=True)
        return None


def prepare_known(
    known: KnownSave, sources: list[torch.Tensor | bytes], target: SaveTarget
) -> PreparedSave:
    """Prepare a save of a structure that was saved before, without its planner."""
    engine, share, layout = target.engine, known.share, known.layout
    packing = target.settings.packing(engine)
    changed = {
        item: replace(share.shapes[item], nbytes=len(sources[item]))
        for item in known.runs
        if len(sources[item]) != share.shapes[item].nbytes
    }
    same = known.naming.separation_hint == target.naming.separation_hint
    if changed:
        shapes = tuple(changed.get(item, shape) for item, shape in enumerate(share.shapes))
        share = replace(share, shapes=shapes)
    if changed or packing != known.packing or not same:
        with target.timeline.measure("layout"):
            layout = engine.lay_out(share.shapes, target.naming, packing)
    elif target.naming != known.naming:
        layout = with_naming(layout, target.naming)
    planned = PlannedSave(share=share, sources=sources)
    target.progress.nbytes = layout.nbytes
    return as_known(PreparedSave(planned=planned, layout=layout, target=target), known)


def as_known(prepared: PreparedSave, known: KnownSave | None) -> PreparedSave:
    """The prepared save, with the known one if their results, which follow from final plan and
    layout, are equal apart from file names.
    """
    is_same = known is not None and (
        prepared.planned.share.plan is known.share.plan and prepared.layout.key == known.layout.key
    )
    if not is_same or prepared.target.settings.transform_descriptors is not None:
        return prepared
    return replace(prepared, known=known)


# --- what was written -----------------------------------------------------------------------------


def require_written(prepared: PreparedSave, report: RankReport) -> list[FileReceipt]:
    """A rank's receipts, in layout order; ``prepared`` is the save :func:`as_written`.

    ``SaveError`` if the rank failed (the subclass says how); ``IncompleteSaveError`` if a file has
    no receipt; ``WriteError`` if the first file, unless a user's stream wrote it, is missing or
    changed.
    """
    if isinstance(report, RankFailed):
        raise error_of(report, job=prepared.target.job)
    found = {receipt.name: receipt for receipt in report.receipts}
    missing = [file.name for file in prepared.layout.files if file.name not in found]
    if missing:
        raise IncompleteSaveError(
            f"the writer reported no result for the files {missing}",
            rank=report.rank,
            phase="collect",
            job=prepared.target.job,
        )
    receipts = [found[file.name] for file in prepared.layout.files]
    if prepared.target.settings.stream is None and receipts:
        _require_file(prepared.target, receipts[0])
    for receipt in receipts:
        if receipt.failed_attempts:
            _log.warning(
                "written after retries=%d path=%s rank=%d last_failure=%r",
                len(receipt.failed_attempts),
                os.path.join(prepared.target.settings.directory, receipt.name),
                prepared.target.settings.rank,
                receipt.failed_attempts[-1],
            )
    return receipts


def as_written(prepared: PreparedSave, report: RankReport) -> PreparedSave:
    """The save with the names under which its files were created."""
    if isinstance(report, RankFailed):
        return prepared
    names = {each.planned_name: each.name for each in report.receipts}
    if all(planned == name for planned, name in names.items()):
        return prepared
    files = [replace(file, name=names.get(file.name, file.name)) for file in prepared.layout.files]
    return replace(prepared, layout=replace(prepared.layout, files=tuple(files)))


@gc_paused()
def write_results(prepared: PreparedSave, report: RankReport) -> list[WriteResult]:
    """DCP's results for a rank's report; ``prepared`` is the save :func:`as_written`.

    Exactly one per planned item, or ``IncompleteSaveError``; other errors as
    :func:`require_written`.
    """
    receipts = require_written(prepared, report)
    extents = [receipt.extents for receipt in receipts]
    if prepared.known is not None and prepared.layout is prepared.known.layout:
        return list(prepared.known.results)
    descriptors = prepared.target.settings.transform_descriptors
    results = expected_results(prepared.planned.share, prepared.layout, extents, descriptors)
    require_one_result_each(
        (item.index for item in prepared.planned.share.plan.items),
        (result.index for result in results),
        rank=prepared.target.settings.rank,
    )
    return results


def _require_file(target: SaveTarget, receipt: FileReceipt) -> None:
    """Check that one file still exists: the directory may have been removed since it was written.

    One file is enough to detect that, and the trainer waits.
    """
    files = storage_at(target.settings.directory)
    path = files.where(receipt.name)
    try:
        call_with_deadline(
            lambda: require_file(files, receipt.name, receipt.nbytes),
            timeout_s=target.engine.options.save_timeout_s,
            doing="looking for a written file",
            phase="collect",
            path=path,
        )
    except SaveTimeoutError:
        raise
    except OSError as error:
        raise WriteError(
            f"the written file is missing or changed: {error.strerror}",
            errno=error.errno,
            phase="collect",
            path=path,
            job=target.job,
            hint="something else removes or changes files in the checkpoint directory",
        ) from error


class WrittenItems(list[WriteResult]):
    """DCP's results of one rank, sent to the coordinator with its files.

    Without results if there is an ``outcome``: those that a later save may refer to.
    """

    # The coordinator gets thousands: without dictionaries there is less to collect.
    __slots__ = ("outcome", "written")

    def __init__(
        self,
        results: Sequence[WriteResult] = (),
        written: RankFiles | None = None,
        outcome: Results | ResultsReference | None = None,
    ) -> None:
        super().__init__(results)
        self.written = written
        self.outcome = outcome

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.outcome, ResultsReference):  # one per rank, in each save
            return _referring, (self.written, *self.outcome)
        return WrittenItems, ([*self], self.written, self.outcome)


def _referring(written: RankFiles | None, token: str, files: tuple[str, ...]) -> WrittenItems:
    return WrittenItems((), written, ResultsReference(token=token, files=files))


def written_files(prepared: PreparedSave, report: RankReport | None) -> RankFiles:
    """The files of a rank, by its report; none without a report."""
    target = prepared.target
    files: tuple[WrittenFile, ...] | None = ()
    if target.settings.stream is not None or isinstance(report, RankFailed):
        files = None
    elif report is not None:
        files = tuple(
            WrittenFile(name=each.name, nbytes=each.nbytes, crc32=each.crc32_of_file)
            for each in report.receipts
        )
    return RankFiles(
        directory=target.settings.directory,
        files=files,
        left=target.visit.left_before(),
        final_path=target.settings.final_path,
    )


_Extents = tuple[tuple[int, int], ...] | None


def expected_results(
    share: Share,
    layout: Layout,
    extents: Sequence[_Extents] | None = None,
    descriptors: tuple[str, ...] | None = None,
) -> list[WriteResult]:
    """DCP's results for files with this layout, apart from extents decided by streams."""
    results = []
    for number, file in enumerate(layout.files):
        decided = extents[number] if extents else None
        transforms = AS_SAFETENSORS if file.header else descriptors
        for position, slot in enumerate(file.slots):
            offset, length = decided[position] if decided else (slot.offset, slot.length)
            info = _torch.StorageInfo(
                file.name, offset, length, None if transforms is None else list(transforms)
            )
            index = share.plan.items[slot.item].index
            results.append(WriteResult(index=index, size_in_bytes=length, storage_data=info))
    return results
