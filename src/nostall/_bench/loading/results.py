"""What was measured: samples of loads and what is said of them, in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nostall._bench.quantities import Spread, median_of
from nostall._bench.results import TargetReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """One timed load of everything."""

    round: int
    load_s: float
    cpu_s: float
    """User and system time of this process and its children."""
    system_s: float
    """The system's part of it; large where memory had to be brought back from the hypervisor."""
    cached: float
    """The share of the files that was in the page cache when the load began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneTensorSample:
    """One tensor out of all, loaded twice in a row."""

    round: int
    first_s: float
    again_s: float
    """With what the contender keeps from the first time, such as metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsSample:
    """An eighth of the rows of each tensor."""

    round: int
    load_s: float
    read_nbytes: int | None
    """What the process got from ``read`` and its relatives; ``None`` if the kernel counts none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadContenderReport:
    """Everything about one contender."""

    name: str
    description: str
    unavailable: str | None
    """Why it did not take part."""
    error: str | None
    """What it failed with; it was left out from there on."""
    warm: tuple[LoadSample, ...]
    """With the files in the page cache."""
    idle: tuple[LoadSample, ...]
    """The same after idle seconds, in which a hypervisor takes freed memory away."""
    cold: tuple[LoadSample, ...]
    """With the files dropped from the page cache."""
    one_tensor: tuple[OneTensorSample, ...]
    rows: tuple[RowsSample, ...]
    mismatches: tuple[str, ...]
    """What a load left wrong, at most one line for each kind of load; empty if all were right."""

    @property
    def measured(self) -> bool:
        """Whether anything was."""
        return bool(self.warm or self.idle or self.cold)

    def median(self, figure: str, among: str = "warm") -> float | None:
        """The median of a figure among the samples of an attribute, such as ``cold``."""
        return median_of([getattr(sample, figure) for sample in getattr(self, among)])

    def spread(self, figure: str, among: str = "warm") -> Spread | None:
        """Its spread."""
        return Spread.of([getattr(sample, figure) for sample in getattr(self, among)])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimitReport:
    """Seconds the machine needs at best, round by round."""

    memcpy_s: tuple[float, ...]
    warm_read_s: dict[str, tuple[float, ...]]
    """By setting, with the file in the page cache."""
    cold_read_s: dict[str, tuple[float, ...]]
    """By setting, with the file dropped from it; only settings that the file system takes."""

    @property
    def memcpy(self) -> float | None:
        """The median."""
        return median_of(self.memcpy_s)

    def best_read(self, phase: str) -> tuple[str, tuple[float, ...]] | None:
        """The setting with the least median, ``warm`` or ``cold``, and its samples."""
        samples = self.warm_read_s if phase == "warm" else self.cold_read_s
        medians = {setting: median_of(each) for setting, each in samples.items()}
        there = {setting: median for setting, median in medians.items() if median is not None}
        best = min(there, key=lambda setting: there[setting], default=None)
        return None if best is None else (best, samples[best])

    def read(self, phase: str) -> float | None:
        """The median of the best setting, ``warm`` or ``cold``."""
        best = self.best_read(phase)
        return None if best is None else median_of(best[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """One run."""

    command: tuple[str, ...]
    options: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    nbytes: int
    """Of all tensors."""
    tensors: int
    sliced_tensors: int
    """Those of which an eighth of the rows is loaded."""
    rows_nbytes: int
    """Of these rows."""
    metadata_nbytes: int | None
    """Size of the DCP metadata."""
    contenders: tuple[LoadContenderReport, ...]
    limits: LoadLimitReport
    targets: tuple[TargetReport, ...]

    def contender(self, name: str) -> LoadContenderReport | None:
        """The report of one contender, if it was there."""
        return next((each for each in self.contenders if each.name == name), None)
