"""Trainers with little to spend, and trainers that measure themselves."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint as dcp

from nostall._engine import default_engine
from nostall.core import AsyncCallsQueue
from support.faults import writer_pids
from support.processes import open_files
from support.states import schedule
from support.waiting import wait_until

State = dict[str, Any]
MIB = 1 << 20


def has_few_descriptors(out: Path) -> None:
    """Save and load 5,000 tensors with a limit of 64 descriptors, also for the writer."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    state: State = {f"t{number}": torch.full((5,), float(number)) for number in range(5000)}
    with AsyncCallsQueue() as queue:
        schedule(queue, out / "checkpoint", state)
        for tensor in state.values():
            tensor.fill_(-1)
    dcp.load(state, checkpoint_id=out / "checkpoint")
    assert all(bool((tensor == float(name[1:])).all()) for name, tensor in state.items())


def saves_again_and_again(out: Path, structures: tuple[int, ...]) -> list[dict[str, int]]:
    """Twenty saves of states of so many MiB, in turn, and what the processes hold then."""
    states = [
        {f"{mib}/{number}": torch.randn(MIB // 4) for number in range(mib)} for mib in structures
    ]
    measured = []
    with AsyncCallsQueue() as queue:
        for number in range(20):
            schedule(queue, out / f"{number % 2}", states[number % len(states)])
            queue.wait()
            measured.append(_held())
        # What was not counted must not be held for ever either.
        pids = (os.getpid(), *writer_pids())
        wait_until(lambda: not any(_is_replaced(link) for pid in pids for link in open_files(pid)))
    return measured


def _lasting_descriptors(pid: int) -> int:
    return sum(not _is_replaced(link) for link in open_files(pid))


def _is_replaced(link: str) -> bool:
    """Whether it leads to a replaced checkpoint's file, which a thread closes later."""
    return link.endswith(".distcp (deleted)")


def _held() -> dict[str, int]:
    trainer = psutil.Process()
    (writer,) = (psutil.Process(pid) for pid in writer_pids())
    of_trainer, of_writer = trainer.memory_full_info(), writer.memory_full_info()
    return {
        # Every page once, however many of the two have it mapped, as both have snapshot memory.
        "proportional": of_trainer.pss + of_writer.pss,
        "trainer": of_trainer.rss,
        "writer": of_writer.rss,
        "reserved": default_engine().arena.reserved_nbytes,
        "trainer descriptors": _lasting_descriptors(trainer.pid),
        "writer descriptors": _lasting_descriptors(writer.pid),
        "trainer threads": trainer.num_threads(),
        "writer threads": writer.num_threads(),
        "children": len(trainer.children(recursive=True)),
    }


if __name__ == "__main__":
    has_few_descriptors(Path(sys.argv[1]))
