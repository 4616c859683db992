"""Staging before planning, as ``dcp.async_save`` does it: a copy of the state dict, and the save that finds it in place.

:func:`stage_for_later` copies to the places that the last save of the structure gave its tensors; :func:`take_over` finds
the image complete then, or takes a snapshot of the copy and remembers the places.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from nostall._engine import Engine
from nostall._memory.arena import Lease
from nostall._memory.copying import Copies, Places
from nostall._memory.overlap import Marks, SnapshotFence, stage_behind
from nostall._memory.snapshot import Snapshot, adopt_staged
from nostall._memory.staged_state import (
    Leaf,
    Spoiled,
    StagedStateDict,
    find_leaves,
    stage_state_dict,
    structure_of,
    unstaged,
)
from nostall._model.jobs import RankFailed
from nostall._ranks.failures import error_of, failure_of
from nostall._save.session import PreparedSave
from nostall._save.stage import stage
from nostall._writer.faults import Faults
from nostall.errors import StagingError
from nostall.stats import Timeline

_log = logging.getLogger("nostall")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A state dict that was copied, or is being copied."""

    copied: dict[str, Any] | Future[Any]
    """With overlapped staging a future, which always ends well."""
    fence: SnapshotFence | None
    """Who knows whether the copy can be used and tensors may change; ``None`` if both is so."""


def stage_for_later(
    state_dict: Mapping[str, Any],
    engine: Engine,
    timeline: Timeline,
    *,
    overlapped: bool,
    rank: int | None,
    path: str,
) -> Staged:
    """Copy a state dict into snapshot memory, as far as is known to where the save will want it.

    Args:
        state_dict: What ``dcp.async_save`` was given.
        engine: Whose memory to copy to.
        timeline: Where to note how long it takes.
        overlapped: Whether to copy behind the trainer's back.
        rank: This rank, if others save with it: what fails here has to fail there, too.
        path: The checkpoint directory, for errors.

    Returns:
        If there are other ranks, a copy that could not be made is what makes the save fail on all of them, with one of the
        errors below.

    Raises:
        SaveTimeoutError: Earlier saves still hold all snapshot memory.
        ReservationError: There is not enough host memory.
    """
    try:
        if overlapped:
            return _copy_in_background(state_dict, engine, timeline)
        return Staged(copied=_copy(state_dict, engine, timeline), fence=None)
    except Exception as error:
        if rank is None:
            raise
        _log.error("the snapshot could not be taken path=%s: %s", path, error)
        return _nothing(state_dict, error, rank=rank, overlapped=overlapped, path=path)


def _copy(state_dict: Mapping[str, Any], engine: Engine, timeline: Timeline) -> StagedStateDict:
    with timeline.measure("stage"):
        leaves, staged, places = _begin_copy(state_dict, engine)
        try:
            places.fill([leaf.tensor for leaf in leaves], method=engine.copy_method).wait()
        except BaseException:
            staged.lease.release()
            raise
    return staged


def _copy_in_background(
    state_dict: Mapping[str, Any], engine: Engine, timeline: Timeline
) -> Staged:
    """As :func:`_copy`, behind the trainer's back. The future ends well in any case.

    DCP waits for it before it talks to other ranks, so an error would leave them waiting for this one; noted in the copy,
    it is raised by the write, where DCP shares failures.
    """
    leaves, staged, places = _begin_copy(state_dict, engine)
    method, faults = engine.copy_method, engine.faults

    def begin(tensors: list[torch.Tensor], after: Marks) -> tuple[None, Copies]:
        Faults(faults).at("stage")
        with timeline.measure("stage"):
            return None, places.fill(tensors, method=method, after=after)

    done, fence = stage_behind(
        [leaf.tensor for leaf in leaves],
        [leaf.fqn for leaf in leaves],
        begin=begin,
        discard=lambda _: None,
        is_watched=False,
        timeout_s=engine.options.save_timeout_s,
    )
    future: Future[StagedStateDict] = Future()
    future.set_running_or_notify_cancel()

    def settle(_: Future[None]) -> None:
        if fence.failure is not None:
            staged.spoil(fence.failure)
        fence.leave()
        future.set_result(staged)

    done.add_done_callback(settle)
    return Staged(copied=future, fence=fence)


def _begin_copy(
    state_dict: Mapping[str, Any], engine: Engine
) -> tuple[list[Leaf], StagedStateDict, Places]:
    leaves = find_leaves(state_dict)
    placement = engine.placements.get(structure_of(leaves), {})
    staged, places = stage_state_dict(state_dict, leaves, placement, engine.lease)
    return leaves, staged, places


def _nothing(
    state_dict: Mapping[str, Any], error: Exception, *, rank: int, overlapped: bool, path: str
) -> Staged:
    """What takes the place of a copy that could not be made, where other ranks have to hear of it: see ``Unstaged``."""
    told = error_of(RankFailed(rank=rank, failure=failure_of(error, phase="stage")))
    told.path = path
    fence = SnapshotFence()
    fence.end(told.message)
    nothing = unstaged(state_dict, told)
    if not overlapped:
        return Staged(copied=nothing, fence=fence)
    future: Future[dict[str, Any]] = Future()
    future.set_result(nothing)
    return Staged(copied=future, fence=fence)


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
