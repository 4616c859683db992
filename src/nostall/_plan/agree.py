"""Agree on plans: with all ranks, from a loaded checkpoint, or from the last plan.

The rule that keeps ranks together: whether ranks communicate while planning depends only on state
that *all* of them agreed on before. Once a cached plan is validated, ranks plan without
communication, so a rank whose structure or planner has changed cannot reach the others. It plans
its own share alone and sends its new plan with its results; the coordinator then makes new
metadata. The outcome of that save informs all ranks, and they plan the next one together.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Hashable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from nostall import _torch
from nostall._commit.columns import (
    CompactPlan,
    LocalPlans,
    PlanColumns,
    compact,
    in_full,
    matches_loaded,
    same_plan,
    sharing,
)
from nostall._model.threads import gc_paused
from nostall._model.values import MOST_SERIES, SaveId
from nostall._plan.planner import (
    PlannerKey,
    PlanShare,
    is_stocks_own,
    plan_columns,
    planner_failures,
    require_one_shape,
)
from nostall._ranks.failures import exception_for, sendable
from nostall._ranks.group import Coordination, coordination_of
from nostall.errors import SaveError

if TYPE_CHECKING:
    from nostall._save.split_plan import CheckpointMetadataCache
    from nostall.filesystem_async import FileSystemWriterAsync

# --- alone: a decision without communication ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPlans:
    """A rank's part of the last plan that all ranks made together."""

    group: Hashable
    """Identifies the process group and this rank in it; plans of another group are not used."""
    planner: PlannerKey
    local: SavePlan
    final: SavePlan
    """This rank's part of the global plan."""
    validated: bool
    """Whether all ranks found their plans equal in two consecutive saves, or to a loaded one's."""

    def are_agreed_in(self, group: Hashable) -> bool:
        """Whether a group plans its next save without communication; equal on all its ranks."""
        return self.validated and self.group == group

    def final_for(self, local: SavePlan, planner: PlannerKey) -> SavePlan:
        """This rank's final plan, without communication; :attr:`final` if nothing has changed."""
        if self.planner == planner and same_plan(self.local, local):
            return self.final
        items = local.items
        if self.planner.kind == planner.kind:
            # Its share without unchanged items that are assigned to another rank. A planner of
            # another kind may leave to other ranks what this one wrote.
            own = {item.index for item in self.final.items}
            before: dict[Any, WriteItem] = {item.index: item for item in self.local.items}
            items = [item for item in items if item.index in own or before.get(item.index) != item]
        return replace(local, items=items, storage_data=self.final.storage_data)


@gc_paused()
@planner_failures()
def local_plan(
    state_dict: dict[str, Any],
    writer: FileSystemWriterAsync,
    planner: SavePlanner,
    wrapper: _torch.DistWrapper,
) -> SavePlan:
    """This rank's plan, before the global plan."""
    arguments: dict[str, Any] = {"state_dict": state_dict, "is_coordinator": wrapper.is_coordinator}
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        arguments["storage_meta"] = writer.storage_meta()
    planner.set_up_planner(**arguments)
    writer.set_up_storage_writer(wrapper.is_coordinator, rank=wrapper.rank, use_collectives=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    if getattr(planner, "can_run_decentralized_global_plan", False):
        # This rank's own planner decides; here, so that a failure still reaches all ranks.
        plan = getattr(planner, "create_decentralized_global_plan", lambda local: local)(plan)
    return plan


# --- together -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _FinalPlan:
    """Sent by the coordinator to each rank after planning together."""

    save: SaveId
    final: PlanShare | SavePlan | None
    validated: bool
    failures: dict[int, _torch.WrappedException]


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalPlan:
    """Every rank's final plan and the metadata that describes them all."""

    local: list[CompactPlan]
    final: Sequence[PlanShare | SavePlan]
    """Each rank's final plan, or how to make it of the local one."""
    metadata: Metadata


def plan_together(
    state_dict: dict[str, Any],
    writer: FileSystemWriterAsync,
    planner: SavePlanner,
    wrapper: _torch.DistWrapper,
    cache: CheckpointMetadataCache | None,
    identity: tuple[Any, Any],
) -> tuple[SavePlan, Metadata | None, SaveId]:
    """Plan with all ranks. Collective.

    Returns this rank's final plan; the metadata, on the coordinator; and what identifies the save.
    The plan is kept in ``cache``, if given, and is valid for ``identity``: the group and the
    planner's configuration. Raises ``CheckpointException`` on every rank if a rank could not plan;
    a rank that fails after all have agreed on a loaded checkpoint's plans raises its own error,
    which finalising reports to the others.
    """
    coordination = coordination_of(wrapper)
    local: SavePlan | _torch.WrappedException
    try:
        local = local_plan(state_dict, writer, planner, wrapper)
    except Exception as error:  # reported to every rank
        local = _torch.wrap_exception(error)
    loaded = None if cache is None else _agreed_loaded_plans(local, coordination, cache)
    made: GlobalPlan | None = None
    if loaded is not None and isinstance(local, SavePlan) and cache is not None:
        assert cache.last_save is not None  # agreed on, too
        try:
            made = global_plan_of(loaded, writer, planner)
            final = _applied(made.final[coordination.rank], local)
        except Exception:  # all ranks agreed to plan alone, so this one must, too
            _keep(cache, identity, local, local, None, validated=True)
            raise
        mine = _FinalPlan(save=cache.last_save, final=final, validated=True, failures={})
    else:
        sent: CompactPlan | _torch.WrappedException
        if isinstance(local, SavePlan):
            sent = compact(local) if is_stocks_own(planner) else local
        else:
            sent = sendable(local)
        answers, gathered = None, coordination.gather(sent)
        if gathered is not None:
            answers, made = _decide_centrally(gathered, writer, planner, coordination, cache)
        mine = coordination.scatter(answers)
    if mine.final is None or not isinstance(local, SavePlan):
        raise exception_for(mine.failures, step="plan", on_coordinator=coordination.is_coordinator)
    final = _applied(mine.final, local)
    made = made if coordination.is_coordinator else None
    if cache is None:
        return final, None if made is None else made.metadata, mine.save
    cache.last_save = mine.save
    metadata = _keep(cache, identity, local, final, made, validated=mine.validated)
    return final, metadata, mine.save


def _applied(final: PlanShare | SavePlan, local: SavePlan) -> SavePlan:
    return final.applied_to(local) if isinstance(final, PlanShare) else final


@gc_paused()
def _decide_centrally(
    gathered: list[CompactPlan | _torch.WrappedException],
    writer: FileSystemWriterAsync,
    planner: SavePlanner,
    coordination: Coordination,
    cache: CheckpointMetadataCache | None,
) -> tuple[list[_FinalPlan], GlobalPlan | None]:
    plans = sharing(plan for plan in gathered if isinstance(plan, CompactPlan))
    failures = {
        rank: plan for rank, plan in enumerate(gathered) if not isinstance(plan, CompactPlan)
    }
    save = SaveId(new_series(), 0)
    if not failures:
        try:
            before = [] if cache is None else cache.all_plans or []
            validated = len(before) == len(plans) and all(map(same_plan, before, plans))
            made = global_plan_of(plans, writer, planner)
            return [
                _FinalPlan(save=save, final=final, validated=validated, failures={})
                for final in made.final
            ], made
        except Exception as error:  # sent to every rank
            failures = {coordination.rank: sendable(_torch.wrap_exception(error))}
    refusal = _FinalPlan(save=save, final=None, validated=False, failures=failures)
    return [refusal] * coordination.world_size, None


def new_series() -> int:
    """A random number for the identities of saves."""
    return secrets.randbelow(MOST_SERIES) + 1


@gc_paused()
@planner_failures()
def global_plan_of(
    plans: list[CompactPlan], writer: FileSystemWriterAsync, planner: SavePlanner
) -> GlobalPlan:
    """The global plan; every rank computes the same one."""
    require_one_shape(plans)
    columns = [plan for plan in plans if isinstance(plan, PlanColumns)]
    if len(columns) == len(plans) and is_stocks_own(planner) and writer._ignores_items:
        made = plan_columns(columns, to_lowest_rank=planner.dedup_save_to_lowest_rank)
        if made is not None:
            shares, metadata = made
            named = writer.prepare_global_plan([SavePlan([]) for _ in plans])
            final = [
                share._replace(storage_data=each.storage_data)
                for share, each in zip(shares, named, strict=True)
            ]
            return GlobalPlan(local=plans, final=final, metadata=metadata)
    full = [in_full(plan) for plan in plans]
    finals, metadata = planner.create_global_plan(list(full))
    if getattr(planner, "can_run_decentralized_global_plan", False):
        finals = full
    return GlobalPlan(local=plans, final=writer.prepare_global_plan(finals), metadata=metadata)


def _agreed_loaded_plans(
    local: SavePlan | _torch.WrappedException,
    coordination: Coordination,
    cache: CheckpointMetadataCache,
) -> list[CompactPlan] | None:
    """The loaded plans, if they equal all ranks' plans; one reduction, unless plans are kept."""
    if cache.plans is not None:
        return None
    loaded = cache.loaded_all_plans
    same = isinstance(local, SavePlan) and matches_loaded(
        loaded, rank=coordination.rank, world_size=coordination.world_size, local=local
    )
    series = new_series() if coordination.is_coordinator else 0
    differs, series = coordination.maximum([int(not same), series])
    agreed = not differs
    cache.last_save = SaveId(series, 0)
    cache.verified_loaded = agreed
    cache.loaded_all_plans = None  # compared once
    return LocalPlans(loaded).plans if agreed and loaded is not None else None


def _keep(
    cache: CheckpointMetadataCache,
    identity: tuple[Any, Any],
    local: SavePlan,
    final: SavePlan,
    made: GlobalPlan | None,
    *,
    validated: bool,
) -> Metadata | None:
    """Keep a plan; on the coordinator, which has ``made``, return metadata for this save."""
    note = final.storage_data
    if type(note) is not _torch.StoragePrefix and hasattr(note, "prefix"):
        # Without the coordinator's note about this save's directory.
        final = replace(final, storage_data=_torch.StoragePrefix(note.prefix))
    group, planner = identity
    plans = CachedPlans(group=group, planner=planner, local=local, final=final, validated=validated)
    if made is not None:
        with_local_plans(made.metadata, made.local)
    cache.keep(plans, made)
    return None if made is None else cache.reusable_metadata()


# --- metadata for one save ------------------------------------------------------------------------


def reusable_metadata(metadata: Metadata) -> Metadata:
    """A shallow copy for the next save of a structure, without the parts of one checkpoint."""
    twin = copy(metadata)
    twin.storage_data = twin.storage_meta = None
    return twin


@gc_paused()
@planner_failures()
def replanned_metadata(
    changed: dict[int, SavePlan], before: list[CompactPlan] | None, planner: SavePlanner | None
) -> Metadata:
    """Metadata for a save in which some ranks planned alone; on the coordinator.

    ``changed`` has the new plans of those ranks, ``before`` the plans of all ranks that the others
    reused; ``SaveError`` if those, or the planner, are unknown here.
    """
    if before is None or planner is None:
        raise SaveError(
            f"the structure changed on ranks {sorted(changed)} and other ranks' plans are unknown",
            phase="commit",
            hint="the next save plans anew",
        )
    now = [compact(changed[rank]) if rank in changed else each for rank, each in enumerate(before)]
    require_one_shape(now if is_stocks_own(planner) else ())
    plans = [changed.get(rank) or in_full(plan) for rank, plan in enumerate(before)]
    _, metadata = planner.create_global_plan(plans)
    return with_local_plans(metadata, plans)


def with_local_plans(metadata: Metadata, plans: Iterable[CompactPlan]) -> Metadata:
    """Attach all ranks' plans where frameworks look for them."""
    vars(metadata)["all_local_plans"] = LocalPlans(plans)
    return metadata
