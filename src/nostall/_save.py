"""One rank's part of a save, from a plan to a report: the composer that joins the stages.

::

    plan -> PlannedSave -> lay_out -> Layout -> take_snapshot -> Snapshot -> write -> RankReport -> results

Facades call these functions and nothing below them. Where the writing happens is the caller's choice: in a writer
process (:func:`write_in_background`), or here and now (:func:`write_here`); the code that writes is the same.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._arena import Lease
from nostall._copying import Copies
from nostall._failures import error_of, failure_of
from nostall._pipeline.collect import require_one_result_each
from nostall._pipeline.layout import FileNaming, Packing, renamed, waves
from nostall._pipeline.plan import Resolver, plan_rank
from nostall._pipeline.snapshot import Snapshot, adopt_staged, begin_snapshot
from nostall._pipeline.structure import KnownStructure
from nostall._runtime import Claim, Engine, joined, when_done
from nostall._staging import Guard, Marks, stage_behind
from nostall._storage.streams import StreamTarget
from nostall._values import (
    Failure,
    FileImage,
    FileReceipt,
    ItemShape,
    Layout,
    PlannedSave,
    RankFailed,
    RankReport,
    RankWritten,
    Share,
    WriteJob,
    page_aligned,
)
from nostall._writer.files import perform
from nostall.errors import IncompleteSaveError, NostallError, SaveAbortedError, StagingError
from nostall.options import WriterOptions
from nostall.stats import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTarget:
    """Where and how one rank's files of one save are written."""

    job: str
    directory: str
    naming: FileNaming
    options: WriterOptions
    stream: StreamTarget | None
    claim: Claim | None
    """Keeps plain file names for this save while anything of it is left; see ``Engine.claim``."""
    transform_descriptors: tuple[str, ...] | None
    """What DCP's reader needs to undo stream transforms; ``None`` without any."""
    timeline: Timeline
    """Where the composer notes how long the stages take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSave:
    """A rank's share with its layout: all that can be done before data is copied."""

    planned: PlannedSave
    layout: Layout
    target: SaveTarget
    known: KnownSave | None = None
    """What it was recognised as, if it is going to have the very results that such a save has."""

    @property
    def rank(self) -> int:
        """The rank whose share it is."""
        return self.planned.share.rank

    @property
    def plan(self) -> SavePlan:
        """The rank's final plan."""
        return self.planned.share.plan


def prepare(
    plan: SavePlan, resolver: Resolver, *, rank: int, target: SaveTarget, engine: Engine
) -> PreparedSave:
    """Resolve a final plan and lay it out.

    Raises:
        StagingError: An item could not be resolved.
    """
    planned = plan_rank(plan, resolver, rank=rank)
    with target.timeline.measure("layout"):
        packing = _packing(target.options, engine)
        layout = engine.lay_out(planned.share.shapes, target.naming, packing)
    return PreparedSave(planned=planned, layout=layout, target=target)


@dataclass(frozen=True, kw_only=True)
class KnownSave:
    """What of a prepared save is structure: all that the next save of the same structure can reuse."""

    structure: KnownStructure
    share: Share
    layout: Layout
    naming: FileNaming
    packing: Packing
    token: str
    """Identifies it among all that ranks may know."""

    @cached_property
    def runs(self) -> list[int]:
        """Items that are bytes."""
        return [item for item, form in enumerate(self.share.forms) if form is None]

    @cached_property
    def results(self) -> tuple[WriteResult, ...]:
        """DCP's results of a save that is written by this layout."""
        return tuple(_expected_results(self.share, self.layout))


def known(prepared: PreparedSave, structure: KnownStructure, engine: Engine) -> KnownSave:
    """What the next save of this structure can reuse."""
    return KnownSave(
        structure=structure,
        share=prepared.planned.share,
        layout=prepared.layout,
        naming=prepared.target.naming,
        packing=_packing(prepared.target.options, engine),
        token=uuid.uuid4().hex,
    )


def prepare_known(
    known: KnownSave, sources: list[torch.Tensor | bytes], *, target: SaveTarget, engine: Engine
) -> PreparedSave:
    """As :func:`prepare`, for a structure that was saved before."""
    share, layout, packing = known.share, known.layout, _packing(target.options, engine)
    shapes = _with_lengths(share, sources, known.runs)
    same_group = known.naming.separation_hint == target.naming.separation_hint
    if shapes is not share.shapes or packing != known.packing or not same_group:
        share = replace(share, shapes=shapes)
        with target.timeline.measure("layout"):
            layout = engine.lay_out(shapes, target.naming, packing)
    elif target.naming != known.naming:
        layout = renamed(layout, target.naming)
    planned = PlannedSave(share=share, sources=sources)
    as_known = layout is known.layout and target.transform_descriptors is None
    return PreparedSave(
        planned=planned, layout=layout, target=target, known=known if as_known else None
    )


def _with_lengths(
    share: Share, sources: Sequence[torch.Tensor | bytes], runs: Sequence[int]
) -> tuple[ItemShape, ...]:
    """The share's shapes with the lengths that its objects have now."""
    lengths = {item: len(cast("bytes", sources[item])) for item in runs}
    changed = {
        item: replace(share.shapes[item], nbytes=nbytes)
        for item, nbytes in lengths.items()
        if nbytes != share.shapes[item].nbytes
    }
    if not changed:
        return share.shapes
    return tuple(changed.get(item, shape) for item, shape in enumerate(share.shapes))


def _packing(options: WriterOptions, engine: Engine) -> Packing:
    return Packing(
        file_count=options.thread_count,
        file_per_item=options.file_per_item,
        max_file_nbytes=engine.options.max_wave_nbytes,
    )


def stage(prepared: PreparedSave, engine: Engine, *, beyond_limit: bool = False) -> Snapshot:
    """Take the snapshot; when this returns, the trainer may change everything.

    Raises:
        SaveTimeoutError: Earlier saves still hold all snapshot memory.
        ReservationError: There is not enough host memory.
        StagingError: A copy failed.
    """
    with prepared.target.timeline.measure("stage"):
        snapshot, copies = _begin_snapshot(prepared, engine, beyond_limit=beyond_limit)
        copies.wait()
    return snapshot


def stage_in_background(
    prepared: PreparedSave, engine: Engine, *, is_aborted: Callable[[], bool]
) -> tuple[Future[Snapshot], Guard]:
    """Take the snapshot behind the trainer's back, which must not change a tensor until it has waited for the guard."""
    _require_unstaged(prepared)
    # Not the parameters themselves, whose data can be replaced meanwhile; the version counter is the same.
    sources = [
        source.detach() if isinstance(source, torch.Tensor) else source
        for source in prepared.planned.sources
    ]
    detached = replace(prepared, planned=replace(prepared.planned, sources=sources))
    named = [
        (shape.fqn, source)
        for shape, source in zip(prepared.layout.shapes, sources, strict=True)
        if isinstance(source, torch.Tensor)
    ]

    def begin(after: Marks) -> tuple[Snapshot, Copies]:
        with prepared.target.timeline.measure("stage"):
            return _begin_snapshot(detached, engine, after=after, is_aborted=is_aborted)

    done, guard = stage_behind(
        [source for _, source in named],
        [name for name, _ in named],
        begin=begin,
        discard=lambda snapshot: give_up(snapshot, prepared.target, engine),
    )
    engine.guards.add(guard)
    return done, guard


def give_up(snapshot: Snapshot, target: SaveTarget, engine: Engine) -> None:
    """Let go of a snapshot that is not going to be written, and of the waves before it."""
    snapshot.lease.release()
    _cancel(snapshot.earlier, target, engine)


def _cancel(written: Sequence[Future[RankReport]], target: SaveTarget, engine: Engine) -> None:
    # Nothing of a save that is given up may be written later, when its names can be another one's.
    if written:
        engine.cancel(target.job, when_done(written, joined), timeout_s=_CANCEL_TIMEOUT_S)


_CANCEL_TIMEOUT_S = 5.0
"""A writer drops a job between two chunks, so well within this; one that does not is killed."""


def _begin_snapshot(
    prepared: PreparedSave,
    engine: Engine,
    *,
    beyond_limit: bool = False,
    after: Marks | None = None,
    is_aborted: Callable[[], bool] = lambda: False,
) -> tuple[Snapshot, Copies]:
    """The snapshot and its copies; of a save that is too large for that, the last wave, with the others being written."""
    _require_unstaged(prepared)
    *earlier, last = waves(prepared.layout, engine.options.max_wave_nbytes)
    most = max(wave.image_nbytes for wave in (*earlier, last))
    written: list[Future[RankReport]] = []
    lease: Lease | None = None
    try:
        for number, wave in enumerate(earlier):
            lease = _lease(prepared, engine, most, beyond_limit=beyond_limit)
            snapshot, copies = _fill(prepared, wave, lease, engine, after)
            copies.wait()
            _require_going(prepared, written, is_aborted)
            snapshot = replace(snapshot, wave=number)
            written.append(write_in_background(snapshot, prepared.target, engine))
            lease = None  # the write's
        lease = _lease(prepared, engine, most, beyond_limit=beyond_limit)
        snapshot, copies = _fill(prepared, last, lease, engine, after)
    except BaseException:
        if lease is not None:
            lease.release()
        _cancel(written, prepared.target, engine)
        raise
    return replace(snapshot, wave=len(earlier), earlier=tuple(written)), copies


def _require_going(
    prepared: PreparedSave, written: Sequence[Future[RankReport]], is_aborted: Callable[[], bool]
) -> None:
    """Refuse to go on with the next wave of a save that is lost."""
    if is_aborted():
        raise SaveAbortedError(
            "the save was aborted", rank=prepared.rank, phase="stage", job=prepared.target.job
        )
    for report in [each.result() for each in written if each.done()]:
        if isinstance(report, RankFailed):
            raise error_of(report, job=prepared.target.job)


def _lease(prepared: PreparedSave, engine: Engine, nbytes: int, *, beyond_limit: bool) -> Lease:
    try:
        return engine.lease(nbytes, beyond_limit=beyond_limit)
    except NostallError as error:
        error.rank, error.job = prepared.rank, prepared.target.job
        raise


def _fill(
    prepared: PreparedSave, layout: Layout, lease: Lease, engine: Engine, after: Marks | None
) -> tuple[Snapshot, Copies]:
    try:
        return begin_snapshot(
            prepared.planned, layout, lease, threads=engine.copy_threads, after=after
        )
    except Exception as error:
        lease.release()
        raise StagingError(
            f"the snapshot failed: {type(error).__name__}: {error}",
            rank=prepared.rank,
            phase="stage",
            job=prepared.target.job,
        ) from error


def _require_unstaged(prepared: PreparedSave) -> None:
    if prepared.layout.files and not prepared.planned.sources:
        raise StagingError(
            "the snapshot of this save was taken already",
            rank=prepared.rank,
            phase="stage",
            job=prepared.target.job,
            hint="every save takes one snapshot; plan again for another one",
        )


def without_sources(prepared: PreparedSave) -> PreparedSave:
    """What is needed of a save once its snapshot is taken; holds no tensor, so the trainer's memory is its own again."""
    return replace(prepared, planned=replace(prepared.planned, sources=()))


def adopt_or_stage(prepared: PreparedSave, engine: Engine) -> tuple[Snapshot, bool]:
    """The snapshot, and whether the items came from a stager; such items are not copied if they are in place."""
    lease = _stager_lease(prepared, engine)
    if lease is None:
        # If the planner made new tensors of everything, the stager's lease is still out: do not wait for it.
        return stage(prepared, engine, beyond_limit=engine.arena.anything_labelled), False
    structure = lease.label
    adopted = adopt_staged(prepared.planned, prepared.layout, lease)
    if adopted is not None:
        # From here on the memory is the write's, however long it takes and whatever becomes of the staged dict.
        return replace(adopted, lease=engine.arena.adopt(lease)), True
    try:
        snapshot = stage(prepared, engine, beyond_limit=True)
    finally:
        lease.release()
    engine.remember_placement(structure, _placement(prepared))
    return snapshot, True


def _stager_lease(prepared: PreparedSave, engine: Engine) -> Lease | None:
    if not engine.arena.anything_labelled:
        return None
    for source in prepared.planned.sources:
        if not isinstance(source, bytes) and source.is_cpu and source.nbytes:
            lease = engine.arena.lease_at(source.data_ptr())
            if lease is not None and lease.label is not None:
                return lease
    return None


def _placement(prepared: PreparedSave) -> dict[str, tuple[int, int]]:
    """Where payloads belong in memory, and how long they are, by name; under ``""`` the whole image."""
    shapes = prepared.layout.shapes
    names = Counter(shape.fqn for shape in shapes)
    placement = {"": (0, prepared.layout.image_nbytes)}
    for file in prepared.layout.files:
        for slot in file.slots:
            fqn = shapes[slot.item].fqn
            if names[fqn] == 1 and shapes[slot.item].container is not None:
                offset = file.image_offset + slot.payload_offset
                placement[fqn] = (offset, slot.payload_nbytes)
    return placement


def write_here(snapshot: Snapshot, target: SaveTarget, engine: Engine) -> RankReport:
    """Write on the calling thread; releases the snapshot."""
    return _write(snapshot, target, engine, cancelled=None)


def _write(
    snapshot: Snapshot, target: SaveTarget, engine: Engine, *, cancelled: threading.Event | None
) -> RankReport:
    try:
        (job,) = _jobs(snapshot, target, engine, processes=1, stream=None)
        images = _images(job, snapshot)
        report = perform(job, images, target.stream, cancelled, engine.cuts.cut)
    finally:
        snapshot.lease.release()
    return joined(
        [*(part.result(engine.options.save_timeout_s) for part in snapshot.earlier), report]
    )


def write_in_background(
    snapshot: Snapshot, target: SaveTarget, engine: Engine
) -> Future[RankReport]:
    """Write in writer processes, or in a thread if the user's callables cannot travel; releases the snapshot."""
    stream = _pickled(target.stream)
    if target.stream is not None and stream is None:
        return _write_in_thread(snapshot, target, engine)
    processes = min(target.options.processes, len(snapshot.layout.files))
    jobs = _jobs(snapshot, target, engine, processes=processes, stream=stream)
    return engine.submit(jobs, snapshot.lease, after=snapshot.earlier)


def await_report(
    future: Future[RankReport], *, rank: int, timeout_s: float, give_up: Callable[[], None]
) -> RankReport:
    """Wait for a rank's report; one that does not come in time is a failed one, and the write is given up."""
    try:
        return future.result(timeout_s)
    except TimeoutError:
        give_up()
        failure = Failure(
            kind="SaveTimeoutError",
            message=f"the files were not written within {timeout_s:g} s",
            phase="write",
            hint="the storage is slower than EngineOptions.save_timeout_s allows, or it is stuck",
        )
        return RankFailed(rank=rank, failure=failure)


def write_results(prepared: PreparedSave, report: RankReport) -> list[WriteResult]:
    """DCP's results for a rank's report, exactly one per planned item.

    Raises:
        SaveError: The report says that the rank failed; the subclass says how.
        IncompleteSaveError: Items and results do not match.
    """
    if isinstance(report, RankFailed):
        raise error_of(report, job=prepared.target.job)
    extents = [receipt.extents for receipt in _in_layout_order(prepared, report)]
    if prepared.known is not None:
        return list(prepared.known.results)
    descriptors = prepared.target.transform_descriptors
    results = _expected_results(prepared.planned.share, prepared.layout, extents, descriptors)
    require_one_result_each(
        (item.index for item in prepared.plan.items),
        (result.index for result in results),
        rank=report.rank,
    )
    return results


_Extents = tuple[tuple[int, int], ...] | None


def _expected_results(
    share: Share,
    layout: Layout,
    extents: Sequence[_Extents] | None = None,
    descriptors: tuple[str, ...] | None = None,
) -> list[WriteResult]:
    """DCP's results for files that are written as laid out, but for the extents that streams have decided."""
    results = []
    for number, file in enumerate(layout.files):
        decided = extents[number] if extents else None
        for position, slot in enumerate(file.slots):
            offset, length = decided[position] if decided else (slot.offset, slot.length)
            info = _torch.StorageInfo(
                file.name, offset, length, None if descriptors is None else list(descriptors)
            )
            index = share.plan.items[slot.item].index
            results.append(WriteResult(index=index, size_in_bytes=length, storage_data=info))
    return results


def partial_files(prepared: PreparedSave) -> list[str]:
    """Where this rank's files would be: what to remove when the save is given up."""
    return [os.path.join(prepared.target.directory, file.name) for file in prepared.layout.files]


# --- jobs ---------------------------------------------------------------------------------------------------------


def _jobs(
    snapshot: Snapshot, target: SaveTarget, engine: Engine, *, processes: int, stream: bytes | None
) -> list[WriteJob]:
    shares: list[list[FileImage]] = [[] for _ in range(max(1, processes))]
    for number, file in enumerate(snapshot.layout.files):
        image = FileImage(
            name=file.name,
            nbytes=file.nbytes,
            block=snapshot.lease.block.id,
            block_offset=file.image_offset,
            seals=file.seals,
        )
        shares[number % len(shares)].append(image)
    return [
        WriteJob(
            job=f"{target.job}/{snapshot.rank}/{snapshot.wave}.{number}",
            rank=snapshot.rank,
            directory=target.directory,
            files=tuple(files),
            sync_files=target.options.sync_files,
            io_threads=engine.io_threads,
            chunk_nbytes=engine.options.chunk_nbytes,
            direct=engine.options.direct_io,
            stream=stream,
            sys_path=tuple(sys.path) if stream is not None else (),
            faults=engine.faults,
        )
        for number, files in enumerate(shares)
    ]


def _images(job: WriteJob, snapshot: Snapshot) -> dict[str, memoryview]:
    block = snapshot.lease.block
    return {
        image.name: block.image(image.block_offset, page_aligned(image.nbytes))
        for image in job.files
    }


def _in_layout_order(prepared: PreparedSave, report: RankWritten) -> list[FileReceipt]:
    receipts = {receipt.name: receipt for receipt in report.receipts}
    missing = [file.name for file in prepared.layout.files if file.name not in receipts]
    if missing:
        raise IncompleteSaveError(
            f"there is no receipt for {missing}",
            rank=prepared.rank,
            phase="collect",
            job=prepared.target.job,
        )
    return [receipts[file.name] for file in prepared.layout.files]


def _pickled(stream: StreamTarget | None) -> bytes | None:
    """The user's callables as a pickle that a process without the user's main module can read, or ``None``."""
    if stream is None:
        return None
    try:
        pickled = pickle.dumps(stream)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return None if b"__main__" in pickled else pickled


def _write_in_thread(snapshot: Snapshot, target: SaveTarget, engine: Engine) -> Future[RankReport]:
    future: Future[RankReport] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            with engine.cancellable(target.job) as cancelled:
                report = _write(snapshot, target, engine, cancelled=cancelled)
        except BaseException as error:  # whoever waits must hear of it
            report = RankFailed(rank=snapshot.rank, failure=failure_of(error, phase="write"))
        future.set_result(report)

    threading.Thread(target=run, name="nostall-stream-writer", daemon=True).start()
    return future
