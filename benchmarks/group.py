"""Several ranks as one: they start together, agree on failures, and report the slowest of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTENDERS_WAIT = timedelta(minutes=10)
"""In contenders' collectives: one that fails on a single rank may leave the others waiting."""
_OWN_WAIT = timedelta(hours=2)
_SUMMED = {"cpu_s", "memory_nbytes"}


class Group:
    """The ranks of this run. With one rank there is no process group, and nothing communicates.

    The benchmark has a process group of its own: contenders use the default one, some of them from
    another thread.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group

    @property
    def is_alone(self) -> bool:
        return self._group is None

    def barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)

    def merged(self, sample: dict[str, float]) -> dict[str, float]:
        """The slowest rank's figures, and of processor time and memory the sum. Collective."""
        if self._group is None or not sample:
            return sample
        most = torch.tensor(list(sample.values()), dtype=torch.float64)
        total = most.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self._group)
        return {
            name: float(summed if name in _SUMMED else slowest)
            for name, slowest, summed in zip(sample, most, total, strict=True)
        }

    def first_text(self, text: str | None) -> str | None:
        """The text of the lowest rank that has one, on all ranks. Collective."""
        if self._group is None:
            return text
        texts: list[str | None] = [None] * self.world_size
        dist.all_gather_object(texts, text, group=self._group)
        said = [f"rank {rank}: {each}" for rank, each in enumerate(texts) if each is not None]
        return said[0] if said else None

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on all ranks. Collective."""
        holder = [value]
        if self._group is not None:
            dist.broadcast_object_list(holder, src=0, group=self._group)
        return holder[0]


def is_launched() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def joined() -> Iterator[Group]:
    """The ranks that torchrun started, or this process alone."""
    if not is_launched() or os.environ["WORLD_SIZE"] == "1":
        yield Group()
        return
    dist.init_process_group("gloo", timeout=_CONTENDERS_WAIT)
    try:
        own = dist.new_group(backend="gloo", timeout=_OWN_WAIT)
        yield Group(dist.get_rank(), dist.get_world_size(), own)
    finally:
        dist.destroy_process_group()


@contextmanager
def working_directory(parent: Path, group: Group) -> Iterator[Path]:
    """An empty directory in ``parent``, the same on all ranks; removed at the end. Collective."""
    made = tempfile.mkdtemp(prefix="nostall-benchmark-", dir=parent) if not group.rank else None
    path = Path(group.from_first(made))
    try:
        yield path
    finally:
        if not group.rank:
            shutil.rmtree(path, ignore_errors=True)


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run ``python -m benchmarks`` with these arguments on that many ranks; the exit status."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    # torchrun would say 1 thread per rank, which on a node with more cores than ranks nobody trains
    # with.
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "benchmarks", *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def python_path() -> str:
    """A ``PYTHONPATH`` with which children find this package, and all that this process has."""
    root = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def answer_of(module: str, arguments: Sequence[str]) -> Any:
    """The last line that a module prints in a fresh process, read as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise ChildProcessError(f"status {done.returncode}: {' '.join(last)}")
    return json.loads(done.stdout.splitlines()[-1])
