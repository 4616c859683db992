"""A fresh process that saves a few times, after ``warmup()`` or without it, started as a module.

Usage: ``python -m nostall._bench.first_save SHAPE NBYTES DIRECTORY SAVES warm|cold``; prints
blocked seconds, and what fresh memory costs here, as JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from nostall._bench.contender import Setting
from nostall._bench.free_memory import fresh_memory_s
from nostall._bench.measure import Trial, time_save
from nostall._bench.ours import SplitSave
from nostall._bench.ranks import Ranks
from nostall._bench.workloads import make_workload

_REPETITIONS = 4


def first_saves(
    shape: str, nbytes: int, directory: Path, saves: int, *, warmed_up: bool
) -> dict[str, float | list[float]]:
    """Blocked seconds of this process's first saves, in order, and the cost of fresh memory."""
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
    contender = SplitSave("nostall", "split save", warmed_up=warmed_up)
    contender.open(Setting(ranks=ranks, nbytes=trial.workload.nbytes, scratch=directory))
    blocked = []
    for number in range(saves):
        path = directory / f"first-{number}"
        blocked.append(time_save(trial, contender, path, number).blocked_s)
        shutil.rmtree(path)
    contender.close()
    return {"fresh_memory_found_s": found_s, "fresh_memory_s": fresh_s, "blocked_s": blocked}


if __name__ == "__main__":
    shape, nbytes, directory, saves, kind = sys.argv[1:]
    print(
        json.dumps(
            first_saves(shape, int(nbytes), Path(directory), int(saves), warmed_up=kind == "warm")
        )
    )
