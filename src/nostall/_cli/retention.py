"""Which checkpoints ``prune`` keeps: policies, of which any one suffices. No I/O, no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nostall._cli.listing import Listed

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_INTERVAL = re.compile(r"(\d+)([smhd])")
_USAGE = "write latest=3, every=1000 (steps) or every=6h (s, m, h or d), separated by commas"


@dataclass(frozen=True, slots=True)
class KeepLatest:
    """Keeps the last ``count`` checkpoints."""

    count: int

    def kept(self, checkpoints: Sequence[Listed]) -> Sequence[Listed]:
        """Those kept of the checkpoints, which are given oldest first."""
        return checkpoints[-self.count :]

    def __str__(self) -> str:
        return f"latest={self.count}"


@dataclass(frozen=True, slots=True)
class KeepEverySteps:
    """Keeps the checkpoints whose step is a multiple of ``steps``."""

    steps: int

    def kept(self, checkpoints: Sequence[Listed]) -> Sequence[Listed]:
        """As :meth:`KeepLatest.kept`."""
        return [each for each in checkpoints if (each.step or 0) % self.steps == 0]

    def __str__(self) -> str:
        return f"every={self.steps}"


@dataclass(frozen=True, slots=True)
class KeepEverySeconds:
    """Keeps the first checkpoint, and each that is ``seconds`` younger than the last one kept."""

    seconds: int
    text: str

    def kept(self, checkpoints: Sequence[Listed]) -> Sequence[Listed]:
        """As :meth:`KeepLatest.kept`."""
        chosen: list[Listed] = []
        for each in checkpoints:
            if not chosen or each.at_s - chosen[-1].at_s >= self.seconds:
                chosen.append(each)
        return chosen

    def __str__(self) -> str:
        return f"every={self.text}"


Policy: TypeAlias = KeepLatest | KeepEverySteps | KeepEverySeconds


def parse_policies(text: str) -> tuple[Policy, ...]:
    """Policies from ``latest=3,every=1000``.

    Raises:
        ValueError: The text has another form.
    """
    return tuple(_policy(part.strip()) for part in text.split(","))


def _policy(text: str) -> Policy:
    kind, _, value = text.partition("=")
    interval = _INTERVAL.fullmatch(value)
    if kind == "every" and interval is not None and int(interval[1]):
        return KeepEverySeconds(int(interval[1]) * _UNITS_S[interval[2]], value)
    if kind in ("latest", "every") and value.isascii() and value.isdecimal() and int(value):
        return KeepLatest(int(value)) if kind == "latest" else KeepEverySteps(int(value))
    raise ValueError(f"{text!r} is not a policy; {_USAGE}")


def reasons(checkpoints: Sequence[Listed], policies: Sequence[Policy]) -> dict[str, list[str]]:
    """For each checkpoint that a policy keeps, by path, the policies that do.

    Args:
        checkpoints: Complete checkpoints with a step, oldest first.
        policies: Any of them keeps a checkpoint.
    """
    kept: dict[str, list[str]] = {}
    for policy in policies:
        for each in policy.kept(checkpoints):
            kept.setdefault(each.path, []).append(str(policy))
    return kept
