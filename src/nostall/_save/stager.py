"""Staging before planning, as in ``dcp.async_save``: copy the state dict, then use the copy.

:func:`stage_for_later` copies tensors to their places in the file image, as in the last save of the
structure, or in a plan that this rank makes alone. Then :func:`take_over` finds the image complete.
If it is not, since other ranks write some of the items, the copy is written like live tensors, and
its places are kept for the next save.

:func:`warmup` reserves the memory of such a plan, and starts the writer process, before the first
save.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from nostall._engine import Engine, default_engine
from nostall._memory.arena import Lease
from nostall._memory.copying import Copies, TargetViews
from nostall._memory.overlap import Marks, SnapshotFence, stage_behind
from nostall._memory.snapshot import Snapshot, adopt_staged
from nostall._memory.staged_state import (
    Leaf,
    Placement,
    StagedStateDict,
    find_leaves,
    stage_state_dict,
    structure_of,
    unstaged,
)
from nostall._model.jobs import Faults, RankFailed
from nostall._model.names import FileFormat
from nostall._model.threads import uninterrupted
from nostall._model.values import ItemShape, Layout
from nostall._plan.items import plan_rank
from nostall._plan.layout import FileNaming, Packing
from nostall._ranks.failures import error_of, failure_of
from nostall._ranks.group import Coordination, Membership
from nostall._save.prepared import PreparedSave, WriterSettings
from nostall.errors import NostallError, OptionError, SaveTimeoutError, StagingError
from nostall.options import is_possible_wait, require_integer
from nostall.stats import Timeline

_log = logging.getLogger("nostall")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """A copy that ``dcp.async_save`` has asked for before planning."""

    fence: SnapshotFence | None
    """Says whether the copy is valid and tensors may change; ``None`` if both are true."""
    timeline: Timeline
    ranks: Membership
    """The ranks of the call; the thread that saves may run after their group was destroyed."""


def stage_for_later(
    state_dict: Mapping[str, Any], engine: Engine, settings: WriterSettings, ranks: Coordination
) -> tuple[dict[str, Any] | Future[Any], Staging]:
    """Copy a state dict into snapshot memory, if possible to its places in the image; with
    overlapped staging, during training.

    Returns the copy, with overlapped staging a future, which never raises. If others of ``ranks``
    save with this one, a failed copy is replaced by an object that fails the save on every rank.
    Otherwise the error is raised, such as ``SaveTimeoutError`` (earlier saves still hold all
    snapshot memory) or ``ReservationError`` (not enough host memory).
    """
    timeline = Timeline()
    copied: dict[str, Any] | Future[Any]
    fence: SnapshotFence | None = None
    try:
        if settings.staging == "overlapped":
            copied, fence = _copy_in_background(state_dict, engine, timeline, settings)
        else:
            copied = _copy(state_dict, engine, timeline, settings)
    except Exception as error:  # fails the save on every rank
        if ranks.world_size == 1:
            raise
        _log.error("the snapshot could not be taken: path=%s: %s", settings.directory, error)
        copied, fence = _substitute(state_dict, error, settings, rank=ranks.rank)
    return copied, Staging(fence=fence, timeline=timeline, ranks=Membership(ranks))


def _copy(
    state_dict: Mapping[str, Any], engine: Engine, timeline: Timeline, settings: WriterSettings
) -> StagedStateDict:
    with timeline.measure("stage"):
        leaves, staged, places = _begin_copy(state_dict, engine, settings)
        try:
            places.fill([leaf.tensor for leaf in leaves], method=engine.copy_method).wait()
        except BaseException:  # passed on; no copy owns the lease yet
            staged.lease.release()
            raise
    return staged


def _copy_in_background(
    state_dict: Mapping[str, Any], engine: Engine, timeline: Timeline, settings: WriterSettings
) -> tuple[Future[Any], SnapshotFence]:
    """Copy during training. The future never raises.

    DCP waits for it before it communicates, so an error would leave other ranks waiting for this
    one. The error is noted in the copy instead and raised by the write, where DCP shares failures.
    """
    leaves, staged, places = _begin_copy(state_dict, engine, settings)
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
            staged.lease.label = fence.failure
        fence.leave()
        future.set_result(staged)

    done.add_done_callback(settle)
    return future, fence


def _begin_copy(
    state_dict: Mapping[str, Any], engine: Engine, settings: WriterSettings
) -> tuple[list[Leaf], StagedStateDict, TargetViews]:
    leaves = find_leaves(state_dict)
    naming, packing = settings.naming(), settings.packing(engine)
    key = (structure_of(leaves), naming, packing)
    placement = engine.placements.get(key)
    if placement is None:
        shapes: Sequence[ItemShape] = ()
        with suppress(Exception):  # planning the save raises it again, where DCP shares failures
            shapes = shapes_planned_alone(state_dict, settings.file_format)
        # Right if no other rank writes an item of this one.
        placement = _placement(engine.lay_out(shapes, naming, packing)) if shapes else {}
        engine.remember_placement(key, placement)
    staged, places = stage_state_dict(state_dict, leaves, placement, engine.lease)
    return leaves, staged, places


def shapes_planned_alone(
    state_dict: Mapping[str, Any], file_format: FileFormat = FileFormat.TORCH_SAVE
) -> Sequence[ItemShape]:
    """The items of this rank if no other rank writes one of them, with DCP's default planner."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state_dict), is_coordinator=True)
    plan = planner.create_local_plan()
    return plan_rank(plan, planner, rank=0, file_format=file_format, path=None).share.shapes


def _substitute(
    state_dict: Mapping[str, Any], error: Exception, settings: WriterSettings, *, rank: int
) -> tuple[dict[str, Any] | Future[Any], SnapshotFence]:
    """The substitute for a failed copy, which fails the save on other ranks: see ``Unstaged``."""
    failure = error_of(RankFailed(rank=rank, failure=failure_of(error, phase="stage")))
    failure.path = settings.directory
    fence = SnapshotFence()
    fence.fail(failure)
    substitute = unstaged(state_dict, failure)
    if settings.staging != "overlapped":
        return substitute, fence
    future: Future[dict[str, Any]] = Future()
    future.set_result(substitute)
    return future, fence


def take_over(prepared: PreparedSave) -> Snapshot | None:
    """The snapshot of staged items that are in their places; ``None`` for other items.
    ``StagingError`` if the stager's copy cannot be used.
    """
    engine, settings = prepared.target.engine, prepared.target.settings
    lease = _stager_lease(prepared, engine)
    if lease is None:
        return None
    structure = lease.label
    if isinstance(structure, StagingError):
        error = copy(structure)
        error.rank = settings.rank
        raise error
    adopted = adopt_staged(prepared.planned, prepared.layout, lease)
    if adopted is None:
        key = (structure, settings.naming(), settings.packing(engine))
        engine.remember_placement(key, _placement(prepared.layout))
        return None
    # The write owns the memory now, also if it outlives the staged dict.
    return replace(adopted, lease=engine.arena.adopt(lease))


def _stager_lease(prepared: PreparedSave, engine: Engine) -> Lease | None:
    if not engine.arena.anything_labelled:
        return None
    for source in prepared.planned.sources:
        if not isinstance(source, bytes) and source.is_cpu and source.nbytes:
            lease = engine.arena.lease_at(source.data_ptr())
            if lease is not None and lease.label is not None:
                return lease
    return None


def _placement(layout: Layout) -> Placement:
    """Offset and length of each payload in the image, by name; ``""`` is the whole image."""
    shapes = layout.shapes
    names = Counter(shape.fqn for shape in shapes)
    placement = {"": (0, layout.image_nbytes)}
    for file in layout.files:
        for slot in file.slots:
            fqn = shapes[slot.item].fqn
            if names[fqn] == 1 and shapes[slot.item].container is not None:
                offset = file.image_offset + slot.payload_offset
                placement[fqn] = (offset, slot.payload_nbytes)
    return placement


# --- warm-up --------------------------------------------------------------------------------------

_CONTAINERS_NBYTES = 2 << 20
"""Reserved for containers: 1.4 KB per tensor."""


def warmup(share: int | Mapping[str, Any] = 0, *, timeout: float = 30.0, wait: bool = True) -> None:
    """Start the writer process and reserve snapshot memory before the first save needs them.

    Without it, most of the time of a first save is the system's, for new memory: a first
    ``dcp.async_save`` of 1 GiB blocks for 630 to 680 ms and is durable after 1.2 to 1.3 s; after
    ``warmup`` it blocks for 75 to 85 ms and is durable after 0.6 to 0.7 s, as later ones.

    Args:
        share: The state dict that will be saved, or the size of this rank's share of it in bytes.
            Tensors that are replicated over ranks count in full: if the split functions save them,
            pass the size instead. 0 starts the process only.
        timeout: Seconds to wait for the process.
        wait: Whether to return when everything is ready. If not, a thread reserves the memory, and
            the first save waits for it, for ``EngineOptions.save_timeout_s`` at most; it raises the
            errors, too.

    Raises:
        ReservationError: There is not enough host memory.
        SaveTimeoutError: The process did not start in time.
        OptionError: ``share`` or ``timeout`` is not possible.
    """
    if not is_possible_wait(timeout):
        raise OptionError(f"invalid timeout={timeout!r}", hint="use seconds")
    engine = default_engine()
    if isinstance(share, Mapping):
        shapes = shapes_planned_alone(share)
        nbytes = engine.lay_out(shapes, FileNaming(prefix=""), Packing(file_count=1)).image_nbytes
        nbytes = min(nbytes, engine.options.max_wave_nbytes or nbytes)
    elif isinstance(share, Integral):
        nbytes = require_integer("share", share, at_least=0)
    else:
        raise OptionError(
            f"warmup() got an object of type {type(share).__name__}",
            hint="pass the state dict that will be saved, or a number of bytes",
        )

    def warm_up() -> None:
        try:
            _warm_up(engine, nbytes, timeout)
        except NostallError as error:  # the first save meets it, too
            _log.warning("the warm-up failed: %s", error)

    with uninterrupted():
        if wait:
            _warm_up(engine, nbytes, timeout)
        else:
            engine.reserve_on_thread(warm_up)


def _warm_up(engine: Engine, nbytes: int, timeout_s: float) -> None:
    writer = engine.writer()
    if nbytes:
        lease = engine.lease(nbytes + _CONTAINERS_NBYTES)
        lease.block.populate()
        lease.release()
    if not writer.wait_ready(timeout_s):
        raise SaveTimeoutError(
            f"writer process {writer.pid} was not ready within {timeout_s:g} s, or ended",
            phase="warmup",
            hint="its standard error says why; sys.executable must be a Python interpreter",
        )
