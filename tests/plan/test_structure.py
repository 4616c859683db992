"""A structure that was saved before is recognised, and nothing else is taken for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from nostall._model.names import FileFormat
from nostall._plan.items import plan_rank
from nostall._plan.planner import serialized
from nostall._plan.structure import KnownStructure, learn_structure
from nostall.core import AsyncCallsQueue
from nostall.state_dict_saver import CheckpointMetadataCache
from support.described import Part, part, with_attributes
from support.states import blobs, schedule

State = dict[str, Any]


def planned(state: State, planner: DefaultSavePlanner | None = None) -> tuple[Any, Any]:
    planner = planner or DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plan = planner.create_local_plan()
    return planner, plan_rank(plan, planner, rank=0, file_format=FileFormat.TORCH_SAVE, path=None)


def learned(state: State, openers: Any = None, planner: Any = None) -> KnownStructure | None:
    planner, save = planned(state, planner)
    arguments = state, planner.state_dict, save
    return learn_structure(*arguments, openers) if openers else learn_structure(*arguments)


def known(state: State, openers: Any = None) -> KnownStructure:
    structure = learned(state, openers)
    assert structure is not None
    return structure


def found(structure: KnownStructure, state: State) -> list[torch.Tensor | bytes] | None:
    return structure.find(state, serialized)


def same(one: list[torch.Tensor | bytes], other: list[torch.Tensor | bytes]) -> bool:
    return len(one) == len(other) and all(
        (a == b)
        if isinstance(a, bytes) or isinstance(b, bytes)
        else (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())
        for a, b in zip(one, other, strict=True)
    )


def example() -> State:
    tied = torch.ones(3)
    return {
        "weight": torch.ones(4, 5),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "view": torch.arange(20.0)[5:9],
        "transposed": torch.ones(3, 4).t(),
        "empty": torch.empty(0, 2),
        "one": torch.ones(2, 2)[:, 0][:1],
        "complex": torch.ones(2, dtype=torch.complex64),
        "nested": OrderedDict(step=torch.tensor(1.0), list=[torch.ones(2), {"lr": 0.1}]),
        "numbers": [1, 2, [3]],
        "by number": {0: {"a": torch.ones(1)}, 1: {"a": torch.ones(1)}},
        "text": "a",
        "nothing": None,
        "tied": tied,
        "tied too": tied,
    }


def set_at(state: State, path: str, value: Any) -> State:
    *parents, last = path.split("/")
    level: Any = state
    for parent in parents:
        level = level[int(parent) if parent.isdigit() else parent]
    level[int(last) if last.isdigit() and not isinstance(level, OrderedDict) else last] = value
    return state


def test_the_same_structure_with_other_values_is_found_anew() -> None:
    """Sources are those that the planner would find, with tied weights as one object and as two."""
    structure, state, other = known(example()), example(), example()
    other["text"], other["numbers"] = "another", [4, 5, [6]]
    other["nested"]["list"][1]["lr"] = 0.0001
    other["tied"] = torch.zeros(3)
    for each in (state, other):
        sources = found(structure, each)
        assert sources is not None
        assert same(sources, list(planned(each)[1].sources))


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


CHANGES: dict[str, Callable[[State], State]] = {
    "a key more": lambda s: {**s, "more": torch.ones(1)},
    "a key less": lambda s: {k: v for k, v in s.items() if k != "weight"},
    "another order": lambda s: dict(reversed(s.items())),
    "another key that is equal": lambda s: set_at(
        s, "by number", {0: {"a": torch.ones(1)}, True: {"a": torch.ones(1)}}
    ),
    "another size": lambda s: set_at(s, "weight", torch.ones(5, 4)),
    "another dtype": lambda s: set_at(s, "weight", torch.ones(4, 5, dtype=torch.float64)),
    "other strides": lambda s: set_at(s, "weight", torch.ones(5, 4).t()),
    "no parameter any more": lambda s: set_at(s, "parameter", torch.ones(3)),
    "a gradient": lambda s: set_at(s, "weight", torch.ones(4, 5, requires_grad=True)),
    "lazily conjugated": lambda s: set_at(
        s, "complex", torch.ones(2, dtype=torch.complex64).conj()
    ),
    "lazily negated": lambda s: set_at(s, "view", torch.ones(4, dtype=torch.complex64).conj().imag),
    "meta": lambda s: set_at(s, "weight", torch.ones(4, 5, device="meta")),
    "of another library": lambda s: set_at(s, "weight", torch.ones(4, 5).to_mkldnn()),
    "nested": lambda s: set_at(
        s, "weight", torch.nested.as_nested_tensor([torch.ones(5)] * 4, layout=torch.strided)
    ),
    "zeros without memory": lambda s: set_at(s, "weight", torch._efficientzerotensor(4, 5)),
    "a recorded program": lambda s: set_at(
        s, "weight", torch._to_functional_tensor(torch.ones(4, 5))
    ),
    "without its memory": lambda s: set_at(s, "weight", emptied(torch.ones(4, 5))),
    "a view without its memory": lambda s: set_at(s, "weight", emptied(torch.ones(6, 5)[2:])),
    "a tensor where an object was": lambda s: set_at(s, "text", torch.ones(1)),
    "an object where a tensor was": lambda s: set_at(s, "weight", 1.0),
    "a tensor in a list of numbers": lambda s: set_at(s, "numbers", [1, 2, torch.ones(1)]),
    "a tensor deeper in it": lambda s: set_at(s, "numbers", [1, 2, [torch.ones(1)]]),
    "a longer list": lambda s: set_at(s, "nested/list", [torch.ones(2), {"lr": 0.1}, 1]),
    "a shape far inside": lambda s: set_at(s, "nested/list/0", torch.ones(3)),
    "a mapping of another kind": lambda s: set_at(s, "nested", dict(s["nested"])),
    "an empty view beyond its storage": lambda s: set_at(
        s, "empty", torch.empty(0).as_strided((0, 2), (2, 1), 3)
    ),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_structure_is_not_taken_for_the_known_one(change: Callable[[State], State]) -> None:
    """Anything that changes what a planner plans, or an item's look in its file, is noticed."""
    assert found(known(example()), change(example())) is None


tensors = st.builds(
    lambda size, dtype, transposed: (
        torch.zeros(size, dtype=dtype).t() if transposed else torch.zeros(size, dtype=dtype)
    ),
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from([torch.float32, torch.int8]),
    st.booleans(),
)
leaves = tensors | st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["x", "yy"])
names = st.sampled_from(["a", "b", "c"])
states = st.dictionaries(
    names,
    st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(names, inner, max_size=3)
            | st.tuples(inner)
        ),
        max_leaves=6,
    ),
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(states, states)
def test_what_is_found_is_what_the_planner_resolves(first: State, other: State) -> None:
    """The second of any two states is not recognised, or its items are the planner's."""
    structure = learned(first)
    sources = found(structure, other) if structure else None
    if sources is None:
        return
    _, before = planned(first)
    _, now = planned(other)
    assert before.share.plan.items == now.share.plan.items
    assert before.share.forms == now.share.forms
    assert same(sources, list(now.sources))


def test_saves_of_a_known_structure_equal_stock_saves(tmp_path: Path) -> None:
    """Values, lengths and file counts change; an integer may be longer than Python prints."""
    cache = CheckpointMetadataCache()
    with AsyncCallsQueue() as queue:
        for number in range(8):
            state = example()
            state["weight"].fill_(number)
            state["text"] = "x" * number
            state["seed"] = 10**5000 + number
            state["nested"]["list"][1]["lr"] = 0.1**number
            options: State = {"thread_count": 2} if number == 5 else {}
            path = tmp_path / ("same" if number in (3, 4, 6) else f"save {number}")
            schedule(queue, path, state, cache=cache, **options)
            assert (cache.known is not None) is (number >= 2)
            queue.wait()
            dcp.save(state, checkpoint_id=tmp_path / f"stock {number}", no_dist=True)
            assert blobs(path) == blobs(tmp_path / f"stock {number}")


def test_a_tensor_that_says_its_place_is_planned_every_time(tmp_path: Path) -> None:
    """Since torch 2.14 a tensor can say which parts of a larger one it holds; they may change."""
    pytest.importorskip("torch.distributed.checkpoint.protocol", reason="torch has it since 2.14")

    def state(row: int) -> State:
        tensor = torch.arange(24.0).reshape(4, 6) + row
        return {"parts": with_attributes(tensor, ((row, 0, 2), (6, 2, 2)))}

    cache = CheckpointMetadataCache()
    with AsyncCallsQueue() as queue:
        for number, row in enumerate((0, 0, 0, 0, 2, 4)):
            ours, stock = tmp_path / f"{number}", tmp_path / f"{number} by stock"
            schedule(queue, ours, state(row), cache=cache)
            queue.maybe_finalize_async_calls(blocking=True)
            dcp.save(state(row), checkpoint_id=stock)
            assert blobs(ours) == blobs(stock)


def opened(leaf: Part) -> tuple[Any, list[torch.Tensor]]:
    local = leaf.as_subclass(torch.Tensor)
    return (leaf.whole, leaf.rows), [local[at : at + count] for _, at, count in leaf.rows]


OPENERS = {Part: opened}


def of_larger(tensor: Any) -> Any:
    tensor.whole = torch.Size([9, 6])
    return tensor


def sharded_example() -> State:
    return {
        "a": part(((0, 0, 2),)),
        "two": part(((0, 0, 1), (2, 1, 1))),
        "plain": torch.rand(3),
        "text": "a",
    }


SHARDED_CHANGES: dict[str, Callable[[State], State]] = {
    "another place": lambda s: {**s, "a": part(((2, 0, 2),))},
    "a larger whole": lambda s: {**s, "a": of_larger(s["a"])},
    "one part less": lambda s: {**s, "two": part(((0, 0, 1),))},
    "another order of parts": lambda s: {**s, "two": part(((2, 1, 1), (0, 0, 1)))},
    "a plain tensor": lambda s: {**s, "a": torch.rand(8, 6)},
}


def test_sharded_tensors_are_found_where_somebody_vouches_for_their_class() -> None:
    """All parts of each, with the values of now."""
    other = sharded_example()
    sources = found(known(sharded_example(), OPENERS), other)
    assert sources is not None
    assert same(sources, list(planned(other)[1].sources))


@pytest.mark.parametrize("change", SHARDED_CHANGES.values(), ids=SHARDED_CHANGES.keys())
def test_changes_of_sharded_tensors_are_seen(change: Callable[[State], State]) -> None:
    """In their places, sizes, number and class, and in the forms of their parts."""
    assert found(known(sharded_example(), OPENERS), change(sharded_example())) is None


class OtherValues(DefaultSavePlanner):
    """Saves values of its own for one tensor, as of an average."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # DCP's
        found = super().transform_object(write_item, object)
        return found + 1 if write_item.index.fqn == "weight" else found


def test_what_depends_on_more_than_is_compared_is_planned_every_time() -> None:
    """Rare kinds of tensors, classes nobody vouches for, and planners with values of their own."""
    one_tensor_twice = {"two": part(((0, 0, 1), (2, 0, 1)))}
    assert learned({"plain": torch.ones(2), "strange": torch.eye(3).to_sparse()}) is None
    assert learned({"strange": torch.ones(3, dtype=torch.complex64).conj()}) is None
    assert learned({"strange": torch._neg_view(torch.ones(3))}) is None
    assert learned(sharded_example()) is None
    assert learned(one_tensor_twice, OPENERS) is None
    assert learned(example(), planner=OtherValues()) is None
