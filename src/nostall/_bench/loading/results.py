"""What was measured: samples of loads and what is said of them, in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from nostall._bench.quantities import best_of, median_of
from nostall._bench.results import RunReport, TargetReport, TookPart


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
class LoadContenderReport(TookPart):
    """Everything about one contender."""

    warm: tuple[LoadSample, ...]
    """With the files in the page cache."""
    idle: tuple[LoadSample, ...]
    """The same after idle seconds, in which a hypervisor takes freed memory away."""
    fresh: tuple[LoadSample, ...]
    """With the files in the page cache, and fresh pages for every temporary tensor."""
    cold: tuple[LoadSample, ...]
    """With the files dropped from the page cache."""
    one_tensor: tuple[OneTensorSample, ...]
    rows: tuple[RowsSample, ...]
    mismatches: tuple[str, ...]
    """What a load left wrong, at most one line for each kind of load; empty if all were right."""

    USUAL = "warm"

    @property
    def measured(self) -> bool:
        """Whether anything was."""
        return bool(self.warm or self.idle or self.cold)


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
        best = best_of(samples)
        return None if best is None else (best, samples[best])

    def read(self, phase: str) -> float | None:
        """The median of the best setting, ``warm`` or ``cold``."""
        best = self.best_read(phase)
        return None if best is None else median_of(best[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(RunReport[LoadContenderReport]):
    """One run that measures loads."""

    sliced_tensors: int
    """Those of which an eighth of the rows is loaded."""
    rows_nbytes: int
    """Of these rows."""
    metadata_nbytes: int | None
    """Size of the DCP metadata."""
    limits: LoadLimitReport
    targets: tuple[TargetReport, ...]
