"""Choose how to plan: with all ranks, from a loaded checkpoint, or from the last plan. Pure.

The rule that keeps ranks together: whether ranks communicate while planning depends only on state
that *all* of them agreed on before. Once a cached plan is validated, ranks plan without
communication, so a rank whose structure has changed cannot reach the others. It plans its own share
alone (:class:`Changed`) and sends its new plan with its results; the coordinator then makes new
metadata. The outcome of that save informs all ranks, and they plan the next one together.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPlans:
    """A rank's part of the last plan that all ranks made together."""

    group: Hashable
    """Identifies the process group and this rank in it; plans of another group are not used."""
    planner: Hashable
    """Identifies the planner's configuration."""
    local: SavePlan
    """This rank's local plan."""
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
    cached: CachedPlans | None, *, group: Hashable, planner: Hashable, local: SavePlan
) -> Route:
    """How this rank plans; :class:`Together` on every rank of a group or on none."""
    if cached is None or not plans_alone(cached, group=group):
        return Together()
    if cached.planner != planner:  # it may leave to other ranks what this one wrote
        return Changed(replace(local, storage_data=cached.final.storage_data), local)
    if same_plan(cached.local, local):
        return Reuse(cached.final)
    return Changed(_own_share(cached, local), local)


def same_plan(one: Any, other: Any) -> bool:
    """Whether two plans have the same items in the same order; storage data may differ."""
    return bool(
        one is other or (one.items == other.items and one.planner_data == other.planner_data)
    )


def _own_share(cached: CachedPlans, local: SavePlan) -> SavePlan:
    """This rank's share without unchanged items that are assigned to another rank."""
    own = {item.index for item in cached.final.items}
    before: dict[Any, WriteItem] = {item.index: item for item in cached.local.items}
    items = [item for item in local.items if item.index in own or before.get(item.index) != item]
    return replace(local, items=items, storage_data=cached.final.storage_data)
