"""One run that measures loads, from options to a report: the composer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nostall._bench.loading.contender import LoadContender
from nostall._bench.loading.contenders import DCP_FORM
from nostall._bench.loading.measure import LoadTrial
from nostall._bench.loading.results import LoadLimitReport, LoadReport
from nostall._bench.loading.session import LoadSession
from nostall._bench.loading.targets import LOAD_TARGETS
from nostall._bench.machine import about_run
from nostall._bench.options import LoadOptions
from nostall._bench.processes import MALLOPT, keep_freed_blocks
from nostall._bench.ranks import Ranks, working_directory
from nostall._bench.targets import check_targets
from nostall._bench.workloads import make_workload

_NO_LIMITS = LoadLimitReport(memcpy_s=(), warm_read_s={}, cold_read_s={})


def run_loads(
    options: LoadOptions, contenders: Sequence[LoadContender], command: Sequence[str] = ()
) -> LoadReport:
    """Measure how these contenders load, and return what was found."""
    keep_freed_blocks()
    with working_directory(options.directory, Ranks(0, 1, None)) as directory:
        saved = make_workload(options.shape, options.nbytes, rank=0, world_size=1)
        trial = LoadTrial.of(saved, directory, options.idle_s)
        session = LoadSession(contenders, trial)
        session.write()
        session.warm_up()
        limits = session.limits()
        session.rounds("warm", options.rounds, limits)
        session.rounds("idle", options.idle_rounds)
        session.rounds("cold", options.rounds, limits)
        session.parts(options.rounds)
        session.rounds("fresh", options.rounds if MALLOPT else 0)
        targets = trial.targets
        report = LoadReport(
            **about_run(command, options, directory),
            nbytes=saved.nbytes,
            tensors=len(saved.tensors),
            sliced_tensors=len(trial.rows),
            rows_nbytes=sum(targets[name][rows].nbytes for name, rows in trial.rows.items()),
            metadata_nbytes=_size(directory / DCP_FORM / ".metadata"),
            contenders=tuple(entry.report() for entry in session.entries),
            limits=_NO_LIMITS if limits is None else limits.report(),
            targets=(),
        )
    return replace(report, targets=check_targets(LOAD_TARGETS, report, shape=options.shape))


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.exists() else None
