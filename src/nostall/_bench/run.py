"""One run of the benchmark, from options to a report: the composer."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from nostall._bench.contender import Contender
from nostall._bench.limits import Limits
from nostall._bench.machine import machine_facts, versions
from nostall._bench.measure import Trial
from nostall._bench.options import BenchOptions
from nostall._bench.probes import probe
from nostall._bench.processes import noise
from nostall._bench.ranks import Ranks
from nostall._bench.results import BenchReport
from nostall._bench.session import Session
from nostall._bench.targets import check_targets
from nostall._bench.workloads import make_workload


@contextmanager
def _working_directory(options: BenchOptions, ranks: Ranks) -> Iterator[Path]:
    """An empty directory on the file system that is asked for; removed at the end."""
    made: str | None = None
    if ranks.leads:
        parent = options.directory or Path.cwd()
        parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix="nostall-bench-", dir=parent)
    path = Path(ranks.from_first(made))
    try:
        yield path
    finally:
        if ranks.leads:
            shutil.rmtree(path, ignore_errors=True)


def run(
    options: BenchOptions,
    contenders: Sequence[Contender],
    ranks: Ranks,
    command: Sequence[str] = (),
) -> BenchReport:
    """Measure these contenders and return what was found. Collective."""
    with ExitStack() as stack:
        directory = stack.enter_context(_working_directory(options, ranks))
        wanted = options.noise and ranks.leads
        helpers = stack.enter_context(noise(directory, wanted=wanted))
        workload = make_workload(
            options.shape, options.nbytes, rank=ranks.rank, world_size=ranks.world_size
        )
        trial = Trial(ranks=ranks, workload=workload, helpers=helpers, directory=directory)
        session = Session(options, contenders, trial, directory)
        stack.callback(session.close)
        if options.memory_saves:
            session.memory()
        session.warm_up()
        limits = session.rounds(Limits(workload.tensors))
        session.idle_rounds()
        session.plain_loops()
        session.slowdowns()
        session.verification()
        steps = session.timeline() if options.plot else ()
        probes = None
        if options.probes and ranks.leads:
            probes = probe(options.shape, options.nbytes, directory)
        ranks.barrier()
        report = BenchReport(
            command=tuple(command),
            options={
                name: str(value) if isinstance(value, Path) else value
                for name, value in asdict(options).items()
            },
            machine=machine_facts(directory),
            versions=versions(),
            nbytes=workload.nbytes,
            tensors=len(workload.tensors),
            contenders=tuple(entry.report() for entry in session.entries),
            limits=limits,
            probes=probes,
            targets=(),
            timeline=steps,
        )
    return replace(report, targets=check_targets(report))
