"""``nostall bench``: nostall, its peers and the machine's limits side by side."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from nostall._bench.options import DEFAULT_NBYTES, SHAPES, BenchOptions
from nostall._bench.quantities import parse_nbytes
from nostall._cli.arguments import Commands, checked, not_negative, positive


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "bench",
        help="measure nostall, its peers and the machine's limits side by side",
        description="Measure nostall, its peers and the machine's limits on the same state dict, in"
        " turns.",
    )
    parser.set_defaults(run=run, refuse=parser.error)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="large", help="what is saved (default: %(default)s)")
    add("--bytes", type=checked(parse_nbytes), help="size per rank, such as 512MiB")
    add("--ranks", type=checked(positive), help="start this many ranks under torchrun with gloo")
    add("--rounds", type=checked(positive), default=7, help="timed rounds (default: %(default)s)")
    add(
        "--contenders",
        default="",
        help="names or patterns, comma-separated, such as 'nostall*,dcp.*'",
    )
    add("--directory", type=Path, help="where to write (default: the current directory)")
    add("--json", type=Path, metavar="FILE", help="store every sample")
    add("--plot", type=Path, metavar="FILE.png", help="draw; needs the plot extra")
    add("--noise", action="store_true", help="with a second process that writes and computes")
    add("--overwrite", action="store_true", help="save over the contender's last checkpoint")
    add(
        *("--idle-rounds",),
        type=checked(not_negative),
        default=2,
        help="rounds in which each save follows idle seconds, 0 for none (default: %(default)s)",
    )
    add("--idle-seconds", type=float, default=10, help="how many (default: %(default)s)")
    add(
        *("--plain-saves",),
        type=checked(not_negative),
        default=3,
        help="saves of each contender in a plain loop, 0 for none (default: %(default)s)",
    )
    add(
        *("--memory-saves",),
        type=checked(not_negative),
        default=5,
        help="saves in a row while memory is sampled, 0 for none (default: %(default)s)",
    )
    add(
        *("--slowdown-rounds",),
        type=checked(not_negative),
        default=3,
        help="rounds with compute loops (default: %(default)s)",
    )
    add("--no-probes", action="store_true", help="leave out start, import and first-save times")
    add("--list", action="store_true", help="list the contenders and exit")


def run(parsed: argparse.Namespace) -> int:
    """Measure and print a report."""
    from nostall._bench.main import bench, list_contenders

    if parsed.list:
        return list_contenders()
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    try:
        options = BenchOptions(
            shape=parsed.shape,
            nbytes=parsed.bytes or DEFAULT_NBYTES[parsed.shape],
            ranks=parsed.ranks or launched,
            rounds=parsed.rounds,
            idle_rounds=parsed.idle_rounds,
            idle_s=parsed.idle_seconds,
            plain_saves=parsed.plain_saves,
            memory_saves=parsed.memory_saves,
            slowdown_rounds=parsed.slowdown_rounds,
            contenders=tuple(name.strip() for name in parsed.contenders.split(",") if name.strip()),
            directory=parsed.directory,
            json=parsed.json,
            plot=parsed.plot,
            noise=parsed.noise,
            overwrite=parsed.overwrite,
            probes=not parsed.no_probes,
        )
        return bench(options, parsed.given)
    except ValueError as error:  # options that exclude each other
        parsed.refuse(str(error))
        raise
