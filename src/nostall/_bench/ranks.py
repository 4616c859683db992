"""Several ranks as one: they start together, agree on failures, and report the slowest of them."""

from __future__ import annotations

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

_SAVE_TIMEOUT = timedelta(minutes=10)
"""For contenders' collectives: one that fails on a single rank may leave the others waiting."""
_OWN_TIMEOUT = timedelta(hours=2)
"""For the benchmark's collectives: while one rank probes or waits, the others wait for it."""


class Ranks:
    """The ranks of this run. With one rank there is no process group, and nothing communicates.

    What the benchmark itself says goes through a group of its own: contenders use the default
    group, some of them from another thread.
    """

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group

    @property
    def distributed(self) -> bool:
        """Whether a process group is there."""
        return self._group is not None

    @property
    def leads(self) -> bool:
        """Whether this rank prints and writes the report."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def maximum(self, figures: Sequence[float]) -> list[float]:
        """The maximum over all ranks, figure by figure. Collective."""
        return self._reduced(figures, dist.ReduceOp.MAX)

    def total(self, figures: Sequence[float]) -> list[float]:
        """The sum over all ranks, figure by figure. Collective."""
        return self._reduced(figures, dist.ReduceOp.SUM)

    def first_text(self, text: str | None) -> str | None:
        """What the first rank that has something to say says, on all ranks. Collective."""
        if self._group is None:
            return text
        texts: list[str | None] = [None] * self.world_size
        dist.all_gather_object(texts, text, group=self._group)
        said = [(rank, each) for rank, each in enumerate(texts) if each is not None]
        return f"rank {said[0][0]}: {said[0][1]}" if said else None

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on all ranks. Collective."""
        if self._group is None:
            return value
        holder = [value]
        dist.broadcast_object_list(holder, src=0, group=self._group)
        return holder[0]

    def _reduced(self, figures: Sequence[float], operation: Any) -> list[float]:
        if self._group is None:
            return list(figures)
        tensor = torch.tensor(list(figures), dtype=torch.float64)
        dist.all_reduce(tensor, op=operation, group=self._group)
        return [float(figure) for figure in tensor.tolist()]


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1:
        yield Ranks(0, 1, None)
        return
    dist.init_process_group("gloo", timeout=_SAVE_TIMEOUT)
    try:
        group = dist.new_group(backend="gloo", timeout=_OWN_TIMEOUT)
        yield Ranks(dist.get_rank(), dist.get_world_size(), group)
    finally:
        dist.destroy_process_group()


@contextmanager
def working_directory(parent: Path | None, ranks: Ranks) -> Iterator[Path]:
    """An empty directory on the file system of ``parent``, or here; removed at the end."""
    made: str | None = None
    if ranks.leads:
        made = tempfile.mkdtemp(prefix="nostall-bench-", dir=parent or Path.cwd())
    path = Path(ranks.from_first(made))
    try:
        yield path
    finally:
        if ranks.leads:
            shutil.rmtree(path, ignore_errors=True)


def started_by_launcher() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run ``python -m nostall`` with these arguments on that many ranks; the exit status."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    # torchrun would say 1 thread per rank, which on a node with more cores than ranks nobody trains
    # with.
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "nostall", *arguments]
    return subprocess.run(command, env=environment, check=False).returncode
