"""What the figures should be; of the figures only the targets are written down.

Every measured value comes from the run's own medians.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from nostall._bench.options import SHAPES
from nostall._bench.quantities import median_of
from nostall._bench.results import BenchReport, ContenderReport, TargetReport

R = TypeVar("R")

MAIN, SYNCHRONOUS = "nostall", "nostall dcp.save"
PLANNED_ONCE = "nostall dcp.save planned once"
LARGE, MANY = ("large",), ("many",)
Measure = Callable[[BenchReport], "float | None"]
_COMPARE = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True, slots=True)
class Target(Generic[R]):
    """A bound on one figure of a report."""

    figure: str
    compare: str
    """``<=`` or ``>=``."""
    bound: float | None
    """``None`` for what is only shown: it depends on others as much as on nostall."""
    measure: Callable[[R], float | None]
    unit: str = ""
    shapes: tuple[str, ...] = SHAPES

    def check(self, report: R) -> TargetReport:
        """Whether a run meets it; neither yes nor no if the run did not measure it."""
        measured = self.measure(report)
        if self.bound is None:
            return TargetReport(figure=self.figure, target="-", measured=measured, met=None)
        return TargetReport(
            figure=self.figure,
            target=f"{self.compare} {self.bound:g}{self.unit}",
            measured=measured,
            met=None if measured is None else bool(_COMPARE[self.compare](measured, self.bound)),
        )


def check_targets(
    targets: Iterable[Target[R]], report: R, *, shape: str
) -> tuple[TargetReport, ...]:
    """All targets that are set for this shape."""
    return tuple(target.check(report) for target in targets if shape in target.shapes)


def quotient(above: float | None, below: float | None) -> float | None:
    """One figure divided by another, if both were measured."""
    return above / below if above is not None and below else None


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value * by


def _figure(report: BenchReport, name: str, figure: str) -> float | None:
    contender = report.contender(name)
    return None if contender is None else contender.median(figure)


def _to_limit(figure: str, limit: str) -> Measure:
    return lambda report: quotient(_figure(report, MAIN, figure), report.limits.median(limit))


def _faster_than_dcp_save(name: str) -> Measure:
    return lambda report: quotient(
        _figure(report, "dcp.save", "durable_s"), _figure(report, name, "durable_s")
    )


def stock_async(report: BenchReport) -> list[ContenderReport]:
    """Every stock asynchronous setting that was measured."""
    return [each for each in report.contenders if each.name.startswith("dcp.async_save")]


def _to_best_stock(figure: str) -> Measure:
    """Least of the stock asynchronous settings / nostall's."""

    def measure(report: BenchReport) -> float | None:
        stock = [each.median(figure) for each in stock_async(report)]
        least = min((value for value in stock if value is not None), default=None)
        return quotient(least, _figure(report, MAIN, figure))

    return measure


def _share_of_possible(name: str) -> Measure:
    """(stock's time until durable / ours) / (stock's / the raw write): stock's time cancels out."""
    return lambda report: quotient(
        report.limits.median("raw_write"), _figure(report, name, "durable_s")
    )


def _off_a_plain_loop(report: BenchReport) -> float | None:
    """By how many per cent the worst stock row differs from a plain loop of the same calls."""
    stock = [each.to_plain for each in report.contenders if each.name.startswith("dcp.")]
    return max((abs(ratio - 1) * 100 for ratio in stock if ratio is not None), default=None)


def _all_nbytes(report: BenchReport) -> int:
    ranks: int = report.options["ranks"]
    return report.nbytes * ranks


def _memory(report: BenchReport) -> float | None:
    contender = report.contender(MAIN)
    if contender is None or contender.memory is None:
        return None
    return contender.memory.peak_nbytes / _all_nbytes(report)


def _memory_growth(report: BenchReport) -> float | None:
    contender = report.contender(MAIN)
    if contender is None or contender.memory is None or len(contender.memory.peaks_nbytes) < 3:
        return None
    return contender.memory.growth_nbytes / _all_nbytes(report) * 100


def _python_loss(report: BenchReport) -> float | None:
    contender = report.contender(MAIN)
    return None if contender is None else _scaled(contender.slowdown("python"), 100)


def _overlapped_ms(report: BenchReport) -> float | None:
    return _scaled(_figure(report, "nostall overlapped", "blocked_s"), 1e3)


def _first_to_steady(report: BenchReport) -> float | None:
    return report.probes.first_to_steady if report.probes else None


def _probe(figure: str, by: float) -> Measure:
    return lambda report: (
        _scaled(median_of(getattr(report.probes, figure)), by) if report.probes else None
    )


TARGETS: tuple[Target[BenchReport], ...] = (
    Target("blocked / warm memcpy", "<=", 1.25, _to_limit("blocked_s", "memcpy"), shapes=LARGE),
    Target("blocked, overlapped staging", "<=", 5, _overlapped_ms, unit=" ms", shapes=LARGE),
    Target(
        "durable / raw parallel write", "<=", 1.2, _to_limit("durable_s", "raw_write"), shapes=LARGE
    ),
    Target(
        "durable: fastest stock async / nostall",
        ">=",
        None,
        _to_best_stock("durable_s"),
        shapes=LARGE,
    ),
    Target(
        "share of the gain that the raw write would have",
        ">=",
        0.8,
        _share_of_possible(MAIN),
        shapes=LARGE,
    ),
    Target(
        "blocked / `_foreach_copy_` of the same tensors",
        "<=",
        2.5,
        _to_limit("blocked_s", "foreach_copy"),
        shapes=MANY,
    ),
    Target("durable: dcp.save / nostall", ">=", 25, _faster_than_dcp_save(MAIN), shapes=MANY),
    Target(
        "synchronous: dcp.save / with nostall's writer and SavePlanner",
        ">=",
        20,
        _faster_than_dcp_save(PLANNED_ONCE),
        shapes=MANY,
    ),
    Target(
        "synchronous: dcp.save / with nostall's writer",
        ">=",
        None,
        _faster_than_dcp_save(SYNCHRONOUS),
        shapes=LARGE,
    ),
    Target(
        "share of the gain of the raw write, synchronous",
        ">=",
        0.8,
        _share_of_possible(SYNCHRONOUS),
        shapes=LARGE,
    ),
    Target(
        "stock in rounds / in a plain loop, furthest off", "<=", 15, _off_a_plain_loop, unit=" %"
    ),
    Target("first save after warmup(state_dict) / steady state", "<=", 1.5, _first_to_steady),
    Target("extra host memory / bytes saved", "<=", 1.05, _memory),
    Target("growth of it from the second to the last save", "<=", 1, _memory_growth, unit=" %"),
    Target("loss of a pure-Python loop while saving", "<=", 5, _python_loss, unit=" %"),
    Target("CPU: thriftiest stock async / nostall", ">=", 1, _to_best_stock("cpu_s")),
    Target("writer ready after start", "<=", 100, _probe("writer_start_s", 1e3), unit=" ms"),
    Target(
        "writer's resident memory before a job",
        "<=",
        20,
        _probe("writer_resident_nbytes", 1e-6),
        unit=" MB",
    ),
    Target("import nostall", "<=", 50, _probe("import_s", 1e3), unit=" ms"),
)
