"""The ways to save: nostall's, torch's, and NVRx's where it is installed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import nostall
from benchmarks.group import Group
from benchmarks.workloads import State
from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)


@dataclass(frozen=True, slots=True)
class Pending:
    """A save in progress; every rank polls it until it is durable."""

    poll: Callable[[], bool]
    """Whether the checkpoint is durable; finalises it when possible, raises if it failed."""
    wait_staged: Callable[[], object] = lambda: None
    """Returns once the state may be changed; at once if the save call has made sure of it."""

    @classmethod
    def of(cls, future: Future[Any]) -> Pending:
        """A save whose future is done when it is durable."""

        def poll() -> bool:
            if not future.done():
                return False
            future.result()
            return True

        return cls(poll)


class Contender:
    """A way of saving, from its first save to its last; stock's loader loads what it saves.

    ``open`` is called before any save, ``close`` at the end, also after a failure. ``save`` and
    ``load`` are collective.
    """

    warmups = 1
    """Saves before the timed ones: three for what caches, one for what does not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.no_dist = True

    def available(self) -> str | None:
        """Why it cannot take part here, or ``None`` if it can."""
        return None

    def open(self, group: Group, nbytes: int, scratch: Path) -> None:
        """Get ready; ``nbytes`` are those of this rank, ``scratch`` is an empty directory."""
        self.no_dist = group.is_alone

    def save(self, state: State, path: Path) -> Pending | None:
        """Start saving into a directory that does not exist; ``None`` if that is durable."""
        raise NotImplementedError

    def load(self, path: Path, into: State) -> State:
        """Load what was saved, with the loader that users of it would use."""
        dcp.load(into, checkpoint_id=path, no_dist=self.no_dist)
        return into

    def close(self) -> None:
        """Let go of everything."""


class SplitSave(Contender):
    """Plan, schedule, finalise: what frameworks do, with the plan cache on."""

    warmups = 3

    _queue: AsyncCallsQueue | None = None
    _cache: CheckpointMetadataCache | None = None

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name)
        self._options = options

    def open(self, group: Group, nbytes: int, scratch: Path) -> None:
        super().open(group, nbytes, scratch)
        nostall.warmup(nbytes)
        self._queue, self._cache = AsyncCallsQueue(), CheckpointMetadataCache()

    def save(self, state: State, path: Path) -> Pending:
        assert self._queue is not None
        writer = FileSystemWriterAsync(path, **self._options)
        planned = save_state_dict_async_plan(
            state,
            writer,
            planner=DefaultSavePlanner(),
            enable_cache=True,
            metadata_cache=self._cache,
        )
        save_fn, preload_fn, args = writer.get_save_function_and_args()
        commit = partial(save_state_dict_async_finalize, *planned)
        self._queue.schedule_async_request(AsyncRequest(save_fn, args, [commit], {}, preload_fn))
        overlapped = self._options.get("staging") == "overlapped"
        return Pending(self._poll, writer.wait_staged) if overlapped else Pending(self._poll)

    def _poll(self) -> bool:
        assert self._queue is not None
        self._queue.poll()
        return self._queue.pending == 0

    def close(self) -> None:
        queue, self._queue, self._cache = self._queue, None, None
        if queue is not None:
            queue.close(abort=queue.pending > 0)


class DcpSave(Contender):
    """``dcp.save`` with a writer; stock's fsyncs by default, as nostall's does."""

    def __init__(
        self,
        name: str,
        writer: Callable[[Path], Any] = FileSystemWriter,
        planner: Callable[[], Any] = DefaultSavePlanner,
    ) -> None:
        super().__init__(name)
        self.writer = writer
        self.planner = planner
        self.warmups = 3 if writer is FileSystemWriterAsync else 1

    def save(self, state: State, path: Path) -> Pending | None:
        writer, planner = self.writer(path), self.planner()
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=self.no_dist)
        return None


class DcpAsyncSave(DcpSave):
    """``dcp.async_save`` in its background thread; a given stager is kept, and caches."""

    kind = AsyncCheckpointerType.THREAD
    stager: DefaultStager | None = None

    def __init__(self, *args: Any, staging: StagingOptions | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.staging = staging
        if staging is not None:
            self.warmups = 3

    def open(self, group: Group, nbytes: int, scratch: Path) -> None:
        super().open(group, nbytes, scratch)
        if self.writer is FileSystemWriterAsync:  # which is its own stager
            nostall.warmup(nbytes)
        if self.staging is not None:
            self.stager = DefaultStager(self.staging)

    def save(self, state: State, path: Path) -> Pending:
        future = dcp.async_save(
            state,
            storage_writer=self.writer(path),
            planner=self.planner(),
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
            no_dist=self.no_dist,
        )
        assert isinstance(future, Future)  # it is something else only with an asynchronous stager
        return Pending.of(future)

    def close(self) -> None:
        stager, self.stager = self.stager, None
        if stager is not None:
            stager.close()


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """For processes that are started inside, too."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class DcpProcessSave(DcpAsyncSave):
    """``dcp.async_save`` with the process checkpointer, which lives from the first save on."""

    kind = AsyncCheckpointerType.PROCESS

    def open(self, group: Group, nbytes: int, scratch: Path) -> None:
        super().open(group, nbytes, scratch)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # where stock asks for the host's name
        if group.is_alone:
            # The process is handed a rank and a world size even if it is told to save alone.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with quiet_stderr():  # the process logs every step of every save there
                pending = self.save({f"rank{group.rank}": torch.zeros(1)}, scratch / "start")
                while not pending.poll():
                    time.sleep(0.01)
        finally:
            if group.is_alone:
                dist.destroy_process_group()

    def close(self) -> None:
        super().close()
        # Stock never ends this process before the interpreter does, and its memory would count for
        # whoever comes next.
        module = import_module("torch.distributed.checkpoint._async_process_executor")
        vars(module)["_CHECKPOINT_PROCESS"] = None


def staging(*, shared: bool, pinned: bool = False) -> StagingOptions:
    """Options of stock's stager, which copies before the call returns."""
    return StagingOptions(
        use_pinned_memory=pinned,
        use_shared_memory=shared,
        use_async_staging=False,
        use_non_blocking_copy=pinned,
    )


class Nvrx(Contender):
    """NVIDIA Resiliency Extension's asynchronous saves, driven as its documentation does."""

    warmups = 3
    _ROOT = "nvidia_resiliency_ext.checkpointing.async_ckpt"
    _queue: Any = None

    def available(self) -> str | None:
        reason = why_not_importable(f"{self._ROOT}.core", f"{self._ROOT}.filesystem_async")
        if reason is None and not torch.cuda.is_available():
            return "it synchronises with CUDA in every save, and there is no CUDA device here"
        return reason

    def open(self, group: Group, nbytes: int, scratch: Path) -> None:
        super().open(group, nbytes, scratch)
        self._queue = import_module(f"{self._ROOT}.core").AsyncCallsQueue(persistent=True)

    def save(self, state: State, path: Path) -> Pending:
        saver = import_module(f"{self._ROOT}.state_dict_saver")
        request = import_module(f"{self._ROOT}.core").AsyncRequest
        writers = import_module(f"{self._ROOT}.filesystem_async")
        path.mkdir(parents=True, exist_ok=True)
        writer = writers.FileSystemWriterAsync(path, thread_count=2)
        planned = saver.save_state_dict_async_plan(
            state, writer, None, 0, planner=DefaultSavePlanner(), enable_cache=True
        )
        save_fn, preload_fn, args = writer.get_save_function_and_args()
        finalize = [lambda: saver.save_state_dict_async_finalize(*planned)]
        self._queue.schedule_async_request(request(save_fn, args, finalize, {}, preload_fn))
        return Pending(self._poll)

    def _poll(self) -> bool:
        self._queue.maybe_finalize_async_calls(blocking=False)
        return bool(self._queue.get_num_unfinalized_calls() == 0)

    def close(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.close()


def why_not_importable(*modules: str) -> str | None:
    """Why one of these modules cannot be imported, or ``None`` if all can."""
    for module in modules:
        try:
            import_module(module)
        except Exception as error:  # an old library fails in its own ways with a new torch
            return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None


def all_contenders(shape: str = "large") -> list[Contender]:
    """Everybody who saves a shape: nostall's ways, the main one first, torch's, and NVRx's."""
    ours, once = FileSystemWriterAsync, nostall.SavePlanner
    own: list[Contender] = [
        SplitSave("nostall"),
        SplitSave("nostall overlapped", staging="overlapped"),
        DcpAsyncSave("nostall dcp.async_save", ours),
        DcpSave("nostall dcp.save", ours),
    ]
    if shape == "many":
        own += [
            DcpAsyncSave("nostall dcp.async_save planned once", ours, once),
            DcpSave("nostall dcp.save planned once", ours, once),
        ]
    four_files = partial(FileSystemWriter, thread_count=4)
    shared, private = staging(shared=True), staging(shared=False)
    stock: list[Contender] = [
        DcpSave("dcp.save"),
        DcpAsyncSave("dcp.async_save"),
        DcpAsyncSave("dcp.async_save 4 files", four_files),
        DcpAsyncSave("dcp.async_save stager", staging=private),
        DcpAsyncSave("dcp.async_save shm stager", staging=shared),
        DcpProcessSave("dcp.async_save process", staging=shared),
    ]
    return [*own, *stock, Nvrx("nvrx")]
