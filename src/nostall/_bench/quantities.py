"""Sizes that people type and read, and the statistics of a few samples. No I/O, no torch."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import Self

_UNITS = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "KIB": 1 << 10,
    "KB": 10**3,
    "M": 1 << 20,
    "MIB": 1 << 20,
    "MB": 10**6,
    "G": 1 << 30,
    "GIB": 1 << 30,
    "GB": 10**9,
    "T": 1 << 40,
    "TIB": 1 << 40,
    "TB": 10**12,
}
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_nbytes(text: str) -> int:
    """Bytes from ``512MiB``, ``1.5G`` (binary), ``100MB`` (decimal) or a plain number.

    Raises:
        ValueError: The text is not a size, or is less than one byte.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"{text!r} is not a size; write 512MiB, 1GiB, 2TiB, 100MB or a number of bytes"
        )
    nbytes = int(float(match.group(1)) * unit)
    if nbytes < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return nbytes


def format_nbytes(nbytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least one of it."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(nbytes) >= unit:
            number = nbytes / unit
            return f"{number:,.0f} {name}" if abs(number) >= 1024 else f"{number:.4g} {name}"
    return f"{nbytes:.0f} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and spread of samples, in their unit."""

    median: float
    low: float
    high: float
    quartiles: tuple[float, float]
    """The 25 % and 75 % points, interpolated; the ends if there are two samples or fewer."""
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self | None:
        """The spread of at least one sample, or ``None`` of none."""
        if not samples:
            return None
        low, high = min(samples), max(samples)
        quartiles = (low, high)
        if len(samples) > 2:
            first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
            quartiles = (first, third)
        return cls(
            median=statistics.median(samples),
            low=low,
            high=high,
            quartiles=quartiles,
            count=len(samples),
        )


def median_of(samples: Sequence[float | None]) -> float | None:
    """The median of those samples that exist, or ``None``."""
    there = [sample for sample in samples if sample is not None]
    return statistics.median(there) if there else None


def best_of(samples: Mapping[str, Sequence[float]]) -> str | None:
    """The setting with the least median, or ``None`` if there are no samples."""
    medians = {setting: median_of(each) for setting, each in samples.items()}
    there = {setting: median for setting, median in medians.items() if median is not None}
    return min(there, key=lambda setting: there[setting], default=None)
