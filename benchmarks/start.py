"""Starts: a program imports torch, builds a model and loads a checkpoint from a cold page cache.

``python -m benchmarks.start STARTED WAY SECONDS NBYTES ROOT`` is that program. Building the model
is SECONDS of work on one core, and memory for its tensors.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import machine
from benchmarks.group import Group, answer_of
from benchmarks.report import Column, Report, Row, Sample, WrongData, attempt, in_rounds

WAYS = ("no load", "nostall.load", "nostall.load prefetched", "dcp.load")
COLUMNS = (
    Column("cold s", "cold_s", digits=2),
    Column("/ no load", "cold_s", digits=2, over="no load"),
    Column("load", "cold_load_s", digits=2),
    Column("warm s", "warm_s", digits=2),
    Column("/ no load", "warm_s", digits=2, over="no load"),
    Column("load", "warm_load_s", digits=2),
)
LEGEND = """\
Median [quartiles] of processes, in seconds from their start until the checkpoint is loaded, with
the files out of the page cache, and in it. Building the model takes as long as the first cold load
by nostall.load. Prefetched: nostall.prefetch is the first call of the program."""
_TENSORS = 64


def measure_starts(nbytes: int, directory: Path, rows: Sequence[Row], *, rounds: int) -> Report:
    """Save a checkpoint, and start a program of each way, in turns."""
    path = directory / "checkpoints" / "step-1000"
    _run("save", 0.0, nbytes, path)
    machine.sync_tree(path)
    files = machine.files_below(path)

    def start(way: str, model_s: float, *, is_cold: bool) -> Sample:
        machine.warm_free_memory(directory, nbytes, Group())
        machine.drop(files) if is_cold else machine.bring_in(files)
        return _run(way, model_s, nbytes, path)

    model_s = start("nostall.load", 0.0, is_cold=True)["load_s"]

    def turn(way: str) -> Sample:
        found: Sample = {}
        for state in ("cold", "warm"):
            sample = start(way, model_s, is_cold=state == "cold")
            found |= {f"{state}_s": sample["total_s"], f"{state}_load_s": sample["load_s"]}
        return found

    in_rounds([partial(attempt, row, partial(turn, row.name), Group()) for row in rows], rounds)
    return Report(contenders=list(rows))


def _run(way: str, model_s: float, nbytes: int, path: Path) -> Sample:
    arguments = [str(time.monotonic()), way, str(model_s), str(nbytes), str(path)]
    sample: Sample = answer_of(__spec__.name, arguments)
    if sample.pop("wrong"):
        raise WrongData("it did not load what was saved")
    return sample


def main(started: str, way: str, model_s: str, nbytes: str, path: str) -> None:
    """The program; prints its seconds as JSON."""
    import nostall

    if way == "nostall.load prefetched":
        nostall.prefetch(path)
    import torch
    import torch.distributed.checkpoint as dcp

    count = int(nbytes) // 4 // _TENSORS
    work, until_s = torch.randn(256, 256), time.monotonic() + float(model_s)
    torch.set_num_threads(1)
    while time.monotonic() < until_s:
        work = torch.nn.functional.normalize(work @ work)
    state = {f"weight.{number}": torch.zeros(count) for number in range(_TENSORS)}
    expected = torch.arange(count, dtype=torch.float32)
    begun_s = time.monotonic()
    if way == "save":
        state = {name: expected + number for number, name in enumerate(state)}
        dcp.save(state, storage_writer=nostall.FileSystemWriterAsync(path))
    elif way == "dcp.load":
        dcp.load(state, checkpoint_id=path)
    elif way != "no load":
        nostall.load(state, path)
    ended_s = time.monotonic()
    wrong = way != "no load" and not all(
        torch.equal(each, expected + number) for number, each in enumerate(state.values())
    )
    sample = {"total_s": ended_s - float(started), "load_s": ended_s - begun_s, "wrong": wrong}
    print(json.dumps(sample))


if __name__ == "__main__":
    main(*sys.argv[1:])
