"""``nostall bench``: nostall, its peers and the machine's limits side by side."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from nostall._bench.options import (
    DEFAULT_NBYTES,
    SHAPES,
    BenchOptions,
    LoadOptions,
    RestartOptions,
    SimulationOptions,
)
from nostall._bench.quantities import format_nbytes, parse_nbytes
from nostall._cli.arguments import at_least, checked, not_empty

HELP = "measure nostall, its peers and the machine's limits side by side"
DESCRIPTION = (
    "Measure nostall, its peers and the machine's limits on the same state dict, in turns."
)

Options = TypeVar("Options", BenchOptions, LoadOptions, RestartOptions, SimulationOptions)

_DEFAULTS: dict[str, Any] = {
    "ranks": 1,
    "rounds": 7,
    "idle_rounds": 2,
    "idle_s": 10.0,
    "plain_saves": 3,
    "memory_saves": 5,
    "slowdown_rounds": 3,
    "noise": False,
    "overwrite": False,
    "probes": True,
    "simulate_items": 100,
}
"""For options that were not given: those that a kind of run does not use must not be."""
_OF_SAVES_ONLY = {
    "plot": "--plot",
    "noise": "--noise",
    "overwrite": "--overwrite",
    "plain_saves": "--plain-saves",
    "memory_saves": "--memory-saves",
    "slowdown_rounds": "--slowdown-rounds",
    "probes": "--no-probes",
}
_IDLE = {"idle_rounds": "--idle-rounds", "idle_s": "--idle-seconds"}
_OF_SIMULATION_ONLY = {"simulate_items": "--simulate-items"}
_UNUSED: dict[str, dict[str, str]] = {
    "save": _OF_SIMULATION_ONLY,
    "load": {**_OF_SAVES_ONLY, **_OF_SIMULATION_ONLY},
    "restart": {**_OF_SAVES_ONLY, **_IDLE, **_OF_SIMULATION_ONLY},
    "simulate-ranks": {**_OF_SAVES_ONLY, **_IDLE, "ranks": "--ranks", "nbytes": "--bytes"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    _add_kinds(parser)
    sizes = DEFAULT_NBYTES.items()
    add("--shape", choices=SHAPES, default="large", help="what is saved (default: %(default)s)")
    add(
        "--bytes",
        type=checked(parse_nbytes),
        dest="nbytes",
        metavar="BYTES",
        help="size per rank, such as 512MiB (default: "
        + ", ".join(f"{format_nbytes(nbytes)} for {shape}" for shape, nbytes in sizes)
        + ")",
    )
    add("--ranks", type=at_least(1), help="start this many ranks under torchrun with gloo")
    add(
        "--rounds",
        type=at_least(1),
        help="timed rounds; with --restart, processes of each contender" + _default("rounds"),
    )
    add(
        "--contenders",
        type=_names,
        default=(),
        help="names or patterns, comma-separated, such as 'nostall*,dcp.*'",
    )
    add(
        "--directory",
        type=checked(_directory),
        help="existing directory to write in (default: the current one)",
    )
    add("--json", type=_file, metavar="FILE", help="store every sample")
    add(
        "--idle-rounds",
        type=at_least(0),
        help="rounds in which each save or load follows idle seconds, 0 for none"
        + _default("idle_rounds"),
    )
    add(
        "--idle-seconds",
        type=float,
        dest="idle_s",
        metavar="SECONDS",
        help="how many" + _default("idle_s"),
    )
    add(
        "--simulate-items",
        type=at_least(1),
        metavar="ITEMS",
        help="unique shards of each simulated rank" + _default("simulate_items"),
    )
    _add_options_of_saves(parser)
    add("--list", action="store_true", help="list the contenders and exit")


def _add_kinds(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_mutually_exclusive_group()
    add = kinds.add_argument
    parser.set_defaults(kind="save")
    add("--load", action="store_const", const="load", dest="kind", help="measure loads")
    add(
        "--restart",
        action="store_const",
        const="restart",
        dest="kind",
        help="measure fresh processes, from their start until a checkpoint is loaded",
    )
    add(
        "--simulate-ranks",
        type=at_least(2),
        metavar="RANKS",
        help="what a save of so many ranks costs its coordinator, in this process",
    )


def _add_options_of_saves(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("only for saves").add_argument
    add(
        "--plot",
        type=_file,
        metavar="FILE.png",
        help="draw the times, and a timeline of steps; needs matplotlib",
    )
    add(
        "--noise",
        action="store_true",
        default=None,
        help="with a second process that writes and computes",
    )
    add(
        "--overwrite",
        action="store_true",
        default=None,
        help="save over the contender's last checkpoint",
    )
    add(
        "--plain-saves",
        type=at_least(0),
        help="repeat each contender's saves in a plain loop until this many found memory at hand,"
        " or four times as many were made; 0 for none" + _default("plain_saves"),
    )
    add(
        "--memory-saves",
        type=at_least(0),
        help="saves in a row while memory is sampled, 0 for none" + _default("memory_saves"),
    )
    add(
        "--slowdown-rounds",
        type=at_least(0),
        help="rounds with compute loops" + _default("slowdown_rounds"),
    )
    add(
        "--no-probes",
        action="store_false",
        default=None,
        dest="probes",
        help="leave out start, import and first-save times",
    )


def _default(name: str) -> str:
    return f" (default: {_DEFAULTS[name]:g})"


def _directory(text: str) -> Path:
    if not Path(not_empty(text)).is_dir():
        raise ValueError(f"{text!r} is not an existing directory")
    return Path(text)


def _file(text: str) -> Path:
    return Path(not_empty(text))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run(parsed: argparse.Namespace) -> int:
    """Measure and print a report."""
    try:
        if parsed.simulate_ranks is not None:
            parsed.kind = "simulate-ranks"
        _refuse_unused(parsed)
        kinds = {
            "save": _saves,
            "load": _loads,
            "restart": _restarts,
            "simulate-ranks": _simulation,
        }
        return kinds[parsed.kind](parsed)
    except ValueError as error:  # options that exclude each other
        parsed.refuse(str(error))
        raise


def _refuse_unused(parsed: argparse.Namespace) -> None:
    """Require that no option was given that this kind of run would ignore.

    Raises:
        ValueError: One was.
    """
    for name, option in _UNUSED[parsed.kind].items():
        if getattr(parsed, name) is not None:
            of = f"with --{parsed.kind}" if parsed.kind != "save" else "without --simulate-ranks"
            raise ValueError(f"{option} has no meaning {of}; leave it out")
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    parsed.ranks = parsed.ranks or launched
    if parsed.kind != "save" and parsed.ranks > 1:
        raise ValueError(
            f"--{parsed.kind} measures one process, not {parsed.ranks} ranks;"
            " leave --ranks out, and torchrun"
        )


def _options(kind: type[Options], parsed: argparse.Namespace) -> Options:
    """What was given, and defaults for the rest."""
    values = {field.name: getattr(parsed, field.name) for field in fields(kind)}
    given = {name: value for name, value in values.items() if value is not None}
    default = {name: _DEFAULTS.get(name) for name in values}
    if "nbytes" in values:
        default["nbytes"] = DEFAULT_NBYTES[parsed.shape]
    return kind(**{**default, **given})


def _saves(parsed: argparse.Namespace) -> int:
    from nostall._bench.main import all_contenders, bench, list_contenders

    if parsed.list:
        return list_contenders(all_contenders(parsed.shape), parsed.contenders)
    return bench(_options(BenchOptions, parsed), parsed.given)


def _loads(parsed: argparse.Namespace) -> int:
    from nostall._bench.loading.contenders import load_contenders
    from nostall._bench.main import bench_loads, list_contenders

    if parsed.list:
        return list_contenders(load_contenders(), parsed.contenders)
    return bench_loads(_options(LoadOptions, parsed), load_contenders(), parsed.given)


def _restarts(parsed: argparse.Namespace) -> int:
    from nostall._bench.main import bench_restarts, list_contenders
    from nostall._bench.restarting.run import restart_ways

    if parsed.list:
        return list_contenders(restart_ways(), parsed.contenders)
    return bench_restarts(_options(RestartOptions, parsed), restart_ways(), parsed.given)


def _simulation(parsed: argparse.Namespace) -> int:
    from nostall._bench.main import simulate_ranks
    from nostall._bench.simulating.ways import WAYS

    if parsed.list:
        print("\n".join(way.name for way in WAYS))
        return 0
    parsed.rounds = parsed.rounds or 3
    return simulate_ranks(_options(SimulationOptions, parsed), WAYS, parsed.given)
