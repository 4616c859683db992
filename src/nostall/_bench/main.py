"""The ``bench`` subcommand behind its arguments."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, TypeVar

from nostall import _torch
from nostall._bench.contender import Contender
from nostall._bench.loading.contender import LoadContender
from nostall._bench.loading.report import render_loads
from nostall._bench.loading.results import LoadReport
from nostall._bench.loading.run import run_loads
from nostall._bench.options import (
    BenchOptions,
    LoadOptions,
    RestartOptions,
    SimulationOptions,
    chosen,
)
from nostall._bench.ours import own_contenders
from nostall._bench.peers import peer_contenders
from nostall._bench.plot import PlotUnavailable, draw, require_matplotlib
from nostall._bench.ranks import joined_ranks, launch, started_by_launcher
from nostall._bench.report import render
from nostall._bench.restarting.report import RestartReport, render_restarts
from nostall._bench.restarting.run import Way as RestartWay
from nostall._bench.restarting.run import run_restarts
from nostall._bench.results import BenchReport, C, RunReport
from nostall._bench.room import (
    nbytes_of_loads,
    nbytes_of_restarts,
    nbytes_of_saves,
    require_room,
    why_no_room,
)
from nostall._bench.run import run
from nostall._bench.simulating.run import SimulationReport, render_simulation, simulate
from nostall._bench.simulating.ways import Way
from nostall._bench.tables import failed


def all_contenders(shape: str) -> list[Contender]:
    """Everybody who saves a shape, nostall first."""
    # Imported late: stock's process checkpointer is a private module, and a torch without it can
    # still list the rest.
    from nostall._bench.stock import stock_contenders

    return [*own_contenders(shape), *stock_contenders(), *peer_contenders()]


class Listed(Protocol):
    """What the list of contenders shows."""

    name: str
    description: str

    def available(self) -> str | None:
        """Why it cannot take part here, or ``None`` if it can."""
        ...


OptionsT = TypeVar("OptionsT", LoadOptions, RestartOptions)
ListedT = TypeVar("ListedT", bound=Listed)
ReportT = TypeVar("ReportT", LoadReport, RestartReport)


def list_contenders(contenders: Sequence[Listed], patterns: Sequence[str]) -> int:
    """Print who could take part, and who cannot and why.

    Raises:
        ValueError: A pattern matches nobody.
    """
    names = chosen([contender.name for contender in contenders], patterns)
    for contender in contenders:
        if contender.name not in names:
            continue
        reason = contender.available()
        print(f"{contender.name:28} {contender.description}")
        if reason is not None:
            print(f"{'':28} not available: {reason}")
    return 0


def bench(options: BenchOptions, arguments: Sequence[str]) -> int:
    """Run, print and store, on one rank or as the process that starts all; the exit status.

    Raises:
        ValueError: The arguments do not fit what is there.
    """
    contenders = all_contenders(options.shape)
    names = chosen([contender.name for contender in contenders], options.contenders)
    if options.plot is not None:
        try:
            require_matplotlib()
        except PlotUnavailable as error:
            raise ValueError(str(error)) from error
    if options.ranks > 1 and not _torch.has_numpy():
        raise ValueError(
            "--ranks above 1 needs NumPy for torch's collectives of objects: pip install numpy"
        )
    taking_part = [contender for contender in contenders if contender.name in names]
    needed = nbytes_of_saves(
        options.nbytes, sum(contender.available() is None for contender in taking_part)
    )
    if options.ranks > 1 and not started_by_launcher():
        require_room(needed * options.ranks)
        return launch(arguments, options.ranks)
    _ignore_warnings_of_torch()
    with joined_ranks() as ranks:
        # All ranks have looked before one allocates anything.
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks.distributed else 1
        why = ranks.first_text(why_no_room(needed * here))
        if why is not None:
            raise ValueError(why)
        if ranks.world_size != options.ranks:
            raise ValueError(
                f"--ranks {options.ranks}, but the launcher started {ranks.world_size};"
                " leave --ranks out under torchrun"
            )
        report = run(options, taking_part, ranks, ["python", "-m", "nostall", *arguments])
        wrong = failed(report.contenders)
        if ranks.leads:
            print(render(report))
            _store(report, options)
    return int(wrong)


def bench_loads(
    options: LoadOptions, contenders: Sequence[LoadContender], arguments: Sequence[str]
) -> int:
    """The same for loads, on this process.

    Raises:
        ValueError: The arguments do not fit what is there.
    """
    require_room(nbytes_of_loads(options.nbytes))
    return _bench_alone(options, contenders, arguments, run_loads, render_loads)


def bench_restarts(
    options: RestartOptions, ways: Sequence[RestartWay], arguments: Sequence[str]
) -> int:
    """The same for restarts, in processes of their own.

    Raises:
        ValueError: The arguments do not fit what is there.
    """
    require_room(nbytes_of_restarts(options.nbytes))
    return _bench_alone(options, ways, arguments, run_restarts, render_restarts)


def simulate_ranks(
    options: SimulationOptions, ways: Sequence[type[Way]], arguments: Sequence[str]
) -> int:
    """The coordinator's part of saves of many ranks, in this process.

    Raises:
        ValueError: The arguments do not fit what is there.
    """
    names = chosen([way.name for way in ways], options.contenders)
    taking_part = [way for way in ways if way.name in names]
    _ignore_warnings_of_torch()
    report = simulate(options, taking_part, ["python", "-m", "nostall", *arguments])
    print(render_simulation(report))
    _store_json(report, options.json)
    return 0


def _bench_alone(
    options: OptionsT,
    contenders: Sequence[ListedT],
    arguments: Sequence[str],
    measure: Callable[[OptionsT, Sequence[ListedT], Sequence[str]], ReportT],
    render_report: Callable[[ReportT], str],
) -> int:
    names = chosen([contender.name for contender in contenders], options.contenders)
    taking_part = [contender for contender in contenders if contender.name in names]
    _ignore_warnings_of_torch()
    report = measure(options, taking_part, ["python", "-m", "nostall", *arguments])
    print(render_report(report))
    _store_json(report, options.json)
    return int(failed(report.contenders))


def _ignore_warnings_of_torch() -> None:
    # Said on every save and load without a process group, and on every background save.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\..*")


def _store(report: BenchReport, options: BenchOptions) -> None:
    _store_json(report, options.json)
    if options.plot is not None:
        draw(report, options.plot)
        print(f"picture: {options.plot}", file=sys.stderr)


def _store_json(report: RunReport[C] | SimulationReport, file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(asdict(report), indent=1) + "\n")
        print(f"samples: {file}", file=sys.stderr)
