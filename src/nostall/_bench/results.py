"""What was measured: samples and what is said of them, in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from nostall._bench.quantities import Spread, best_of, median_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TookPart:
    """What is known at the end of a contender of any kind of run."""

    name: str
    description: str
    unavailable: str | None
    """Why it did not take part."""
    error: str | None
    """What it failed with; it was left out from there on."""

    USUAL = ""
    """The attribute with the samples of the rounds."""

    def samples_of(self, figure: str, among: str | None = None) -> list[Any]:
        """A figure of the samples of an attribute, such as ``idle_saves``."""
        return [getattr(sample, figure) for sample in getattr(self, among or self.USUAL)]

    def median(self, figure: str, among: str | None = None) -> float | None:
        """The median of a figure among the samples of an attribute."""
        return median_of(self.samples_of(figure, among))

    def spread(self, figure: str, among: str | None = None) -> Spread | None:
        """Its spread."""
        return Spread.of(self.samples_of(figure, among))


class Judged(Protocol):
    """What is said of any contender at the end."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def measured(self) -> bool:
        """Whether anything was."""
        ...

    @property
    def mismatches(self) -> tuple[str, ...]:
        """What was wrong in what it saved or loaded."""
        ...


C = TypeVar("C", bound=Judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport(Generic[C]):
    """One run of any kind."""

    command: tuple[str, ...]
    options: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    nbytes: int
    """Of all tensors of one rank."""
    tensors: int
    contenders: tuple[C, ...]

    def contender(self, name: str) -> C | None:
        """The report of one contender, if it was there."""
        return next((each for each in self.contenders if each.name == name), None)


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
    system_s: float
    """The system's part of it; large where memory had to be brought back from the hypervisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Extra host memory of trainer and children since before the first use; sum of ranks."""

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
    """What a compute loop loses between a save call's return and durability: 0.1 is a tenth."""

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
    """Names that differ, at most a few, or why loading failed; empty if the checkpoint is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderReport(TookPart):
    """Everything about one contender."""

    saves: tuple[SaveSample, ...]
    idle_saves: tuple[SaveSample, ...]
    """After idle seconds, in which a hypervisor takes freed memory away."""
    plain_saves: tuple[SaveSample, ...]
    """One after the other, without free memory being warmed."""
    memory: MemoryFigures | None
    slowdowns: tuple[SlowdownSample, ...]
    verification: Verification | None

    USUAL = "saves"

    @property
    def measured(self) -> bool:
        """Whether any timed save was."""
        return bool(self.saves)

    @property
    def mismatches(self) -> tuple[str, ...]:
        """How its checkpoint differs from what was saved."""
        return () if self.verification is None else self.verification.mismatches

    @property
    def warm_plain_saves(self) -> tuple[SaveSample, ...]:
        """The plain saves that needed no fresh memory, going by their system time."""
        usual = self.median("system_s")
        if usual is None:
            return ()
        return tuple(each for each in self.plain_saves if each.system_s <= 1.5 * usual + 0.05)

    @property
    def to_plain(self) -> float | None:
        """Time until durable in the rounds / in a plain loop with memory at hand."""
        here, plain = self.median("durable_s"), self.median("durable_s", "warm_plain_saves")
        return here / plain if here and plain else None

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
        return best_of(self.raw_write_s)

    def median(self, limit: str) -> float | None:
        """Median of ``memcpy``, ``foreach_copy`` or, with the best setting, ``raw_write``."""
        if limit == "raw_write":
            best = self.best_write
            return None if best is None else median_of(self.raw_write_s[best])
        return median_of(self.memcpy_s if limit == "memcpy" else self.foreach_copy_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSaves:
    """The first saves of a fresh process."""

    contender: str
    """Its name."""
    warmed_up: bool
    """Whether ``warmup(state_dict)`` came before them."""
    fresh_memory_found_s: float
    """Seconds of reserving and mapping memory of the state's size when the process started."""
    fresh_memory_s: float
    """The same right afterwards, when the machine has the memory."""
    blocked_s: tuple[float, ...]
    """Of its saves, in order."""
    durable_s: tuple[float, ...]
    """Of its saves, in order."""

    @property
    def steady_s(self) -> float | None:
        """The median of the saves from the fourth on."""
        return median_of(self.blocked_s[3:])

    @property
    def to_steady(self) -> float | None:
        """The first save / the saves from the fourth on: blocked or durable, whichever is more."""
        steady, durable = self.steady_s, median_of(self.durable_s[3:])
        if not steady or not durable:
            return None
        return max(self.blocked_s[0] / steady, self.durable_s[0] / durable)

    @property
    def paid_for_memory_s(self) -> float:
        """The part of the first save that any program pays for new memory, if no warm-up did."""
        return 0.0 if self.warmed_up else self.fresh_memory_s

    @property
    def rest_s(self) -> float | None:
        """The part of the first save that is neither the copy nor the memory."""
        return (
            None
            if self.steady_s is None
            else self.blocked_s[0] - self.steady_s - self.paid_for_memory_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Figures of nostall that no save shows."""

    writer_start_s: tuple[float, ...]
    writer_resident_nbytes: tuple[int, ...]
    import_s: tuple[float, ...]
    """``import nostall`` in a fresh interpreter, less what the bare interpreter takes."""
    first_saves: tuple[FirstSaves, ...]
    """Of several fresh processes of each kind."""

    @property
    def first_to_steady(self) -> float | None:
        """First save / steady state after a warm-up: each contender's median, the worst of them."""
        medians = [
            median_of([each.to_steady for each in processes])
            for (_, warmed_up), processes in self.kinds.items()
            if warmed_up
        ]
        return max((median for median in medians if median is not None), default=None)

    @property
    def kinds(self) -> dict[tuple[str, bool], list[FirstSaves]]:
        """The processes by contender, and whether they have warmed up."""
        kinds: dict[tuple[str, bool], list[FirstSaves]] = {}
        for each in self.first_saves:
            kinds.setdefault((each.contender, each.warmed_up), []).append(each)
        return kinds


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
class BenchReport(RunReport[ContenderReport]):
    """One run that measures saves."""

    limits: LimitReport
    probes: ProbeReport | None
    targets: tuple[TargetReport, ...]
    timeline: tuple[Step, ...]
