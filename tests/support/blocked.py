"""How long saves keep a training loop from its next step."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence

WARM_UP = 2
"""First saves, which are not counted: nothing is reserved or cached yet."""


class Blocked:
    """Adds up the time between steps, from one save to the next.

    A loop calls :meth:`step_ends` and :meth:`step_begins`; the time between the two is spent on
    saving, polling, and little else. ``every`` so many steps there is a save.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps = 0
        self._since_s: float | None = None
        self._blocked_s = [0.0]

    def step_ends(self) -> None:
        if self._steps and self._steps % self._every == 0:
            self._blocked_s.append(0.0)
        self._since_s = time.perf_counter()

    def step_begins(self) -> None:
        if self._since_s is not None:
            self._blocked_s[-1] += time.perf_counter() - self._since_s
        self._steps += 1

    def call_begins(self) -> None:
        """A call of the library begins within the step."""
        self._since_s = time.perf_counter()

    def call_ends(self) -> None:
        """It is over; the time counts as that of the last save."""
        if self._since_s is not None:
            self._blocked_s[-1] += time.perf_counter() - self._since_s
        self._since_s = None

    def milliseconds(self) -> list[float]:
        """For each save after the first ones, but the last, the time that it took from training."""
        return [1000 * seconds for seconds in self._blocked_s[1 + WARM_UP : -1]]


def report(what: str, found: Mapping[str, Sequence[float]]) -> None:
    """Print medians, extremes and the number of saves."""
    for name, times in found.items():
        print(
            f"{what}: {name}: median {statistics.median(times):.1f} ms per save"
            f" ({min(times):.1f} to {max(times):.1f}, {len(times)} saves)"
        )
    print(json.dumps({what: found}))
