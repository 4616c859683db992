"""``nostall bench``: nostall, its peers and the machine's limits side by side."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path

from nostall._bench.options import DEFAULT_NBYTES, SHAPES, BenchOptions
from nostall._bench.quantities import format_nbytes, parse_nbytes
from nostall._cli.arguments import at_least, checked

HELP = "measure nostall, its peers and the machine's limits side by side"
DESCRIPTION = (
    "Measure nostall, its peers and the machine's limits on the same state dict, in turns."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.set_defaults(refuse=parser.error)
    add = parser.add_argument
    defaults = DEFAULT_NBYTES.items()
    add("--shape", choices=SHAPES, default="large", help="what is saved (default: %(default)s)")
    add(
        "--bytes",
        type=checked(parse_nbytes),
        dest="nbytes",
        metavar="BYTES",
        help="size per rank, such as 512MiB (default: "
        + ", ".join(f"{format_nbytes(nbytes)} for {shape}" for shape, nbytes in defaults)
        + ")",
    )
    add("--ranks", type=at_least(1), help="start this many ranks under torchrun with gloo")
    add("--rounds", type=at_least(1), default=7, help="timed rounds (default: %(default)s)")
    add(
        "--contenders",
        type=_names,
        default=(),
        help="names or patterns, comma-separated, such as 'nostall*,dcp.*'",
    )
    add("--directory", type=Path, help="where to write (default: the current directory)")
    add("--json", type=Path, metavar="FILE", help="store every sample")
    add(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw the times, and a timeline of steps; needs matplotlib",
    )
    add("--noise", action="store_true", help="with a second process that writes and computes")
    add("--overwrite", action="store_true", help="save over the contender's last checkpoint")
    add(
        "--idle-rounds",
        type=at_least(0),
        default=2,
        help="rounds in which each save follows idle seconds, 0 for none (default: %(default)s)",
    )
    add(
        "--idle-seconds",
        type=float,
        default=10,
        dest="idle_s",
        metavar="SECONDS",
        help="how many (default: %(default)s)",
    )
    add(
        "--plain-saves",
        type=at_least(0),
        default=3,
        help="repeat each contender's saves in a plain loop until this many found memory at hand,"
        " or four times as many were made; 0 for none (default: %(default)s)",
    )
    add(
        "--memory-saves",
        type=at_least(0),
        default=5,
        help="saves in a row while memory is sampled, 0 for none (default: %(default)s)",
    )
    add(
        "--slowdown-rounds",
        type=at_least(0),
        default=3,
        help="rounds with compute loops (default: %(default)s)",
    )
    add(
        "--no-probes",
        action="store_false",
        dest="probes",
        help="leave out start, import and first-save times",
    )
    add("--list", action="store_true", help="list the contenders and exit")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run(parsed: argparse.Namespace) -> int:
    """Measure and print a report."""
    from nostall._bench.main import bench, list_contenders

    if parsed.list:
        return list_contenders()
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    parsed.ranks = parsed.ranks or launched
    parsed.nbytes = parsed.nbytes or DEFAULT_NBYTES[parsed.shape]
    options = {field.name: getattr(parsed, field.name) for field in fields(BenchOptions)}
    try:
        return bench(BenchOptions(**options), parsed.given)
    except ValueError as error:  # options that exclude each other
        parsed.refuse(str(error))
        raise
