"""Policies are pure: which steps stay, whatever the steps and the policies are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
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
    unseen_metrics,
)
from nostall._manager.steps import name_of, step_of
from nostall.errors import OptionError


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


def test_latest_are_the_highest_steps() -> None:
    """Also where there are fewer."""
    assert set(KeepLatest(2).keeps(records(1, 5, 9))) == {5, 9}
    assert set(KeepLatest(9).keeps(records(1, 5))) == {1, 5}


def test_best_are_those_with_the_best_metric() -> None:
    """Equal metrics favour the higher step; steps without the metric, or with NaN, never count."""
    seen = records(1, 2, 3, 4, 5, loss=[0.5, 0.1, 0.1, float("nan"), 0.9])
    assert set(KeepBest(1, "loss").keeps(seen)) == {3}
    assert set(KeepBest(2, "loss", "max").keeps(seen)) == {5, 1}
    assert set(KeepBest(9, "loss").keeps(seen)) == {1, 2, 3, 5}
    assert set(KeepBest(9, "accuracy").keeps(seen)) == set()


def test_every_so_many_steps_or_seconds() -> None:
    """Multiples of a step; or the lowest one and those that are far enough from the last."""
    assert set(KeepEvery(steps=4).keeps(records(2, 4, 6, 8))) == {4, 8}
    assert set(KeepEvery(seconds=2).keeps(records(10, 20, 30, 40, 50))) == {10, 30, 50}


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


@given(RECORDS, st.lists(POLICIES, min_size=1, max_size=4), st.data())
def test_what_must_stay_stays(
    seen: list[StepRecord], policies: list[Policy], data: st.DataObject
) -> None:
    """The highest step, the last of this run, and what any policy keeps, always."""
    steps = [each.step for each in seen]
    own = data.draw(st.lists(st.sampled_from(steps), unique=True)) if steps else []
    kept = steps_to_keep(seen, policies, own)
    assert kept <= set(steps)
    assert kept >= {*steps[-1:], *own[-1:]}
    for policy in policies:
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


def test_without_policies_everything_stays() -> None:
    """Nothing is removed unless it was asked for."""
    assert steps_to_keep(records(1, 2, 3), []) == {1, 2, 3}


@given(st.integers(0, 10**15))
def test_a_directory_name_is_parsed_back(step: int) -> None:
    """Each step has one name."""
    assert step_of(name_of(step)) == step


@pytest.mark.parametrize(
    "name",
    [
        "step-1",
        "step-0000000001",
        "step-00000001x",
        "Step-000000001",
        "step-00000000\N{ARABIC-INDIC DIGIT ONE}",
        "latest",
    ],
)
def test_other_names_are_no_steps(name: str) -> None:
    """Two directories never have the same step."""
    assert step_of(name) is None


def test_metrics_that_no_step_has_are_found() -> None:
    """Only those by which a policy keeps steps."""
    policies = [KeepLatest(1), KeepBest(1, "los"), KeepBest(2, "loss")]
    assert unseen_metrics(policies, records(1, 2, loss=[0.5, 0.25])) == ["los"]
    assert unseen_metrics(policies, records(1)) == ["los", "loss"]
    assert unseen_metrics([KeepLatest(1)], records(1)) == []
