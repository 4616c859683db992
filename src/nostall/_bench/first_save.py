"""A fresh process that saves a few times, after ``warmup()`` or without it, started as a module.

Usage: ``python -m nostall._bench.first_save CONTENDER SHAPE NBYTES DIRECTORY SAVES warm|cold``;
prints blocked and durable seconds, and what fresh memory costs here, as JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import nostall
from nostall._bench.contender import Contender, Setting
from nostall._bench.free_memory import fresh_memory_s
from nostall._bench.measure import Trial, time_save
from nostall._bench.ours import OwnAsyncSave, SplitSave
from nostall._bench.ranks import Ranks
from nostall._bench.workloads import make_workload

CONTENDERS = (
    SplitSave("nostall", "split save", warmed_up=False),
    OwnAsyncSave(warmed_up=False),
)
_REPETITIONS = 4


def first_saves(
    contender: Contender,
    shape: str,
    nbytes: int,
    directory: Path,
    saves: int,
    *,
    warmed_up: bool,
) -> dict[str, float | list[float]]:
    """Blocked and durable seconds of a process's first saves, and the cost of fresh memory."""
    ranks = Ranks(0, 1, None)
    trial = Trial(
        ranks=ranks,
        workload=make_workload(shape, nbytes, rank=0, world_size=1),
        helpers=frozenset(),
        directory=directory,
    )
    found_s = fresh_memory_s(trial.workload.nbytes)
    # Once the machine has the memory, what is left is what the kernel takes for it; at best, as a
    # limit should be.
    fresh_s = min(fresh_memory_s(trial.workload.nbytes) for _ in range(_REPETITIONS))
    if warmed_up:
        nostall.warmup(trial.workload.state)
    contender.open(Setting(ranks=ranks, nbytes=trial.workload.nbytes, scratch=directory))
    samples = []
    for number in range(saves):
        path = directory / f"first-{number}"
        samples.append(time_save(trial, contender, path, number))
        shutil.rmtree(path)
    contender.close()
    return {
        "fresh_memory_found_s": found_s,
        "fresh_memory_s": fresh_s,
        "blocked_s": [each.blocked_s for each in samples],
        "durable_s": [each.durable_s for each in samples],
    }


if __name__ == "__main__":
    name, shape, nbytes, directory, saves, kind = sys.argv[1:]
    found = first_saves(
        {each.name: each for each in CONTENDERS}[name],
        *(shape, int(nbytes), Path(directory), int(saves)),
        warmed_up=kind == "warm",
    )
    print(json.dumps(found))
