"""What the commands print: tables, progress, JSON. No torch.

On a terminal, tables and progress are rich's if the extra ``cli`` is installed. Everything else is
plain: columns of text, one line per entry.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nostall.errors import NostallError

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def printable(text: str) -> str:
    """The text with unprintable characters escaped: names in metadata may control a terminal."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def print_error(text: str) -> None:
    """Print one line on standard error."""
    print(f"nostall: {printable(' '.join(text.split()))}", file=sys.stderr)


def describe(error: Exception) -> str:
    """What happened where, and the next step; a command has no rank, and needs no phase."""
    if not isinstance(error, NostallError):
        if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
            return f"{error.filename}: {error.strerror}"
        return str(error)
    place = f"{error.path}: " if error.path else ""
    return f"{place}{error.message}" + (f" ({error.hint})" if error.hint else "")


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> None:
    """Print rows under their headings.

    Args:
        columns: The headings.
        rows: The cells.
        right: Headings of the columns that are aligned right, separated by spaces.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    aligned = [column in right.split() for column in columns]
    if not sys.stdout.isatty() or not _print_pretty(columns, cells, aligned):
        _print_plain(columns, cells, aligned)


def _print_plain(
    columns: Sequence[str], rows: Sequence[Sequence[str]], aligned: Sequence[bool]
) -> None:
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, aligned, strict=True)
        )
        print("  ".join(padded).rstrip())


def _print_pretty(
    columns: Sequence[str], rows: Sequence[Sequence[str]], aligned: Sequence[bool]
) -> bool:
    """Print with rich; false if it is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, right in zip(columns, aligned, strict=True):
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # not markup
    Console().print(table)
    return True


Report = Callable[[int, int], object]
"""Called with bytes done and bytes to do, from any thread."""


@contextmanager
def progress(what: str) -> Iterator[Report]:
    """Show progress while a block runs, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
    except ImportError:
        try:
            yield _show_percentage
        finally:
            print(end="\r\033[K", file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(
        *columns,
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show_percentage(done: int, total: int) -> None:
    print(end=f"\r{done / max(1, total):4.0%}", file=sys.stderr, flush=True)


def format_size(nbytes: int) -> str:
    """A size in the largest binary unit that leaves at least one of it, with one digit behind."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"


def format_age(seconds: float) -> str:
    """An age in the largest unit that leaves at least two of it."""
    for unit_s, name in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{max(0, seconds):.0f} s"
