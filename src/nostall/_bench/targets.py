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

MAIN = "nostall"
_COMPARE = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Generic[R]):
    """A bound on one figure of a report."""

    figure: str
    compare: str
    """``<=`` or ``>=``."""
    bound: float | None
    """``None`` for what is only shown: it depends on others as much as on nostall."""
    unit: str
    measure: Callable[[R], float | None]
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


def _against_limit(figure: str, limit: str) -> Callable[[BenchReport], float | None]:
    return lambda report: quotient(_figure(report, MAIN, figure), report.limits.median(limit))


def _against(slower: str, faster: str) -> Callable[[BenchReport], float | None]:
    return lambda report: quotient(
        _figure(report, slower, "durable_s"), _figure(report, faster, "durable_s")
    )


def stock_async(report: BenchReport) -> list[ContenderReport]:
    """Every stock asynchronous setting that was measured."""
    return [each for each in report.contenders if each.name.startswith("dcp.async_save")]


def _against_best_stock(figure: str) -> Callable[[BenchReport], float | None]:
    """Least of the stock asynchronous settings / nostall's."""

    def measure(report: BenchReport) -> float | None:
        stock = [each.median(figure) for each in stock_async(report)]
        least = min((value for value in stock if value is not None), default=None)
        return quotient(least, _figure(report, MAIN, figure))

    return measure


def _share_of_possible(name: str) -> Callable[[BenchReport], float | None]:
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


def _memory_ratio(report: BenchReport) -> float | None:
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


TARGETS: tuple[Target[BenchReport], ...] = (
    Target(
        figure="blocked / warm memcpy",
        compare="<=",
        bound=1.25,
        unit="",
        measure=_against_limit("blocked_s", "memcpy"),
        shapes=("large",),
    ),
    Target(
        figure="blocked, overlapped staging",
        compare="<=",
        bound=5,
        unit=" ms",
        measure=lambda report: _scaled(_figure(report, "nostall overlapped", "blocked_s"), 1e3),
        shapes=("large",),
    ),
    Target(
        figure="durable / raw parallel write",
        compare="<=",
        bound=1.20,
        unit="",
        measure=_against_limit("durable_s", "raw_write"),
        shapes=("large",),
    ),
    Target(
        figure="durable: fastest stock async / nostall",
        compare=">=",
        bound=None,
        unit="",
        measure=_against_best_stock("durable_s"),
        shapes=("large",),
    ),
    Target(
        figure="share of the gain that the raw write would have",
        compare=">=",
        bound=0.8,
        unit="",
        measure=_share_of_possible(MAIN),
        shapes=("large",),
    ),
    Target(
        figure="blocked / `_foreach_copy_` of the same tensors",
        compare="<=",
        bound=2.5,
        unit="",
        measure=_against_limit("blocked_s", "foreach_copy"),
        shapes=("many",),
    ),
    Target(
        figure="durable: dcp.save / nostall",
        compare=">=",
        bound=25,
        unit="",
        measure=_against("dcp.save", MAIN),
        shapes=("many",),
    ),
    Target(
        figure="synchronous: dcp.save / with nostall's writer",
        compare=">=",
        bound=None,
        unit="",
        measure=_against("dcp.save", "nostall dcp.save"),
        shapes=("large",),
    ),
    Target(
        figure="share of the gain of the raw write, synchronous",
        compare=">=",
        bound=0.8,
        unit="",
        measure=_share_of_possible("nostall dcp.save"),
        shapes=("large",),
    ),
    Target(
        figure="stock in rounds / in a plain loop, furthest off",
        compare="<=",
        bound=15,
        unit=" %",
        measure=_off_a_plain_loop,
    ),
    Target(
        figure="first save after warmup(state_dict) / steady state",
        compare="<=",
        bound=1.5,
        unit="",
        measure=lambda report: report.probes.first_to_steady if report.probes else None,
    ),
    Target(
        figure="extra host memory / bytes saved",
        compare="<=",
        bound=1.05,
        unit="",
        measure=_memory_ratio,
    ),
    Target(
        figure="growth of it from the second to the last save",
        compare="<=",
        bound=1,
        unit=" %",
        measure=_memory_growth,
    ),
    Target(
        figure="loss of a pure-Python loop while saving",
        compare="<=",
        bound=5,
        unit=" %",
        measure=_python_loss,
    ),
    Target(
        figure="CPU: thriftiest stock async / nostall",
        compare=">=",
        bound=1,
        unit="",
        measure=_against_best_stock("cpu_s"),
    ),
    Target(
        figure="writer ready after start",
        compare="<=",
        bound=100,
        unit=" ms",
        measure=lambda report: (
            _scaled(median_of(report.probes.writer_start_s), 1e3) if report.probes else None
        ),
    ),
    Target(
        figure="writer's resident memory before a job",
        compare="<=",
        bound=20,
        unit=" MB",
        measure=lambda report: (
            _scaled(median_of(report.probes.writer_resident_nbytes), 1e-6)
            if report.probes
            else None
        ),
    ),
    Target(
        figure="import nostall",
        compare="<=",
        bound=50,
        unit=" ms",
        measure=lambda report: (
            _scaled(median_of(report.probes.import_s), 1e3) if report.probes else None
        ),
    ),
)
