"""A fresh process that warms up and saves a few times, started as a module.

Usage: ``python -m nostall._bench.first_save SHAPE NBYTES DIRECTORY SAVES``; prints the blocked seconds as JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from nostall._bench.contender import Setting
from nostall._bench.measure import Trial, time_save
from nostall._bench.ours import own_contenders
from nostall._bench.ranks import Ranks
from nostall._bench.workloads import make_workload


def blocked_s(shape: str, nbytes: int, directory: Path, saves: int) -> list[float]:
    """Blocked seconds of the first saves of this process, in order."""
    ranks = Ranks(0, 1, None)
    trial = Trial(
        ranks=ranks,
        workload=make_workload(shape, nbytes, rank=0, world_size=1),
        helpers=frozenset(),
    )
    contender = own_contenders()[0]
    contender.open(Setting(ranks=ranks, nbytes=trial.workload.nbytes, scratch=directory))
    blocked = []
    for number in range(saves):
        path = directory / f"first-{number}"
        blocked.append(time_save(trial, contender, path, number).blocked_s)
        shutil.rmtree(path)
    contender.close()
    return blocked


if __name__ == "__main__":
    shape, nbytes, directory, saves = sys.argv[1:]
    print(json.dumps(blocked_s(shape, int(nbytes), Path(directory), int(saves))))
