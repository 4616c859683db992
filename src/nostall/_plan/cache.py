"""Decide how the next plan is made: with all ranks, from what a loaded checkpoint says, or from the last one. Pure.

The rule that keeps ranks together: whether ranks talk while planning depends only on what *all* of them agreed on
before. Once a cached plan is validated nobody talks, so a rank whose structure has changed cannot call the others; it
plans its own share alone (:class:`Changed`) and its new plan travels with its results, where the coordinator makes the
metadata anew. All ranks learn of it with the outcome of that save, and the next one is planned by all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPlans:
    """What a rank keeps of the last plan that all ranks made together."""

    group: Hashable
    """Identifies the process group and this rank in it; plans of another group are worthless."""
    planner: Hashable
    """Identifies the planner's configuration."""
    local: SavePlan
    """What this rank asked for."""
    final: SavePlan
    """What it was told to write."""
    validated: bool
    """Whether all ranks found the plans of two saves in a row equal, or equal to those of a loaded checkpoint."""


@dataclass(frozen=True, slots=True)
class Together:
    """All ranks plan together, and compare with their cached plans."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """This rank's plan is unchanged; no communication."""

    final: SavePlan


@dataclass(frozen=True, slots=True)
class Changed:
    """This rank's plan has changed since all agreed to reuse; no communication, the others learn of it later."""

    final: SavePlan
    local: SavePlan
    """The new plan, for the coordinator."""


Route: TypeAlias = Together | Reuse | Changed


def nobody_talks(cached: CachedPlans | None, *, group: Hashable) -> bool:
    """Whether the ranks of a group plan their next save without each other; equal on all of them."""
    return cached is not None and cached.validated and cached.group == group


def choose_route(
    cached: CachedPlans | None, *, group: Hashable, planner: Hashable, local: SavePlan
) -> Route:
    """How this rank plans; either every rank of a group gets :class:`Together` or none does."""
    if cached is None or not nobody_talks(cached, group=group):
        return Together()
    if cached.planner == planner and same_plan(cached.local, local):
        return Reuse(cached.final)
    return Changed(_plan_alone(cached, local), local)


def same_plan(one: Any, other: Any) -> bool:
    """Whether two plans ask for the same items in the same order, whatever they are stored as."""
    return bool(
        one is other or (one.items == other.items and one.planner_data == other.planner_data)
    )


def matches_loaded(
    loaded: Sequence[SavePlan] | None, *, rank: int, world_size: int, local: SavePlan
) -> bool:
    """Whether this rank's plan is the one that a loaded checkpoint was saved with."""
    return loaded is not None and len(loaded) == world_size and same_plan(loaded[rank], local)


def _plan_alone(cached: CachedPlans, local: SavePlan) -> SavePlan:
    """This rank's share without the items that, unchanged, another rank has been told to write."""
    own = {item.index for item in cached.final.items}
    before: dict[Any, WriteItem] = {item.index: item for item in cached.local.items}
    items = [item for item in local.items if item.index in own or before.get(item.index) != item]
    return replace(local, items=items, storage_data=cached.final.storage_data)
