"""Saves that go wrong: on gloo ranks, and in trainers that are interrupted or killed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

import nostall
from nostall import _engine
from nostall._engine import reset
from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions, StagingMode
from nostall.state_dict_saver import CheckpointMetadataCache
from programs.entry_points import async_save_in_thread, loaded_wrong, queue_persistent, save
from support.faults import Fault, Hold, inject, writer_pids
from support.states import begin_async, schedule, small_state

State = dict[str, Any]
Report = dict[str, Any]
STAGING: tuple[StagingMode, ...] = ("blocking", "overlapped")

AT_ONCE = EngineOptions(write_retries=0)
"""No fault of these passes, so no save waits for that."""
ERRNO_FAULTS = {
    f"{errno.errorcode[code]} at {point}": (Fault.errno(point, code), code)
    for code in (errno.ENOSPC, errno.EIO)
    for point in ("open", "chunk", "fsync")
}
DEATHS = {
    "SIGKILL": Fault.kill("chunk", signal.SIGKILL),
    "exit 17": Fault.exit("chunk", 17),
    "exit just before the report": Fault.exit("report", 3),
}
RAISING = {"an exception that nobody expects": Fault.raising("chunk", "nobody expects this")}
ALL_FAULTS: dict[str, Fault] = {
    **{name: fault for name, (fault, _) in ERRNO_FAULTS.items()},
    **DEATHS,
    **RAISING,
}


# --- what came of a save, as plain data -----------------------------------------------------------


def outcome_of(save: Callable[[], object]) -> Report:
    """How a save ended: each rank's failure with all its attributes, the text, the seconds."""
    began = time.monotonic()
    text, failures = "", {}
    try:
        save()
    except CheckpointException as error:
        text = str(error)
        failures = {str(rank): _plain(each) for rank, (each, _) in error.failures.items()}
    return {"text": text, "failures": failures, "seconds": time.monotonic() - began}


def _plain(error: BaseException) -> Report:
    names = ("rank", "phase", "path", "errno", "exit_code", "message")
    causes, cause = [], error.__cause__
    while cause is not None:
        causes.append(type(cause).__name__)
        cause = cause.__cause__
    plain = {name: getattr(error, name, None) for name in names}
    return {"kind": type(error).__name__, "causes": causes, **plain}


def kill_and_wait(pid: int) -> None:
    """SIGKILL a child and return when it is gone, leaving its exit status to its owner."""
    process = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([process], [], [], 60)[0]
    finally:
        os.close(process)


# --- two ranks ------------------------------------------------------------------------------------


def rank_state(seed: int) -> State:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return {
        **small_state(seed),
        f"of rank {rank}": torch.randn(50, 40, generator=generator),
        f"object of rank {rank}": {"seed": seed},
    }


def loads(path: Path, seed: int) -> bool:
    """Whether stock ``dcp.load`` finds exactly this in a checkpoint. Collective."""
    return loaded_wrong(path, rank_state(seed), rank_state(seed=-1)) == []


def scene(
    path: Path,
    *faults: Fault,
    overwritten: bool = False,
    polling: bool = False,
    planner: SavePlanner | None = None,
    cache: CheckpointMetadataCache | None = None,
) -> Report:
    """A split save that fails, and the save after it. Collective; faults are of this rank only."""
    queue, finalized = AsyncCallsQueue(), []
    if overwritten:
        schedule(queue, path, rank_state(seed=1))
        queue.wait()
    dist.barrier()

    def save_badly() -> None:
        told = [lambda: finalized.append(1)]
        schedule(queue, path, rank_state(seed=2), planner=planner, cache=cache, after=told)
        if polling:
            poll(queue)
        else:
            queue.wait()

    with inject(*faults):
        report = outcome_of(save_badly)
    dist.barrier()
    if overwritten:
        report["previous loads"] = loads(path, seed=1)
    report["committed"] = (path / ".metadata").exists()
    report["files"] = sorted(os.listdir(path)) if path.exists() else []
    dist.barrier()
    schedule(queue, path, rank_state(seed=3))
    queue.close()
    dist.barrier()
    return {**report, "next loads": loads(path, seed=3), "finalized": finalized != []}


def poll(queue: AsyncCallsQueue, deadline_s: float = 60.0) -> None:
    """Poll once a step, as a training loop does, until the queue is empty."""
    deadline = time.monotonic() + deadline_s
    while queue.pending:
        if not queue.poll():
            time.sleep(0.001)  # training's: without it, polls would keep a core from the writer
        # Any rank past the deadline ends the loop on every rank.
        late = torch.tensor([int(time.monotonic() > deadline)])
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        if late.item():
            raise TimeoutError("the queue is not empty and nothing was raised")


def writer_scenes(out: Path) -> dict[str, Report]:
    """Every fault, on one rank over nothing and on the other over a checkpoint. Collective."""
    nostall.configure(AT_ONCE)
    reports = {}
    for number, (name, fault) in enumerate(ALL_FAULTS.items()):
        for overwritten in (False, True):
            title = f"{name} over another" if overwritten else name
            victim = (number + overwritten) % 2
            faults = [fault] if dist.get_rank() == victim else []
            polling = bool(number // 2 % 2)
            report = scene(out / title, *faults, overwritten=overwritten, polling=polling)
            reports[title] = {**report, "victim": victim}
    return reports


class Troubled(DefaultSavePlanner):
    """Fails on rank 1, before the ranks plan together or when it is asked for data afterwards.

    Where it fails is kept in a list, so that a plan cache takes a planner that fails for one that
    does not.
    """

    def __init__(self, *where: str) -> None:
        super().__init__()
        self.where = list(where)

    def create_local_plan(self) -> SavePlan:
        if "no plan" in self.where and dist.get_rank() == 1:
            raise LookupError("no plan today")
        return super().create_local_plan()

    def resolve_data(self, write_item: WriteItem) -> Any:
        if "no data" in self.where and write_item.index.fqn == "of rank 1":
            raise LookupError("no data today")
        return super().resolve_data(write_item)


def planner_scene(path: Path, where: str, *, cached: bool) -> Report:
    """A planner that fails first of all, or when plans are cached and ranks no longer talk."""
    cache = CheckpointMetadataCache()
    with AsyncCallsQueue() as queue:
        for number in range(3 if cached else 0):
            known = path.with_name(f"{path.name} {number}")
            schedule(queue, known, rank_state(seed=number), planner=Troubled(), cache=cache)
            queue.wait()
    assert cache.get_metadata_caching_status()[0] is cached, "whether ranks plan in silence"
    return scene(path, planner=Troubled(where), cache=cache)


def stopped_scene(path: Path) -> Report:
    """A writer of rank 1 that is stopped for good; no rank waits longer than two seconds for it."""
    nostall.configure(EngineOptions(save_timeout_s=2))
    try:
        stop = Fault.kill("chunk", signal.SIGSTOP)
        return scene(path, *([stop] if dist.get_rank() == 1 else []))
    finally:
        reset()
        nostall.configure(AT_ONCE)


WAYS: dict[str, Callable[[Path, State], None]] = {
    "save_now": save,
    "save_async": async_save_in_thread,
    "save_split": queue_persistent,
}


def stock_scene(
    save: Callable[[int], None],
    trouble: contextlib.AbstractContextManager[None],
    loads: Callable[[int], bool],
) -> Report:
    """A save over a checkpoint that fails because of rank 1, and the saves around it."""
    save(1)
    dist.barrier()
    with trouble if dist.get_rank() == 1 else contextlib.nullcontext():
        report = outcome_of(lambda: save(2))
    dist.barrier()
    report["previous loads"] = loads(1)
    save(3)
    dist.barrier()
    return {**report, "next loads": loads(3)}


def stock_scenes(out: Path) -> dict[str, Report]:
    """``dcp.save`` with a full device and ``dcp.async_save`` with a killed writer, on rank 1."""
    found = {}
    for name, fault in (
        ("save_now", Fault.errno("chunk", errno.ENOSPC)),
        ("save_async", Fault.kill("chunk", signal.SIGKILL)),
    ):
        path, way = out / name, WAYS[name]
        saved = partial(lambda way, path, seed: way(path, rank_state(seed)), way, path)
        found[name] = stock_scene(saved, inject(fault), partial(loads, path))
    return found


class Late(FileSystemWriterAsync):
    """Its save begins when ``begin`` is called, as if the thread that saves were late."""

    begin: Callable[[], None]

    def stage(self, state_dict: State) -> Any:
        staged: Future[Any] = Future()
        copied = super().stage(state_dict)
        self.begin = lambda: staged.set_result(getattr(copied, "result", lambda: copied)())
        return staged


def saves_begun_without_their_group(out: Path) -> Report:
    """``dcp.async_save``, then ``destroy_process_group()``, before the thread that saves runs."""
    reports: Report = {}
    rank = dist.get_rank()
    save(out / "blocking", rank_state(1))

    def begin_late(
        title: str,
        staging: StagingMode = "blocking",
        *,
        members: list[int] | None = None,
        no_dist: bool = False,
    ) -> None:
        group: Any = members and dist.new_group(members, use_local_synchronization=True)
        writer = Late(out / title, staging=staging)
        saving = begin_async(writer, rank_state(2), process_group=group, no_dist=no_dist)
        dist.barrier()
        dist.destroy_process_group()
        writer.begin()
        report = outcome_of(lambda: saving.result(60))
        report["committed"] = nostall.is_complete(out / title)
        reports[title] = report
        store = dist.FileStore(str(out / f"store {len(reports)}"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

    begin_late("blocking")
    begin_late("overlapped", staging="overlapped")
    begin_late("a group", members=[0, 1])
    begin_late(f"alone {rank}", no_dist=True)
    begin_late(f"in a group of one {rank}", members=[rank])
    reports["previous loads"] = loads(out / "blocking", seed=1)
    return reports


class OnlyTensors(DefaultSavePlanner):
    """Saves what is a tensor and leaves out the rest."""

    def set_up_planner(
        self,
        state_dict: State,
        storage_meta: Any = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # DCP's
    ) -> None:
        super().set_up_planner(tensors_of(state_dict), storage_meta, is_coordinator)


def tensors_of(state: State) -> State:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


@contextlib.contextmanager
def no_memory() -> Iterator[None]:
    """No memory can be reserved for a snapshot."""
    reset()
    nostall.configure(AT_ONCE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def memory_scene(path: Path, staging: StagingMode, planner: type[SavePlanner]) -> Report:
    """``dcp.async_save`` for which rank 1 has no memory; only tensors are looked at."""
    writer = FileSystemWriterAsync(path, staging=staging)

    def save(seed: int) -> None:
        # With an id of its own, DCP resets the writer between staging and writing.
        begin_async(writer, rank_state(seed), checkpoint_id=path, planner=planner()).result(60)

    def loads(seed: int) -> bool:
        return loaded_wrong(path, tensors_of(rank_state(seed)), tensors_of(rank_state(-1))) == []

    return stock_scene(save, no_memory(), loads)


def directory_scene(out: Path, way: str) -> Report:
    """A save to another directory on each rank, and one to the same directory under two names."""
    rank = dist.get_rank()
    mine, same_one = out / f"{way} {rank}", out / f"{way} same"
    report = outcome_of(lambda: WAYS[way](mine, rank_state(1)))
    dist.barrier()
    report["committed"] = list(out.glob(f"{way} */.metadata")) != []
    dist.barrier()
    if rank == 1:
        same_one.symlink_to(out / f"{way} 0")
    dist.barrier()
    WAYS[way](same_one if rank == 1 else mine, rank_state(2))
    dist.barrier()
    return {**report, "next loads": loads(mine if rank == 0 else same_one, seed=2)}


def other_scenes(out: Path) -> dict[str, Report]:
    """Everything that is not a writer's own failure. Collective."""
    nostall.configure(AT_ONCE)
    refused = [Fault.errno("commit", errno.EISDIR)] if dist.get_rank() == 0 else []
    return {
        **stock_scenes(out),
        **{
            f"no memory, {staging}, {planner.__name__}": memory_scene(
                out / f"no memory {staging} {planner.__name__}", staging, planner
            )
            for staging, planner in product(STAGING, (DefaultSavePlanner, OnlyTensors))
        },
        **{f"directories, {way}": directory_scene(out, way) for way in WAYS},
        "commit": scene(out / "commit", *refused),
        "commit over another": scene(out / "commit over another", *refused, overwritten=True),
        **{
            f"{what}, {cached=}": planner_scene(out / f"{what} {cached}", what, cached=cached)
            for what, cached in product(("no plan", "no data"), (False, True))
        },
        "stopped": stopped_scene(out / "stopped"),
    }


# --- trainers, one process each, that tell a test on standard output how far they are -------------


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def stands_in_the_middle_of_a_save(out: Path) -> None:
    """Hold a save open, with forked children, and wait to be killed."""
    hold = Hold("chunk")
    hold.stop(schedule, AsyncCallsQueue(), out / "checkpoint", small_state(1))
    children = []
    # os.fork() runs nostall's hook, which closes descriptors in the child; a fork from C code does
    # not.
    for make in (os.fork, ctypes.CDLL(None).fork):
        child = make()
        if child == 0:
            while True:
                signal.pause()
        children.append(child)
    say(pid=os.getpid(), writer=writer_pids()[0], children=children)
    sys.stdin.readline()


def is_interrupted(out: Path) -> None:
    """Get the SIGINT of a whole process group while a save is held, and finish it all the same."""
    hold = Hold("chunk")
    queue = AsyncCallsQueue()
    hold.stop(schedule, queue, out / "checkpoint", small_state(1))
    before = writer_pids()
    # A shell that runs the tests in its background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A signal between the interpreter's last look and a blocking read would wait as long as that
    # read.
    signalled, signal_fd = os.pipe()
    os.set_blocking(signal_fd, False)
    signal.set_wakeup_fd(signal_fd)
    interrupted = False
    try:
        say(pid=os.getpid())
        select.select([signalled], [], [])
    except KeyboardInterrupt:
        interrupted = True
    hold.release()
    queue.close()
    say(interrupted=interrupted, same_writer=writer_pids() == before)


def forks(out: Path) -> None:
    """Fork while a save is held; the children look around and leave in every way."""

    def close_and_exit(code: int) -> None:
        queue.close()
        os._exit(code)

    hold = Hold("chunk")
    with AsyncCallsQueue() as queue:
        hold.stop(schedule, queue, out / "held", small_state(1))
        before = writer_pids()
        codes = []
        for leave in (os._exit, sys.exit, close_and_exit):
            child = os.fork()
            if child == 0:
                leave(0 if _engine._process.engine is None and queue.pending == 0 else 1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        hold.release()
        queue.wait()
        schedule(queue, out / "next", small_state(2))
    say(codes=codes, same_writer=writer_pids() == before)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
