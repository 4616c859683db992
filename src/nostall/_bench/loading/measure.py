"""How a figure is measured: one load of everything, of one tensor, of an eighth of the rows.

Every load overwrites tensors that are there already and have other values than the saved ones, and
each is compared with what was saved, bit by bit, after the clock has stopped. Functions return the
sample, and what the load left wrong.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from nostall._bench.free_memory import warm_free_memory
from nostall._bench.loading.contender import LoadContender, LoadsRows
from nostall._bench.loading.page_cache import bring_in, cached_share, drop, files_below
from nostall._bench.loading.results import LoadSample, OneTensorSample, RowsSample
from nostall._bench.loading.rows import eighth, part_of, path_of
from nostall._bench.processes import fresh_pages_for_each_block, give_memory_back, tree_cpu_time
from nostall._bench.workloads import Workload, differences, integers, said_of, tensors_of

Phase = Literal["warm", "idle", "fresh", "cold"]
_IO_COUNTS = Path("/proc/self/io")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTrial:
    """What every measurement needs."""

    saved: Workload
    """As it was saved; it does not change."""
    target: Workload
    """What is loaded into: tensors of the same names and shapes."""
    directory: Path
    """On the file system that is measured."""
    idle_s: float
    targets: dict[str, Tensor]
    """The target's tensors by name: a load has to fill these very tensors."""
    rows: dict[str, slice]
    """An eighth of the rows of every tensor that has eight."""

    @classmethod
    def of(cls, saved: Workload, directory: Path, idle_s: float) -> LoadTrial:
        """With targets of their own."""
        target = Workload(saved.shape, saved.blank())
        targets = dict(tensors_of(target.state))
        rows = {name: eighth(tensor) for name, tensor in targets.items()}
        return cls(
            saved=saved,
            target=target,
            directory=directory,
            idle_s=idle_s,
            targets=targets,
            rows={name: each for name, each in rows.items() if each is not None},
        )

    def prepare(self, phase: Phase, path: Path) -> float:
        """Get memory and page cache ready for one load of the files in ``path``.

        Free memory is warm, except in the phase that is about memory that is not. The heap is
        trimmed.

        Returns:
            The share of the files that is in the page cache now.
        """
        files = files_below(path)
        if phase != "cold":
            bring_in(files)
        if phase == "idle":
            give_memory_back()  # now: what is freed after the idle seconds is still there
            time.sleep(self.idle_s)
        else:
            warm_free_memory(self.directory, self.saved.nbytes, rank=0, barrier=lambda: None)
            give_memory_back()
        if phase == "cold":
            drop(files)  # after the heap was trimmed: mapped pages would stay
        return cached_share(files)


def time_load(
    trial: LoadTrial, contender: LoadContender, path: Path, number: int, *, phase: Phase
) -> tuple[LoadSample, str | None]:
    """Time one load of everything."""
    trial.target.advance()
    into = trial.target.same_tensors()
    contender.forget()
    cached = trial.prepare(phase, path)
    used_before = tree_cpu_time()
    with fresh_pages_for_each_block() if phase == "fresh" else nullcontext():
        started = time.perf_counter()
        contender.load(path, into)
        load_s = time.perf_counter() - started
    used = tree_cpu_time().since(used_before)
    sample = LoadSample(
        round=number,
        load_s=load_s,
        cpu_s=used.user_s + used.system_s,
        system_s=used.system_s,
        cached=cached,
    )
    return sample, said_of(differences(trial.saved.state, trial.targets))


def time_one_tensor(
    trial: LoadTrial, contender: LoadContender, path: Path, number: int
) -> tuple[OneTensorSample, str | None]:
    """Time two loads of the tensor in the middle: a first one, and another one right after it."""
    name = list(trial.targets)[len(trial.targets) // 2]
    saved = dict(tensors_of(trial.saved.state))[name]
    part = part_of(trial.target.state, path_of(trial.target.state, name))
    target = dict(tensors_of(part))
    contender.forget()
    trial.prepare("warm", path)
    seconds, wrong = [], None
    for _ in range(2):
        integers(target[name]).copy_(~integers(saved))
        started = time.perf_counter()
        contender.load(path, part)
        seconds.append(time.perf_counter() - started)
        wrong = wrong or said_of(differences({name: saved}, target))
    return OneTensorSample(round=number, first_s=seconds[0], again_s=seconds[1]), wrong


def time_rows(
    trial: LoadTrial, contender: LoadsRows, path: Path, number: int
) -> tuple[RowsSample, str | None]:
    """Time one load of an eighth of the rows of each tensor, and count what is read."""
    saved = dict(tensors_of(trial.saved.state))
    expected = {name: saved[name][rows] for name, rows in trial.rows.items()}
    targets = {name: _inverted(tensor) for name, tensor in expected.items()}
    contender.forget()
    trial.prepare("warm", path)
    read_before = _read_nbytes()
    started = time.perf_counter()
    contender.load_rows(path, targets, trial.rows)
    load_s = time.perf_counter() - started
    read_after = _read_nbytes()
    counted = None if read_before is None or read_after is None else read_after - read_before
    sample = RowsSample(round=number, load_s=load_s, read_nbytes=counted)
    return sample, said_of(differences(expected, targets))


def _inverted(tensor: Tensor) -> Tensor:
    """A tensor of the same shape in which every bit is another one."""
    other = torch.empty_like(tensor)
    integers(other).copy_(~integers(tensor))
    return other


def _read_nbytes() -> int | None:
    """Bytes that all threads of this process have got from reads so far, the page cache included.

    Of mapped files nothing counts. ``None`` if the kernel does not count or does not tell.
    """
    try:
        lines = _IO_COUNTS.read_text().splitlines()
    except OSError:
        return None
    counts = dict(line.split(": ") for line in lines)
    return int(counts["rchar"])
