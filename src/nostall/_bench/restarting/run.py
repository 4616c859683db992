"""One run that measures restarts: saves a checkpoint, and starts processes that load it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nostall
import nostall._engine
from nostall._bench.contender import sync_tree
from nostall._bench.entry import AnyEntry
from nostall._bench.free_memory import warm_free_memory
from nostall._bench.loading.contenders import save_with_nostall
from nostall._bench.loading.page_cache import bring_in, files_below
from nostall._bench.machine import about_run
from nostall._bench.options import RestartOptions
from nostall._bench.processes import give_memory_back, lone_environment
from nostall._bench.ranks import Ranks, working_directory
from nostall._bench.restarting import first_step
from nostall._bench.restarting.report import (
    RestartContenderReport,
    RestartReport,
    RestartSample,
)
from nostall._bench.workloads import make_workload

_TIMEOUT_S = 600.0
_NAMES_SHOWN = 5


class Way:
    """A way to restart, each time in a new process."""

    def __init__(self, name: str, description: str) -> None:
        self.name = name
        self.description = description

    def available(self) -> str | None:
        """Why it cannot take part here, or ``None`` if it can."""
        return None

    def start(self, options: RestartOptions, root: Path) -> dict[str, Any]:
        """What :func:`nostall._bench.restarting.first_step.first_step` returned in a new process.

        Raises:
            ChildProcessError: It failed.
        """
        module = first_step.__name__
        arguments = [self.name, options.shape, str(options.nbytes), str(root)]
        started_s = time.monotonic()  # the same clock in all processes
        done = subprocess.run(
            [sys.executable, "-m", module, str(started_s), *arguments],
            env=lone_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            raise ChildProcessError(f"status {done.returncode}: {' '.join(last)}")
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer


def restart_ways() -> list[Way]:
    """nostall's, and stock's beside them."""
    return [
        Way(first_step.OWN, "latest_complete and nostall.load"),
        Way(first_step.READER, "latest_complete and dcp.load with nostall.FileSystemReader"),
        Way(first_step.STOCK, "the newest directory with metadata, and stock dcp.load"),
    ]


@dataclass(slots=True, kw_only=True)
class _Entry(AnyEntry[Way]):
    """A way in a run, and what is known of it so far."""

    samples: list[RestartSample] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def restart(self, options: RestartOptions, root: Path, number: int) -> None:
        try:
            answer = self.contender.start(options, root)
        except Exception as failure:  # whatever went wrong in the process; the run goes on
            self.error = f"{type(failure).__name__}: {failure}"
            return
        self.samples.append(RestartSample(round=number, stages_s=answer["seconds"]))
        self.wrong = self.wrong or answer["wrong"][:_NAMES_SHOWN]

    def report(self) -> RestartContenderReport:
        return RestartContenderReport(
            **self.about(), samples=tuple(self.samples), mismatches=tuple(self.wrong)
        )


def run_restarts(
    options: RestartOptions, ways: Sequence[Way], command: Sequence[str] = ()
) -> RestartReport:
    """Measure these ways to restart, in turns, and return what was found."""
    entries = [_Entry(contender=way, unavailable=way.available()) for way in ways]
    with working_directory(options.directory, Ranks(0, 1, None)) as directory:
        root = directory / "checkpoints"
        nbytes, tensors = _save(options, root / "step-1000")
        turns = list(entries)
        for number in range(options.rounds):
            sys.stderr.write(f"processes {number + 1} of {options.rounds}\n")
            for entry in turns:
                if entry.stands:
                    bring_in(files_below(root))
                    warm_free_memory(directory, nbytes, rank=0, barrier=lambda: None)
                    entry.restart(options, root, number)
            turns = turns[1:] + turns[:1]  # so that nobody always goes first
        return RestartReport(
            **about_run(command, options, directory),
            nbytes=nbytes,
            tensors=tensors,
            contenders=tuple(entry.report() for entry in entries),
        )


def _save(options: RestartOptions, path: Path) -> tuple[int, int]:
    """Save what the processes load; its bytes and number of tensors. Keeps none of it."""
    made = make_workload(options.shape, options.nbytes, rank=0, world_size=1)
    workload = first_step.with_known_values(made)
    state = {**workload.state, first_step.TRAINER: first_step.OBJECTS_OF_TRAINER}
    save_with_nostall(state, path)
    nostall._engine.reset()
    sync_tree(path)
    found = workload.nbytes, len(workload.tensors)
    del made, workload, state
    give_memory_back()
    return found
