"""Loads of everything into tensors that are there already, from a warm and from a cold page cache.

Every load overwrites other values, and is compared with what was saved, bit by bit, after the clock
has stopped. One that brings something else, or fills tensors of its own, is out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlanner, StorageReader

import nostall
from benchmarks import machine
from benchmarks.contenders import why_not_importable
from benchmarks.group import Group
from benchmarks.limits import Copies, RawReads
from benchmarks.report import Column, Report, Row, Sample, WrongData, attempt, in_rounds
from benchmarks.workloads import State, Workload, differences, said_of
from nostall import _engine, _torch

COLUMNS = (
    Column("warm ms", "warm_s", 1e3),
    Column("/ memcpy", "warm_s", digits=2, over="memcpy"),
    Column("/ raw read", "warm_s", digits=2, over="warm raw read"),
    Column("/ dcp.load", "warm_s", digits=2, over="dcp.load"),
    Column("CPU s", "cpu_s", digits=2),
    Column("cold ms", "cold_s", 1e3),
    Column("/ raw read", "cold_s", digits=2, over="cold raw read"),
    Column("/ dcp.load", "cold_s", digits=2, over="dcp.load"),
    Column("cached %", "cached", 100, 0),
)
LEGEND = """\
Median [quartiles] of the rounds; ratios are those of each round. cached: the share of the files
that was in the page cache when a cold load began; on tmpfs nothing is cold."""


def save_with_nostall(state: State, path: Path) -> None:
    """Write the checkpoint that nostall and stock load: stock's files, with nostall's manifest."""
    dcp.save(state, storage_writer=nostall.FileSystemWriterAsync(path), no_dist=True)


def save_with_torch(state: State, path: Path) -> None:
    path.mkdir(parents=True)
    torch.save(state, path / "all.pt")


def save_safetensors(state: State, path: Path) -> None:
    path.mkdir(parents=True)
    file = str(path / "all.safetensors")
    import_module("safetensors.torch").save_file(state, file)


@dataclass(slots=True, kw_only=True)
class LoadContender:
    """A way of loading tensors into tensors that are there already."""

    name: str
    load: Callable[[State, Path], object]
    """Overwrite the tensors of a state dict."""
    write: Callable[[State, Path], None] = save_with_nostall
    """Save what will be loaded; contenders with the same function read the same files."""
    needs: str = "torch"

    def available(self) -> str | None:
        return why_not_importable(self.needs)


def dcp_load(
    reader: Callable[[Path], StorageReader], planner: Callable[[], LoadPlanner] = DefaultLoadPlanner
) -> Callable[[State, Path], None]:
    """``dcp.load`` with a new reader and planner for every load."""
    return lambda into, path: dcp.load(
        into, storage_reader=reader(path), planner=planner(), no_dist=True
    )


def torch_load(into: State, path: Path) -> None:
    _copy(torch.load(path / "all.pt", mmap=True, weights_only=True), into)


def load_safetensors(into: State, path: Path) -> None:
    _copy(import_module("safetensors.torch").load_file(path / "all.safetensors"), into)


def _copy(loaded: Mapping[str, Tensor], into: State) -> None:
    _torch.copy_each(list(into.values()), [loaded[name] for name in into])


def load_contenders() -> list[LoadContender]:
    """Everybody, nostall first."""
    checked = partial(nostall.FileSystemReader, verify="crc")
    ways: dict[str, Callable[[State, Path], object]] = {
        "nostall.load": nostall.load,
        "nostall.load crc": partial(nostall.load, verify="crc"),
        "nostall dcp.load": dcp_load(nostall.FileSystemReader),
        "nostall dcp.load planned": dcp_load(nostall.FileSystemReader, nostall.LoadPlanner),
        "nostall dcp.load crc": dcp_load(checked),
        "nostall dcp.load cached": dcp_load(nostall.CachedMetadataFileSystemReader),
        "dcp.load": dcp_load(dcp.FileSystemReader),
    }
    return [
        *(LoadContender(name=name, load=load) for name, load in ways.items()),
        LoadContender(name="torch.load mmap", load=torch_load, write=save_with_torch),
        LoadContender(
            name="safetensors",
            load=load_safetensors,
            write=save_safetensors,
            needs="safetensors.torch",
        ),
    ]


class Loads:
    """The state that one run loads, the files it loads from, and the measurements."""

    def __init__(self, workload: Workload, directory: Path) -> None:
        self.saved = workload
        self.directory = directory
        self.target = Workload(workload.shape, workload.blank())
        self.tensors = dict(self.target.state)
        """The target's tensors by name; a load has to fill these very tensors."""

    def path_of(self, contender: LoadContender) -> Path:
        """Where its files are."""
        return self.directory / contender.write.__name__

    def written(self, contender: LoadContender) -> Sample:
        """Save the files of a form once, and machine.sync them: only then can they be dropped."""
        path = self.path_of(contender)
        if not path.exists():
            contender.write(self.saved.state, path)
            machine.sync_tree(path)
        return {}

    def prepare(self, path: Path, *, cold: bool) -> float:
        """Warm free memory, and warm or cool the files; the share that is in the page cache."""
        files = machine.files_below(path)
        # As in a restarted process, where nothing is known of the checkpoint.
        nostall.CachedMetadataFileSystemReader.clear_metadata_cache()
        machine.warm_free_memory(self.directory, self.saved.nbytes, Group())
        if cold:
            machine.drop(files)
        else:
            machine.bring_in(files)
        return machine.cached_share(files)

    def timed(self, contender: LoadContender, *, cold: bool) -> Sample:
        """One load."""
        self.target.advance()
        into = dict(self.target.state)
        path = self.path_of(contender)
        cached = self.prepare(path, cold=cold)
        used_s = machine.tree_cpu_s()
        started = time.perf_counter()
        contender.load(into, path)
        took_s = time.perf_counter() - started
        used_s = machine.tree_cpu_s() - used_s
        if wrong := differences(self.saved.state, self.tensors):
            raise WrongData(f"its load did not bring what was saved: {said_of(wrong)}")
        return {"cold_s": took_s, "cached": cached} if cold else {"warm_s": took_s, "cpu_s": used_s}

    def limits(self) -> tuple[Callable[[], Sample], Callable[[], Sample]]:
        """Functions that measure copies with warm reads, and cold reads, of the largest file."""
        file = max(machine.files_below(self.directory), key=lambda each: each.stat().st_size)
        copies, reads = Copies(self.saved.tensors), RawReads(file)

        def warm() -> Sample:
            self.prepare(file.parent, cold=False)
            return {**copies.measure(), **reads.measure(cold=False, prepare=lambda: None)}

        def cold() -> Sample:
            return reads.measure(cold=True, prepare=partial(machine.drop, [file]))

        return warm, cold


def measure_loads(loads: Loads, contenders: Sequence[LoadContender], *, rounds: int) -> Report:
    """Measure these contenders, and the limits in the same rounds."""
    machine.keep_freed_blocks()
    group = Group()
    limit_row = Row(name="limits")
    rows = [Row.of(each, group) for each in contenders]
    both = list(zip(rows, contenders, strict=True))
    for row, contender in both:
        attempt(row, partial(loads.written, contender), group)
        attempt(row, lambda: loads.timed(contender, cold=False) and {}, group)  # noqa: B023  # called at once
    _engine.reset()  # its process has no part in loading
    if any(row.status == "in" for row in rows):
        for cold, limits in enumerate(loads.limits()):
            turns = [partial(attempt, limit_row, limits, group)]
            turns += [
                partial(attempt, row, partial(loads.timed, contender, cold=bool(cold)), group)
                for row, contender in both
            ]
            in_rounds(turns, rounds)
    return Report(limits=limit_row, contenders=rows)
