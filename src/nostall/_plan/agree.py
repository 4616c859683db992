"""Agree on plans: with all ranks, from a loaded checkpoint, or from the last plan.

The rule that keeps ranks together: whether ranks communicate while planning depends only on state
that *all* of them agreed on before. Once a cached plan is validated, ranks plan without
communication, so a rank whose structure or planner has changed cannot reach the others. It plans
its own share alone (:class:`Changed`) and sends its new plan with its results; the coordinator then
makes new metadata. The outcome of that save informs all ranks, and they plan the next one together.

:class:`PlanMemory` keeps the structure of one sequence of saves: plans and, on the coordinator, the
metadata without the parts of a single checkpoint. Metadata passed in or out is never changed.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Hashable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
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
from nostall._commit.metadata import local_plans_in
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
from nostall._ranks.group import Coordination
from nostall.errors import SaveError

# --- how to plan: a decision without communication ------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class Together:
    """All ranks plan together, and compare with their cached plans."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """This rank's plan is unchanged; no communication."""

    final: SavePlan


@dataclass(frozen=True, slots=True)
class Changed:
    """This rank's plan has changed since all ranks agreed to reuse; no communication yet."""

    final: SavePlan
    local: SavePlan
    """The new plan, for the coordinator."""


Route: TypeAlias = Together | Reuse | Changed


def plans_alone(cached: CachedPlans | None, *, group: Hashable) -> bool:
    """Whether a group plans its next save without communication; equal on all its ranks."""
    return cached is not None and cached.validated and cached.group == group


def choose_route(
    cached: CachedPlans | None, *, group: Hashable, planner: PlannerKey, local: SavePlan
) -> Route:
    """How this rank plans; :class:`Together` on every rank of a group or on none."""
    if cached is None or not plans_alone(cached, group=group):
        return Together()
    if cached.planner == planner and same_plan(cached.local, local):
        return Reuse(cached.final)
    if cached.planner.kind != planner.kind:  # it may leave to other ranks what this one wrote
        return Changed(replace(local, storage_data=cached.final.storage_data), local)
    # Its share without unchanged items that are assigned to another rank.
    own = {item.index for item in cached.final.items}
    before: dict[Any, WriteItem] = {item.index: item for item in cached.local.items}
    items = [item for item in local.items if item.index in own or before.get(item.index) != item]
    return Changed(replace(local, items=items, storage_data=cached.final.storage_data), local)


# --- planning -------------------------------------------------------------------------------------


class PlanningWriter(Protocol):
    """The methods of a storage writer that planning uses."""

    @property
    def _ignores_items(self) -> bool:
        """Whether :meth:`prepare_global_plan` is known to look at no item."""

    def storage_meta(self) -> StorageMeta | None:
        """DCP's description of the storage, for planners."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001  # DCP's
        """Set the writer's role."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """This rank's plan, as the writer changes it."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """All ranks' plans, as the writer changes them."""


class PlanMemory:
    """The plans of one sequence of saves."""

    def __init__(self) -> None:
        self.plans: CachedPlans | None = None
        """The plans of the last save that all ranks planned together."""
        self.loaded_all_plans: Sequence[SavePlan] | None = None
        """All ranks' plans from a loaded checkpoint, until they are compared."""
        self.verified_loaded = False
        """Whether those plans equal the plans of all ranks."""
        self.all_plans: list[CompactPlan] | None = None
        """All ranks' plans of the last save planned together; on the coordinator only."""
        self._metadata: Metadata | None = None
        self.last_save: SaveId | None = None
        """The identity of the last save, as long as ranks are known to count alike."""

    def adopt_loaded(self, metadata: Metadata | None) -> None:
        """Adopt the plans that a loaded checkpoint was saved with.

        No effect while plans of an earlier save are kept: later saves rest on the plans that all
        ranks made together, and a rank with other plans would write items that its metadata lacks.
        """
        if self.plans is None:
            self._metadata = metadata
            self.loaded_all_plans = local_plans_in(metadata)

    def keep(self, plans: CachedPlans, made: GlobalPlan | None) -> None:
        """Keep a plan that all ranks made together; ``made`` is given on the coordinator only."""
        self.plans = plans
        self.all_plans = None if made is None else made.local
        if made is not None:
            self._metadata = made.metadata

    def forget(self) -> None:
        """Plan the next save together: a rank's structure has changed, or a save failed."""
        self.plans = self.loaded_all_plans = self.all_plans = None
        self.verified_loaded = False

    def reusable_metadata(self) -> Metadata | None:
        """Metadata for one more save of the same structure: without parts of one checkpoint."""
        return None if self._metadata is None else reusable_metadata(self._metadata)


def reusable_metadata(metadata: Metadata) -> Metadata:
    """A shallow copy for the next save of a structure, without the parts of one checkpoint."""
    twin = copy(metadata)
    twin.storage_data = twin.storage_meta = None
    return twin


@dataclass(frozen=True, slots=True, kw_only=True)
class _FinalPlan:
    """Sent by the coordinator to each rank after planning together."""

    save: SaveId
    final: PlanShare | SavePlan | None
    validated: bool
    failures: dict[int, _torch.WrappedException]


@gc_paused()
@planner_failures()
def local_plan(
    state_dict: dict[str, Any],
    writer: PlanningWriter,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalPlan:
    """Every rank's final plan and the metadata that describes them all."""

    local: list[CompactPlan]
    final: Sequence[PlanShare | SavePlan]
    """Each rank's final plan, or how to make it of the local one."""
    metadata: Metadata


def plan_together(
    local: SavePlan | _torch.WrappedException,
    writer: PlanningWriter,
    planner: SavePlanner,
    coordination: Coordination,
    memory: PlanMemory | None,
    identity: tuple[Any, Any],
) -> tuple[SavePlan, Metadata | None, SaveId]:
    """Plan with all ranks. Collective.

    Returns this rank's final plan; the metadata, on the coordinator; and what identifies the save.
    ``local`` may be this rank's failure. The plan is kept in ``memory``, if given, and is valid for
    ``identity``: the group and the planner's configuration. Raises ``CheckpointException`` on every
    rank if a rank could not plan; a rank that fails after all have agreed on a loaded checkpoint's
    plans raises its own error, which finalising reports to the others.
    """
    loaded = None if memory is None else _agreed_loaded_plans(local, coordination, memory)
    if loaded is not None and isinstance(local, SavePlan) and memory is not None:
        assert memory.last_save is not None  # agreed on, too
        try:
            made = global_plan_of(loaded, writer, planner)
            final = made.final[coordination.rank]
            final = final.applied_to(local) if isinstance(final, PlanShare) else final
        except Exception:  # all ranks agreed to plan alone, so this one must, too
            # Finalising reports the failure.
            _keep(memory, identity, local, local, None, validated=True)
            raise
        kept = made if coordination.is_coordinator else None
        metadata = _keep(memory, identity, local, final, kept, validated=True)
        return final, metadata, memory.last_save
    sent: CompactPlan | _torch.WrappedException
    if isinstance(local, SavePlan):
        sent = compact(local) if is_stocks_own(planner) else local
    else:
        sent = sendable(local)
    gathered = coordination.gather(sent)
    answers, made_here = None, None
    if gathered is not None:
        answers, made_here = _decide_centrally(gathered, writer, planner, coordination, memory)
    mine = coordination.scatter(answers)
    if mine.failures or mine.final is None or not isinstance(local, SavePlan):
        raise exception_for(mine.failures, step="plan", on_coordinator=coordination.is_coordinator)
    final = mine.final.applied_to(local) if isinstance(mine.final, PlanShare) else mine.final
    if memory is None:
        return final, None if made_here is None else made_here.metadata, mine.save
    memory.last_save = mine.save
    metadata = _keep(memory, identity, local, final, made_here, validated=mine.validated)
    return final, metadata, mine.save


@gc_paused()
def _decide_centrally(
    gathered: list[CompactPlan | _torch.WrappedException],
    writer: PlanningWriter,
    planner: SavePlanner,
    coordination: Coordination,
    memory: PlanMemory | None,
) -> tuple[list[_FinalPlan], GlobalPlan | None]:
    plans = sharing(plan for plan in gathered if isinstance(plan, CompactPlan))
    failures = {
        rank: plan for rank, plan in enumerate(gathered) if not isinstance(plan, CompactPlan)
    }
    made = None
    validated = False
    if not failures:
        try:
            before = None if memory is None else memory.all_plans
            validated = before is not None and len(before) == len(plans)
            validated = validated and all(map(same_plan, before or (), plans))
            made = global_plan_of(plans, writer, planner)
        except Exception as error:  # sent to every rank
            failures = {coordination.rank: sendable(_torch.wrap_exception(error))}
    save = SaveId(new_series(), 0)
    if made is None:
        refusal = _FinalPlan(save=save, final=None, validated=False, failures=failures)
        return [refusal] * coordination.world_size, None
    return [
        _FinalPlan(save=save, final=final, validated=validated, failures={}) for final in made.final
    ], made


def new_series() -> int:
    """A random number for the identities of saves."""
    return secrets.randbelow(MOST_SERIES) + 1


@gc_paused()
@planner_failures()
def global_plan_of(
    plans: list[CompactPlan], writer: PlanningWriter, planner: SavePlanner
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
    local: SavePlan | _torch.WrappedException, coordination: Coordination, memory: PlanMemory
) -> list[CompactPlan] | None:
    """The loaded plans, if they equal all ranks' plans; one reduction, unless plans are kept."""
    if memory.plans is not None:
        return None
    loaded = memory.loaded_all_plans
    same = isinstance(local, SavePlan) and matches_loaded(
        loaded, rank=coordination.rank, world_size=coordination.world_size, local=local
    )
    series = new_series() if coordination.is_coordinator else 0
    differs, series = coordination.maximum([int(not same), series])
    agreed = not differs
    memory.last_save = SaveId(series, 0)
    memory.verified_loaded = agreed
    memory.loaded_all_plans = None  # compared once
    return LocalPlans.of(loaded).plans if agreed and loaded is not None else None


def _keep(
    memory: PlanMemory,
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
    memory.keep(plans, made)
    return None if made is None else memory.reusable_metadata()


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
