"""Make a plan with all ranks, or alone; the impure half of ``_plan.cache``.

:class:`PlanMemory` is what one sequence of saves remembers. It holds structure only: plans, and on the coordinator the
metadata without what belongs to one checkpoint. Metadata handed in or out is never changed.
"""

from __future__ import annotations

import inspect
import io
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from nostall import _torch
from nostall._commit.metadata import local_plans_in
from nostall._plan.cache import CachedPlans, matches_loaded, same_plan
from nostall._ranks.failures import exception_for, sendable
from nostall._ranks.group import Coordination
from nostall.errors import NostallError, SaveError


class PlanningWriter(Protocol):
    """What planning needs of a storage writer."""

    def storage_meta(self) -> StorageMeta | None:
        """What DCP tells planners about the storage."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001  # DCP's
        """Tell the writer its role."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The writer's say in this rank's plan."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The writer's say in all ranks' plans."""


class PlanMemory:
    """What one sequence of saves remembers of its plans."""

    def __init__(self) -> None:
        self.plans: CachedPlans | None = None
        """The plans of the last save that all ranks planned together."""
        self.loaded_all_plans: list[SavePlan] | None = None
        """All ranks' plans from a loaded checkpoint, until they have been looked at."""
        self.verified_loaded = False
        """Whether those plans turned out to be still everyone's."""
        self._all_plans: list[SavePlan] | None = None
        self._metadata: Metadata | None = None

    def adopt_loaded(self, metadata: Metadata | None) -> None:
        """Take over what a loaded checkpoint says about the plans it was saved with.

        Only where no save has been planned yet: later ones rest on what all ranks have planned together, and a rank that
        went on from something else would save what is not in its metadata.
        """
        if self.plans is None:
            self._metadata = metadata
            self.loaded_all_plans = local_plans_in(metadata)

    def keep(
        self, plans: CachedPlans, all_plans: list[SavePlan] | None, metadata: Metadata | None
    ) -> None:
        """Remember a plan that all ranks made together; plans and metadata are known to the coordinator only."""
        self.plans = plans
        self._all_plans = all_plans
        if metadata is not None:
            self._metadata = metadata

    def forget(self) -> None:
        """Plan the next save together, because some rank's structure has changed or a save failed."""
        self.plans = self.loaded_all_plans = self._all_plans = None
        self.verified_loaded = False

    def note_loaded(self, *, still_valid: bool) -> None:
        """Note whether the loaded plans are still everyone's; they are looked at once."""
        self.verified_loaded = still_valid
        self.loaded_all_plans = None

    @property
    def all_plans(self) -> list[SavePlan] | None:
        """All ranks' plans of the last save that they planned together; on the coordinator only."""
        return self._all_plans

    def reusable_metadata(self) -> Metadata | None:
        """Metadata for one more save of the same structure."""
        return None if self._metadata is None else _unsaved(self._metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What the coordinator tells a rank after planning together."""

    final: SavePlan | None
    validated: bool
    failures: dict[int, _torch.WrappedException]


@contextmanager
def planner_failures() -> Iterator[None]:
    """Where a planner is asked: what it raises is an ``Exception``, as all that is told to other ranks has to be.

    DCP's ``CheckpointException`` is none; from elsewhere it is what all ranks have been told already.

    Raises:
        SaveError: The planner has raised DCP's.
    """
    try:
        yield
    except _torch.CheckpointException as error:
        raise SaveError(f"the planner has raised {error!r}", phase="plan") from error


@planner_failures()
def local_plan(
    state_dict: dict[str, Any],
    writer: PlanningWriter,
    planner: SavePlanner,
    wrapper: _torch.DistWrapper,
) -> SavePlan:
    """This rank's plan, before other ranks have a say."""
    arguments: dict[str, Any] = {"state_dict": state_dict, "is_coordinator": wrapper.is_coordinator}
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        arguments["storage_meta"] = writer.storage_meta()
    planner.set_up_planner(**arguments)
    writer.set_up_storage_writer(wrapper.is_coordinator, rank=wrapper.rank, use_collectives=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    if getattr(planner, "can_run_decentralized_global_plan", False):
        # This rank's own planner decides what it writes; here, so that a failure is still told to all ranks.
        plan = getattr(planner, "create_decentralized_global_plan", lambda local: local)(plan)
    return plan


def set_up_writer(writer: PlanningWriter, plan: SavePlan, wrapper: _torch.DistWrapper) -> None:
    """What :func:`local_plan` does with the writer, for a plan that is known already."""
    writer.set_up_storage_writer(wrapper.is_coordinator, rank=wrapper.rank, use_collectives=True)
    writer.prepare_local_plan(plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalPlan:
    """Every rank's final plan and the metadata that describes them all."""

    local: list[SavePlan]
    final: list[SavePlan]
    metadata: Metadata


def plan_together(
    local: SavePlan | _torch.WrappedException,
    writer: PlanningWriter,
    planner: SavePlanner,
    coordination: Coordination,
    memory: PlanMemory | None,
    identity: tuple[Any, Any],
) -> tuple[SavePlan, Metadata | None]:
    """Plan with all ranks. Collective.

    Args:
        local: This rank's plan, or why it has none.
        writer: This rank's writer.
        planner: This rank's planner.
        coordination: The ranks.
        memory: Where to keep what was planned, if anywhere.
        identity: What the plan is valid for: the group and the planner's configuration.

    Returns:
        This rank's final plan; the metadata on the coordinator.

    Raises:
        CheckpointException: A rank could not plan; raised on every rank.
    """
    mine_or_none = local if isinstance(local, SavePlan) else None
    loaded = None if memory is None else _agreed_loaded_plans(mine_or_none, coordination, memory)
    if loaded is not None and isinstance(local, SavePlan) and memory is not None:
        try:
            made = _global_plan(loaded, writer, planner)
        except Exception:
            # The others have agreed to plan without talking and so must this rank; it fails when the save is finalised.
            plans = CachedPlans(
                group=identity[0], planner=identity[1], local=local, final=local, validated=True
            )
            memory.keep(plans, None, None)
            raise
        final = made.final[coordination.rank]
        plans = CachedPlans(
            group=identity[0], planner=identity[1], local=local, final=_kept(final), validated=True
        )
        return final, _keep(memory, plans, made if coordination.is_coordinator else None)
    gathered = coordination.gather(local if isinstance(local, SavePlan) else sendable(local))
    told, made_here = None, None
    if gathered is not None:
        told, made_here = _decide_centrally(gathered, writer, planner, coordination, memory)
    mine = coordination.scatter(told)
    if mine.failures or mine.final is None or not isinstance(local, SavePlan):
        raise exception_for(mine.failures, step="plan", on_coordinator=coordination.is_coordinator)
    if memory is None:
        return mine.final, None if made_here is None else made_here.metadata
    plans = CachedPlans(
        group=identity[0],
        planner=identity[1],
        local=local,
        final=_kept(mine.final),
        validated=mine.validated,
    )
    return mine.final, _keep(memory, plans, made_here)


def _kept(final: SavePlan) -> SavePlan:
    """A final plan without what the coordinator says of the directory of this one save."""
    if type(final.storage_data) is _torch.StoragePrefix or not hasattr(
        final.storage_data, "prefix"
    ):
        return final
    return replace(final, storage_data=_torch.StoragePrefix(final.storage_data.prefix))


def _decide_centrally(
    gathered: list[SavePlan | _torch.WrappedException],
    writer: PlanningWriter,
    planner: SavePlanner,
    coordination: Coordination,
    memory: PlanMemory | None,
) -> tuple[list[_Told], GlobalPlan | None]:
    failures = {rank: plan for rank, plan in enumerate(gathered) if not isinstance(plan, SavePlan)}
    plans = [plan for plan in gathered if isinstance(plan, SavePlan)]
    made = None
    validated = False
    if not failures:
        try:
            validated = memory is not None and _same_plans(memory.all_plans, plans)
            made = _global_plan(plans, writer, planner)
        except Exception as error:  # told to every rank
            failures = {coordination.rank: sendable(_torch.wrap_exception(error))}
    if made is None:
        refusal = _Told(final=None, validated=False, failures=failures)
        return [refusal] * coordination.world_size, None
    return [_Told(final=final, validated=validated, failures={}) for final in made.final], made


def _same_plans(before: list[SavePlan] | None, plans: list[SavePlan]) -> bool:
    return (
        before is not None
        and len(before) == len(plans)
        and all(same_plan(one, other) for one, other in zip(before, plans, strict=True))
    )


@planner_failures()
def _global_plan(plans: list[SavePlan], writer: PlanningWriter, planner: SavePlanner) -> GlobalPlan:
    """The same on whichever rank it is computed."""
    finals, metadata = planner.create_global_plan(list(plans))
    if getattr(planner, "can_run_decentralized_global_plan", False):
        finals = plans
    return GlobalPlan(local=plans, final=writer.prepare_global_plan(finals), metadata=metadata)


def _agreed_loaded_plans(
    local: SavePlan | None, coordination: Coordination, memory: PlanMemory
) -> list[SavePlan] | None:
    """The loaded checkpoint's plans if they are still everyone's; one reduction, whatever a rank has loaded."""
    if memory.plans is not None:
        return None
    loaded = memory.loaded_all_plans
    same = local is not None and matches_loaded(
        loaded, rank=coordination.rank, world_size=coordination.world_size, local=local
    )
    agreed = coordination.maximum([int(not same)]) == [0]
    memory.note_loaded(still_valid=agreed)
    return loaded if agreed else None


def _keep(memory: PlanMemory, plans: CachedPlans, made: GlobalPlan | None) -> Metadata | None:
    """Remember a plan; ``made`` is there on the coordinator, which gets metadata for the save at hand."""
    if made is None:
        memory.keep(plans, None, None)
        return None
    with_local_plans(made.metadata, made.local)
    memory.keep(plans, made.local, made.metadata)
    return _unsaved(made.metadata)


@planner_failures()
def replanned_metadata(
    changed: dict[int, SavePlan], before: list[SavePlan] | None, planner: SavePlanner | None
) -> Metadata:
    """Metadata for a save in which some ranks planned alone; on the coordinator.

    Args:
        changed: The new plans of those ranks.
        before: All ranks' plans that the others reused.
        planner: The coordinator's planner.

    Raises:
        SaveError: The other ranks' plans are not known here.
    """
    if before is None or planner is None:
        raise SaveError(
            f"the structure changed on ranks {sorted(changed)} and the other ranks' plans are not known",
            phase="commit",
            hint="the next save plans anew",
        )
    plans = [changed.get(rank, plan) for rank, plan in enumerate(before)]
    _, metadata = planner.create_global_plan(plans)
    return with_local_plans(metadata, plans)


def with_local_plans(metadata: Metadata, plans: list[SavePlan]) -> Metadata:
    """Put all ranks' plans where frameworks look for them."""
    vars(metadata)["all_local_plans"] = plans
    return metadata


def _unsaved(metadata: Metadata) -> Metadata:
    """The same structure for another save: a copy without what belongs to one checkpoint."""
    twin = copy(metadata)
    twin.storage_data = None
    twin.storage_meta = None
    return twin


def group_identity(group: dist.ProcessGroup | None, *, use_dist: bool) -> Any:
    """Differs, on all ranks alike, once a group is destroyed and made again."""
    return weakref.ref(group or dist.group.WORLD) if use_dist else None


def planner_key(planner: SavePlanner) -> Any:
    """The planner's class and switches, before it has seen a state dict."""
    switches = {
        name: value
        for name, value in vars(planner).items()
        if isinstance(value, bool | int | str) and name != "is_coordinator"
    }
    return type(planner), tuple(sorted(switches.items()))


def is_stocks_own(planner: SavePlanner) -> bool:
    """Whether it is DCP's planner itself in its usual configuration, whose plan is a function of the structure alone."""
    return (
        type(planner) is DefaultSavePlanner
        and planner.flatten_state_dict
        and planner.flatten_sharded_tensors
        and not _torch.caches_plans(planner)
    )


def serialize(value: Any) -> bytes:
    """The bytes that DCP's planner makes of an object."""
    if type(value) in _SCALARS and _is_short(value):
        return _serialize_scalar(type(value).__name__, repr(value), value)
    return _saved(value)


_SCALARS = (bool, int, float, str, type(None))
_LONGEST_KEPT = 256
"""Characters of a text, or bits of an integer, whose bytes are kept: all that are kept together are a few megabytes."""


def _is_short(value: bool | float | str | None) -> bool:  # noqa: FBT001  # a value of the user's
    if isinstance(value, str):
        return len(value) <= _LONGEST_KEPT
    return not isinstance(value, int) or value.bit_length() <= _LONGEST_KEPT


@lru_cache(maxsize=4096)
def _serialize_scalar(_kind: str, _text: str, value: Any) -> bytes:
    # The key holds more than the value, because 1 == 1.0 == True and 0.0 == -0.0.
    return _saved(value)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def without_state(planner: SavePlanner) -> SavePlanner:
    """A planner that can still make global plans, but keeps no tensor of this save alive until it is finalised."""
    twin = copy(planner)
    vars(twin).pop("state_dict", None)
    return twin


def as_save_error(error: BaseException, rank: int) -> NostallError:
    if isinstance(error, NostallError):
        return error
    return SaveError(f"{type(error).__name__}: {error}", rank=rank, phase="plan")
