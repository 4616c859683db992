"""Cells, tables and lines that all reports share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nostall._bench.quantities import Spread, format_nbytes
from nostall._bench.results import Judged, TargetReport, TookPart

MISSING = "-"
_VERDICTS = {True: "met", False: "MISSED", None: ""}
_FEW_ROUNDS = 3


def failed(contenders: Sequence[Judged]) -> bool:
    """Whether something was saved or loaded wrong, or nothing could be measured at all."""
    return any(each.mismatches for each in contenders) or not any(
        each.measured for each in contenders
    )


def verdict(contenders: Sequence[Judged], verb: str, separator: str = "; ") -> str:
    """Whose checkpoint or load is wrong, and what of it."""
    return "\n".join(
        f"ERROR: {each.name} did not {verb} what was saved: {separator.join(each.mismatches)}"
        for each in contenders
        if each.mismatches
    )


def in_parts(*parts: str) -> str:
    """A report of its parts; empty ones are left out."""
    return "\n\n".join(part for part in parts if part)


def where(machine: dict[str, Any], versions: dict[str, str]) -> str:
    """The machine and what ran there, in two lines."""
    return (
        f"{machine['cpu']}, {machine['cpus_usable']} cores,"
        f" {format_nbytes(machine['memory_nbytes'])}, {machine['file_system']};"
        f" torch {versions['torch']} on {machine['torch_threads']} threads,"
        f" nostall {versions['nostall']} with {versions['crc32']}'s CRC-32"
    )


def left_out(contenders: Sequence[TookPart]) -> str:
    """Who did not take part, who failed, and why."""
    lines = [
        f"not available: {each.name}: {each.unavailable}"
        for each in contenders
        if each.unavailable is not None
    ]
    lines += [f"FAILED: {each.name}: {each.error}" for each in contenders if each.error is not None]
    return "\n".join(lines)


def limit_table(limits: Sequence[tuple[str, Sequence[float]]], nbytes: int) -> str:
    """Limits by name, with the seconds that each took for ``nbytes`` bytes."""
    rows = [("limit", "ms [quartiles]", "GB/s")]
    for name, samples in limits:
        spread = Spread.of(samples)
        speed = None if spread is None else nbytes / spread.median / 1e9
        rows.append((name, with_spread(spread, 1e3, 1), number(speed, 1, 2)))
    return table(rows)


def target_table(targets: Sequence[TargetReport]) -> str:
    """The targets that were measured."""
    rows = [
        (each.figure, each.target, number(each.measured, 1, 2), _VERDICTS[each.met])
        for each in targets
        if each.measured is not None
    ]
    return table([("figure", "target", "measured", ""), *rows]) if rows else ""


def remarks(targets: Sequence[TargetReport], *, rounds: int) -> str:
    """What the table of targets leaves open."""
    lines = []
    missing = [each.figure for each in targets if each.measured is None]
    if missing:
        lines.append(f"not measured: {'; '.join(missing)}")
    if rounds < _FEW_ROUNDS:
        lines.append(f"with fewer than {_FEW_ROUNDS} rounds chance decides whether targets are met")
    return "\n".join(lines)


# --- cells ------------------------------------------------------------------------------------


def number(value: float | None, scale: float, digits: int) -> str:
    """A number with so many digits."""
    return MISSING if value is None else f"{value * scale:.{digits}f}"


def ratio(value: float | None, of: float | None) -> str:
    """One number divided by another."""
    return MISSING if value is None or not of else f"{value / of:.2f}"


def bits(each: Judged) -> str:
    """Whether what it saved or loaded has the same bits."""
    return "WRONG" if each.mismatches else "same"


def percent(value: float | None) -> str:
    """A share of one in per cent, with its sign."""
    return MISSING if value is None else f"{value * 100:+.0f} %"


def with_spread(spread: Spread | None, scale: float, digits: int) -> str:
    """A median and, in brackets, the quartiles."""
    if spread is None:
        return MISSING
    low, high = (f"{end * scale:.{digits}f}" for end in spread.quartiles)
    return f"{spread.median * scale:.{digits}f} [{low}, {high}]"


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown: the headings, then the rows; the first column is aligned left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(cells: Sequence[str], fill: Callable[[str, int], str]) -> str:
        first, *rest = cells
        aligned = [first.ljust(widths[0])]
        aligned += [fill(cell, width) for cell, width in zip(rest, widths[1:], strict=True)]
        return "| " + " | ".join(aligned) + " |"

    header, *body = (line(row, str.rjust) for row in rows)
    ruler = "|" + "|".join(
        "-" * (width + 2) if column == 0 else "-" * (width + 1) + ":"
        for column, width in enumerate(widths)
    )
    return "\n".join([header, ruler + "|", *body])
