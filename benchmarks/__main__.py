"""``python -m benchmarks saves|loads|restart|start|ranks|callers``."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import callers, loads, ranks, restart, saves, start
from benchmarks.contenders import all_contenders
from benchmarks.group import Group, is_launched, joined, launch, working_directory
from benchmarks.machine import facts, versions
from benchmarks.report import Report, Row, rendered
from benchmarks.workloads import DEFAULT_MIB, SHAPES, make_workload

_MODULES = {
    "saves": saves,
    "loads": loads,
    "restart": restart,
    "start": start,
    "ranks": ranks,
    "callers": callers,
}
_WITHOUT_A_SHAPE = ("ranks", "callers")


def main(arguments: Sequence[str]) -> int:
    """Measure and print; 1 if something was wrong or nothing could be measured."""
    parser = _parser()
    given = parser.parse_args(arguments)
    # Said by torch on every save and load without a process group, and on every background save.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\..*")
    try:
        chosen = _chosen(given)
        _require_room(given, len(chosen))
    except ValueError as error:
        parser.error(str(error))
    if given.kind == "saves" and given.ranks > 1 and not is_launched():
        return launch(arguments, given.ranks)
    with joined() as group, working_directory(given.directory, group) as directory:
        report = _measured(given, chosen, group, directory)
        report.about = {
            "command": ["python", "-m", "benchmarks", *arguments],
            "options": {key: str(value) for key, value in vars(given).items()},
            "machine": facts(directory),
            "versions": versions(),
        }
    if not group.rank:
        print(rendered(report, _MODULES[given.kind].COLUMNS, _MODULES[given.kind].LEGEND))
        if given.json is not None:
            report.store(given.json)
    return int(report.failed)


def _require_room(given: argparse.Namespace, contenders: int) -> None:
    if given.kind in _WITHOUT_A_SHAPE:
        return
    copies = {"saves": 3 + contenders, "loads": 5, "restart": 4, "start": 5}[given.kind]
    wanted = copies * _nbytes(given) * getattr(given, "ranks", 1)
    if wanted > (there := psutil.virtual_memory().available):
        raise ValueError(f"this may need {wanted >> 20} MiB of memory, and {there >> 20} are there")


def _nbytes(given: argparse.Namespace) -> int:
    return int((given.mib or DEFAULT_MIB[given.shape]) * 2**20)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", allow_abbrev=False)
    kinds = parser.add_subparsers(dest="kind", required=True)
    added = {}
    for kind, text in (
        ("saves", "save a state dict by each contender, in turns with the machine's limits"),
        ("loads", "load one, from a warm and from a cold page cache"),
        ("restart", "fresh processes, from their start to their first save"),
        ("start", "programs that import torch, build a model and load"),
        ("ranks", "what a save of many ranks costs its coordinator, simulated"),
        ("callers", "what a save costs the training thread, for several kinds of callers"),
    ):
        added[kind] = kinds.add_parser(kind, help=text, description=text, allow_abbrev=False)
        add = added[kind].add_argument
        if kind not in _WITHOUT_A_SHAPE:
            add("--shape", choices=SHAPES, default="large", help="default: %(default)s")
            add("--mib", type=float, help=f"size per rank; default: {DEFAULT_MIB}")
        add("--rounds", type=int, default=7, help="default: %(default)s")
        add("--contenders", default="*", help="patterns, such as 'nostall*,dcp.save'")
        add("--directory", type=Path, default=Path(), help="where to write; default: here")
        add("--json", type=Path, metavar="FILE", help="store every sample")
    add = added["saves"].add_argument
    add("--ranks", type=int, default=1, help="start this many under torchrun with gloo")
    add("--memory-saves", type=int, default=3, help="while memory is sampled, 0 for none")
    add = added["ranks"].add_argument
    add("--ranks", type=int, default=1024, help="default: %(default)s")
    add("--items", type=int, default=100, help="unique shards of each; default: %(default)s")
    add = added["callers"].add_argument
    add("--tensors", type=int, default=5000, help="default: %(default)s")
    return parser


def _chosen(given: argparse.Namespace) -> list[Any]:
    """The contenders that match a pattern, in their own order.

    Raises:
        ValueError: A pattern matches nobody.
    """
    everybody: Sequence[Any]
    match given.kind:
        case "saves":
            everybody = all_contenders(given.shape)
        case "loads":
            everybody = loads.load_contenders()
        case "restart":
            everybody = restart.ways()
        case "start":
            everybody = [Row(name=name) for name in start.WAYS]
        case "callers":
            everybody = callers.callers()
        case _:
            everybody = ranks.WAYS
    names = [each.name for each in everybody]
    patterns = [pattern.strip() for pattern in given.contenders.split(",")]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"no contender matches {pattern!r}; there are: {', '.join(names)}")
    return [each for each in everybody if any(fnmatch.fnmatchcase(each.name, p) for p in patterns)]


def _measured(
    given: argparse.Namespace, chosen: list[Any], group: Group, directory: Path
) -> Report:
    if given.kind == "ranks":
        state = ranks.ShardedState(ranks=given.ranks, items=given.items)
        return ranks.measure_ranks(state, directory, chosen, rounds=given.rounds)
    if given.kind == "callers":
        return callers.measure_callers(given.tensors, directory, chosen, rounds=given.rounds)
    nbytes = _nbytes(given)
    if given.kind == "start":
        return start.measure_starts(nbytes, directory, chosen, rounds=given.rounds)
    if given.kind == "restart":
        return restart.measure_restarts(given.shape, nbytes, directory, chosen, rounds=given.rounds)
    workload = make_workload(given.shape, nbytes, rank=group.rank, world_size=group.world_size)
    if given.kind == "loads":
        return loads.measure_loads(loads.Loads(workload, directory), chosen, rounds=given.rounds)
    return saves.measure_saves(
        saves.Saves(workload, directory, group),
        chosen,
        rounds=given.rounds,
        memory_saves=given.memory_saves,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
