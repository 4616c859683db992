"""What was measured: the samples and everything that is said about them. Times in seconds, memory in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nostall._bench.quantities import Spread, median_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSample:
    """One timed save; the slowest rank counts for times, the sum of all ranks for CPU."""

    round: int
    call_s: float
    """What the save call took."""
    finish_s: float
    """What the poll took that found the save written and committed it."""
    blocked_s: float
    """Both, added up on each rank."""
    durable_s: float
    """From the call until everything was fsynced and committed."""
    cpu_s: float
    """User and system time of trainer and children from the call until durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Extra host memory of trainer and children, above the level before the contender was first used; sum of ranks."""

    peaks_nbytes: tuple[int, ...]
    """Of each of several saves in a row; the first has the contender's preparations in it."""

    @property
    def peak_nbytes(self) -> int:
        return max(self.peaks_nbytes)

    @property
    def growth_nbytes(self) -> int:
        """From the second save to the last one; 0 if there were fewer than three."""
        return self.peaks_nbytes[-1] - self.peaks_nbytes[1] if len(self.peaks_nbytes) > 2 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowdownSample:
    """What a compute loop loses between the return of a save call and durability: 0.1 is a tenth of its rate."""

    round: int
    loop: str
    """``python`` or ``matmul``."""
    lost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A last save, changed right after it was staged, loaded back and compared bit by bit."""

    staged_s: float
    """From the call until the state could be changed."""
    mismatches: tuple[str, ...]
    """Names that differ, at most a few, or why it could not be loaded; empty if the checkpoint is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderReport:
    """Everything about one contender."""

    name: str
    description: str
    unavailable: str | None
    """Why it did not take part."""
    error: str | None
    """What it failed with; it was left out from there on."""
    saves: tuple[SaveSample, ...]
    memory: MemoryFigures | None
    slowdowns: tuple[SlowdownSample, ...]
    verification: Verification | None

    def median(self, figure: str) -> float | None:
        """The median of a figure of :class:`SaveSample`."""
        return median_of([getattr(save, figure) for save in self.saves])

    def spread(self, figure: str) -> Spread | None:
        """Its spread."""
        return Spread.of([getattr(save, figure) for save in self.saves])

    def slowdown(self, loop: str) -> float | None:
        """The median loss of one loop."""
        return median_of([sample.lost for sample in self.slowdowns if sample.loop == loop])


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReport:
    """Seconds the machine needs at best, round by round."""

    memcpy_s: tuple[float, ...]
    foreach_copy_s: tuple[float, ...]
    raw_write_s: dict[str, tuple[float, ...]]
    """By setting."""
    direct: bool
    """Whether raw writes went past the page cache."""

    @property
    def best_write(self) -> str | None:
        """The setting with the least median."""
        medians = {setting: median_of(s) for setting, s in self.raw_write_s.items()}
        there = {setting: median for setting, median in medians.items() if median is not None}
        return min(there, key=lambda setting: there[setting], default=None)

    def median(self, limit: str) -> float | None:
        """Median of ``memcpy``, ``foreach_copy`` or ``raw_write``, the latter with the best setting."""
        if limit == "raw_write":
            best = self.best_write
            return None if best is None else median_of(self.raw_write_s[best])
        return median_of(self.memcpy_s if limit == "memcpy" else self.foreach_copy_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Figures of nostall that no save shows."""

    writer_start_s: tuple[float, ...]
    writer_resident_nbytes: tuple[int, ...]
    import_s: tuple[float, ...]
    """``import nostall`` in a fresh interpreter, less what the bare interpreter takes."""
    first_saves_s: tuple[tuple[float, ...], ...]
    """Blocked seconds of the saves of fresh processes after ``warmup()``, in order."""

    @property
    def first_to_steady(self) -> float | None:
        """Median over the processes of first save / median of the saves from the fourth on."""
        ratios = []
        for saves in self.first_saves_s:
            steady = median_of(saves[3:])
            ratios.append(saves[0] / steady if steady else None)
        return median_of(ratios)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a compute loop."""

    contender: str
    start_s: float
    duration_s: float
    saving: bool
    """Whether a save was called before, or under way during this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReport:
    """A figure and what it should be."""

    figure: str
    target: str
    measured: float | None
    met: bool | None
    """``None`` if it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """One run."""

    command: tuple[str, ...]
    options: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    nbytes: int
    """Saved by each rank."""
    tensors: int
    contenders: tuple[ContenderReport, ...]
    limits: LimitReport
    probes: ProbeReport | None
    targets: tuple[TargetReport, ...]
    timeline: tuple[Step, ...]

    def contender(self, name: str) -> ContenderReport | None:
        """The report of one contender, if it was there."""
        return next((each for each in self.contenders if each.name == name), None)
