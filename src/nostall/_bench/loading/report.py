"""What a run of loads prints: contenders, limits, parts of the checkpoint, and targets."""

from __future__ import annotations

from collections.abc import Sequence

from nostall._bench.loading.results import LoadContenderReport, LoadReport
from nostall._bench.quantities import format_nbytes, median_of
from nostall._bench.tables import (
    MISSING,
    bits,
    in_parts,
    left_out,
    limit_table,
    number,
    ratio,
    remarks,
    table,
    target_table,
    verdict,
    where,
    with_spread,
)

_LEGEND = """\
warm: the files are in the page cache; fresh pages: warm, but every temporary tensor of 128 KiB or
more has pages of its own; cold: the files were dropped from the page cache; /memcpy and /read: the
time divided by the limits below, the read in the same phase; freed memory taken away: warm, after
idle seconds, in which a hypervisor takes back what was freed; one tensor: of all, the first time
and once more; 1/8 of the rows: of each tensor; read: from storage or page cache, without mapped
files; /bytes: that / the bytes of all tensors; bitwise: whether every load left what was saved; -:
not measured, or does not apply"""
_NOT_COLD = 0.01
_NOT_WARM = 0.99


def render_loads(report: LoadReport) -> str:
    """The whole report as text."""
    return in_parts(
        _heading(report),
        _contender_table(report),
        _parts_table(report),
        _LEGEND,
        left_out(report.contenders),
        _limit_table(report),
        target_table(report.targets),
        remarks(report.targets, rounds=report.options["rounds"]),
        _page_cache_remarks(report.contenders),
        verdict(report.contenders, "load"),
    )


def _heading(report: LoadReport) -> str:
    options = report.options
    return (
        f"loading {options['shape']}: {format_nbytes(report.nbytes)} in {report.tensors} tensors,"
        f" rounds: {options['rounds']}\n{where(report.machine, report.versions)}"
    )


def _contender_table(report: LoadReport) -> str:
    rows: list[tuple[str, ...]] = [
        (
            "contender",
            *("warm ms [quartiles]", "/memcpy", "/read", "CPU s", "system s"),
            "fresh pages ms [quartiles]",
            *("cold ms [quartiles]", "/read", "bitwise"),
        )
    ]
    for each in report.contenders:
        if each.measured:
            rows.append(_row(report, each))
        if each.idle:
            rows.append(_row_after_idle_seconds(report, each))
    return table(rows)


def _row(report: LoadReport, each: LoadContenderReport) -> tuple[str, ...]:
    return (
        each.name,
        *_warm_cells(report, each, "warm"),
        with_spread(each.spread("load_s", "fresh"), 1e3, 1),
        with_spread(each.spread("load_s", "cold"), 1e3, 1),
        ratio(each.median("load_s", "cold"), report.limits.read("cold")),
        bits(each),
    )


def _row_after_idle_seconds(report: LoadReport, each: LoadContenderReport) -> tuple[str, ...]:
    name = f"{each.name}, freed memory taken away"
    return (name, *_warm_cells(report, each, "idle"), MISSING, MISSING, MISSING, MISSING)


def _warm_cells(report: LoadReport, each: LoadContenderReport, phase: str) -> tuple[str, ...]:
    load_s = each.median("load_s", phase)
    return (
        with_spread(each.spread("load_s", phase), 1e3, 1),
        ratio(load_s, report.limits.memcpy),
        ratio(load_s, report.limits.read("warm")),
        number(each.median("cpu_s", phase), 1, 2),
        number(each.median("system_s", phase), 1, 2),
    )


def _parts_table(report: LoadReport) -> str:
    rows: list[tuple[str, ...]] = [
        (
            "contender",
            *("one tensor ms [quartiles]", "once more"),
            *("1/8 of the rows ms [quartiles]", "read MiB", "/bytes"),
        )
    ]
    for each in report.contenders:
        read = median_of([sample.read_nbytes for sample in each.rows])
        if each.one_tensor:
            rows.append(
                (
                    each.name,
                    with_spread(each.spread("first_s", "one_tensor"), 1e3, 2),
                    number(each.median("again_s", "one_tensor"), 1e3, 2),
                    with_spread(each.spread("load_s", "rows"), 1e3, 1),
                    number(read, 1 / (1 << 20), 1),
                    ratio(read, report.nbytes),
                )
            )
    return table(rows) if len(rows) > 1 else ""


def _limit_table(report: LoadReport) -> str:
    limits = report.limits
    named: list[tuple[str, Sequence[float]]] = [("warm memcpy, one flat copy", limits.memcpy_s)]
    for phase in ("warm", "cold"):
        best = limits.best_read(phase)
        if best is not None:
            named.append((f"raw read, {phase} ({best[0]})", best[1]))
    return limit_table(named, report.nbytes)


def _page_cache_remarks(contenders: Sequence[LoadContenderReport]) -> str:
    """Who was not measured under the conditions that the table names."""
    lines = []
    for each in contenders:
        warm, cold = each.median("cached", "warm"), each.median("cached", "cold")
        if cold is not None and cold > _NOT_COLD:
            lines.append(
                f"not cold: {cold:.0%} of the files of {each.name} stayed in the page cache"
            )
        if warm is not None and warm < _NOT_WARM:
            lines.append(f"not warm: {warm:.0%} of the files of {each.name} were in the page cache")
    return "\n".join(lines)
