"""A fresh process that finds a checkpoint, loads it, and saves for the first time.

Usage: ``python -m benchmarks.fresh STARTED WAY SHAPE NBYTES ROOT``, where STARTED is the monotonic
clock when the process was started. Prints the seconds of each stage as JSON, and what was loaded
wrong. Nothing is imported at the top that a stage imports.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.workloads import Workload

OBJECTS: dict[str, Any] = {"step": 1000, "losses": [1 / each for each in range(1, 1001)]}
"""Objects saved beside the tensors, under the key ``trainer``."""
WAYS = {
    "nostall": "nostall",
    "nostall dcp": "nostall dcp.async_save",
    "stock": "dcp.async_save",
}
"""Ways to load, and the contender that saves after each."""
_LATER_SAVES = 3


class Stopwatch:
    """Seconds by stage."""

    def __init__(self, started_s: float) -> None:
        self.last_s = started_s
        self.seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Charge the time since the previous lap to this stage."""
        last_s, self.last_s = self.last_s, time.monotonic()
        self.seconds[stage] = self.last_s - last_s


def restarted(way: str, shape: str, nbytes: int, root: Path, started_s: float) -> dict[str, Any]:
    """The seconds of each stage, and the names of what was loaded wrong."""
    watch = Stopwatch(started_s)
    import torch.distributed.checkpoint as dcp

    watch.lap("torch_s")
    import nostall

    if way != "stock":
        _ = nostall.latest_complete, nostall.load, nostall.FileSystemReader  # imports them
        watch.lap("nostall_s")
    # What a job builds before it can load is not part of a restart's cost here.
    from benchmarks.workloads import differences, make_workload

    workload = make_workload(shape, nbytes)
    state: dict[str, Any] = {**workload.blank(), "trainer": dict.fromkeys(OBJECTS)}
    watch.last_s = time.monotonic()
    if way == "stock":
        path = max((str(each.parent) for each in root.glob("*/.metadata")), default=None)
    else:
        path = nostall.latest_complete(root)
    assert path is not None
    watch.lap("find_s")
    if way == "nostall":
        nostall.load(state, path)
    else:
        reader = dcp.FileSystemReader if way == "stock" else nostall.FileSystemReader
        dcp.load(state, storage_reader=reader(path), no_dist=True)
    watch.lap("load_s")
    total_s = sum(watch.seconds.values())
    objects = state.pop("trainer")
    wrong = differences(workload.state, state)
    wrong += [name for name, value in OBJECTS.items() if objects[name] != value]
    saves = _first_saves(way, workload, root.parent)
    return {"seconds": {**watch.seconds, "total_s": total_s, **saves}, "wrong": wrong}


def _first_saves(way: str, workload: Workload, directory: Path) -> dict[str, float]:
    """Seconds that the first saves of this process block, after ``warmup(state)``."""
    import nostall
    from benchmarks.contenders import all_contenders
    from benchmarks.group import Group
    from benchmarks.saves import Saves

    known = {each.name: each for each in all_contenders("large")}
    contender = known[WAYS[way]]
    saves = Saves(workload, directory, Group())
    watch = Stopwatch(time.monotonic())
    if way != "stock":
        nostall.warmup(workload.state)
        watch.lap("warmup_s")
    contender.open(saves.group, workload.nbytes, directory)
    samples = []
    for _ in range(1 + _LATER_SAVES):
        with saves.fresh() as path:
            samples.append(saves.timed(contender, path))
    contender.close()
    first, *later = (each["blocked_s"] for each in samples)
    return {
        **watch.seconds,
        "first_blocked_s": first,
        "later_blocked_s": sorted(later)[len(later) // 2],
        "first_durable_s": samples[0]["durable_s"],
    }


if __name__ == "__main__":
    started, way, shape, nbytes, root = sys.argv[1:]
    print(json.dumps(restarted(way, shape, int(nbytes), Path(root), float(started))))
