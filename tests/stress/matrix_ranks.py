"""The ranks of the fault matrix: they make a save that is to fail, and one after it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

import nostall
from nostall._engine import reset
from nostall._ranks import agreement
from nostall.core import AsyncCallsQueue
from nostall.errors import NostallError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.state_dict_saver import CheckpointMetadataCache
from stress.matrix_cells import Cell
from support.faults import Fault, Hold, inject
from support.processes import open_files
from support.states import schedule
from support.waiting import wait_until

RANKS = 2
LONG_S = 60.0
SHORT_S = 3.0
"""The longest wait for a stopped process."""
LOST_S = 6.0
"""Timeout of collectives when a trainer dies."""
OPTIONS: dict[str, dict[str, Any]] = {"1 file": {"thread_count": 1}, "4 files": {"thread_count": 4}}

_LEARNING = 4
"""After so many saves of a structure nothing is planned, and ranks commit through the store."""
_caches = [CheckpointMetadataCache()]
"""One, until this process is looked at."""

State = dict[str, Any]
Report = dict[str, Any]


def state_of(rank: int, seed: int) -> State:
    """A rank's share: some tensors of 200 KB, a view, an object."""
    values = {f"{n} of {rank}": float(100 * seed + 10 * rank + n) for n in range(6)}
    return {
        **{name: torch.full((50_000,), value) for name, value in values.items()},
        f"view of {rank}": torch.arange(100)[seed : seed + 20],
        f"object of {rank}": {"seed": seed},
    }


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a rank plays its part."""

    cell: Cell
    path: Path
    store: Path
    tell_fd: int
    """Where it reports to."""
    go_fd: int
    """Descriptor that it reads from between the failing save and the next one."""

    def say(self, **report: Any) -> None:
        os.write(self.tell_fd, (json.dumps(report) + "\n").encode())


def fail_and_go_on(stage: Stage, rank: int, hold: Hold | None) -> None:
    """Save, perhaps over a checkpoint, while something goes wrong; then again, if possible."""
    cell = stage.cell
    begin(stage, rank)
    queue = AsyncCallsQueue()
    nostall.warmup()
    if cell.way == "early":
        become_known(stage, queue, rank)
    if cell.overwrite:
        save(stage, queue, rank, 1)
    dist.barrier()
    is_victim = rank == cell.rank
    planner = _Troubled(cell) if is_victim and cell.place == "trainer" else DefaultSavePlanner()
    faults = [hold.fault] if hold is not None else ordered(cell)
    with inject(*faults) if is_victim else contextlib.nullcontext():
        report = outcome_of(lambda: save(stage, queue, rank, 2, planner))
    stage.say(**report)
    os.read(stage.go_fd, 1)
    if not cell.ends_trainer:
        save(stage, queue, rank, 3)
        queue.close()
        reset()
        stage.say(left=still_open(stage.path))
        dist.destroy_process_group()


def become_known(stage: Stage, queue: AsyncCallsQueue, rank: int) -> None:
    """Save elsewhere, until a save is committed before anybody polls."""
    for number in range(_LEARNING):
        save(replace(stage, path=stage.path.with_name(f"learning-{number}")), queue, rank, 1)
    path = stage.path.with_name("known")
    schedule(queue, path, state_of(rank, 1), cache=_caches[0], **OPTIONS[stage.cell.shape])
    wait_until(lambda: nostall.is_complete(path))
    queue.wait()


def begin_anew(stage: Stage, rank: int) -> None:
    """After the death of a trainer: the restarted job's next save."""
    begin(stage, rank)
    with AsyncCallsQueue() as queue:
        save(stage, queue, rank, 3)
    reset()
    stage.say(left=still_open(stage.path))
    dist.destroy_process_group()


def begin(stage: Stage, rank: int) -> None:
    torch.set_num_threads(1)
    if stage.cell.fault == "read-only directory":
        obey_modes()
    stopped = stage.cell.fault == "SIGSTOP"
    agreement.PATIENCE_S = 0.0 if stage.cell.ends_trainer else LONG_S
    nostall.configure(
        EngineOptions(
            write_retries=0,
            chunk_nbytes=64 << 10,
            io_threads=2,
            save_timeout_s=SHORT_S if stopped else LONG_S,
        )
    )
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(stage.store), RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=LOST_S if stage.cell.ends_trainer else LONG_S),
    )


def save(
    stage: Stage,
    queue: AsyncCallsQueue,
    rank: int,
    seed: int,
    planner: DefaultSavePlanner | None = None,
) -> None:
    """One save in the cell's way; with overlapped staging by a loop that only polls."""
    state, options = state_of(rank, seed), OPTIONS[stage.cell.shape]
    match stage.cell.way:
        case "sync":
            writer = FileSystemWriterAsync(stage.path, **options)
            dcp.save(state, storage_writer=writer, planner=planner)
        case "async":
            schedule(queue, stage.path, state, planner=planner, **options)
            queue.wait()
        case "early":
            schedule(queue, stage.path, state, planner=planner, cache=_caches[0], **options)
            queue.wait()
        case "overlapped":
            schedule(queue, stage.path, state, planner=planner, staging="overlapped", **options)
            while queue.pending:
                queue.poll()


class _Troubled(DefaultSavePlanner):
    """Ends its process, or fails, when it is asked for data."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self._fault = cell.fault

    def resolve_data(self, write_item: WriteItem) -> Any:
        match self._fault:
            case "exit 17":
                os._exit(17)
            case "exception":
                raise LookupError("nobody expects this")
            case _:
                return super().resolve_data(write_item)


def ordered(cell: Cell) -> list[Fault]:
    """The victim's instructions for its saves; none, where the planner has them."""
    point, after = ("chunk", 1) if cell.place == "writer" else ("publish", 0)
    if cell.place == "trainer":
        return []
    match cell.fault:
        case "ENOSPC" | "EIO" | "EDQUOT":
            return [Fault.errno(point, getattr(errno, cell.fault), after=after)]
        case "exception":
            return [Fault.raising(point, "nobody expects this")]
        case "exit 17":
            return [Fault.exit(point, 17, after=after)]
        case name:
            return [Fault.kill(point, getattr(signal, name), after=after)]


def outcome_of(attempt: Callable[[], None]) -> Report:
    """How a save ended, as plain data."""
    began_s = time.monotonic()
    try:
        attempt()
    except CheckpointException as error:
        failures = {rank: each for rank, (each, _) in error.failures.items()}
        report: Report = {
            "typed": all(isinstance(each, NostallError) for each in failures.values()),
            "failures": {str(rank): _plain(each) for rank, each in failures.items()},
            "text": str(error),
        }
    except NostallError as error:
        report = {"typed": True, "text": f"{type(error).__name__}: {error}"}
    except RuntimeError as error:  # a collective of DCP's own
        report = {"typed": False, "text": f"{type(error).__name__}: {error}"}
    else:
        report = {"typed": False, "text": "it succeeded"}
    return {**report, "seconds": time.monotonic() - began_s}


def _plain(error: BaseException) -> Report:
    return {name: getattr(error, name, None) for name in ("phase", "path", "errno", "message")}


def still_open(path: Path) -> list[str]:
    """Descriptors and mappings of nostall's that this process still has after a reset."""
    gc.collect()  # of what a failure's traceback holds
    marks, found = ("nostall", str(path)), open_files(os.getpid())
    # Modules of a package that is called like that are no harm.
    found += [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    return [name for name in found if any(mark in name for mark in marks) and "hold" not in name]


def obey_modes() -> None:
    """Give up the superuser's right to ignore modes, for this process and its children."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    libc.capget(header, sets)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
        for each in range(3):
            sets[each] &= ~(1 << capability)
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


def all_states(seed: int) -> State:
    """The content of a checkpoint of this seed."""
    return {key: value for rank in range(RANKS) for key, value in state_of(rank, seed).items()}
