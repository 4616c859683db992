"""Which steps stay, whatever the steps and the policies are."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nostall._manager.policies import (
    KeepBest,
    KeepEvery,
    KeepLatest,
    Policy,
    StepRecord,
    better_of,
    steps_to_keep,
)
from nostall._manager.steps import name_of, step_of
from nostall.errors import OptionError
from nostall.manager import CheckpointManager


def records(*steps: int, loss: Sequence[float] = ()) -> list[StepRecord]:
    """Steps committed one second apart, with these losses."""
    metrics = [{"loss": each} for each in loss] or [{} for _ in steps]
    return [
        StepRecord(step=step, committed_at_s=float(number), metrics=each)
        for number, (step, each) in enumerate(zip(steps, metrics, strict=True))
    ]


POLICIES = st.one_of(
    st.builds(KeepLatest, st.integers(1, 6)),
    st.builds(KeepBest, st.integers(1, 6), st.just("loss"), st.sampled_from(["min", "max"])),
    st.builds(KeepEvery, steps=st.integers(1, 9)),
    st.builds(KeepEvery, seconds=st.floats(0.1, 20)),
)
RECORDS = st.lists(
    st.tuples(st.integers(0, 60), st.floats(0, 100), st.floats(-1, 1) | st.none()),
    unique_by=lambda each: each[0],
).map(
    lambda drawn: [
        StepRecord(step=step, committed_at_s=at_s, metrics={} if loss is None else {"loss": loss})
        for step, at_s, loss in sorted(drawn)
    ]
)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (KeepLatest(2), {8, 10}),
        (KeepLatest(9), {2, 4, 6, 8, 10}),
        (KeepBest(1, "loss"), {6}),
        (KeepBest(2, "loss", "max"), {2, 10}),
        (KeepBest(9, "loss"), {2, 4, 6, 10}),
        (KeepBest(9, "accuracy"), set()),
        (KeepEvery(steps=4), {4, 8}),
        (KeepEvery(seconds=2), {2, 6, 10}),
    ],
    ids=str,
)
def test_each_policy_keeps_what_it_says(policy: Policy, kept: set[int]) -> None:
    """With equal metrics the higher step; never one without the metric, or with NaN."""
    losses = [0.5, 0.1, 0.1, math.nan, 0.9]
    assert set(policy.keeps(records(2, 4, 6, 8, 10, loss=losses))) == kept


class KeepGood(KeepLatest):
    """A user's own, made from one that needs no metrics."""

    def keeps(self, records: Sequence[StepRecord]) -> Collection[int]:
        return {each.step for each in records if each.metrics.get("loss", 1.0) < 0.5}


def test_a_policy_made_from_another_gets_metrics(tmp_path: Path) -> None:
    """Otherwise it would not keep what its user wants to keep, and the steps would be removed."""
    with CheckpointManager(tmp_path, keep=KeepGood(1)) as manager:
        for step, loss in ((1, 0.9), (2, 0.1), (3, 0.9), (4, 0.9)):
            manager.save(step, {"weight": torch.ones(2)}, metrics={"loss": loss})
            manager.wait()
        assert manager.all_steps() == [2, 4]


# Each `type: ignore` is an argument of a wrong type, which is an error at run time, too.
REFUSED: dict[str, Callable[[], object]] = {
    "no steps": lambda: KeepLatest(0),
    "no best": lambda: KeepBest(0, "loss"),
    "mode": lambda: KeepBest(1, "loss", "least"),  # type: ignore[arg-type]
    "nothing": KeepEvery,
    "both": lambda: KeepEvery(steps=1, seconds=1.0),
    "no time": lambda: KeepEvery(seconds=0.0),
    "negative": lambda: KeepEvery(steps=-1),
    "metric's mode": lambda: better_of([], {"loss": "lowest"}),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("what", REFUSED)
def test_impossible_policies_are_refused(what: str) -> None:
    """Where they are written."""
    with pytest.raises(OptionError):
        REFUSED[what]()


@given(RECORDS, st.lists(POLICIES, max_size=4), st.data())
def test_what_must_stay_stays(
    seen: list[StepRecord], policies: list[Policy], data: st.DataObject
) -> None:
    """The highest step, the last of this run, and what any policy keeps; without one, all."""
    steps = [each.step for each in seen]
    own = data.draw(st.lists(st.sampled_from(steps), unique=True)) if steps else []
    kept = steps_to_keep(seen, policies, own)
    assert kept <= set(steps)
    assert kept >= {*steps[-1:], *own[-1:]}
    for policy in policies or [KeepLatest(99)]:
        assert kept >= set(policy.keeps(seen))


@given(RECORDS, st.lists(POLICIES, min_size=1, max_size=4))
def test_a_second_decision_removes_nothing_more(
    seen: list[StepRecord], policies: list[Policy]
) -> None:
    """Policies keep all survivors of a pass until a step is added, so a pass may be interrupted."""
    kept = steps_to_keep(seen, policies)
    left = [each for each in seen if each.step in kept]
    assert steps_to_keep(left, policies) == kept


def test_policies_may_disagree_about_a_metric() -> None:
    """The best and the worst stay; which is better is then for the caller to say."""
    both = [KeepBest(1, "loss"), KeepBest(1, "loss", "max"), KeepBest(1, "speed", "max")]
    assert better_of(both, {}) == {"speed": "max"}
    assert better_of(both, {"loss": "min"}) == {"speed": "max", "loss": "min"}


@given(st.integers(0, 10**15))
def test_a_directory_name_is_parsed_back(step: int) -> None:
    """Each step has one name."""
    assert step_of(name_of(step)) == step


def test_other_names_are_no_steps() -> None:
    """Two directories never have the same step."""
    padded = ["step-1", "step-0000000001", "step-00000000\N{ARABIC-INDIC DIGIT ONE}"]
    others = [*padded, "step-00000001x", "Step-000000001", "latest"]
    assert {name: step_of(name) for name in others} == dict.fromkeys(others)
