"""Restarts: fresh processes from their start until they have loaded, and their first saves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import fresh, machine
from benchmarks.group import Group, answer_of
from benchmarks.loads import save_with_nostall
from benchmarks.report import Column, Report, Row, Sample, WrongData, attempt, in_rounds
from benchmarks.workloads import make_workload, said_of
from nostall import _engine

COLUMNS = (
    Column("total ms", "total_s", 1e3, 0),
    Column("/ stock", "total_s", digits=2, over="stock"),
    Column("torch", "torch_s", 1e3, 0),
    Column("nostall", "nostall_s", 1e3, 0),
    Column("find", "find_s", 1e3),
    Column("load", "load_s", 1e3),
    Column("/ stock", "load_s", digits=2, over="stock"),
    Column("warmup", "warmup_s", 1e3, 0),
    Column("first save blocked", "first_blocked_s", 1e3),
    Column("later", "later_blocked_s", 1e3),
    Column("first durable", "first_durable_s", 1e3, 0),
)
LEGEND = """\
Median [quartiles] of processes, in ms. total: from the start of the process until the first step
could begin, without making the model: the interpreter and torch, nostall, finding the checkpoint,
loading it. later: the median of three saves after the first."""


def ways() -> list[Row]:
    return [Row(name=name) for name in fresh.WAYS]


def measure_restarts(
    shape: str, nbytes: int, directory: Path, rows: Sequence[Row], *, rounds: int
) -> Report:
    """Save a checkpoint, and start processes of each way, in turns."""
    root = directory / "checkpoints"
    saved_nbytes = _save(shape, nbytes, root / "step-1000")

    def start(way: str) -> Sample:
        machine.bring_in(machine.files_below(root))
        machine.warm_free_memory(directory, saved_nbytes, Group())
        arguments = [str(time.monotonic()), way, shape, str(nbytes), str(root)]
        answer = answer_of(fresh.__name__, arguments)
        if answer["wrong"]:
            raise WrongData(f"it did not load what was saved: {said_of(answer['wrong'])}")
        seconds: Sample = answer["seconds"]
        return seconds

    in_rounds([partial(attempt, row, partial(start, row.name), Group()) for row in rows], rounds)
    return Report(contenders=list(rows))


def _save(shape: str, nbytes: int, path: Path) -> int:
    """Save what the processes load; its bytes. Keeps none of it."""
    workload = make_workload(shape, nbytes)
    state: dict[str, Any] = {**workload.state, "trainer": fresh.OBJECTS}
    save_with_nostall(state, path)
    _engine.reset()
    machine.sync_tree(path)
    saved_nbytes = workload.nbytes
    del workload, state
    machine.give_memory_back()
    return saved_nbytes
