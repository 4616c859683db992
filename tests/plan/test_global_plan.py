"""Global plans made from columns are stock's; when ranks plan alone, and use plans again."""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from nostall._commit.columns import (
    LocalPlans,
    PlanColumns,
    compact,
    in_full,
    matches_loaded,
    same_plan,
    sharing,
)
from nostall._commit.metadata import PLANS_KEY, load_metadata, local_plans_in
from nostall._plan.agree import CachedPlans
from nostall._plan.planner import PlannerKey, plan_columns, require_one_shape
from nostall._save.plans_by_name import SentPlan
from nostall.errors import RankMismatchError, UntrustedMetadataError

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn]


def item(
    name: str, kind: WriteItemType, *place: tuple[int, ...], of: Any = torch.float32
) -> WriteItem:
    """An object, or the part of a tensor with these offsets, sizes and shape of the whole."""
    if kind is WriteItemType.BYTE_IO:
        return WriteItem(MetadataIndex(name), kind)
    offsets, sizes, shape = map(torch.Size, place)
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=of), shape)
    return WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data)


@st.composite
def parts(draw: Any, name: str) -> list[WriteItem]:
    """The items of one name that all ranks together have."""
    kind, dtype = draw(st.sampled_from(WriteItemType)), draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=2)))
    if kind is WriteItemType.BYTE_IO:
        return [item(name, kind)]
    if kind is WriteItemType.TENSOR or not shape:
        return [item(name, kind, (0,) * len(shape), shape, shape, of=dtype)]
    spans = []
    for length in shape:
        cuts = draw(st.lists(st.integers(0, length), max_size=2))
        spans.append(list(itertools.pairwise([0, *sorted(cuts), length])))
    unique: dict[tuple[int, ...], tuple[int, ...]] = {}
    for box in itertools.product(*spans):
        if draw(st.integers(0, 19)):  # or a part is missing
            unique[tuple(begin for begin, _ in box)] = tuple(end - begin for begin, end in box)
    return [item(name, kind, at, of, shape, of=dtype) for at, of in unique.items()]


@st.composite
def local_plans(draw: Any) -> list[SavePlan]:
    """Plans of some ranks: each part is planned by one of them or by several."""
    ranks = draw(st.integers(1, 4))
    of_rank: dict[int, list[WriteItem]] = defaultdict(list)
    for number in range(draw(st.integers(0, 5))):
        for each in draw(parts(f"name {number}")):
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                of_rank[rank].append(each)
    plans = []
    for rank in range(ranks):
        items = draw(st.permutations(of_rank[rank]))
        names = draw(st.permutations([each.index.fqn for each in items]))
        paths = {name: (name, draw(st.sampled_from([0, rank]))) for name in names}
        plans.append(SavePlan(items, planner_data=paths))
    return plans


def by_stock(
    planner: DefaultSavePlanner, plans: list[SavePlan]
) -> tuple[list[Any], Metadata] | None:
    """Final plans and metadata; ``None`` if it refuses the plans."""
    try:
        finals, metadata = planner.create_global_plan(plans)
    except (AssertionError, AttributeError, ValueError):
        return None
    return list(map(hinted, finals)), metadata


def hinted(plan: SavePlan) -> Any:
    """A plan with its hints, which are not compared otherwise."""
    return plan, [each.index.index for each in plan.items]


@given(plans=local_plans(), to_lowest_rank=st.booleans())
def test_the_global_plan_is_that_of_stock(
    plans: list[SavePlan],
    to_lowest_rank: bool,  # noqa: FBT001  # of hypothesis
) -> None:
    """Who writes what, the order of items and chunks, hints, and the planner's own data."""
    columns = [each for each in sharing(map(compact, plans)) if isinstance(each, PlanColumns)]
    assert len(columns) == len(plans)
    stock = by_stock(DefaultSavePlanner(dedup_save_to_lowest_rank=to_lowest_rank), plans)
    made = plan_columns(columns, to_lowest_rank=to_lowest_rank)
    assert (made is None) == (stock is None)
    if made is not None and stock is not None:
        shares, metadata = made
        finals = [share.applied_to(plan) for share, plan in zip(shares, plans, strict=True)]
        assert list(map(hinted, finals)) == stock[0]
        assert metadata == stock[1]
        for mine, theirs in (
            (metadata.planner_data, stock[1].planner_data),
            (metadata.state_dict_metadata, stock[1].state_dict_metadata),
        ):
            assert list(mine) == list(theirs)


@given(plans=local_plans())
def test_plans_arrive_as_they_were_sent(plans: list[SavePlan]) -> None:
    """Plans pickled as columns come back equal, even if ranks share some, and from a checkpoint."""
    sent = pickle.loads(pickle.dumps(list(map(compact, plans))))
    assert list(map(in_full, sharing(sent))) == plans
    kept = LocalPlans(sharing(sent))
    assert kept == plans
    assert kept[:1] == plans[:1]
    assert LocalPlans.of_plain(pickle.loads(pickle.dumps(kept.plain))) == plans
    others = pickle.loads(pickle.dumps(kept))
    assert (type(others), others) == (list, plans)


@given(plans=local_plans())
def test_stocks_planner_understands_what_ranks_send(plans: list[SavePlan]) -> None:
    """It may be that of the coordinator, while others have ``nostall.SavePlanner``."""
    received = pickle.loads(
        pickle.dumps([SentPlan(**vars(plan), made=plan.items) for plan in plans])
    )
    assert by_stock(DefaultSavePlanner(), received) == by_stock(DefaultSavePlanner(), plans)
    assert [plan.items[:] for plan in received] == [plan.items for plan in plans]
    assert pickle.loads(pickle.dumps(received)) == plans


def test_what_ranks_have_in_common_is_kept_once() -> None:
    """A rank adds at most 10 bytes per tensor to a checkpoint if all tensors are cut alike."""

    def kept(ranks: int) -> int:
        plans = []
        for rank in range(ranks):
            of_rank = [
                item(f"layers.{each}.weight", WriteItemType.SHARD, (rank,), (1,), (ranks,))
                for each in range(1000)
            ]
            paths = {each.index.fqn: (each.index.fqn,) for each in of_rank}
            plans.append(compact(SavePlan(of_rank, planner_data=paths)))
        sent = pickle.loads(pickle.dumps(plans))
        return len(pickle.dumps(LocalPlans(sharing(sent)).plain, protocol=3))

    few, many = kept(2), kept(34)
    assert (many - few) / (32 * 1000) <= 10


class OwnItem(WriteItem):
    """An item class of a user's planner, as the other ones here."""


class OwnPlan(SavePlan): ...


class OwnChunk(ChunkStorageMetadata): ...


class OwnData(TensorWriteData): ...


def unusual_plans() -> dict[str, SavePlan]:
    """Plans of a class, or with an item, that a planner or an object of the user's may make."""
    shard = item("a", WriteItemType.SHARD, (1,), (1,), (2,))
    data, one = shard.tensor_data, torch.Size([1])
    assert data is not None
    parts: dict[str, dict[str, Any]] = {
        "own chunk": {"chunk": OwnChunk(one, one)},
        "other chunk": {"chunk": ChunkStorageMetadata(torch.Size([0]), one)},
        "no chunk": {"chunk": None},
        "no properties": {"properties": None},
        "memory format": {"properties": TensorProperties(memory_format=torch.channels_last_3d)},
        "shape": {"size": (2,)},
    }
    items = {
        "item": OwnItem(shard.index, shard.type, None, data),
        "hint": replace(shard, index=replace(shard.index, index=3)),
        "name": replace(shard, index=MetadataIndex(7, one)),  # type: ignore[arg-type]  # as unflattened
        "object": replace(shard, type=WriteItemType.BYTE_IO),
        "data": replace(shard, tensor_data=OwnData(data.chunk, data.properties, data.size)),
        **{name: replace(shard, tensor_data=replace(data, **part)) for name, part in parts.items()},
    }
    return {"plan": OwnPlan([]), **{name: SavePlan([each]) for name, each in items.items()}}


@pytest.mark.parametrize("name", unusual_plans())
def test_a_plan_that_is_not_of_the_usual_kind_stays_as_it_is(name: str) -> None:
    """Stock's planner judges it, on the coordinator; a planner may add to a plan of its own."""
    plan = unusual_plans()[name]
    assert compact(plan) is plan
    assert in_full(plan) is plan
    assert LocalPlans([plan])[0] is plan


def test_plans_are_kept_as_columns_whoever_made_them() -> None:
    """Whole plans, which ranks send after a change of structure, are kept as columns, too."""
    plan = SavePlan([item("a", WriteItemType.BYTE_IO)], planner_data={})
    columns = compact(plan)
    assert isinstance(columns, PlanColumns)
    assert LocalPlans([plan, columns]).plain == 2 * [[*columns]]


@pytest.mark.parametrize("plain", [None, 7, [7], [[7]]])
def test_plans_of_an_unknown_form_are_left_out(plain: Any) -> None:
    """A later nostall may write another one; the checkpoint can be loaded nevertheless."""
    assert LocalPlans.of_plain(plain) is None
    found = Metadata({}, planner_data={PLANS_KEY: plain})
    content = pickle.dumps(found, protocol=3)
    assert not hasattr(load_metadata(content, path="/d"), "all_local_plans")
    assert local_plans_in(found) is None


@pytest.mark.parametrize(
    "columns",
    [
        (["a"], b"", [], [], [], [], []),
        (["a"], b"\x07", [None], [()], [()], [0], []),
        (["a"], b"\x02", [(0,)], [(1,)], [(1,)], [3], []),
        (["a"], b"\x02", ["no"], [(1,)], [(1,)], [0], [TensorProperties()]),
        (7, 7, 7, 7, 7, 7, 7),
    ],
)
def test_damaged_plans_equal_no_plan(columns: Any) -> None:
    """A rank that has them says so to the others, which wait for it."""
    loaded = LocalPlans.of_plain([[*columns, {}]])
    assert loaded is not None
    with pytest.raises(UntrustedMetadataError, match="are not plans"):
        loaded[0]
    assert not matches_loaded(loaded, rank=0, world_size=1, local=SavePlan([]))


def test_shapes_that_differ_between_ranks_are_refused() -> None:
    """Only one of the tensors would be saved; the error names both shapes and their ranks."""
    whole, part = WriteItemType.TENSOR, WriteItemType.SHARD

    def plans(*last: WriteItem) -> list[Any]:
        items = [item("a", whole, (0,), (4,), (4,)), item("b", WriteItemType.BYTE_IO)]
        items.append(item("c", part, (0,), (3,), (6,)))
        equal = [compact(SavePlan(items, planner_data={})) for _ in range(2)]
        return sharing([*equal, compact(SavePlan([*last], planner_data={}))])

    alike = [item("a", whole, (0,), (4,), (4,)), item("b", whole, (0,), (2,), (2,))]
    require_one_shape(plans(*alike, item("c", part, (3,), (3,), (6,))))
    for kind, place, name in (
        (whole, ((0,), (5,), (5,)), "a"),
        (whole, ((0, 0), (4, 1), (4, 1)), "a"),
        (part, ((3,), (4,), (7,)), "c"),
    ):
        with pytest.raises(RankMismatchError, match=rf"{name} differs.* rank 0 and .* rank 2"):
            require_one_shape(plans(item(name, kind, *place)))


# --- planning together or alone -------------------------------------------------------------------

ITEMS = st.builds(
    lambda name, size: item(name, WriteItemType.TENSOR, (0,), (size,), (size,)),
    st.sampled_from("abcde"),
    st.integers(1, 2),
)
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


@given(cached=caches())
def test_whether_ranks_talk_does_not_depend_on_one_ranks_plan(cached: CachedPlans) -> None:
    """All ranks plan together if what they agreed on is not valid for this group; else none."""
    assert cached.are_agreed_in("g") == (cached.validated and cached.group == "g")


@given(cached=caches(), local=PLANS, planner=PLANNERS)
def test_a_rank_that_changed_writes_all_that_only_it_knows(
    cached: CachedPlans, local: SavePlan, planner: PlannerKey
) -> None:
    """Not what another rank writes; but all, if another class of planner might assign otherwise."""
    assume(cached.planner != planner or not same_plan(cached.local, local))
    final = cached.final_for(local, planner)
    assert final.storage_data == cached.final.storage_data
    told = {one.index for one in cached.final.items}
    for one in local.items:
        is_same_kind = planner.kind == cached.planner.kind
        left_to_others = is_same_kind and one in cached.local.items and one.index not in told
        assert (one in final.items) == (not left_to_others)
    assert [one for one in local.items if one in final.items] == final.items


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
