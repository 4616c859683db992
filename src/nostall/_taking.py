"""Take a snapshot: at once, behind the trainer's back, in waves, or by adopting what a stager has copied already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import compress
from typing import Any

import torch

from nostall._arena import Lease
from nostall._copying import Copies, Places
from nostall._failures import error_of, failure_of
from nostall._jobs import RankFailed, RankReport
from nostall._lifecycle import State
from nostall._pipeline.layout import waves
from nostall._pipeline.restage import (
    Leaf,
    Spoiled,
    StagedStateDict,
    find_leaves,
    stage_state_dict,
    structure_of,
    unstaged,
)
from nostall._pipeline.snapshot import Snapshot, adopt_staged, begin_snapshot
from nostall._reports import CANCEL_TIMEOUT_S, joined, when_done
from nostall._runtime import Engine
from nostall._save import PreparedSave, SaveTarget
from nostall._staging import Guard, Marks, stage_behind
from nostall._values import Layout
from nostall._writer.faults import Faults
from nostall._writing import write_in_background
from nostall.errors import NostallError, SaveAbortedError, StagingError
from nostall.stats import Timeline


def stage(prepared: PreparedSave, engine: Engine, *, beyond_limit: bool = False) -> Snapshot:
    """Take the snapshot; when this returns, the trainer may change everything.

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
) -> tuple[Future[Snapshot], Guard]:
    """Take the snapshot behind the trainer's back, which must not change a tensor until it has waited for the guard."""
    _require_unstaged(prepared)
    # Not the parameters themselves, whose data can be replaced meanwhile; the version counter is the same.
    sources = [
        source.detach() if isinstance(source, torch.Tensor) else source
        for source in prepared.planned.sources
    ]
    detached = replace(prepared, planned=replace(prepared.planned, sources=sources))
    tensors = [source for source in sources if isinstance(source, torch.Tensor)]
    of_tensors = (isinstance(source, torch.Tensor) for source in sources)
    names = [shape.fqn for shape in compress(prepared.layout.shapes, of_tensors)]

    prepared.target.progress.to(State.STAGING)

    def begin(after: Marks) -> tuple[Snapshot, Copies]:
        Faults(prepared.target.faults).at("stage")
        with prepared.target.timeline.measure("stage"):
            return _begin_snapshot(detached, engine, after=after, is_aborted=is_aborted)

    done, guard = stage_behind(
        tensors,
        names,
        begin=begin,
        discard=lambda snapshot: give_up(snapshot, prepared.target, engine),
        is_watched=True,
    )
    return done, guard


def stage_copy(
    state_dict: Mapping[str, Any], engine: Engine, timeline: Timeline
) -> StagedStateDict:
    """Copy a state dict into snapshot memory, as far as is known to where the save will want it; for a stager.

    Raises:
        SaveTimeoutError: Earlier saves still hold all snapshot memory.
        ReservationError: There is not enough host memory.
    """
    with timeline.measure("stage"):
        leaves, staged, places = _begin_copy(state_dict, engine)
        try:
            places.fill([leaf.tensor for leaf in leaves], threads=engine.copy_threads).wait()
        except BaseException:
            staged.lease.release()
            raise
    return staged


def stage_copy_in_background(
    state_dict: Mapping[str, Any], engine: Engine, timeline: Timeline
) -> tuple[Future[StagedStateDict], Guard]:
    """As :func:`stage_copy`, behind the trainer's back. The future ends well in any case.

    DCP waits for it before it talks to other ranks, so an error would leave them waiting for this one; noted in the copy,
    it is raised by the write, where DCP shares failures.
    """
    leaves, staged, places = _begin_copy(state_dict, engine)
    tensors, threads, faults = [leaf.tensor for leaf in leaves], engine.copy_threads, engine.faults

    def begin(after: Marks) -> tuple[None, Copies]:
        Faults(faults).at("stage")
        with timeline.measure("stage"):
            return None, places.fill(tensors, threads=threads, after=after)

    done, guard = stage_behind(
        tensors,
        [leaf.fqn for leaf in leaves],
        begin=begin,
        discard=lambda _: None,
        is_watched=False,
    )
    future: Future[StagedStateDict] = Future()
    future.set_running_or_notify_cancel()

    def settle(_: Future[None]) -> None:
        if guard.failure is not None:
            staged.spoil(guard.failure)
        guard.leave()
        future.set_result(staged)

    done.add_done_callback(settle)
    return future, guard


def _begin_copy(
    state_dict: Mapping[str, Any], engine: Engine
) -> tuple[list[Leaf], StagedStateDict, Places]:
    leaves = find_leaves(state_dict)
    placement = engine.placements.get(structure_of(leaves), {})
    staged, places = stage_state_dict(state_dict, leaves, placement, engine.lease)
    return leaves, staged, places


def stage_nothing(
    state_dict: Mapping[str, Any], error: Exception, *, rank: int, path: str
) -> tuple[dict[str, Any], Guard]:
    """What takes the place of a copy that could not be made, where other ranks have to hear of it: see ``Unstaged``."""
    told = error_of(RankFailed(rank=rank, failure=failure_of(error, phase="stage")))
    told.path = path
    guard = Guard()
    guard.end(told.message)
    return unstaged(state_dict, told), guard


def give_up(snapshot: Snapshot, target: SaveTarget, engine: Engine) -> None:
    """Let go of a snapshot that is not going to be written, and of the waves before it."""
    snapshot.lease.release()
    _cancel(snapshot.earlier, target, engine)


def _cancel(written: Sequence[Future[RankReport]], target: SaveTarget, engine: Engine) -> None:
    # Nothing of a save that is given up may be written later, when its names can be another one's.
    if written:
        engine.cancel(target.job, when_done(written, joined), timeout_s=CANCEL_TIMEOUT_S)


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
            lease = lease_for(prepared, engine, most, beyond_limit=beyond_limit)
            snapshot, copies = _fill(prepared, wave, lease, engine, after)
            copies.wait()
            _require_going(prepared, written, is_aborted)
            snapshot = replace(snapshot, wave=number)
            written.append(write_in_background(snapshot, prepared.target, engine))
            lease = None  # the write's
        lease = lease_for(prepared, engine, most, beyond_limit=beyond_limit)
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


def take_over(prepared: PreparedSave, engine: Engine) -> Snapshot | None:
    """The snapshot of items that a stager has copied, copied anew where they are not in place; ``None`` for other items.

    Raises:
        StagingError: The stager's copy cannot be used.
        ReservationError: There is not enough host memory.
    """
    lease = _stager_lease(prepared, engine)
    if lease is None:
        return None
    structure = lease.label
    if isinstance(structure, Spoiled):
        raise StagingError(structure.why, rank=prepared.rank, phase="stage")
    adopted = adopt_staged(prepared.planned, prepared.layout, lease)
    if adopted is not None:
        # From here on the memory is the write's, however long it takes and whatever becomes of the staged dict.
        return replace(adopted, lease=engine.arena.adopt(lease))
    try:
        snapshot = stage(prepared, engine, beyond_limit=True)
    finally:
        lease.release()
    engine.remember_placement(structure, _placement(prepared))
    return snapshot


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
