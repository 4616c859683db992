"""Saves: what blocks training, when they are durable, what they need, and whether they are right.

Each contender is measured alone for its memory. Then all are opened, save as often as their caches
need, are verified, and take turns with the limits; at the end they are verified once more. One that
fails or saves something else is out, on all ranks.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks import machine
from benchmarks.contenders import Contender, Pending
from benchmarks.group import Group
from benchmarks.limits import Copies, RawWrites
from benchmarks.report import Column, Report, Row, Sample, WrongData, attempt, in_rounds
from benchmarks.workloads import Workload, differences, said_of
from nostall import _engine

COLUMNS = (
    Column("blocked ms", "blocked_s", 1e3),
    Column("/ memcpy", "blocked_s", digits=2, over="memcpy"),
    Column("staged ms", "staged_s", 1e3),
    Column("durable s", "durable_s", digits=3),
    Column("/ raw write", "durable_s", digits=2, over="raw write"),
    Column("/ dcp.save", "durable_s", digits=2, over="dcp.save"),
    Column("CPU s", "cpu_s", digits=2),
    Column("memory MiB", "memory_nbytes", 2**-20, 0),
)
LEGEND = """\
Median [quartiles] of the rounds; ratios are those of each round. blocked: time of the training
thread inside the library, the save call and the poll that commits; staged: until the state
may be changed; durable: until all is fsynced and committed; memory: peak of the extra host memory,
measured alone."""
_POLL_EVERY_S = 0.001


def wait_durable(pending: Pending | None) -> float:
    """Poll about every millisecond until a save is durable; the seconds that the last poll took."""
    while pending is not None:
        polled = time.perf_counter()
        if pending.poll():
            return time.perf_counter() - polled
        time.sleep(_POLL_EVERY_S)
    return 0.0


class Saves:
    """One run's state dict, directory and ranks. Every method is collective."""

    def __init__(self, workload: Workload, directory: Path, group: Group) -> None:
        self.workload = workload
        self.directory = directory
        self.group = group
        self._directories = 0

    @contextmanager
    def fresh(self) -> Iterator[Path]:
        """A new path, the same on every rank; removed, and that synced, afterwards."""
        self._directories += 1
        path = self.directory / f"{self._directories}"
        yield path
        self.group.barrier()
        if not self.group.rank:
            shutil.rmtree(path, ignore_errors=True)
            machine.sync(self.directory)  # what deleting costs the file system is paid here
        self.group.barrier()

    def turn(self, row: Row, contender: Contender, *steps: Callable[[Path], Sample]) -> None:
        """Attempt steps with a new path; a contender that is out then is closed at once.

        It may have failed because it holds all descriptors there are, or all memory.
        """
        if row.status == "in":
            with self.fresh() as path:
                for step in steps:
                    attempt(row, partial(step, path), self.group)
            if row.status != "in":
                close(contender)

    def opened(self, contender: Contender, path: Path) -> Sample:
        """Open a contender; there is no figure."""
        path.mkdir(parents=True, exist_ok=True)
        contender.open(self.group, self.workload.nbytes, path)
        return {}

    def timed(self, contender: Contender, path: Path) -> Sample:
        """One save of fresh values."""
        self.workload.advance()
        self.warm()
        used_s = machine.tree_cpu_s()
        self.group.barrier()
        started = time.perf_counter()
        pending = contender.save(self.workload.state, path)
        call_s = time.perf_counter() - started
        finish_s = wait_durable(pending)
        durable_s = time.perf_counter() - started
        return {
            "blocked_s": call_s + finish_s,
            "call_s": call_s,
            "finish_s": finish_s,
            "durable_s": durable_s,
            "cpu_s": machine.tree_cpu_s() - used_s,
        }

    def untimed(self, contender: Contender, path: Path) -> Sample:
        """A save that fills caches."""
        self.timed(contender, path)
        return {}

    def memory(self, contender: Contender, saves: int, path: Path) -> Sample:
        """The peak of extra memory over a few saves of a contender that is opened for them."""
        machine.give_memory_back()
        with machine.peak_memory() as samples:
            before = samples[0]
            self.opened(contender, path)
            try:
                for number in range(saves):
                    self.workload.advance()
                    self.group.barrier()
                    wait_durable(contender.save(self.workload.state, path / f"save-{number}"))
                samples.append(machine.tree_memory_nbytes())  # a short save may fall between two
            finally:
                contender.close()
                _engine.reset()
        return {"memory_nbytes": max(samples) - before}

    def verify(self, row: Row, contender: Contender) -> None:
        """Save, change everything as soon as that is allowed, load what was saved, and compare."""

        def save(path: Path) -> Sample:
            self.workload.advance()
            self.group.barrier()
            started = time.perf_counter()
            pending = contender.save(self.workload.state, path)
            if pending is not None:
                pending.wait_staged()
            staged_s = time.perf_counter() - started
            self.workload.advance()
            wait_durable(pending)
            return {"staged_s": staged_s}

        def load(path: Path) -> Sample:
            self.workload.set_version(self.workload.version - 1)
            try:
                loaded = contender.load(path, self.workload.blank())
            except Exception as error:
                why = f"it cannot be loaded: {type(error).__name__}: {error}"
                raise WrongData(why) from error
            if wrong := differences(self.workload.state, loaded):
                raise WrongData(f"its checkpoint is not what was saved: {said_of(wrong)}")
            return {}

        self.turn(row, contender, save, load)

    def warm(self) -> None:
        """Let whoever is next find free memory that is there."""
        machine.warm_free_memory(self.directory, self.workload.nbytes, self.group)


def limits_of(saves: Saves) -> Callable[[], Sample]:
    """A function that measures, once per round, copies and writes of as many bytes as a save."""
    copies = Copies(saves.workload.tensors)
    writes = RawWrites(copies.pages, saves.workload.nbytes)

    path = saves.directory / f"raw-{saves.group.rank}"

    def measure() -> Sample:
        saves.workload.advance()
        saves.warm()
        saves.group.barrier()
        return {**copies.measure(), **writes.measure(path, saves.group.barrier)}

    return measure


def measure_saves(
    saves: Saves,
    contenders: Sequence[Contender],
    *,
    rounds: int,
    memory_saves: int = 0,
    limits: Callable[[], Sample] | None = None,
) -> Report:
    """Measure these contenders, and the limits in the same rounds. Collective."""
    group = saves.group
    limit_row = Row(name="limits")
    rows = [Row.of(each, group) for each in contenders]
    both = list(zip(rows, contenders, strict=True))
    for row, contender in both if memory_saves else ():
        saves.turn(row, contender, partial(saves.memory, contender, memory_saves))
    for row, contender in both:
        saves.turn(row, contender, partial(saves.opened, contender))
    for row, contender in both:
        for _ in range(contender.warmups - 1):
            saves.turn(row, contender, partial(saves.untimed, contender))
        saves.verify(row, contender)
    in_rounds(
        [
            partial(attempt, limit_row, limits or limits_of(saves), group),
            *(partial(saves.turn, *each, partial(saves.timed, each[1])) for each in both),
        ],
        rounds,
    )
    for row, contender in both:
        saves.verify(row, contender)
        if row.status == "in":
            close(contender)
    _engine.reset()
    return Report(limits=limit_row, contenders=rows)


def close(contender: Contender) -> None:
    """Close a contender; the others are closed, too, whatever this one says."""
    try:
        contender.close()
    except Exception as error:  # its figures are there already
        sys.stderr.write(f"{contender.name} could not be closed: {error}\n")
