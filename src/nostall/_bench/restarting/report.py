"""What was measured of restarts, in seconds, and what a run prints."""

from __future__ import annotations

from dataclasses import dataclass

from nostall._bench.quantities import format_nbytes, median_of
from nostall._bench.restarting.first_step import STAGES
from nostall._bench.results import RunReport, TookPart
from nostall._bench.tables import (
    bits,
    in_parts,
    left_out,
    number,
    table,
    verdict,
    where,
    with_spread,
)

_LEGEND = """\
total: from the start of the process until the first step could begin, without making the model;
planning: the load until it reads; objects: what is not a tensor, and what the load does last;
bitwise: whether everything was loaded as it was saved; -: not measured, or does not apply"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartSample:
    """One process."""

    round: int
    stages_s: dict[str, float]
    """By name; a contender need not have all of them."""

    @property
    def total_s(self) -> float:
        """All stages."""
        return sum(self.stages_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartContenderReport(TookPart):
    """Everything about one contender."""

    samples: tuple[RestartSample, ...]
    mismatches: tuple[str, ...]
    """Names of what was loaded wrong; empty if all was right."""

    USUAL = "samples"

    @property
    def measured(self) -> bool:
        """Whether any process was."""
        return bool(self.samples)

    def stage_s(self, stage: str) -> float | None:
        """The median of one stage."""
        return median_of([sample.stages_s.get(stage) for sample in self.samples])


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartReport(RunReport[RestartContenderReport]):
    """One run that measures restarts."""


def render_restarts(report: RestartReport) -> str:
    """The whole report as text."""
    wrong = verdict(report.contenders, "load", separator=", ")
    return in_parts(
        _heading(report), _stage_table(report), _LEGEND, left_out(report.contenders), wrong
    )


def _heading(report: RestartReport) -> str:
    options = report.options
    return (
        f"restarting with {options['shape']}: {format_nbytes(report.nbytes)} in {report.tensors}"
        f" tensors, processes: {options['rounds']} each\n"
        f"{where(report.machine, report.versions)}"
    )


def _stage_table(report: RestartReport) -> str:
    rows: list[tuple[str, ...]] = [("ms", "total [quartiles]", *STAGES, "bitwise")]
    rows += [
        (
            each.name,
            with_spread(each.spread("total_s"), 1e3, 0),
            *(number(each.stage_s(stage), 1e3, 1) for stage in STAGES),
            bits(each),
        )
        for each in report.contenders
        if each.measured
    ]
    return table(rows)
