"""What one run was asked for. No torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEFAULT_NBYTES = {
    "large": 1 << 30,
    "many": 20_000 * 4096,
    "mixed": 3 << 29,
    "llama3-8b": 1 << 30,
    "lora": 1 << 30,
}
"""Bytes per rank; ``mixed`` has room for GPT-2's smallest model with its optimizer state."""
SHAPES = tuple(DEFAULT_NBYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The command line of a run that measures saves, checked."""

    shape: str
    nbytes: int
    """Per rank."""
    ranks: int
    rounds: int
    idle_rounds: int
    """Rounds in which each save follows on idle seconds, without free memory being warmed."""
    idle_s: float
    plain_saves: int
    """Saves in a plain loop that find memory at hand, after one that does not count."""
    memory_saves: int
    slowdown_rounds: int
    contenders: tuple[str, ...]
    """Names or shell patterns; empty for all."""
    directory: Path | None
    """Where checkpoints go; ``None`` for a temporary directory below the current one."""
    json: Path | None
    plot: Path | None
    noise: bool
    overwrite: bool
    """Whether a contender's timed saves replace each other."""
    probes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The command line of a run that measures loads, checked."""

    shape: str
    nbytes: int
    rounds: int
    idle_rounds: int
    """Rounds in which each load follows idle seconds, without free memory being warmed."""
    idle_s: float
    contenders: tuple[str, ...]
    """As of :class:`BenchOptions`."""
    directory: Path | None
    """The same."""
    json: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartOptions:
    """The command line of a run that measures restarts, checked."""

    shape: str
    nbytes: int
    rounds: int
    """Processes of each contender."""
    contenders: tuple[str, ...]
    """As of :class:`BenchOptions`."""
    directory: Path | None
    """The same."""
    json: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """The command line of a run that simulates ranks, checked."""

    simulate_ranks: int
    simulate_items: int
    """Unique shards of each."""
    rounds: int
    """Saves in the steady state."""
    contenders: tuple[str, ...]
    """As of :class:`BenchOptions`."""
    directory: Path | None
    """The same; metadata goes there."""
    json: Path | None


Options = BenchOptions | LoadOptions | RestartOptions | SimulationOptions


def as_stored(options: Options) -> dict[str, Any]:
    """The options as JSON has them."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(options).items()
    }


def chosen(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that match any pattern, in their own order; all of them without patterns.

    Raises:
        ValueError: A pattern matches nothing.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"no contender matches {pattern!r}; there are: {', '.join(names)}")
    return [
        name
        for name in names
        if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
