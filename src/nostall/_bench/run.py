"""One run of the benchmark, from options to a report: the composer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from nostall._bench.contender import Contender
from nostall._bench.limits import Limits
from nostall._bench.machine import about_run
from nostall._bench.measure import Trial
from nostall._bench.options import BenchOptions
from nostall._bench.probes import probe
from nostall._bench.processes import noise
from nostall._bench.ranks import Ranks, working_directory
from nostall._bench.results import BenchReport
from nostall._bench.session import Session
from nostall._bench.targets import TARGETS, check_targets
from nostall._bench.workloads import make_workload


def run(
    options: BenchOptions,
    contenders: Sequence[Contender],
    ranks: Ranks,
    command: Sequence[str] = (),
) -> BenchReport:
    """Measure these contenders and return what was found. Collective."""
    with ExitStack() as stack:
        directory = stack.enter_context(working_directory(options.directory, ranks))
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
            **about_run(command, options, directory),
            nbytes=workload.nbytes,
            tensors=len(workload.tensors),
            contenders=tuple(entry.report() for entry in session.entries),
            limits=limits,
            probes=probes,
            targets=(),
            timeline=steps,
        )
    return replace(report, targets=check_targets(TARGETS, report, shape=options.shape))
