"""Take the snapshot of a planned save, and write it.

It is taken at once, during training, or in waves; it is written in the writer process, or in a
thread if the user's callables cannot be sent there.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

import torch

from nostall._memory.arena import Lease
from nostall._memory.copying import Copies, require_unchanged
from nostall._memory.overlap import Marks, SnapshotFence, stage_behind
from nostall._memory.snapshot import Snapshot, begin_snapshot
from nostall._model.jobs import (
    NO_BLOCK,
    Faults,
    FileImage,
    RankFailed,
    RankReport,
    WriteJob,
    page_aligned,
)
from nostall._model.names import some
from nostall._model.progress import SaveState
from nostall._model.threads import is_done
from nostall._model.values import Layout, PlannedSave
from nostall._plan.layout import waves
from nostall._ranks.failures import await_report, error_of, failure_of, joined, when_done
from nostall._save.prepared import PreparedSave, SaveTarget
from nostall._storage.deadlines import begin, remove_with_deadline
from nostall._storage.locations import is_address, storage_options_of
from nostall._writer.files import perform
from nostall._writer.seals import WholeImage
from nostall._writer.trainer_side import import_paths
from nostall.errors import NostallError, SaveAbortedError, StagingError

# --- take the snapshot ----------------------------------------------------------------------------


def stage(prepared: PreparedSave, *, beyond_limit: bool = False) -> Snapshot:
    """Take the snapshot; when this returns, the trainer may change any tensor.

    ``SaveTimeoutError`` if earlier saves still hold all snapshot memory; ``ReservationError`` if
    there is not enough host memory; ``StagingError`` if a copy failed.
    """
    prepared.target.progress.to(SaveState.STAGING)
    with prepared.target.timeline.measure("stage"):
        snapshot, copies = _begin_snapshot(prepared, beyond_limit=beyond_limit)
        copies.wait()
    return snapshot


def stage_in_background(prepared: PreparedSave) -> tuple[Future[Snapshot], SnapshotFence]:
    """Take the snapshot during training; no tensor may be changed before a wait for the fence."""
    prepared.target.progress.to(SaveState.STAGING)
    # The thread refers to this only, which has no tensors.
    bare = replace(prepared, planned=replace(prepared.planned, sources=()))

    def begin_copies(sources: list[torch.Tensor | bytes], after: Marks) -> tuple[Snapshot, Copies]:
        detached = replace(bare, planned=replace(bare.planned, sources=sources))
        Faults(bare.target.faults).at("stage")
        with bare.target.timeline.measure("stage"):
            return _begin_snapshot(detached, after=after)

    return stage_behind(
        prepared.planned.sources,
        [shape.fqn for shape in prepared.layout.shapes],
        begin=begin_copies,
        discard=lambda snapshot: give_up(snapshot, bare.target),
        is_watched=True,
        timeout_s=bare.target.engine.options.save_timeout_s,
    )


def _changed(planned: PlannedSave) -> list[str]:
    """Names of the tensors that are no longer as they were planned."""
    share, names = planned.share, []
    for shape, form, source in zip(share.shapes, share.forms, planned.sources, strict=True):
        if form is not None and isinstance(source, torch.Tensor):
            # A tensor subclass may raise anything else, which says nothing of a change.
            with suppress(Exception):
                try:
                    require_unchanged(source, form.dtype, form.size)
                except ValueError:
                    names.append(shape.fqn)
    return names


def give_up(snapshot: Snapshot, target: SaveTarget) -> None:
    """Release a snapshot that will not be written, and cancel the waves before it."""
    snapshot.lease.release()
    _cancel(snapshot.earlier, target)


def _cancel(written: Sequence[Future[RankReport]], target: SaveTarget) -> None:
    # No file of a save that is given up may be written later: another save may use its name.
    target.engine.cancel(target.job, when_done(written, joined) if written else None)


def _begin_snapshot(
    prepared: PreparedSave, *, beyond_limit: bool = False, after: Marks | None = None
) -> tuple[Snapshot, Copies]:
    """The snapshot and its copies; of a save in waves, the last, while the others are written."""
    target, engine = prepared.target, prepared.target.engine
    layouts = waves(prepared.layout, engine.options.max_wave_nbytes)
    most = max(wave.image_nbytes for wave in layouts)
    written: list[Future[RankReport]] = []
    lease: Lease | None = None
    try:
        while True:
            wave = layouts[len(written)]
            lease = lease_for(target, most, beyond_limit=beyond_limit)
            try:
                snapshot, copies = begin_snapshot(
                    prepared.planned, wave, lease, method=engine.copy_method, after=after
                )
            except Exception as error:  # tensor subclasses and devices can raise anything
                changed = _changed(prepared.planned)
                raise StagingError(
                    f"the snapshot failed: {type(error).__name__}: {error}"
                    + (f"; changed after planning: {some(changed)}" if changed else ""),
                    rank=target.settings.rank,
                    phase="stage",
                    job=target.job,
                    hint="stage before a tensor's data is replaced or resized" if changed else None,
                ) from error
            snapshot = replace(snapshot, wave=len(written))
            if wave is layouts[-1]:
                return replace(snapshot, earlier=tuple(written)), copies
            copies.wait()
            _require_going(target, written)
            written.append(write_in_background(snapshot, target))
            lease = None  # owned by the write
    except BaseException:  # an interrupt, too: nothing else releases the lease and the waves
        if lease is not None:
            lease.release()
        _cancel(written, target)
        raise


def _require_going(target: SaveTarget, written: Sequence[Future[RankReport]]) -> None:
    """Refuse the next wave of a save that is aborted or has failed."""
    if target.progress.is_over:
        rank, job = target.settings.rank, target.job
        raise SaveAbortedError("the save was aborted", rank=rank, phase="stage", job=job)
    for report in [each.result() for each in written if is_done(each)]:
        if isinstance(report, RankFailed):
            raise error_of(report, job=target.job)


def lease_for(
    target: SaveTarget, nbytes: int, *, beyond_limit: bool, as_buffer: bool = False
) -> Lease:
    """Memory of the engine for a snapshot; errors name the save."""
    try:
        return target.engine.lease(nbytes, beyond_limit=beyond_limit, as_buffer=as_buffer)
    except NostallError as error:
        error.rank, error.job = target.settings.rank, target.job
        raise


# --- write it -------------------------------------------------------------------------------------


def write_here(snapshot: Snapshot, target: SaveTarget) -> RankReport:
    """Write in this process while the caller waits; releases the snapshot."""
    return wait_for(_write_in_thread(snapshot, target), target)


def wait_for(written: Future[RankReport], target: SaveTarget) -> RankReport:
    """A rank's report; the save is given up after a timeout or if the caller is interrupted.

    After an interrupt the files are removed, as no report names them.
    """
    give_up = partial(target.engine.cancel, target.job, written)
    try:
        return await_report(
            written,
            rank=target.settings.rank,
            path=target.settings.directory,
            timeout_s=target.engine.options.save_timeout_s,
            give_up=give_up,
        )
    except BaseException:  # an interrupt, such as Ctrl-C, too
        give_up()
        remove_with_deadline(sorted(target.progress.created))
        raise


def _write(snapshot: Snapshot, target: SaveTarget, cancelled: threading.Event) -> RankReport:
    try:
        block = snapshot.lease.block
        job = job_of(snapshot.layout, target, wave=snapshot.wave, block=block.id)
        images = {
            image.name: WholeImage(block.image(image.block_offset, page_aligned(image.nbytes)))
            for image in job.files
        }
        report = perform(
            job,
            images,
            () if target.settings.stream is None else (target.settings.stream,),
            cancelled=cancelled,
            on_progress=partial(target.progress.wrote, job.job),
            on_created=target.progress.created.add,
        )
    finally:
        snapshot.lease.release()
    if not snapshot.earlier:
        return report
    before = wait_for(when_done(snapshot.earlier, joined), target)
    return joined([before, report])


def write_in_background(snapshot: Snapshot, target: SaveTarget) -> Future[RankReport]:
    """Write in the writer process, or a thread for unpicklable callables; releases the snapshot."""
    target.progress.to(SaveState.STAGED)
    stream: bytes | None = None
    if target.settings.stream is not None:
        with suppress(pickle.PicklingError, AttributeError, TypeError):
            stream = pickle.dumps(target.settings.stream)
        if stream is None or b"__main__" in stream:  # the writer process does not run it
            return _write_in_thread(snapshot, target)
    block = snapshot.lease.block.id
    job = job_of(snapshot.layout, target, wave=snapshot.wave, block=block, stream=stream)
    return target.engine.submit(job, snapshot.lease, target.progress, after=snapshot.earlier)


def _write_in_thread(snapshot: Snapshot, target: SaveTarget) -> Future[RankReport]:
    # As Engine.submit does.
    snapshot = replace(snapshot, lease=target.engine.arena.adopt(snapshot.lease))
    return in_thread(partial(_write, snapshot, target), target)


def in_thread(
    write: Callable[[threading.Event], RankReport], target: SaveTarget
) -> Future[RankReport]:
    """Write in a new thread, which is abandoned if storage hangs. It owns all that ``write`` holds.

    ``write`` receives an event, which ``Engine.cancel`` sets when the save is given up.
    """
    registered = ExitStack()
    cancelled = registered.enter_context(target.engine.cancellable(target.job))

    def run() -> RankReport:
        with registered:
            try:
                return write(cancelled)
            except BaseException as error:  # becomes the report
                failure = failure_of(error, phase="write")
                return RankFailed(rank=target.settings.rank, failure=failure)

    return begin("nostall-writer", run)


def job_of(
    layout: Layout,
    target: SaveTarget,
    *,
    wave: int = 0,
    block: int = NO_BLOCK,
    stream: bytes | None = None,
) -> WriteJob:
    """The job that writes a rank's files, or one wave of them.

    ``block`` identifies the arena block that holds the images; ``stream`` is a pickle of the user's
    callables.
    """
    settings, engine = target.settings, target.engine
    needs_packages = stream is not None or is_address(settings.directory) or target.faults
    return WriteJob(
        job=f"{target.job}/{settings.rank}/{wave}",
        rank=settings.rank,
        directory=settings.directory,
        files=tuple(
            FileImage(
                name=file.name,
                nbytes=file.nbytes,
                block=block,
                block_offset=file.image_offset,
                seals=file.seals,
            )
            for file in layout.files
        ),
        sync_files=settings.sync_files,
        io_threads=engine.io_threads,
        chunk_nbytes=settings.chunk_nbytes(layout, engine),
        direct=engine.options.direct_io,
        retries=engine.options.write_retries,
        checksum_files=bool(torch.serialization.get_crc32_options()),
        stream=stream,
        sys_path=tuple(import_paths()) if needs_packages else (),
        storage_options=storage_options_of(settings.directory),
        faults=target.faults,
    )
