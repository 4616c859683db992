"""How a figure is measured: one save, one compute loop, a few saves for their memory, one load.

Every function here runs on all ranks at the same time, with the same arguments, and returns what
all ranks agree on.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nostall._bench.contender import Contender, Durable, Pending
from nostall._bench.free_memory import warm_free_memory
from nostall._bench.processes import MemorySampler, give_memory_back, tree_cpu_time
from nostall._bench.ranks import Ranks
from nostall._bench.results import (
    MemoryFigures,
    SaveSample,
    SlowdownSample,
    Step,
    Verification,
)
from nostall._bench.workloads import Workload, differences, said_of

_POLL_EVERY_S = 0.001
_UNIT_S = 0.001
_UNITS_PER_POLL = 10
_CALIBRATIONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What every measurement needs."""

    ranks: Ranks
    workload: Workload
    helpers: frozenset[int]
    """Process ids whose consumption is not the contenders'."""
    directory: Path
    """On the file system that is measured."""

    def warm_free_memory(self) -> None:
        """Let whoever is next find free memory that is there."""
        warm_free_memory(
            self.directory,
            self.workload.nbytes,
            rank=self.ranks.rank,
            barrier=self.ranks.barrier,
        )


def wait_durable(pending: Pending) -> float:
    """Poll about every millisecond until a save is durable; the seconds that the last poll took."""
    while True:
        polled = time.perf_counter()
        if pending.poll():
            return time.perf_counter() - polled
        time.sleep(_POLL_EVERY_S)


def time_save(
    trial: Trial,
    contender: Contender,
    path: Path,
    number: int,
    *,
    prepare: Callable[[], None] = lambda: None,
) -> SaveSample:
    """Time one save of fresh values; ``prepare`` comes before them.

    The heap begins trimmed. Whether it would keep the memory of the last save's copy depends on
    what happens to lie at its top: stock ``dcp.async_save`` of 256 MiB blocks for 27 ms on a heap
    that kept it, and for 60 ms on a trimmed one.
    """
    prepare()
    trial.workload.advance()
    give_memory_back()
    used_before = tree_cpu_time(trial.helpers)
    trial.ranks.barrier()
    started = time.perf_counter()
    pending = contender.save(trial.workload.state, path)
    call_s = time.perf_counter() - started
    finish_s = 0.0 if isinstance(pending, Durable) else wait_durable(pending)
    durable_s = time.perf_counter() - started
    used = tree_cpu_time(trial.helpers).since(used_before)
    slowest = trial.ranks.maximum([call_s, finish_s, call_s + finish_s, durable_s])
    user_s, system_s = trial.ranks.total([used.user_s, used.system_s])
    return SaveSample(
        round=number,
        call_s=slowest[0],
        finish_s=slowest[1],
        blocked_s=slowest[2],
        durable_s=slowest[3],
        cpu_s=user_s + system_s,
        system_s=system_s,
    )


# --- compute loops ----------------------------------------------------------------------------


def python_unit() -> Callable[[], None]:
    """About a millisecond of pure Python."""

    def run(count: int) -> None:
        number = 0
        for each in range(count):
            number += each * each

    return _calibrated(run)


def matmul_unit() -> Callable[[], None]:
    """About a millisecond of matrix products on all of torch's threads."""
    left, right = torch.rand(192, 192), torch.rand(192, 192)
    product = torch.empty(192, 192)

    def run(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=product)

    return _calibrated(run)


LOOPS = {"python": python_unit, "matmul": matmul_unit}


def _calibrated(run: Callable[[int], None]) -> Callable[[], None]:
    """``run`` with the count that takes about one unit when nothing is in its way."""
    count = 1
    while (took := _least_s(run, count)) < _UNIT_S:
        count *= 2
    fitted = max(1, round(count * _UNIT_S / took))
    return lambda: run(fitted)


def _least_s(run: Callable[[int], None], count: int) -> float:
    """Seconds of the fastest of a few runs."""
    least = math.inf
    for _ in range(_CALIBRATIONS):
        started = time.perf_counter()
        run(count)
        least = min(least, time.perf_counter() - started)
    return least


def _rate(unit: Callable[[], None], stop: Callable[[], bool]) -> float:
    """Units per second until ``stop``, which is asked every few units and not timed."""
    units, busy_s = 0, 0.0
    while units == 0 or not stop():
        started = time.perf_counter()
        for _ in range(_UNITS_PER_POLL):
            unit()
        busy_s += time.perf_counter() - started
        units += _UNITS_PER_POLL
    return units / busy_s


def loop_slowdown(
    trial: Trial, contender: Contender, path: Path, number: int, *, loop: str, alone_s: float
) -> SlowdownSample | None:
    """What a loop loses while a save is under way; ``None`` if the call returns when durable.

    Args:
        trial: Ranks and state.
        contender: Who saves.
        path: Where to.
        number: Of the round.
        loop: A key of ``LOOPS``.
        alone_s: Seconds for which the loop runs without a save, immediately before.
    """
    unit = LOOPS[loop]()
    trial.workload.advance()
    gc.collect()
    trial.warm_free_memory()
    trial.ranks.barrier()
    until = time.perf_counter() + alone_s
    alone = _rate(unit, lambda: time.perf_counter() >= until)
    trial.ranks.barrier()
    pending = contender.save(trial.workload.state, path)
    if isinstance(pending, Durable):
        return None
    meanwhile = _rate(unit, pending.poll)
    (lost,) = trial.ranks.maximum([1 - meanwhile / alone])
    return SlowdownSample(round=number, loop=loop, lost=lost)


def timeline(trial: Trial, contender: Contender, path: Path, *, durable_s: float) -> list[Step]:
    """The durations of the steps of a matmul loop, with a save in the middle; this rank's."""
    unit = matmul_unit()
    trial.workload.advance()
    trial.warm_free_memory()
    trial.ranks.barrier()
    origin = time.perf_counter()
    steps: list[Step] = []
    pending: Pending | None = None
    saved_from, saved_until = origin + durable_s, None
    while saved_until is None or time.perf_counter() < saved_until + durable_s:
        started = time.perf_counter()
        saving = pending is not None and saved_until is None
        if pending is None and started >= saved_from:
            pending, saving = contender.save(trial.workload.state, path), True
        elif pending is not None and saved_until is None and pending.poll():
            saved_until = time.perf_counter()
        for _ in range(_UNITS_PER_POLL):
            unit()
        ended = time.perf_counter()
        steps.append(
            Step(
                contender=contender.name,
                start_s=started - origin,
                duration_s=ended - started,
                saving=saving,
            )
        )
    return steps


# --- memory and correctness -------------------------------------------------------------------


def measure_memory(
    trial: Trial,
    sampler: MemorySampler,
    contender: Contender,
    directory: Path,
    *,
    prepare: Callable[[], None],
    saves: int,
) -> MemoryFigures:
    """Peak memory of each of several saves, above the level before ``prepare``."""
    give_memory_back()
    trial.ranks.barrier()
    before, _ = sampler.level()
    prepare()
    peaks = []
    for number in range(saves):
        trial.workload.advance()
        gc.collect()
        trial.ranks.barrier()
        wait_durable(contender.save(trial.workload.state, directory / str(number)))
        peaks.append(sampler.level()[1] - before)
    return MemoryFigures(peaks_nbytes=tuple(int(peak) for peak in trial.ranks.total(peaks)))


def verify(trial: Trial, contender: Contender, path: Path) -> Verification:
    """Save, change everything as soon as that is allowed, load what was saved, and compare."""
    workload = trial.workload
    workload.advance()
    saved_version = workload.version
    trial.ranks.barrier()
    started = time.perf_counter()
    pending = contender.save(workload.state, path)
    pending.wait_staged()
    (staged_s,) = trial.ranks.maximum([time.perf_counter() - started])
    workload.advance()
    wait_durable(pending)
    trial.ranks.barrier()
    workload.set_version(saved_version)
    said = trial.ranks.first_text(_what_is_wrong(contender, path, workload))
    return Verification(staged_s=staged_s, mismatches=() if said is None else (said,))


def _what_is_wrong(contender: Contender, path: Path, workload: Workload) -> str | None:
    """How a checkpoint differs from the state, or ``None``; one that does not load differs."""
    try:
        loaded = contender.load(path, workload.blank())
    except Exception as error:  # whatever its loader raises
        return f"it cannot be loaded: {type(error).__name__}: {error}"
    return said_of(differences(workload.state, loaded))
