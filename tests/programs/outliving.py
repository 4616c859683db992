"""Trainers that end while their saves are written."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall import _engine
from nostall.core import AsyncCallsQueue
from nostall.state_dict_saver import CheckpointMetadataCache
from nostall.testing import Fault, inject, writer_pids
from support.states import schedule, small_state

LINGER_S = 60.0


def train(path: str, faults: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """Schedule a save, tell the test, and end as it says."""
    _engine.default_engine().faults = tuple(faults)
    if options.pop("drains", False):
        nostall.drain_on_sigterm(grace_s=1.0)
    queue = AsyncCallsQueue()
    with queue:
        schedule(queue, path, small_state(7), **{"linger_s": LINGER_S, **options})
        print(json.dumps(writer_pids()), flush=True)
        if sys.stdin.readline() == "raise\n":
            raise RuntimeError("of the trainer")


def state_of(rank: int, step: int, *, ranks_with_items: int) -> dict[str, torch.Tensor]:
    """A tensor of the rank, if it has any."""
    if rank >= ranks_with_items:
        return {}
    return {f"w{rank}": torch.full((1000,), float(step))}


def killed(out: Path, ranks_with_items: str, saves: str) -> None:
    """Saves of one structure, of which the last one is not committed when all ranks die."""
    rank, last = dist.get_rank(), int(saves) - 1
    queue, cache = AsyncCallsQueue(), CheckpointMetadataCache()
    for step in range(last + 1):
        path = out / ("last" if step % 2 else f"step-{step}")
        state = state_of(rank, step, ranks_with_items=int(ranks_with_items))
        schedule(queue, path, state, cache=cache, linger_s=LINGER_S)
        if step < last:
            queue.wait()
            dist.barrier()
            assert not list(path.glob(".complete*"))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def killed_with_a_writer(out: Path) -> None:
    """The writer process of rank 1 dies with all trainers."""
    rank = dist.get_rank()
    queue = AsyncCallsQueue()
    fault = Fault.kill("report", signal.SIGKILL)
    with inject(*[fault] * rank):
        schedule(queue, out / "step-0", {f"w{rank}": torch.ones(10)}, linger_s=LINGER_S)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def killed_after_a_change(out: Path) -> None:
    """Rank 1 has one more tensor than in the saves before, of which no other rank knows."""
    rank = dist.get_rank()
    queue, cache = AsyncCallsQueue(), CheckpointMetadataCache()
    for step in range(4):
        state = {f"w{rank}": torch.full((10,), float(step))}
        if (step, rank) == (3, 1):
            state["new"] = torch.ones(10)
        schedule(queue, out / f"step-{step}", state, cache=cache, linger_s=LINGER_S)
        if step < 3:
            queue.wait()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def raised_on_one_rank(out: Path) -> None:
    """An exception of rank 0, of which rank 1 learns nothing; the writer process is held."""
    rank = dist.get_rank()
    fault = Fault({"point": "start", "do": "hold", "reached": f"{out}/reached", "go": f"{out}/go"})
    with AsyncCallsQueue() as queue, inject(*[fault] * (1 - rank)):
        schedule(queue, out / "step-0", {f"w{rank}": torch.ones(10)}, linger_s=LINGER_S)
        dist.barrier()
        if rank == 0:
            raise RuntimeError("of rank 0")
        signal.pause()  # until the launcher ends it


def killed_after_a_save_of_one_rank(out: Path) -> None:
    """Rank 0 has begun, and given up, a save more than rank 1; then two saves are under way."""
    rank = dist.get_rank()
    queue, cache = AsyncCallsQueue(), CheckpointMetadataCache()
    for step in range(3):
        schedule(queue, out / "warm", tensor_of(rank, step), cache=cache, linger_s=LINGER_S)
        queue.wait()
    if rank == 0:
        schedule(queue, out / "alone", tensor_of(rank, 50), cache=cache, linger_s=LINGER_S)
    queue.close(abort=True)
    dist.barrier()
    for step in (100, 200):
        schedule(queue, out / "last", tensor_of(rank, step), cache=cache, linger_s=LINGER_S)
    for call in list(queue._calls):
        call.outcome.result(60)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def tensor_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {f"w{rank}": torch.full((1000,), float(step))}


def closed_without_a_rank(out: Path, how: str) -> None:
    """Rank 1 dies; rank 0 ends its saves as always."""
    rank = dist.get_rank()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which may come first
    if how == "manager":
        manager = manager_of(out)
        manager.save(0, tensor_of(rank, 7))
        end: Any = manager.close
    else:
        queue = AsyncCallsQueue()
        schedule(queue, out / "steps" / "step-000000000", tensor_of(rank, 7), linger_s=LINGER_S)
        end = queue.close
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    end()


def given_up(out: Path) -> list[list[str]]:
    """The names that are left by saves of which rank 1 has no item."""
    state = tensor_of(0, 1) if dist.get_rank() == 0 else {}
    queue = AsyncCallsQueue()
    left = []
    for name, end in (("closed", partial(queue.close, abort=True)), ("aborted", nostall.abort_all)):
        schedule(queue, out / name, state, linger_s=LINGER_S)
        dist.barrier()
        end()
        dist.barrier()
        left.append(sorted(os.listdir(out / name)))
    return left


def failed_on_one_rank(out: Path) -> list[str]:
    """The names that are left when one rank could not write its files, and the others could."""
    rank = dist.get_rank()
    queue = AsyncCallsQueue()
    with inject(*[Fault.errno("chunk", 28)] * rank):
        schedule(queue, out / "step-0", {f"w{rank}": torch.ones(10)}, linger_s=LINGER_S)
    try:
        queue.wait()
    except CheckpointException:
        dist.barrier()
        return sorted(os.listdir(out / "step-0"))
    raise AssertionError("the save has not failed")


def resumed(out: Path) -> list[float]:
    """What two ranks have recovered and restored."""
    rank = dist.get_rank()
    manager = manager_of(out)
    state = {f"w{rank}": torch.zeros(1000)}
    restored = manager.restore(state, recover_s=LINGER_S)
    assert restored is not None
    manager.save(restored.step + 1, state)  # and go on
    manager.close()
    return [float(restored.step), float(state[f"w{rank}"][0])]


def managed(out: Path) -> None:
    """A manager's saves, of which the last one is not committed when all ranks die."""
    rank = dist.get_rank()
    manager = manager_of(out)
    for step in range(4):
        manager.save(step, {f"w{rank}": torch.full((1000,), float(step))})
        if step < 3:
            manager.wait()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def manager_of(root: Path) -> nostall.CheckpointManager:
    """Its saves outlive the trainer."""

    def writer(path: str) -> nostall.FileSystemWriterAsync:
        return nostall.FileSystemWriterAsync(path, linger_s=LINGER_S)

    return nostall.CheckpointManager(root / "steps", writer=writer)


if __name__ == "__main__":
    train(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
