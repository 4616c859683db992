"""Which checkpoints ``prune`` keeps: the manager's policies, from text. No I/O, no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nostall._cli.listing import Listed
from nostall._manager.policies import KeepEvery, KeepLatest, Policy, StepRecord

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_INTERVAL = re.compile(r"(\d+)([smhd])")
_USAGE = "write latest=3, every=1000 (steps) or every=6h (s, m, h or d), separated by commas"


@dataclass(frozen=True, slots=True)
class Rule:
    """A policy, and the text that it was given by."""

    text: str
    policy: Policy


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Rules from ``latest=3,every=1000``.

    Raises:
        ValueError: The text has another form.
    """
    parts = [part.strip() for part in text.split(",")]
    return tuple(Rule(part, _policy(part)) for part in parts)


def _policy(text: str) -> Policy:
    kind, _, value = text.partition("=")
    interval = _INTERVAL.fullmatch(value)
    if kind == "every" and interval is not None and int(interval[1]):
        return KeepEvery(seconds=int(interval[1]) * _UNITS_S[interval[2]])
    if kind in ("latest", "every") and value.isascii() and value.isdecimal() and int(value):
        return KeepLatest(int(value)) if kind == "latest" else KeepEvery(steps=int(value))
    raise ValueError(f"{text!r} is not a policy; {_USAGE}")


def reasons(checkpoints: Sequence[Listed], rules: Sequence[Rule]) -> dict[str, list[str]]:
    """For each checkpoint that a rule keeps, by path, the rules that do.

    Args:
        checkpoints: Complete checkpoints; those without a step are not kept by a rule.
        rules: Any of them keeps a checkpoint.
    """
    # Of two checkpoints of one step, the later one says when the step was committed.
    times = {each.step: each.at_s for each in sorted(checkpoints, key=lambda each: each.at_s)}
    records = [
        StepRecord(step=step, committed_at_s=at_s)
        for step, at_s in sorted((step, at_s) for step, at_s in times.items() if step is not None)
    ]
    kept: dict[str, list[str]] = {}
    for rule in rules:
        steps = rule.policy.keeps(records)
        for each in checkpoints:
            if each.step in steps:
                kept.setdefault(each.path, []).append(rule.text)
    return kept
