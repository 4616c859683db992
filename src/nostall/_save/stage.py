"""Take a snapshot of a planned save: at once, during training, or in waves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch

from nostall._engine import Engine
from nostall._memory.arena import Lease
from nostall._memory.copying import Copies
from nostall._memory.fence import SnapshotFence
from nostall._memory.overlap import Marks, stage_behind
from nostall._memory.snapshot import Snapshot, begin_snapshot
from nostall._model.interrupts import is_done
from nostall._model.jobs import RankFailed, RankReport
from nostall._model.progress import State
from nostall._model.values import Layout
from nostall._plan.layout import waves
from nostall._ranks.failures import error_of
from nostall._ranks.reports import joined, when_done
from nostall._save.session import PreparedSave
from nostall._save.settings import SaveTarget
from nostall._save.write import write_in_background
from nostall._writer.faults import Faults
from nostall.errors import NostallError, SaveAbortedError, StagingError


def stage(prepared: PreparedSave, engine: Engine, *, beyond_limit: bool = False) -> Snapshot:
    """Take the snapshot; when this returns, the trainer may change any tensor.

    Raises:
        SaveTimeoutError: Earlier saves still hold all snapshot memory.
        ReservationError: There is not enough host memory.
        StagingError: A copy failed.
    """
    prepared.target.progress.to(State.STAGING)
    with prepared.target.timeline.measure("stage"):
        snapshot, copies = _begin_snapshot(prepared, engine, beyond_limit=beyond_limit)
        copies.wait()
    return snapshot


def stage_in_background(
    prepared: PreparedSave, engine: Engine, *, is_aborted: Callable[[], bool]
) -> tuple[Future[Snapshot], SnapshotFence]:
    """Take the snapshot during training; no tensor may be changed before a wait for the fence."""
    _require_unstaged(prepared)
    prepared.target.progress.to(State.STAGING)
    bare = without_sources(prepared)  # the thread refers to this only

    def begin(sources: list[torch.Tensor | bytes], after: Marks) -> tuple[Snapshot, Copies]:
        detached = replace(bare, planned=replace(bare.planned, sources=sources))
        Faults(bare.target.faults).at("stage")
        with bare.target.timeline.measure("stage"):
            return _begin_snapshot(detached, engine, after=after, is_aborted=is_aborted)

    return stage_behind(
        prepared.planned.sources,
        [shape.fqn for shape in prepared.layout.shapes],
        begin=begin,
        discard=lambda snapshot: give_up(snapshot, bare.target, engine),
        is_watched=True,
        timeout_s=engine.options.save_timeout_s,
    )


def give_up(snapshot: Snapshot, target: SaveTarget, engine: Engine) -> None:
    """Release a snapshot that will not be written, and cancel the waves before it."""
    snapshot.lease.release()
    _cancel(snapshot.earlier, target, engine)


def _cancel(written: Sequence[Future[RankReport]], target: SaveTarget, engine: Engine) -> None:
    # No file of a save that is given up may be written later: another save may use its name.
    engine.cancel(target.job, when_done(written, joined) if written else None)


def _begin_snapshot(
    prepared: PreparedSave,
    engine: Engine,
    *,
    beyond_limit: bool = False,
    after: Marks | None = None,
    is_aborted: Callable[[], bool] = lambda: False,
) -> tuple[Snapshot, Copies]:
    """The snapshot and its copies; of a save in waves, the last, while the others are written."""
    _require_unstaged(prepared)
    *earlier, last = waves(prepared.layout, engine.options.max_wave_nbytes)
    most = max(wave.image_nbytes for wave in (*earlier, last))
    written: list[Future[RankReport]] = []
    lease: Lease | None = None
    try:
        for number, wave in enumerate(earlier):
            lease = lease_for(prepared, engine, most, beyond_limit=beyond_limit)
            snapshot, copies = _fill(prepared, wave, lease, engine, after)
            copies.wait()
            _require_going(prepared, written, is_aborted)
            snapshot = replace(snapshot, wave=number)
            written.append(write_in_background(snapshot, prepared.target, engine))
            lease = None  # owned by the write
        lease = lease_for(prepared, engine, most, beyond_limit=beyond_limit)
        snapshot, copies = _fill(prepared, last, lease, engine, after)
    except BaseException:  # an interrupt, too: nothing else releases the lease and the waves
        if lease is not None:
            lease.release()
        _cancel(written, prepared.target, engine)
        raise
    return replace(snapshot, wave=len(earlier), earlier=tuple(written)), copies


def _require_going(
    prepared: PreparedSave, written: Sequence[Future[RankReport]], is_aborted: Callable[[], bool]
) -> None:
    """Refuse the next wave of a save that is aborted or has failed."""
    if is_aborted():
        raise SaveAbortedError(
            "the save was aborted", rank=prepared.rank, phase="stage", job=prepared.target.job
        )
    for report in [each.result() for each in written if is_done(each)]:
        if isinstance(report, RankFailed):
            raise error_of(report, job=prepared.target.job)


def lease_for(prepared: PreparedSave, engine: Engine, nbytes: int, *, beyond_limit: bool) -> Lease:
    """As :meth:`Engine.lease`, with errors that name the save."""
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
            prepared.planned, layout, lease, method=engine.copy_method, after=after
        )
    except Exception as error:  # tensor subclasses and devices can raise anything
        raise StagingError(
            f"the snapshot failed: {type(error).__name__}: {error}",
            rank=prepared.rank,
            phase="stage",
            job=prepared.target.job,
        ) from error


def _require_unstaged(prepared: PreparedSave) -> None:
    if prepared.layout.files and not prepared.planned.sources:
        raise StagingError(
            "the snapshot of this save was already taken",
            rank=prepared.rank,
            phase="stage",
            job=prepared.target.job,
            hint="every save takes one snapshot; plan again to take another",
        )


def without_sources(prepared: PreparedSave) -> PreparedSave:
    """The save without its tensors, which need not be kept once the snapshot is taken."""
    return replace(prepared, planned=replace(prepared.planned, sources=()))
