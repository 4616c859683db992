"""What was measured of restarts, in seconds, and what a run prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nostall._bench.quantities import Spread, format_nbytes, median_of
from nostall._bench.restarting.first_step import STAGES
from nostall._bench.tables import left_out, number, table, where, with_spread

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
class RestartContenderReport:
    """Everything about one contender."""

    name: str
    description: str
    unavailable: str | None
    """Why it did not take part."""
    error: str | None
    """What it failed with; it was left out from there on."""
    samples: tuple[RestartSample, ...]
    mismatches: tuple[str, ...]
    """Names of what was loaded wrong; empty if all was right."""

    def stage_s(self, stage: str) -> float | None:
        """The median of one stage."""
        return median_of([sample.stages_s.get(stage) for sample in self.samples])


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartReport:
    """One run."""

    command: tuple[str, ...]
    options: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    nbytes: int
    """Of all tensors."""
    tensors: int
    contenders: tuple[RestartContenderReport, ...]


def render_restarts(report: RestartReport) -> str:
    """The whole report as text."""
    wrong = "\n".join(
        f"ERROR: {each.name} did not load what was saved: {', '.join(each.mismatches)}"
        for each in report.contenders
        if each.mismatches
    )
    parts = [_heading(report), _stage_table(report), _LEGEND, left_out(report.contenders), wrong]
    return "\n\n".join(part for part in parts if part)


def restarts_failed(report: RestartReport) -> bool:
    """Whether something was loaded wrong, or nothing could be measured at all."""
    return any(each.mismatches for each in report.contenders) or not any(
        each.samples for each in report.contenders
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
            with_spread(Spread.of([sample.total_s for sample in each.samples]), 1e3, 0),
            *(number(each.stage_s(stage), 1e3, 1) for stage in STAGES),
            "WRONG" if each.mismatches else "same",
        )
        for each in report.contenders
        if each.samples
    ]
    return table(rows)
