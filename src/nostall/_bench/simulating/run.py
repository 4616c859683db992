"""Run the simulation, and print what it found."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from nostall._bench.machine import about_run
from nostall._bench.options import SimulationOptions
from nostall._bench.quantities import median_of
from nostall._bench.simulating.exchange import Exchange
from nostall._bench.simulating.state import ShardedState
from nostall._bench.simulating.ways import Way
from nostall._bench.tables import in_parts, number, table, where
from nostall._engine import default_engine

_LEGEND = """\
first: with planning; later: median of the saves after the second; collectives, store: operations of
the coordinator, without polls; up, down: bytes that it gets from a rank and sends to one; total: of
all ranks, both ways; CPU: its processor time, without the network, and that of its writer process;
kept: memory after the saves"""
_BEFORE_STEADY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSave:
    """What one save costs the coordinator."""

    way: str
    save: str
    collectives: int
    store_operations: int
    up_nbytes: int
    """Of all ranks."""
    down_nbytes: int
    cpu_s: float
    writer_cpu_s: float
    """Of its writer process."""
    kept_nbytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """One run."""

    command: tuple[str, ...]
    options: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    saves: tuple[SimulatedSave, ...]


def simulate(
    options: SimulationOptions, ways: Sequence[type[Way]], command: Sequence[str]
) -> SimulationReport:
    """Let the coordinator of each way do its work for a few saves."""
    state = ShardedState(options.simulate_ranks, options.simulate_items)
    saves: list[SimulatedSave] = []
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="nostall-simulated-") as below:
        for kind in ways:
            way = kind(state)
            print(f"{way.name} ...", file=sys.stderr)
            saves += _saves_of(way, Path(below), options.rounds)
    facts = about_run(command, options, options.directory or Path())
    return SimulationReport(**facts, saves=tuple(saves))


def _saves_of(way: Way, below: Path, rounds: int) -> list[SimulatedSave]:
    gc.collect()
    before = psutil.Process().memory_info().rss
    exchanges = []
    for number_of_save in range(_BEFORE_STEADY + rounds):
        gc.collect()
        exchange = Exchange()
        began_s = _writers_cpu_s()
        way.save(exchange, below / f"{number_of_save}")
        exchange.writer_cpu_s = _writers_cpu_s() - began_s
        exchanges.append(exchange)
        if (made := below / f"{number_of_save}").exists():
            shutil.rmtree(made)
    gc.collect()
    kept = psutil.Process().memory_info().rss - before
    first, later = exchanges[0], exchanges[_BEFORE_STEADY:]
    steady = min(later, key=lambda each: abs(each.cpu_s - (_median_s(later))))
    return [
        _as_save(way, "first", first, None),
        _as_save(way, "later", steady, kept),
    ]


def _writers_cpu_s() -> float:
    """Processor time of the writer process, which is started if there is none."""
    (writer,) = default_engine().writers(1)
    times = psutil.Process(writer.pid).cpu_times()
    return times.user + times.system


def _median_s(exchanges: Sequence[Exchange]) -> float:
    return median_of([each.cpu_s for each in exchanges]) or 0.0


def _as_save(way: Way, save: str, exchange: Exchange, kept: int | None) -> SimulatedSave:
    return SimulatedSave(
        way=way.name,
        save=save,
        collectives=exchange.collectives,
        store_operations=exchange.store_operations,
        up_nbytes=exchange.up_nbytes,
        down_nbytes=exchange.down_nbytes,
        cpu_s=exchange.cpu_s,
        writer_cpu_s=exchange.writer_cpu_s,
        kept_nbytes=kept,
    )


def render_simulation(report: SimulationReport) -> str:
    """The whole report as text."""
    ranks = report.options["simulate_ranks"]
    heading = (
        f"simulated: {ranks} ranks with {report.options['simulate_items']} unique shards each\n"
        f"{where(report.machine, report.versions)}"
    )
    rows = [
        (
            "coordinator",
            "save",
            "collectives",
            "store",
            "up kB",
            "down kB",
            "total MB",
            "CPU s",
            "us per rank",
            "writer CPU s",
            "kept MiB",
        )
    ]
    rows += [
        (
            each.way,
            each.save,
            str(each.collectives),
            str(each.store_operations),
            number(each.up_nbytes / ranks, 1e-3, 2),
            number(each.down_nbytes / ranks, 1e-3, 2),
            number(each.up_nbytes + each.down_nbytes, 1e-6, 1),
            number(each.cpu_s, 1, 3),
            number(each.cpu_s / ranks, 1e6, 1),
            number(each.writer_cpu_s, 1, 2),
            number(each.kept_nbytes, 2**-20, 0),
        )
        for each in report.saves
    ]
    return in_parts(heading, table(rows), _LEGEND)
