"""The findings of a run: samples of contenders and limits, one table as text, one form as JSON."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from benchmarks.group import Group

Sample: TypeAlias = dict[str, float]
"""One turn of one contender on this rank: figures by name, with their unit in the name."""


class WrongData(Exception):
    """A checkpoint does not have, or a load did not bring, what was saved."""


class Named(Protocol):
    name: str

    def available(self) -> str | None: ...


@dataclass(slots=True, kw_only=True)
class Row:
    """A contender or a limit of the machine, and what was measured of it."""

    name: str
    status: Literal["in", "not available", "FAILED", "WRONG"] = "in"
    why: str = ""
    """Why it is no longer in; only of those that are in do samples count."""
    samples: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, contender: Named, group: Group) -> Row:
        """The row of a contender; "not available" unless every rank can run it. Collective."""
        row = cls(name=contender.name)
        if (why := group.first_text(contender.available())) is not None:
            row.status, row.why = "not available", why
        return row


@dataclass(slots=True, kw_only=True)
class Report:
    """One run of any kind; this is the JSON form."""

    about: dict[str, Any] = field(default_factory=dict)
    """Command, options, machine and versions; each of the latter three by name."""
    limits: Row = field(default_factory=lambda: Row(name="limits"))
    contenders: list[Row]

    def samples(self, name: str, figure: str) -> list[float]:
        """A figure of a contender that is still in."""
        rows = [row for row in self.contenders if (row.name, row.status) == (name, "in")]
        return rows[0].samples.get(figure, []) if rows else []

    def limit(self, prefix: str) -> list[float]:
        """The samples with the least median among the limits whose names begin like this."""
        found = [each for name, each in self.limits.samples.items() if name.startswith(prefix)]
        return min(found, key=statistics.median, default=[])

    @property
    def failed(self) -> bool:
        """Whether something was wrong, or nothing could be measured."""
        return any(row.status == "WRONG" for row in [self.limits, *self.contenders]) or not any(
            row.samples for row in self.contenders if row.status == "in"
        )

    def store(self, file: Path) -> None:
        """Write every sample as JSON."""
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")


def attempt(row: Row, measure: Callable[[], Sample], group: Group) -> None:
    """Add a sample to a row that is in; if that fails on any rank, the row is out on all.

    Collective, and so is what ``measure`` does.
    """
    if row.status != "in":
        return
    sample: Sample = {}
    failed = wrong = None
    try:
        sample = measure()
    except WrongData as error:
        wrong = str(error)
    except Exception as error:  # a contender may fail in any way; the run goes on
        failed = f"{type(error).__name__}: {error}".strip()
    failed, wrong = group.first_text(failed), group.first_text(wrong)
    if failed is None and wrong is None:
        for figure, value in group.merged(sample).items():
            row.samples.setdefault(figure, []).append(value)
        return
    row.status, row.why = ("FAILED", failed) if failed is not None else ("WRONG", wrong or "")
    if not group.rank:
        sys.stderr.write(f"{row.status}: {row.name}: {row.why}\n")


def in_rounds(turns: Sequence[Callable[[], None]], rounds: int) -> None:
    """Take every turn once per round; each round begins with another one."""
    order = list(turns)
    for _ in range(rounds):
        for turn in order:
            turn()
        order.append(order.pop(0))


@dataclass(frozen=True, slots=True)
class Column:
    """A figure as the table shows it: median and quartiles of samples, or of ratios."""

    heading: str
    figure: str
    scale: float = 1.0
    digits: int = 1
    over: str = ""
    """Name of the contender or limit by whose sample each sample is divided, round by round."""

    def cell(self, row: Row, report: Report) -> str:
        """The text for a row; ``-`` if it was not measured."""
        samples = row.samples.get(self.figure, [])
        if self.over:
            below = report.samples(self.over, self.figure) or report.limit(self.over)
            # Ratios belong to rounds: of rows that were measured equally often.
            fits = len(samples) == len(below) and all(below)
            pairs = zip(samples, below, strict=True) if fits else ()
            samples = [above / beneath for above, beneath in pairs]
        return with_quartiles([each * self.scale for each in samples], self.digits)


def with_quartiles(samples: Sequence[float], digits: int) -> str:
    """``median [25 %, 75 %]``; the ends instead of quartiles if there are two samples."""
    if not samples:
        return "-"
    middle = f"{statistics.median(samples):.{digits}f}"
    if len(samples) == 1:
        return middle
    low, high = min(samples), max(samples)
    if len(samples) > 2:
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return f"{middle} [{low:.{digits}f}, {high:.{digits}f}]"


def rendered(report: Report, columns: Sequence[Column], legend: str) -> str:
    """The whole report as text."""
    about = report.about
    options, versions = (
        ", ".join(f"{name} {value}" for name, value in about[part].items())
        for part in ("options", "versions")
    )
    there = [row for row in report.contenders if row.status == "in"]
    rows = [["", *(column.heading for column in columns)]]
    rows += [[row.name, *(column.cell(row, report) for column in columns)] for row in there]
    limits = [["limit", "ms [quartiles]"]]
    limits += [
        [name.removesuffix("_s"), with_quartiles([each * 1e3 for each in samples], 1)]
        for name, samples in report.limits.samples.items()
    ]
    out = [
        f"{row.status}: {row.name}: {row.why}"
        for row in [report.limits, *report.contenders]
        if row.status != "in"
    ]
    parts = [
        f"{options}\n{', '.join(about['machine'].values())}\n{versions}",
        table(rows),
        table(limits) if len(limits) > 1 else "",
        legend,
        "\n".join(out),
    ]
    return "\n\n".join(part for part in parts if part)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first one to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
