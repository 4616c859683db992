"""The picture: blocked and durable time against the limits, and the steps of a saving loop."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from nostall._bench.results import BenchReport, Step


class PlotUnavailable(RuntimeError):
    """matplotlib is not there."""


def require_matplotlib() -> Any:
    """matplotlib, set up to draw into files.

    Raises:
        PlotUnavailable: It is not installed.
    """
    try:
        matplotlib = import_module("matplotlib")
    except ImportError as error:
        raise PlotUnavailable(
            f"--plot needs matplotlib ({error}); install the extra: pip install 'nostall[plot]'"
        ) from error
    matplotlib.use("Agg")
    return matplotlib


def draw(report: BenchReport, file: Path) -> None:
    """Write the picture to a file; its suffix says the format."""
    require_matplotlib()
    pyplot = import_module("matplotlib.pyplot")
    rows = 2 if report.timeline else 1
    figure, axes = pyplot.subplots(rows, 2, figsize=(13, 4.5 * rows), squeeze=False)
    limits = report.limits
    _bars(axes[0][0], report, "blocked_s", "blocked, ms", 1e3, ("memcpy", limits.median("memcpy")))
    _bars(
        *(axes[0][1], report, "durable_s", "until durable, s", 1.0),
        ("raw write", limits.median("raw_write")),
    )
    if report.timeline:
        _timelines(axes[1], report.timeline)
    figure.suptitle(
        f"nostall {report.versions['nostall']}, {report.options['shape']},"
        f" ranks: {report.options['ranks']}, torch {report.versions['torch']}"
    )
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _bars(
    axis: Any,
    report: BenchReport,
    figure: str,
    title: str,
    scale: float,
    limit: tuple[str, float | None],
) -> None:
    """Medians with quartiles, the least on top, and the limit as a line."""
    spreads = [(each.name, each.spread(figure)) for each in report.contenders]
    there = [(name, spread) for name, spread in spreads if spread is not None]
    there.sort(key=lambda pair: -pair[1].median)
    errors = [
        [(spread.median - spread.quartiles[0]) * scale for _, spread in there],
        [(spread.quartiles[1] - spread.median) * scale for _, spread in there],
    ]
    axis.barh(
        [name for name, _ in there],
        [spread.median * scale for _, spread in there],
        xerr=errors,
        color=["tab:green" if name.startswith("nostall") else "tab:gray" for name, _ in there],
    )
    name, seconds = limit
    if seconds is not None:
        axis.axvline(seconds * scale, color="tab:red", label=f"{name}: {seconds * scale:.3g}")
        axis.legend()
    axis.set_xscale("log")
    axis.set_title(title)


def _timelines(axes: Sequence[Any], steps: Sequence[Step]) -> None:
    """One axis per contender, the same scale on all."""
    names = list(dict.fromkeys(step.contender for step in steps))
    highest = max(step.duration_s for step in steps) * 1.1e3
    for axis, name in zip(axes, names, strict=False):
        for saving, color, label in (
            (False, "tab:blue", "no save"),
            (True, "tab:red", "call and save under way"),
        ):
            shown = [step for step in steps if step.contender == name and step.saving is saving]
            axis.plot(
                [step.start_s for step in shown],
                [step.duration_s * 1e3 for step in shown],
                ".",
                color=color,
                label=label,
            )
        axis.set(title=f"steps: {name}", xlabel="s", ylabel="ms", ylim=(0.5, highest))
        axis.set_yscale("log")
        axis.legend()
    for axis in axes[len(names) :]:
        axis.set_visible(False)
