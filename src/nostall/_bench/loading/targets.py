"""What the figures of loads should be; of the figures only the targets are written down."""

from __future__ import annotations

from collections.abc import Callable

from nostall._bench.loading.results import LoadReport
from nostall._bench.quantities import median_of
from nostall._bench.targets import LARGE, MANY, Target, quotient

Measure = Callable[[LoadReport], float | None]

READER = "nostall dcp.load"
OWN = "nostall.load"
STOCK = "dcp.load"


def _seconds(report: LoadReport, name: str, phase: str = "warm") -> float | None:
    contender = report.contender(name)
    return None if contender is None else contender.median("load_s", phase)


def _to_memcpy(name: str) -> Measure:
    return lambda report: quotient(_seconds(report, name), report.limits.memcpy)


def _to_cold_read(name: str) -> Measure:
    return lambda report: quotient(_seconds(report, name, "cold"), report.limits.read("cold"))


def _speedup(name: str) -> Measure:
    return lambda report: quotient(_seconds(report, STOCK), _seconds(report, name))


def _cost_of_checksums(name: str) -> Measure:
    """What comparing checksums adds, in per cent; not measured with zlib, which sets the pace."""

    def measure(report: LoadReport) -> float | None:
        if report.versions["crc32"] != "isal":
            return None
        ratio = quotient(_seconds(report, f"{name} crc"), _seconds(report, name))
        return None if ratio is None else (ratio - 1) * 100

    return measure


def _read_beyond_rows(report: LoadReport) -> float | None:
    """KiB per tensor that are read beside the wanted rows and the metadata."""
    contender = report.contender(READER)
    if contender is None or report.metadata_nbytes is None or not report.sliced_tensors:
        return None
    read = median_of([sample.read_nbytes for sample in contender.rows])
    if read is None:
        return None
    beyond = read - report.rows_nbytes - report.metadata_nbytes
    return beyond / report.sliced_tensors / 1024


LOAD_TARGETS: tuple[Target[LoadReport], ...] = (
    *(
        Target(f"warm: {name} / memcpy", "<=", 1.25, _to_memcpy(name), shapes=LARGE)
        for name in (READER, OWN)
    ),
    *(
        Target(f"cold: {name} / raw parallel read", "<=", 1.2, _to_cold_read(name), shapes=LARGE)
        for name in (READER, OWN)
    ),
    *(
        Target(f"warm: dcp.load / {name}", ">=", bound, _speedup(name), shapes=shapes)
        for shapes, bounds in ((("large", "mixed", "llama3-8b"), (None, None)), (MANY, (6, 20)))
        for name, bound in zip((READER, OWN), bounds, strict=True)
    ),
    *(
        Target(
            f"warm: {name}, more time with checksums",
            "<=",
            10,
            _cost_of_checksums(name),
            unit=" %",
            shapes=LARGE,
        )
        for name in (READER, OWN)
    ),
    Target(
        "1/8 of the rows: read beside them and the metadata, per tensor",
        "<=",
        16,
        _read_beyond_rows,
        unit=" KiB",
        shapes=LARGE,
    ),
)
