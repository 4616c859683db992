"""Saves that go wrong: on gloo ranks, and in trainers that are interrupted or killed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

import nostall
from nostall import _engine
from nostall._engine import reset
from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions, StagingMode
from nostall.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from support.faults import Fault, Hold, inject, writer_pids
from support.states import blobs, schedule, small_state

State = dict[str, Any]

AT_ONCE = EngineOptions(write_retries=0)
"""No fault of these passes, so no save waits for that."""
ERRNO_FAULTS = {
    f"{errno.errorcode[code]} at {point}": (Fault.errno(point, code), code)
    for code in (errno.ENOSPC, errno.EIO)
    for point in ("open", "chunk", "fsync")
}
DEATHS = {
    "SIGKILL": (Fault.kill("chunk", signal.SIGKILL), -signal.SIGKILL),
    "exit 17": (Fault.exit("chunk", 17), 17),
    "exit just before the report": (Fault.exit("report", 3), 3),
}
RAISING = {"an exception that nobody expects": Fault.raising("chunk", "nobody expects this")}
ALL_FAULTS: dict[str, Fault] = {
    **{name: fault for name, (fault, _) in ERRNO_FAULTS.items()},
    **{name: fault for name, (fault, _) in DEATHS.items()},
    **RAISING,
}


# --- what came of a save, as plain data -----------------------------------------------------------


def outcome_of(save: Callable[[], object]) -> dict[str, Any]:
    """How a save ended: each rank's failure with all its attributes, the text, the seconds."""
    began = time.monotonic()
    try:
        save()
    except CheckpointException as error:
        return {
            "text": str(error),
            "failures": {str(rank): _plain(each) for rank, (each, _) in error.failures.items()},
            "seconds": time.monotonic() - began,
        }
    return {"failures": {}, "seconds": time.monotonic() - began}


def _plain(error: BaseException) -> dict[str, Any]:
    names = ("rank", "phase", "path", "errno", "exit_code", "message")
    causes, cause = [], error.__cause__
    while cause is not None:
        causes.append(type(cause).__name__)
        cause = cause.__cause__
    plain = {name: getattr(error, name, None) for name in names}
    return {"kind": type(error).__name__, "causes": causes, **plain}


def digest(path: Path) -> str:
    """One word for all items of a committed checkpoint."""
    total = hashlib.sha256()
    for key, content in sorted(blobs(path).items()):
        total.update(repr(key).encode() + content)
    return total.hexdigest()


def kill_and_wait(pid: int) -> None:
    """SIGKILL a child and return when it is gone, leaving its exit status to its owner."""
    process = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([process], [], [], 60)[0]
    finally:
        os.close(process)


class Attempt:
    """One split save with a finalize function that leaves a trace."""

    def __init__(
        self,
        queue: AsyncCallsQueue,
        path: Path,
        state: State,
        *,
        planner: SavePlanner | None = None,
        cache: CheckpointMetadataCache | None = None,
        **options: Any,
    ) -> None:
        self.finalized = False
        writer = FileSystemWriterAsync(path, **options)
        planned = save_state_dict_async_plan(
            state,
            writer,
            planner=planner,
            enable_cache=cache is not None,
            metadata_cache=cache,
        )
        save_fn, preload_fn, args = writer.get_save_function_and_args()
        finalize = [lambda: save_state_dict_async_finalize(*planned), self._note]
        queue.schedule_async_request(AsyncRequest(save_fn, args, finalize, {}, preload_fn))

    def _note(self) -> None:
        self.finalized = True


# --- two ranks ------------------------------------------------------------------------------------


def rank_state(seed: int) -> State:
    """Something of each rank's own and something that all have."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return {
        **small_state(seed),
        f"of rank {rank}": torch.randn(50, 40, generator=generator),
        f"object of rank {rank}": {"seed": seed},
    }


def loads_as(path: Path, expected: State) -> bool:
    """Whether stock ``dcp.load`` finds exactly this in a checkpoint. Collective."""
    state = rank_state(seed=-1)
    dcp.load(state, checkpoint_id=path)
    return same(state, expected)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


class Scene:
    """A directory for one failing save, and the saves before and after it. Collective."""

    def __init__(self, out: Path, name: str, *, overwritten: bool) -> None:
        self.path = out / name
        self.queue = AsyncCallsQueue()
        self._overwritten = overwritten
        self.report: dict[str, Any] = {}
        if overwritten:
            schedule(self.queue, self.path, rank_state(seed=1))
            self.queue.wait()
        dist.barrier()

    def look(self) -> None:
        """Report the content of the directory after the failure."""
        dist.barrier()
        if self._overwritten:
            self.report["previous loads"] = loads_as(self.path, rank_state(seed=1))
        else:
            self.report["committed"] = (self.path / ".metadata").exists()
        self.report["files"] = sorted(os.listdir(self.path))
        dist.barrier()

    def save_again(self) -> None:
        """The next save of the same structure to the same place."""
        schedule(self.queue, self.path, rank_state(seed=3))
        self.queue.close()
        dist.barrier()
        self.report["next loads"] = loads_as(self.path, rank_state(seed=3))


@contextlib.contextmanager
def on_rank(rank: int, *faults: Fault) -> Iterator[None]:
    """Faults on one rank only."""
    with inject(*faults) if dist.get_rank() == rank else contextlib.nullcontext():
        yield


def failing_scene(
    out: Path, name: str, fault: Fault, *, victim: int, overwritten: bool, polling: bool
) -> dict[str, Any]:
    """A save during which something happens to the writer of one rank."""
    scene = Scene(out, name, overwritten=overwritten)
    with on_rank(victim, fault):
        attempt = Attempt(scene.queue, scene.path, rank_state(seed=2))
    scene.report = outcome_of((lambda: poll(scene.queue)) if polling else scene.queue.wait)
    scene.look()
    scene.save_again()
    return {**scene.report, "finalized": attempt.finalized}


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


def writer_faults(out: Path) -> dict[str, Any]:
    """Every fault, on one rank over nothing and on the other over a checkpoint. Collective.

    ``matrix.py`` has all combinations; what is looked at more closely here is what the user is
    told.
    """
    results = {}
    for number, (name, fault) in enumerate(ALL_FAULTS.items()):
        for overwritten in (False, True):
            title = f"{name} over another" if overwritten else name
            victim = (number + overwritten) % 2
            report = failing_scene(
                out,
                title,
                fault,
                victim=victim,
                overwritten=overwritten,
                polling=bool(number // 2 % 2),
            )
            results[title] = {**report, "victim": victim}
    return results


class Troubled(DefaultSavePlanner):
    """Fails on rank 1, before the ranks plan together or when it is asked for data afterwards.

    Where it fails is kept in a list, so that a plan cache takes a planner that fails for one that
    does not.
    """

    def __init__(self, *where: str) -> None:
        super().__init__()
        self.where = list(where)

    def create_local_plan(self) -> SavePlan:
        if "plan" in self.where and dist.get_rank() == 1:
            raise LookupError("no plan today")
        return super().create_local_plan()

    def resolve_data(self, write_item: WriteItem) -> Any:
        if "data" in self.where and write_item.index.fqn == "of rank 1":
            raise LookupError("no data today")
        return super().resolve_data(write_item)


def planner_scene(out: Path, name: str, where: str, *, saves_before: int) -> dict[str, Any]:
    """A planner that fails first of all, or when plans are cached and ranks no longer talk."""
    scene = Scene(out, name, overwritten=False)
    cache = CheckpointMetadataCache()
    for number in range(saves_before):
        path = out / f"{name}, save {number}"
        schedule(scene.queue, path, rank_state(seed=number), planner=Troubled(), cache=cache)
        scene.queue.wait()
    attempts: list[Attempt] = []

    def save() -> None:
        attempts.append(
            Attempt(
                scene.queue, scene.path, rank_state(seed=2), planner=Troubled(where), cache=cache
            )
        )
        scene.queue.wait()

    silent = cache.get_metadata_caching_status()[0]
    scene.report = outcome_of(save)
    scene.path.mkdir(exist_ok=True)
    scene.look()
    scene.save_again()
    finalized = any(attempt.finalized for attempt in attempts)
    return {**scene.report, "finalized": finalized, "silent": silent}


def commit_scene(out: Path, name: str, *, overwritten: bool) -> dict[str, Any]:
    """A save whose metadata the coordinator's storage refuses."""
    scene = Scene(out, name, overwritten=overwritten)
    refused = [Fault.errno("commit", errno.EISDIR)] if dist.get_rank() == 0 else []
    with inject(*refused):
        attempt = Attempt(scene.queue, scene.path, rank_state(seed=2))
        scene.report = outcome_of(scene.queue.wait)
    scene.look()
    scene.save_again()
    return {**scene.report, "finalized": attempt.finalized}


def stopped_scene(out: Path, name: str) -> dict[str, Any]:
    """A writer of rank 1 that is stopped for good; no rank waits longer than two seconds for it."""
    nostall.configure(EngineOptions(save_timeout_s=2))
    try:
        fault = Fault.kill("chunk", signal.SIGSTOP)
        return failing_scene(out, name, fault, victim=1, overwritten=False, polling=False)
    finally:
        reset()
        nostall.configure(AT_ONCE)


def save_now(path: Path, seed: int) -> None:
    """One save with ``dcp.save``."""
    dcp.save(rank_state(seed), storage_writer=FileSystemWriterAsync(path))


def save_async(path: Path, seed: int) -> None:
    """One save with ``dcp.async_save``."""
    future = dcp.async_save(rank_state(seed), storage_writer=FileSystemWriterAsync(path))
    future.result(60)  # type: ignore[union-attr]  # not an upload response


def dcp_scenes(out: Path) -> dict[str, Any]:
    """``dcp.save`` with a full device and ``dcp.async_save`` with a killed writer, on rank 1."""
    results = {}
    for name, way, fault in (
        ("save", save_now, Fault.errno("chunk", errno.ENOSPC)),
        ("async_save", save_async, Fault.kill("chunk", signal.SIGKILL)),
    ):
        path = out / name
        way(path, 1)
        dist.barrier()
        with on_rank(1, fault):
            report = outcome_of(lambda way=way, path=path: way(path, 2))  # type: ignore[misc]  # mypy has no type for defaults
        dist.barrier()
        report["previous loads"] = loads_as(path, rank_state(seed=1))
        way(path, 3)
        dist.barrier()
        report["next loads"] = loads_as(path, rank_state(seed=3))
        results[name] = report
    return results


class Late(FileSystemWriterAsync):
    """Its save begins when ``begin`` is called, as if the thread that saves were late."""

    begin: Callable[[], None]

    def stage(self, state_dict: State) -> Any:
        staged: Future[Any] = Future()
        copied = super().stage(state_dict)
        self.begin = lambda: staged.set_result(getattr(copied, "result", lambda: copied)())
        return staged


def saves_begun_without_their_group(out: Path) -> dict[str, Any]:
    """``dcp.async_save``, then ``destroy_process_group()``, before the thread that saves runs."""
    reports: dict[str, Any] = {}
    rank = dist.get_rank()
    save_now(out / "blocking", 1)

    def begin_late(
        title: str,
        staging: StagingMode = "blocking",
        *,
        members: list[int] | None = None,
        no_dist: bool = False,
    ) -> None:
        group: Any = members and dist.new_group(members, use_local_synchronization=True)
        writer = Late(out / title, staging=staging)
        saving: Any = dcp.async_save(
            rank_state(2), storage_writer=writer, process_group=group, no_dist=no_dist
        )
        dist.barrier()
        dist.destroy_process_group()
        writer.begin()
        report = outcome_of(lambda: saving.upload_completion.result(60))
        report["committed"] = nostall.is_complete(out / title)
        reports[title] = report
        store = dist.FileStore(str(out / f"store {len(reports)}"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

    begin_late("blocking")
    begin_late("overlapped", staging="overlapped")
    begin_late("a group", members=[0, 1])
    begin_late(f"alone {rank}", no_dist=True)
    begin_late(f"in a group of one {rank}", members=[rank])
    reports["previous loads"] = loads_as(out / "blocking", rank_state(1))
    return reports


class OnlyTensors(DefaultSavePlanner):
    """Saves what is a tensor and leaves out the rest."""

    def set_up_planner(
        self,
        state_dict: State,
        storage_meta: Any = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # DCP's
    ) -> None:
        tensors = {
            name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)
        }
        super().set_up_planner(tensors, storage_meta, is_coordinator)


@contextlib.contextmanager
def no_memory_on_rank(rank: int) -> Iterator[None]:
    """One rank can reserve no memory for a snapshot."""
    if dist.get_rank() != rank:
        yield
        return
    reset()
    nostall.configure(AT_ONCE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def memory_scene(
    out: Path, name: str, *, staging: StagingMode, planner: Callable[[], SavePlanner]
) -> dict[str, Any]:
    """``dcp.async_save`` over a checkpoint, for which rank 1 has no memory."""
    path = out / name

    def save(seed: int) -> None:
        writer = FileSystemWriterAsync(path, staging=staging)
        # With an id of its own, DCP resets the writer between staging and writing.
        saving: Any = dcp.async_save(
            rank_state(seed), checkpoint_id=path, storage_writer=writer, planner=planner()
        )
        getattr(saving, "upload_completion", saving).result(60)

    def loads(seed: int) -> bool:
        state, expected = rank_state(seed=-1), rank_state(seed)
        names = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
        state = {name: state[name] for name in names}
        dcp.load(state, checkpoint_id=path)
        return same(state, {name: expected[name] for name in names})

    save(1)
    dist.barrier()
    with no_memory_on_rank(1):
        report = outcome_of(lambda: save(2))
    dist.barrier()
    report["previous loads"] = loads(1)
    save(3)
    dist.barrier()
    report["next loads"] = loads(3)
    return report


def memory_scenes(out: Path) -> dict[str, Any]:
    """Memory that one rank lacks, with either staging, and with a planner that overlooks that."""
    return {
        f"no memory, {staging}, {planner.__name__}": memory_scene(
            out, f"no memory {staging} {planner.__name__}", staging=staging, planner=planner
        )
        for staging in ("blocking", "overlapped")
        for planner in (DefaultSavePlanner, OnlyTensors)
    }


def save_split(path: Path, seed: int) -> None:
    """One save with the split functions."""
    with AsyncCallsQueue() as queue:
        Attempt(queue, path, rank_state(seed))


def directory_scene(out: Path, name: str, way: Callable[[Path, int], None]) -> dict[str, Any]:
    """A save to another directory on each rank, and one to the same directory under two names."""
    rank = dist.get_rank()
    mine, same_one = out / f"{name} {rank}", out / f"{name} same"
    report = outcome_of(lambda: way(mine, 1))
    dist.barrier()
    report["committed"] = any((out / f"{name} {each}" / ".metadata").exists() for each in (0, 1))
    if rank == 1:
        same_one.symlink_to(out / f"{name} 0")
    dist.barrier()
    way(same_one if rank == 1 else mine, 2)
    dist.barrier()
    report["next loads"] = loads_as(mine if rank == 0 else same_one, rank_state(seed=2))
    return report


def other_faults(out: Path) -> dict[str, Any]:
    """Everything that is not a writer's own failure. Collective."""
    return {
        **dcp_scenes(out),
        **memory_scenes(out),
        **{
            f"directories, {way.__name__}": directory_scene(out, way.__name__, way)
            for way in (save_now, save_async, save_split)
        },
        "commit": commit_scene(out, "commit", overwritten=False),
        "commit over another": commit_scene(out, "commit over another", overwritten=True),
        "no plan": planner_scene(out, "no plan", "plan", saves_before=0),
        "no plan, cached": planner_scene(out, "no plan, cached", "plan", saves_before=3),
        "no data": planner_scene(out, "no data", "data", saves_before=0),
        "no data, cached": planner_scene(out, "no data, cached", "data", saves_before=3),
        "stopped": stopped_scene(out, "stopped"),
    }


def everything(out: Path) -> dict[str, Any]:
    """All of it in one start of the ranks. Collective."""
    nostall.configure(AT_ONCE)
    return {"writer": writer_faults(out / "writer"), "other": other_faults(out / "other")}


# --- trainers, one process each, that tell a test on standard output how far they are -------------


def say(**message: Any) -> None:
    """One line of JSON to the test."""
    print(json.dumps(message), flush=True)


def listen() -> None:
    """Wait for a line from the test."""
    sys.stdin.readline()


def stands_in_the_middle_of_a_save(out: Path, fork: str = "") -> None:
    """Hold a save open, with forked children if asked, and wait to be killed."""
    hold = Hold("chunk")
    with inject(hold.fault):
        schedule(AsyncCallsQueue(), out / "checkpoint", small_state(1))
    hold.wait_reached()
    children = []
    if fork:
        # os.fork() runs nostall's hook, which closes descriptors in the child; a fork from C code
        # does not.
        for make in (os.fork, ctypes.CDLL(None).fork):
            child = make()
            if child == 0:
                while True:
                    signal.pause()
            children.append(child)
    say(pid=os.getpid(), writer=writer_pids()[0], children=children)
    listen()


def is_interrupted(out: Path) -> None:
    """Get the SIGINT of a whole process group while a save is held, and finish it all the same."""
    hold = Hold("chunk")
    queue = AsyncCallsQueue()
    with inject(hold.fault):
        schedule(queue, out / "checkpoint", small_state(1))
    hold.wait_reached()
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
    """Fork while a save is held; the children look around and leave in every way.

    At once, through ``sys.exit`` and with it through the queue's ``with`` block, and after closing
    the queue.
    """

    def close_and_exit(code: int) -> None:
        queue.close()
        os._exit(code)

    hold = Hold("chunk")
    with AsyncCallsQueue() as queue:
        with inject(hold.fault):
            schedule(queue, out / "held", small_state(1))
        hold.wait_reached()
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
    dcp.save(small_state(1), storage_writer=FileSystemWriter(out / "stock held"))
    dcp.save(small_state(2), storage_writer=FileSystemWriter(out / "stock next"))
    say(codes=codes, same_writer=writer_pids() == before)


def has_a_file_size_limit(out: Path) -> None:
    """Save 3 MB with a file limit of 1 MB: on the writer, on the trainer, before reserving."""
    state = {"weight": torch.arange(3 << 18, dtype=torch.float32)}
    limit = (1 << 20, resource.RLIM_INFINITY)
    none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    nostall.warmup(4 << 20)
    writer = writer_pids()[0]
    with AsyncCallsQueue() as queue:
        resource.prlimit(writer, resource.RLIMIT_FSIZE, limit)
        schedule(queue, out / "in the writer", state)
        in_the_writer = outcome_of(queue.wait)
        resource.prlimit(writer, resource.RLIMIT_FSIZE, none)
        schedule(queue, out / "without", state)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    in_the_trainer = outcome_of(lambda: _save(out / "in the trainer", state))
    reset()
    before_memory = outcome_of(lambda: _save(out / "before memory", state))
    resource.setrlimit(resource.RLIMIT_FSIZE, none)
    say(
        in_the_writer=in_the_writer,
        in_the_trainer=in_the_trainer,
        before_memory=before_memory,
        after=digest(out / "without") != "",
    )


def _save(path: Path, state: State) -> None:
    dcp.save(state, storage_writer=FileSystemWriterAsync(path))
