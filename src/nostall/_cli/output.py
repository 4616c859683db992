"""Answers of commands, printed as text or as JSON. No torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from nostall.errors import NostallError


class Status(IntEnum):
    """Exit statuses, as ``docs/cli.md`` explains them; the last two are a shell's."""

    FINE = 0
    FAILED = 1
    WRONG_ARGUMENTS = 2
    NOT_THERE = 3
    NOT_UNDERSTOOD = 4
    INTERRUPTED = 130
    PIPE_CLOSED = 141


class NotThere(Exception):
    """No checkpoint exists, or no such directory."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a command."""

    plain: Any
    """Printed by ``--json``."""
    lines: Iterable[str]
    """Printed otherwise."""
    status: Status = Status.FINE
    error: Exception | None = None
    """Something that is wrong nevertheless; ends the command with its own status."""


def printable(text: str, *, keeps_bytes: bool = False) -> str:
    """The text with unprintable characters escaped: a name may have some that control a terminal.

    ``keeps_bytes`` leaves bytes of a path that are not text; to print them may be an error.
    """
    return "".join(
        each
        if each.isprintable() or (keeps_bytes and "\ud800" <= each <= "\udfff")
        else each.encode("unicode_escape").decode()
        for each in text
    )


def print_error(error: Exception | str) -> None:
    """Print on one line what happened where, and the next step."""
    text = str(error) or "not enough memory"
    if isinstance(error, NostallError):  # a command has no rank, and needs no phase
        place = f"{error.path}: " if error.path else ""
        text = f"{place}{error.message}" + (f" ({error.hint})" if error.hint else "")
    elif isinstance(error, UnicodeEncodeError):
        text = f"{error.object!a:.200} cannot be printed as {error.encoding}"
    elif isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        text = f"{error.filename}: {error.strerror}"
    print(f"nostall: {printable(' '.join(text.split()))}", file=sys.stderr)


def table(columns: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of columns under their headings, or none without rows.

    Headings are separated by spaces; ``>`` before one aligns its column right. A cell may be
    ``None``.
    """
    headings = columns.split()
    cells = [["" if each is None else printable(str(each)) for each in row] for row in rows]
    lines = [[heading.lstrip(">") for heading in headings], *cells]
    formats = [
        f"{'>' if heading.startswith('>') else '<'}{max(map(len, column))}"
        for heading, column in zip(headings, zip(*lines, strict=True), strict=True)
    ]
    return ["  ".join(map(format, line, formats)).rstrip() for line in lines] if cells else []


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], object]]:
    """Show bytes done of bytes to do while a block runs, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return

    def show(done: int, total: int) -> None:
        of_all = f"{format_size(done)} of {format_size(total)}"
        share = f"{done / max(1, total):4.0%}"
        print(end=f"\r{what} {share}, {of_all}\033[K", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print(end="\r\033[K", file=sys.stderr, flush=True)


def format_size(nbytes: int) -> str:
    """A size in the largest binary unit that leaves at least one of it, with one digit behind."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"


def format_age(seconds: float) -> str:
    """An age in the largest unit that leaves at least two of it."""
    for unit_s, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{max(0, seconds):.0f} s"


def plain_metrics(metrics: dict[str, float]) -> dict[str, float | None]:
    """Metrics for JSON, which has no numbers that are not finite: they are null."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def format_metrics(metrics: dict[str, float]) -> str:
    """Metrics as ``loss=0.25 accuracy=0.9``."""
    return " ".join(f"{name}={value:.6g}" for name, value in metrics.items())
