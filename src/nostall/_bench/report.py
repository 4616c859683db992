"""What a run prints: a table of contenders, one of limits, and one of targets."""

from __future__ import annotations

from collections.abc import Sequence

from nostall._bench.quantities import format_nbytes, median_of
from nostall._bench.results import BenchReport, ContenderReport
from nostall._bench.tables import (
    MISSING,
    bits,
    in_parts,
    left_out,
    limit_table,
    number,
    percent,
    ratio,
    remarks,
    table,
    target_table,
    verdict,
    where,
    with_spread,
)

_LEGEND = """\
blocked: time of the training thread inside the library, the save call and the poll that commits;
staged: until the state may be changed; durable: until all is fsynced and committed; /memcpy and
/write: blocked and durable time divided by the limits below; memory: peak of the extra host memory;
python, matmul: loss of a compute loop beside the save; bitwise: whether the checkpoint loads as it
was saved; -: not measured, or does not apply"""


def render(report: BenchReport) -> str:
    """The whole report as text."""
    return in_parts(
        _heading(report),
        _contender_table(report),
        _LEGEND,
        left_out(report.contenders),
        _limit_table(report),
        _free_memory_table(report),
        _first_saves_table(report),
        target_table(report.targets),
        remarks(report.targets, rounds=report.options["rounds"]),
        verdict(report.contenders, "write"),
    )


def _heading(report: BenchReport) -> str:
    options = report.options
    conditions = ", with a noisy neighbour" if options["noise"] else ""
    conditions += ", each save over the last one" if options["overwrite"] else ""
    return (
        f"{options['shape']}: {format_nbytes(report.nbytes)} in {report.tensors} tensors per rank,"
        f" ranks: {options['ranks']}, rounds: {options['rounds']}{conditions}\n"
        f"{where(report.machine, report.versions)}"
    )


def _contender_table(report: BenchReport) -> str:
    memcpy, write = report.limits.median("memcpy"), report.limits.median("raw_write")
    total_nbytes = report.nbytes * report.options["ranks"]
    rows: list[tuple[str, ...]] = [
        (
            "contender",
            "blocked ms [quartiles]",
            "call",
            "finish",
            "staged",
            "/memcpy",
            "durable s [quartiles]",
            "/write",
            "CPU s",
            "system s",
            "memory MiB",
            "/bytes",
            "python",
            "matmul",
            "bitwise",
        )
    ]
    rows += [
        _contender_row(each, memcpy, write, total_nbytes)
        for each in report.contenders
        if each.measured
    ]
    return table(rows)


def _contender_row(
    each: ContenderReport, memcpy: float | None, write: float | None, total_nbytes: int
) -> tuple[str, ...]:
    blocked_s, durable_s = each.median("blocked_s"), each.median("durable_s")
    peak = None if each.memory is None else each.memory.peak_nbytes
    verified = each.verification
    return (
        each.name,
        with_spread(each.spread("blocked_s"), 1e3, 1),
        number(each.median("call_s"), 1e3, 1),
        number(each.median("finish_s"), 1e3, 1),
        number(verified.staged_s if verified else None, 1e3, 1),
        ratio(blocked_s, memcpy),
        with_spread(each.spread("durable_s"), 1, 3),
        ratio(durable_s, write),
        number(each.median("cpu_s"), 1, 2),
        number(each.median("system_s"), 1, 2),
        number(peak, 1 / (1 << 20), 0),
        ratio(peak, total_nbytes),
        percent(each.slowdown("python")),
        percent(each.slowdown("matmul")),
        MISSING if verified is None else bits(each),
    )


def _limit_table(report: BenchReport) -> str:
    limits = report.limits
    best = limits.best_write
    named: list[tuple[str, Sequence[float]]] = [
        ("warm memcpy, one flat copy", limits.memcpy_s),
        ("`_foreach_copy_` of the tensors", limits.foreach_copy_s),
    ]
    if best is not None:
        through = "O_DIRECT" if limits.direct else "page cache: O_DIRECT was refused"
        named.append((f"raw write + fsync ({best}, {through})", limits.raw_write_s[best]))
    return limit_table(named, report.nbytes)


def _free_memory_table(report: BenchReport) -> str:
    """Figures from outside the rounds: a plain loop, and saves after memory was taken away."""
    rows = [
        (
            "contender",
            *("durable s", "system s", "in a plain loop", "with memory at hand", "saves"),
            "rounds / plain",
            *("freed memory was taken away by the hypervisor", "system s"),
        )
    ]
    rows += [
        (
            each.name,
            number(each.median("durable_s"), 1, 3),
            number(each.median("system_s"), 1, 2),
            number(each.median("durable_s", "plain_saves"), 1, 3),
            number(each.median("durable_s", "warm_plain_saves"), 1, 3),
            f"{len(each.warm_plain_saves)} of {len(each.plain_saves)}",
            number(each.to_plain, 1, 2),
            number(each.median("durable_s", "idle_saves"), 1, 3),
            number(each.median("system_s", "idle_saves"), 1, 2),
        )
        for each in report.contenders
        if each.idle_saves or each.plain_saves
    ]
    return table(rows) if len(rows) > 1 else ""


def _first_saves_table(report: BenchReport) -> str:
    """The first save of a process, and what of it is the price of fresh memory."""
    if report.probes is None:
        return ""
    headings = (
        *("blocked ms", "steady", "new memory", "the rest", "new memory, taken away before"),
        *("durable ms", "steady"),
    )
    rows: list[tuple[str, ...]] = [("first save of a process", *headings)]
    for (contender, warmed_up), processes in report.probes.kinds.items():
        samples: list[list[float | None]] = [
            [each.blocked_s[0] for each in processes],
            [each.steady_s for each in processes],
            [each.paid_for_memory_s for each in processes],
            [each.rest_s for each in processes],
            [each.fresh_memory_found_s for each in processes],
            [each.durable_s[0] for each in processes],
            [median_of(each.durable_s[3:]) for each in processes],
        ]
        name = f"{contender}, {'after warmup(state_dict)' if warmed_up else 'without'}"
        rows.append((name, *(number(median_of(column), 1e3, 0) for column in samples)))
    return table(rows)
