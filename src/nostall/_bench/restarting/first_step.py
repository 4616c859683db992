"""A fresh process that finds a checkpoint and loads it, started as a module.

Usage: ``python -m nostall._bench.restarting.first_step STARTED WAY SHAPE NBYTES ROOT``, where
STARTED is the monotonic clock when the process was started; prints the seconds of each stage as
JSON, and what was loaded wrong. Nothing is imported at the top that a stage imports: only
``nostall/__init__.py``, which imports nothing itself, counts with the interpreter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nostall._bench.workloads import Workload

INTERPRETER = "interpreter, torch"
NOSTALL = "nostall"
FINDING = "finding"
METADATA = "metadata"
PLANNING = "planning"
READING = "reading"
OBJECTS = "objects"
STAGES = (INTERPRETER, NOSTALL, FINDING, METADATA, PLANNING, READING, OBJECTS)
OWN, READER, STOCK = "nostall.load", "nostall dcp.load", "dcp.load"
OURS = (OWN, READER)
TRAINER = "trainer"
_SEED = 17
OBJECTS_OF_TRAINER: dict[str, Any] = {
    "step": 1000,
    "epoch": 3,
    "losses": [1 / number for number in range(1, 1001)],
    "order": list(range(10_000)),
    "name": "restart",
}


Find = Callable[[Path], "str | Path | None"]
Load = Callable[[dict[str, Any], Path, "Stopwatch"], None]


class Stopwatch:
    """Seconds by stage."""

    def __init__(self, started_s: float) -> None:
        self._last_s = started_s
        self.seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """What has passed since the last lap belongs to this stage."""
        now_s = time.monotonic()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def skip(self) -> None:
        """What has passed since the last lap belongs to no stage."""
        self._last_s = time.monotonic()

    @contextmanager
    def divided(self, owner: object, method: str, *, before: str, stage: str) -> Iterator[None]:
        """While inside, each call of a method is one stage, and what came before it another."""
        call, own = getattr(owner, method), vars(owner).get(method)

        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.lap(before)
            try:
                return call(*args, **kwargs)
            finally:
                self.lap(stage)

        setattr(owner, method, timed)
        try:
            yield
        finally:
            if own is None:
                delattr(owner, method)  # what it inherits is there again
            else:
                setattr(owner, method, own)

    @contextmanager
    def dividing_a_load(self, reader: object, planner: object, metadata: str) -> Iterator[None]:
        """While inside, a load is divided where it calls its reader, and that its planner.

        Args:
            reader: A reader, or its class.
            planner: The same of a planner.
            metadata: The method of the reader that reads metadata.
        """
        with (
            self.divided(reader, metadata, before=PLANNING, stage=METADATA),
            self.divided(reader, "read_data", before=PLANNING, stage=READING),
            self.divided(planner, "load_bytes", before=READING, stage=OBJECTS),
        ):
            yield
        self.lap(OBJECTS)


def first_step(way: str, shape: str, nbytes: int, root: Path, started_s: float) -> dict[str, Any]:
    """Import, find and load; the seconds of each stage, and the names of what is wrong then."""
    watch = Stopwatch(started_s)
    import_module("torch.distributed.checkpoint")
    watch.lap(INTERPRETER)
    find, load = _tools(way)
    if way in OURS:
        watch.lap(NOSTALL)
    # What a job builds before it can load is not part of a restart's cost here.
    from nostall._bench.workloads import differences, make_workload

    workload = with_known_values(make_workload(shape, nbytes, rank=0, world_size=1))
    state = {**workload.blank(), TRAINER: dict.fromkeys(OBJECTS_OF_TRAINER)}
    watch.skip()
    path = find(root)
    assert path is not None
    watch.lap(FINDING)
    load(state, Path(path), watch)
    objects = state.pop(TRAINER)
    wrong = differences(workload.state, state)
    wrong += [name for name, value in OBJECTS_OF_TRAINER.items() if objects[name] != value]
    return {"seconds": watch.seconds, "wrong": wrong}


def with_known_values(workload: Workload) -> Workload:
    """The same values in every process: a training step need not give the same bits again."""
    import torch

    from nostall._bench.workloads import integers

    generator = torch.Generator().manual_seed(_SEED)
    for tensor in workload.tensors:
        integers(tensor).random_(generator=generator)
    return workload


def _tools(way: str) -> tuple[Find, Load]:
    """How to find and how to load; imports what both need."""
    if way == STOCK:
        from torch.distributed.checkpoint import FileSystemReader

        return _newest_with_metadata, _dcp_load(FileSystemReader)
    import nostall

    if way == READER:
        return nostall.latest_complete, _dcp_load(nostall.FileSystemReader)
    if way != OWN:
        raise ValueError(f"{way!r} is not one of {OWN}, {READER}, {STOCK}")
    from nostall._read.planner import Planner

    own_load, reader = nostall.load, nostall.CachedMetadataFileSystemReader  # imports both

    def load(state: dict[str, Any], path: Path, watch: Stopwatch) -> None:
        with watch.dividing_a_load(reader, Planner, "shared_metadata"):
            own_load(state, path)

    return nostall.latest_complete, load


def _newest_with_metadata(root: Path) -> Path | None:
    """What a job without nostall does: the highest step that has metadata."""
    names = [name for name in os.listdir(root) if (root / name / ".metadata").exists()]
    newest = max(names, key=lambda name: int(name.rpartition("-")[2]), default=None)
    return None if newest is None else root / newest


def _dcp_load(make_reader: Callable[[Path], Any]) -> Load:
    """``dcp.load``, divided where it calls the reader, and where that calls the planner."""

    def load(state: dict[str, Any], path: Path, watch: Stopwatch) -> None:
        from torch.distributed.checkpoint import DefaultLoadPlanner
        from torch.distributed.checkpoint import load as dcp_load

        reader, planner = make_reader(path), DefaultLoadPlanner()
        with watch.dividing_a_load(reader, planner, "read_metadata"):
            dcp_load(state, storage_reader=reader, planner=planner, no_dist=True)

    return load


if __name__ == "__main__":
    started, way, shape, nbytes, root = sys.argv[1:]
    print(json.dumps(first_step(way, shape, int(nbytes), Path(root), float(started))))
