"""One rank's part of a save: the composer of the stages. Read this first.

::

    plan -> PlannedSave -> lay_out -> Layout             prepare() here
         -> begin_snapshot -> Snapshot                   stage() in stage
         -> write -> RankReport                          write_here() and write_in_background()
                                                         in write; for synchronous saves,
                                                         write_now() in write_directly does both
         -> results                                      write_results() here

Facades call these functions and nothing below them. The caller chooses where to write: in a writer
process, or in this one while it waits. The code that writes is the same.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._commit.collect import require_one_result_each
from nostall._commit.known_results import Results, ResultsReference
from nostall._commit.publication import end_of_program, program_of
from nostall._engine import Engine
from nostall._model.collection import no_collection
from nostall._model.jobs import FileReceipt, RankFailed, RankReport, RankWritten
from nostall._model.names import AS_SAFETENSORS
from nostall._model.values import ItemShape, Layout, PlannedSave, RankFiles, Share, WrittenFile
from nostall._plan.items import Resolver, plan_rank
from nostall._plan.layout import FileNaming, Packing, renamed, without
from nostall._plan.structure import KnownStructure
from nostall._plan.structure import learn as learn_structure
from nostall._ranks.failures import error_of
from nostall._save.settings import SaveTarget, WriterSettings
from nostall._storage.deadlines import in_time
from nostall._storage.places import storage_at
from nostall._storage.port import require_file
from nostall.errors import IncompleteSaveError, SaveTimeoutError, WriteError

_log = logging.getLogger("nostall")


@dataclass
class Beside(_torch.StoragePrefix):
    """DCP's prefix of a rank's file names, from a coordinator that found a checkpoint."""

    beside: str
    """The directory of that checkpoint."""


@dataclass(frozen=True, slots=True)
class FrozenFile:
    """A file of items that a user calls frozen."""

    name: str
    """Its planned name."""
    seen: tuple[Hashable, ...] | None
    """What tells whether its items are unchanged in the next save; ``None`` if nothing does."""
    is_kept: bool
    """Whether the last save's file takes its place: linked, or copied by the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSave:
    """A rank's share with its layout, before any data is copied."""

    planned: PlannedSave
    layout: Layout
    target: SaveTarget
    known: KnownSave | None = None
    """The known save with the same results, apart from file names; ``None`` if there is none."""
    frozen: tuple[FrozenFile, ...] = ()
    """Set when the snapshot is taken."""
    linked: tuple[FileReceipt, ...] = ()
    """Receipts of those that were linked. Set with them."""
    copied: Future[RankReport] | None = None
    """Receipts of those that the store copies, once no request is under way. Set with them."""

    @property
    def to_write(self) -> Layout:
        """The layout of the files whose place no earlier file takes."""
        return without(self.layout, {each.name for each in self.frozen if each.is_kept})

    @property
    def rank(self) -> int:
        """The rank of the share."""
        return self.planned.share.rank

    @property
    def plan(self) -> SavePlan:
        """The rank's final plan."""
        return self.planned.share.plan

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the rank's files, in layout order."""
        return tuple(file.name for file in self.layout.files)


@no_collection()
def prepare(
    plan: SavePlan, resolver: Resolver, *, target: SaveTarget, engine: Engine
) -> PreparedSave:
    """Resolve a final plan and lay it out.

    Raises:
        StagingError: An item could not be resolved.
    """
    settings = target.settings
    planned = plan_rank(
        plan, resolver, rank=settings.rank, file_format=settings.options.file_format
    )
    with target.timeline.measure("layout"):
        packing = settings.packing(engine)
        layout = engine.lay_out(planned.share.shapes, target.naming, packing)
    target.progress.expect(layout.nbytes)
    return PreparedSave(planned=planned, layout=layout, target=target)


@dataclass(frozen=True, kw_only=True)
class KnownSave:
    """The part of a prepared save that the next save of the same structure can reuse."""

    structure: KnownStructure
    share: Share
    layout: Layout
    naming: FileNaming
    packing: Packing
    token: str
    """Identifies this structure among all known to ranks."""

    def fits(self, settings: WriterSettings) -> bool:
        """Whether a writer with these settings can use it, whose containers have its format."""
        return self.naming.file_format is settings.options.file_format

    @cached_property
    def runs(self) -> list[int]:
        """Items that are bytes."""
        return [item for item, form in enumerate(self.share.forms) if form is None]

    @cached_property
    def results(self) -> tuple[WriteResult, ...]:
        """DCP's results of a save with this layout."""
        return tuple(_expected_results(self.share, self.layout))

    @cached_property
    def pickled_results(self) -> bytes:
        """The same, as :func:`pickled_results`."""
        return _pickled(self.results)


def known(prepared: PreparedSave, structure: KnownStructure, engine: Engine) -> KnownSave:
    """The part of a prepared save that the next one of this structure can reuse."""
    items = prepared.plan.items
    require_one_result_each(
        (item.index for item in items),
        (items[slot.item].index for file in prepared.layout.files for slot in file.slots),
        rank=prepared.rank,
    )
    return KnownSave(
        structure=structure,
        share=prepared.planned.share,
        layout=prepared.layout,
        naming=prepared.target.naming,
        packing=prepared.target.settings.packing(engine),
        token=uuid.uuid4().hex,
    )


@no_collection()
def learn(
    prepared: PreparedSave, state_dict: dict[str, Any], flat: dict[str, Any], engine: Engine
) -> KnownSave | None:
    """The reusable part of a prepared save, before staging; ``None`` if nothing is safe.

    Args:
        prepared: The save.
        state_dict: The planned state dict.
        flat: The same, flattened by the planner.
        engine: The engine of the save.
    """
    try:
        structure = learn_structure(state_dict, flat, prepared.planned)
        return None if structure is None else known(prepared, structure, engine)
    except Exception:  # this save is not affected; the next one is planned
        _log.debug("the structure was not learned", exc_info=True)
        return None


def prepare_known(
    known: KnownSave, sources: list[torch.Tensor | bytes], *, target: SaveTarget, engine: Engine
) -> PreparedSave:
    """As :func:`prepare`, for a structure that was saved before."""
    share, layout, packing = known.share, known.layout, target.settings.packing(engine)
    shapes = _with_lengths(share, sources, known.runs)
    groups, now = known.naming, target.naming
    same = (groups.separation_hint, groups.frozen) == (now.separation_hint, now.frozen)
    if shapes is not share.shapes or packing != known.packing or not same:
        share = replace(share, shapes=shapes)
        with target.timeline.measure("layout"):
            layout = engine.lay_out(shapes, target.naming, packing)
    elif target.naming != known.naming:
        layout = renamed(layout, target.naming)
    planned = PlannedSave(share=share, sources=sources)
    target.progress.expect(layout.nbytes)
    return as_known(PreparedSave(planned=planned, layout=layout, target=target), known)


def as_known(prepared: PreparedSave, known: KnownSave | None) -> PreparedSave:
    """The prepared save, with the known one if their results are equal apart from file names."""
    is_same = known is not None and prepared.planned.share is known.share
    if not is_same or prepared.target.settings.transform_descriptors is not None:
        return prepared
    return replace(prepared, known=known)


def _with_lengths(
    share: Share, sources: Sequence[torch.Tensor | bytes], runs: Sequence[int]
) -> tuple[ItemShape, ...]:
    """The share's shapes with the current lengths of its objects."""
    lengths = {item: len(cast("bytes", sources[item])) for item in runs}
    changed = {
        item: replace(share.shapes[item], nbytes=nbytes)
        for item, nbytes in lengths.items()
        if nbytes != share.shapes[item].nbytes
    }
    if not changed:
        return share.shapes
    return tuple(changed.get(item, shape) for item, shape in enumerate(share.shapes))


def require_written(prepared: PreparedSave, report: RankReport) -> list[FileReceipt]:
    """A rank's receipts, in layout order.

    Args:
        prepared: The save :func:`as_written`.
        report: The rank's report.

    Raises:
        SaveError: The rank failed; the subclass says how.
        IncompleteSaveError: A file has no receipt.
        WriteError: A file no longer exists.
    """
    if isinstance(report, RankFailed):
        raise error_of(report, job=prepared.target.job)
    receipts = _in_layout_order(prepared, report)
    if prepared.target.settings.stream is None and receipts:
        _require_file(prepared.target, receipts[0])
    for receipt in receipts:
        if receipt.failed_attempts:
            _log.warning(
                "written after retries=%d path=%s rank=%d last_failure=%r",
                len(receipt.failed_attempts),
                os.path.join(prepared.target.settings.directory, receipt.name),
                prepared.rank,
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


def pickled_results(prepared: PreparedSave) -> bytes:
    """The places of a rank's items, under the planned names of files: metadata without items."""
    if prepared.known is not None and prepared.layout is prepared.known.layout:
        return prepared.known.pickled_results
    return _pickled(_expected_results(prepared.planned.share, prepared.layout))


def _pickled(results: Iterable[WriteResult]) -> bytes:
    places = {each.index: each.storage_data for each in results}
    metadata = Metadata(state_dict_metadata={}, storage_data=places)
    return program_of(metadata) + end_of_program(None)


def write_results(prepared: PreparedSave, report: RankReport) -> list[WriteResult]:
    """DCP's results for a rank's report, exactly one per planned item.

    Args:
        prepared: The save :func:`as_written`.
        report: The rank's report.

    Raises:
        SaveError: As :func:`require_written`.
        IncompleteSaveError: Items and results do not match.
    """
    receipts = require_written(prepared, report)
    extents = [receipt.extents for receipt in receipts]
    if prepared.known is not None and prepared.layout is prepared.known.layout:
        return list(prepared.known.results)
    descriptors = prepared.target.settings.transform_descriptors
    results = _expected_results(prepared.planned.share, prepared.layout, extents, descriptors)
    require_one_result_each(
        (item.index for item in prepared.plan.items),
        (result.index for result in results),
        rank=prepared.rank,
    )
    return results


def _require_file(target: SaveTarget, receipt: FileReceipt) -> None:
    """Check that one file still exists: the directory may have been removed since it was written.

    One file is enough to detect that, and the trainer waits.
    """
    files = storage_at(target.settings.directory)
    path = files.where(receipt.name)
    try:
        in_time(
            lambda: require_file(files, receipt.name, receipt.nbytes),
            timeout_s=target.timeout_s,
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
    """DCP's results of one rank and its files, sent to the coordinator together.

    Args:
        results: The results.
        written: The rank's files.
        token: Identifies results that a later save may refer to.
        files: Names of the files of the items.
        are_sent: Whether the coordinator has received the results before: then a reference to them
            is sent.
    """

    def __init__(
        self,
        results: Iterable[WriteResult] = (),
        written: RankFiles | None = None,
        token: str | None = None,
        files: tuple[str, ...] = (),
        are_sent: bool = False,  # noqa: FBT001, FBT002  # pickled by position
    ) -> None:
        super().__init__(results)
        self.written = written
        self._token = token
        self.files = files
        self._are_sent = are_sent

    @property
    def outcome(self) -> Results | ResultsReference:
        """What the coordinator keeps, or a reference to it."""
        if self._are_sent and self._token is not None:
            return ResultsReference(token=self._token, files=self.files)
        return Results(items=list(self), files=self.files, token=self._token)

    def __reduce__(self) -> tuple[Any, ...]:
        items = () if self._are_sent else list(self)
        return WrittenItems, (items, self.written, self._token, self.files, self._are_sent)


def written_items(
    results: Iterable[WriteResult],
    written: RankFiles,
    prepared: PreparedSave,
    sent_token: str | None,
) -> WrittenItems:
    """Results that the coordinator keeps.

    Args:
        results: The results.
        written: The rank's files.
        prepared: The save.
        sent_token: The token of this rank's results that the coordinator has.
    """
    token = None if prepared.known is None else prepared.known.token
    are_sent = token is not None and token == sent_token
    return WrittenItems(results, written, token, prepared.files, are_sent)


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
        belongs_at=target.settings.belongs_at,
    )


_Extents = tuple[tuple[int, int], ...] | None


def _expected_results(
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


def _in_layout_order(prepared: PreparedSave, report: RankWritten) -> list[FileReceipt]:
    receipts = {receipt.name: receipt for receipt in report.receipts}
    missing = [file.name for file in prepared.layout.files if file.name not in receipts]
    if missing:
        raise IncompleteSaveError(
            f"no receipt for {missing}",
            rank=prepared.rank,
            phase="collect",
            job=prepared.target.job,
        )
    return [receipts[file.name] for file in prepared.layout.files]
