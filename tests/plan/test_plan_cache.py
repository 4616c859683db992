"""The decision between planning together and alone, and when a cached plan is used again."""

from __future__ import annotations

import pickle
from dataclasses import replace

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from nostall._commit.local_plans import matches_loaded, same_plan
from nostall._plan.agree import (
    CachedPlans,
    Changed,
    Reuse,
    Together,
    choose_route,
    plans_alone,
)
from nostall._plan.planner import PlannerKey


def item(name: str, size: int = 1) -> WriteItem:
    extent = torch.Size([size])
    return WriteItem(
        index=MetadataIndex(name, torch.Size([0])),
        type=WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size([0]), sizes=extent),
            properties=TensorProperties(dtype=torch.float32),
            size=extent,
        ),
    )


ITEMS = st.builds(item, st.sampled_from("abcde"), st.integers(1, 2))
PLANNERS = st.builds(PlannerKey, st.sampled_from("pq"), st.integers(1, 2))
PLANS = st.lists(ITEMS, max_size=5, unique_by=lambda one: one.index.fqn).map(SavePlan)


@st.composite
def caches(draw: st.DrawFn) -> CachedPlans:
    local = draw(PLANS)
    kept = draw(st.lists(st.booleans(), min_size=len(local.items), max_size=len(local.items)))
    mine = [one for one, keep in zip(local.items, kept, strict=True) if keep]
    return CachedPlans(
        group=draw(st.sampled_from(["g", "h"])),
        planner=draw(PLANNERS),
        local=local,
        final=replace(local, items=mine, storage_data="prefix"),
        validated=draw(st.booleans()),
    )


@given(cached=st.none() | caches(), local=PLANS, planner=PLANNERS)
def test_whether_ranks_talk_does_not_depend_on_one_ranks_plan(
    cached: CachedPlans | None, local: SavePlan, planner: PlannerKey
) -> None:
    """All ranks plan together if what they agreed on is not valid for this group; else none."""
    route = choose_route(cached, group="g", planner=planner, local=local)
    silent = cached is not None and cached.validated and cached.group == "g"
    assert plans_alone(cached, group="g") == silent
    assert isinstance(route, Together) == (not silent)


@given(cached=caches(), local=PLANS, planner=PLANNERS)
def test_a_final_plan_is_used_again_only_for_the_same_plan(
    cached: CachedPlans, local: SavePlan, planner: PlannerKey
) -> None:
    """With one item more, fewer or different, or another planner, the old plan does not fit."""
    cached = replace(cached, group="g", validated=True)
    route = choose_route(cached, group="g", planner=planner, local=local)
    same = cached.planner == planner and cached.local.items == local.items
    assert isinstance(route, Reuse) == same
    if isinstance(route, Reuse):
        assert route.final is cached.final


@given(cached=caches())
def test_an_unchanged_plan_is_always_recognised(cached: CachedPlans) -> None:
    """Also where it is an equal one, not the same object, and where storage has marked it."""
    cached = replace(cached, group="g", validated=True)
    local = pickle.loads(pickle.dumps(replace(cached.local, storage_data="anything")))
    route = choose_route(cached, group="g", planner=cached.planner, local=local)
    assert route == Reuse(cached.final)


@given(cached=caches(), local=PLANS, planner=PLANNERS)
def test_a_rank_that_changed_writes_all_that_only_it_knows(
    cached: CachedPlans, local: SavePlan, planner: PlannerKey
) -> None:
    """Alone, it writes its assigned items and what is new, not what another rank writes already.

    A planner of another class may assign all items otherwise: it writes what that one plans.
    """
    cached = replace(cached, group="g", validated=True)
    assume(cached.planner != planner or not same_plan(cached.local, local))
    route = choose_route(cached, group="g", planner=planner, local=local)
    assert isinstance(route, Changed)
    assert route.local is local
    assert route.final.storage_data == cached.final.storage_data
    told = {one.index for one in cached.final.items}
    for one in local.items:
        is_same_kind = planner.kind == cached.planner.kind
        left_to_others = is_same_kind and one in cached.local.items and one.index not in told
        assert (one in route.final.items) == (not left_to_others)
    assert [one for one in local.items if one in route.final.items] == route.final.items


@given(loaded=st.none() | st.lists(PLANS, min_size=1, max_size=4), local=PLANS, data=st.data())
def test_loaded_plans_count_only_if_this_ranks_is_among_them(
    loaded: list[SavePlan] | None, local: SavePlan, data: st.DataObject
) -> None:
    """A checkpoint of another number of ranks, or of another plan, does not stand for this one."""
    world_size = data.draw(st.integers(1, 4))
    rank = data.draw(st.integers(0, world_size - 1))
    if loaded is not None and rank < len(loaded) and data.draw(st.booleans()):
        local = replace(loaded[rank], storage_data="ours")
    expected = (
        loaded is not None
        and len(loaded) == world_size
        and loaded[rank].items == local.items
        and loaded[rank].planner_data == local.planner_data
    )
    assert matches_loaded(loaded, rank=rank, world_size=world_size, local=local) == expected
