"""``python -m nostall``: the command line. Subcommands import torch only if they need it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from nostall._bench.options import DEFAULT_NBYTES, SHAPES, BenchOptions
from nostall._bench.quantities import parse_nbytes
from nostall._version import __version__

__all__ = ["main"]

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status.

    0 for success, 1 for a failure, 2 for wrong arguments; ``verify`` has more.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser, bench_parser = _parsers()
    parsed = parser.parse_args(given)
    if parsed.command == "verify":
        return _verify(parsed)
    try:
        return _bench(parsed, given)
    except ValueError as error:
        bench_parser.error(str(error))


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser, and that of ``bench``, whose options can exclude each other."""
    parser = argparse.ArgumentParser(prog="python -m nostall", description="nostall's tools.")
    parser.add_argument("--version", action="version", version=f"nostall {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    bench = commands.add_parser(
        "bench",
        help="measure nostall, its peers and the machine's limits side by side",
        description="Measure nostall, its peers and the machine's limits on the same state dict, in"
        " turns.",
    )
    _add_bench_arguments(bench)
    verify = commands.add_parser(
        "verify",
        help="read a whole checkpoint and report any damage",
        description="Read a whole checkpoint and compare it with its checksums. Exit status: 0 if"
        " it is as it was written, 1 if it is damaged or not complete, 2 for wrong arguments, 3 if"
        " there is no checkpoint, 4 if it has no manifest and its metadata is not understood.",
    )
    verify.add_argument("path", type=Path, metavar="PATH", help="checkpoint directory")
    verify.add_argument("--json", action="store_true", help="print the findings as JSON")
    verify.add_argument(
        *("--threads",),
        type=_checked(_positive),
        default=8,
        help="number of files to read at a time (default: %(default)s)",
    )
    return parser, bench


def _verify(parsed: argparse.Namespace) -> int:
    from nostall.integrity import State, verify

    progress = _show_progress if sys.stderr.isatty() else None
    found = verify(parsed.path, threads=parsed.threads, progress=progress)
    if progress is not None:
        print(end="\r\033[K", file=sys.stderr)
    status = {State.WHOLE: 0, State.DAMAGED: 1, State.NOT_THERE: 3, State.NOT_UNDERSTOOD: 4}[
        found.state
    ]
    if parsed.json:
        print(json.dumps({"ok": found.ok, **asdict(found)}, indent=2))
        return status
    if found.note is not None:
        print(f"note: {found.note}")
    for damage in found.damages:
        print(f"damaged: {damage}")
    if found.unchecked:
        print(f"no checksum: {len(found.unchecked)} items, for example {found.unchecked[0]}")
    if not found.ok:
        verdict = found.state.value.upper()
    elif found.has_manifest:
        verdict = "as it was written"
    else:
        verdict = (
            "no damage found; without a manifest, only the checksums of its records were compared"
        )
    print(
        f"{found.path}: {verdict} ({found.items} items, {found.files} files, {found.nbytes} bytes)"
    )
    return status


def _show_progress(done: int, total: int) -> None:
    print(end=f"\r{done / max(1, total):4.0%}", file=sys.stderr, flush=True)


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="large", help="what is saved (default: %(default)s)")
    add("--bytes", type=_checked(parse_nbytes), help="size per rank, such as 512MiB")
    add("--ranks", type=_checked(_positive), help="start this many ranks under torchrun with gloo")
    add("--rounds", type=_checked(_positive), default=7, help="timed rounds (default: %(default)s)")
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
        type=_checked(_not_negative),
        default=2,
        help="rounds in which each save follows idle seconds, 0 for none (default: %(default)s)",
    )
    add("--idle-seconds", type=float, default=10, help="how many (default: %(default)s)")
    add(
        *("--plain-saves",),
        type=_checked(_not_negative),
        default=3,
        help="saves of each contender in a plain loop, 0 for none (default: %(default)s)",
    )
    add(
        *("--memory-saves",),
        type=_checked(_not_negative),
        default=5,
        help="saves in a row while memory is sampled, 0 for none (default: %(default)s)",
    )
    add(
        *("--slowdown-rounds",),
        type=_checked(_not_negative),
        default=3,
        help="rounds with compute loops (default: %(default)s)",
    )
    add("--no-probes", action="store_true", help="leave out start, import and first-save times")
    add("--list", action="store_true", help="list the contenders and exit")


def _bench(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    from nostall._bench.main import bench, list_contenders

    if parsed.list:
        return list_contenders()
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
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
    return bench(options, given)


def _checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A type for argparse that shows the message of a ``ValueError``."""

    def checked(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(f"{text} is less than 1")
    return int(text)


def _not_negative(text: str) -> int:
    if int(text) < 0:
        raise ValueError(f"{text} is negative")
    return int(text)
