"""Which steps stay: small frozen policies, combined by *any keeps*.

Pure: a policy sees the committed steps and names those that it keeps. What no policy keeps is
removed, except for the steps that :func:`steps_to_keep` keeps whatever the policies say.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from nostall.errors import OptionError
from nostall.options import is_possible_wait, require_integer

Better = Literal["min", "max"]
"""Whether the lowest or the highest value of a metric is the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A committed step."""

    step: int
    committed_at_s: float
    """Seconds since the epoch, as in the manifest if it was read; else by the clock of storage."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics that were saved with it; empty if no policy needs a step's files."""


class Policy(Protocol):
    """Names the steps that have to stay."""

    def keeps(self, records: Sequence[StepRecord]) -> Collection[int]:
        """The steps to keep.

        A step that is not kept must not be kept later: it may be gone.

        Args:
            records: All committed steps, in ascending order.
        """


@dataclass(frozen=True, slots=True)
class KeepLatest(Policy):
    """Keeps the ``n`` highest steps.

    Raises:
        OptionError: ``n`` is less than 1.
    """

    n: int

    def __post_init__(self) -> None:
        require_integer("n", self.n, at_least=1)

    def keeps(self, records: Sequence[StepRecord]) -> Collection[int]:
        """The ``n`` highest steps."""
        return {record.step for record in records[-self.n :]}


@dataclass(frozen=True, slots=True)
class KeepBest(Policy):
    """Keeps the ``n`` steps with the best value of a metric; of equal ones, the higher steps.

    Steps without the metric, or with NaN, are not kept by this policy.

    Raises:
        OptionError: ``n`` is less than 1, or ``mode`` is neither ``"min"`` nor ``"max"``.
    """

    n: int
    metric: str
    mode: Better = "min"

    def __post_init__(self) -> None:
        require_integer("n", self.n, at_least=1)
        if self.mode not in ("min", "max"):
            raise OptionError(f"invalid mode={self.mode!r}", hint='use "min" or "max"')

    def keeps(self, records: Sequence[StepRecord]) -> Collection[int]:
        """The ``n`` best steps."""
        sign = 1.0 if self.mode == "min" else -1.0
        values = [
            (sign * record.metrics[self.metric], -record.step)
            for record in records
            if not math.isnan(record.metrics.get(self.metric, math.nan))
        ]
        return {-step for _, step in sorted(values)[: self.n]}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepEvery(Policy):
    """Keeps every step that is a multiple of ``steps``, or one step per ``seconds``.

    With ``seconds``, the lowest step stays, and each next one that was committed at least so many
    seconds after the last that stays.

    Raises:
        OptionError: Not exactly one of them is given, or it is not positive.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise OptionError("KeepEvery needs steps or seconds", hint="pass one of them")
        if self.steps is not None:
            require_integer("steps", self.steps, at_least=1)
        elif not is_possible_wait(self.seconds) or not self.seconds:
            raise OptionError(f"invalid seconds={self.seconds!r}", hint="use seconds > 0")

    def keeps(self, records: Sequence[StepRecord]) -> Collection[int]:
        """The steps at these distances."""
        if self.steps is not None:
            return {record.step for record in records if record.step % self.steps == 0}
        kept, next_s = set(), -math.inf
        for record in records:
            if record.committed_at_s >= next_s:
                kept.add(record.step)
                next_s = record.committed_at_s + (self.seconds or 0.0)
        return kept


def policies_of(keep: Policy | Iterable[Policy] | None) -> tuple[Policy, ...]:
    """One policy, several or none."""
    policies = tuple(keep) if isinstance(keep, Iterable) else () if keep is None else (keep,)
    for policy in policies:
        if isinstance(policy, type) or not hasattr(policy, "keeps"):
            raise OptionError(
                f"invalid keep={keep!r:.200}: {policy!r:.100} is not a policy",
                hint="use KeepLatest(3), KeepBest(1, metric), KeepEvery(steps=1000), a list of"
                " these, or an object with keeps(records)",
            )
    return policies


def reads_files(policy: Policy) -> bool:
    """Whether a policy may look at metrics or exact times, which must be read from storage.

    A subclass may: it can have its own ``keeps``.
    """
    if type(policy) is KeepEvery:
        return policy.seconds is not None
    return type(policy) is not KeepLatest


def better_of(policies: Iterable[Policy], metrics: Mapping[str, Better]) -> dict[str, Better]:
    """Which value of a metric is better: as ``metrics`` says, or as all policies agree."""
    if not isinstance(metrics, Mapping):
        raise OptionError(f"invalid metrics={metrics!r:.200}", hint='use {"loss": "min"}')
    for name, mode in metrics.items():
        KeepBest(1, name, mode)  # refuses another mode
    best = [policy for policy in policies if isinstance(policy, KeepBest)]
    modes = {(policy.metric, policy.mode) for policy in best}
    agreed = {name: mode for name, mode in modes if [n for n, _ in modes].count(name) == 1}
    return {**agreed, **metrics}


def unseen_metrics(policies: Iterable[Policy], records: Sequence[StepRecord]) -> list[str]:
    """The metrics of ``KeepBest`` policies that no step has, or all as NaN: a misspelt name?"""
    read = {policy.metric for policy in policies if isinstance(policy, KeepBest)}
    return sorted(read - metrics_in(records))


def metrics_in(records: Iterable[StepRecord]) -> set[str]:
    """The names of the metrics that steps have; ``name=nan`` where one is NaN."""
    found = (each for record in records for each in record.metrics.items())
    return {f"{name}=nan" if math.isnan(value) else name for name, value in found}


def steps_to_keep(
    records: Sequence[StepRecord], policies: Sequence[Policy], own: Sequence[int] = ()
) -> set[int]:
    """The steps that stay: the highest, the last of ``own``, and those that any policy keeps.

    Without policies every step stays. Records are in ascending order. This run has saved the steps
    ``own``: after a return to an earlier step, higher ones of another run do not take their places,
    and what policies keep of ``own`` alone stays, too.
    """
    steps = [record.step for record in records]
    known = frozenset(own)
    mine = [record for record in records if record.step in known]
    wanted = {*steps[-1:], *own[-1:]}
    for policy in policies:
        wanted.update(policy.keeps(records))
        if mine and mine[-1] is not records[-1]:
            wanted.update(policy.keeps(mine))
    return wanted.intersection(steps) if policies else set(steps)
