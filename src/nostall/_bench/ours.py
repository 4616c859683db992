"""nostall's own ways of saving."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

import nostall
from nostall import _torch
from nostall._bench.contender import (
    Contender,
    Durable,
    Pending,
    PendingFuture,
    Setting,
    why_not_importable,
)
from nostall._bench.workloads import State
from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.errors import OptionError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)


def load_with_dcp(path: Path, into: State, *, no_dist: bool) -> State:
    """Load in place with stock ``dcp.load``."""
    dcp.load(into, checkpoint_id=path, no_dist=no_dist)
    return into


@dataclass(slots=True)
class _Scheduled:
    """A request in a queue; the poll that finds it written commits it."""

    queue: AsyncCallsQueue
    writer: Any
    overlapped: bool

    def poll(self) -> bool:
        self.queue.poll()
        return self.queue.pending == 0

    def wait_staged(self) -> None:
        if self.overlapped:
            self.writer.wait_staged()


class SplitSave:
    """Plan, schedule, finalise: what frameworks do, with the plan cache on."""

    warmups = 3

    def __init__(
        self, name: str, description: str, staging: str | None = None, *, warmed_up: bool = True
    ) -> None:
        self.name = name
        self.description = description
        self._staging = staging
        self._warmed_up = warmed_up
        self._queue: AsyncCallsQueue | None = None
        self._cache: CheckpointMetadataCache | None = None

    def available(self) -> str | None:
        try:
            self._writer(Path("unused"))
        except (TypeError, OptionError) as error:
            return f"this version refuses staging={self._staging!r}: {error}"
        return None

    def open(self, setting: Setting) -> None:
        if self._warmed_up:
            nostall.warmup(setting.nbytes)
        self._queue = AsyncCallsQueue()
        self._cache = CheckpointMetadataCache()

    def save(self, state: State, path: Path) -> Pending:
        assert self._queue is not None
        writer = self._writer(path)
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
        return _Scheduled(self._queue, writer, overlapped=self._staging is not None)

    def load(self, path: Path, into: State) -> State:
        return load_with_dcp(path, into, no_dist=not dcp.state_dict_saver.dist.is_initialized())

    def close(self) -> None:
        queue, self._queue, self._cache = self._queue, None, None
        if queue is not None:
            queue.close(abort=queue.pending > 0)

    def _writer(self, path: Path) -> FileSystemWriterAsync:
        options: dict[str, Any] = {} if self._staging is None else {"staging": self._staging}
        return FileSystemWriterAsync(path, **options)


class CompressedSave(SplitSave):
    """The same through stock's compression, of four files at a time."""

    def __init__(self) -> None:
        super().__init__("nostall zstd", "the same as nostall, 4 files through stock's ZStandard")

    def available(self) -> str | None:
        return why_not_importable("zstandard") or super().available()

    def _writer(self, path: Path) -> FileSystemWriterAsync:
        return FileSystemWriterAsync(path, thread_count=4, _extensions=[_torch.compression()])


class OwnAsyncSave:
    """``dcp.async_save`` with nostall's writer, which is its own stager."""

    name = "nostall dcp.async_save"
    description = "dcp.async_save with FileSystemWriterAsync as writer and stager"
    warmups = 3

    def __init__(self, *, warmed_up: bool = True, plans_once: bool = False) -> None:
        self._warmed_up = warmed_up
        self._planner_type = nostall.SavePlanner if plans_once else DefaultSavePlanner
        self._no_dist = True
        if plans_once:
            self.name += " planned once"
            self.description += ", with SavePlanner"

    def available(self) -> str | None:
        return None

    def open(self, setting: Setting) -> None:
        self._no_dist = not setting.ranks.distributed
        if self._warmed_up:
            nostall.warmup(setting.nbytes)

    def save(self, state: State, path: Path) -> Pending:
        saved = dcp.async_save(
            state,
            storage_writer=FileSystemWriterAsync(path),
            planner=self._planner_type(),
            no_dist=self._no_dist,
        )
        assert isinstance(saved, Future)
        return PendingFuture(saved)

    def load(self, path: Path, into: State) -> State:
        return load_with_dcp(path, into, no_dist=self._no_dist)

    def close(self) -> None:
        return None


class OwnSyncSave(OwnAsyncSave):
    """``dcp.save`` with nostall's writer."""

    name = "nostall dcp.save"
    description = "dcp.save with FileSystemWriterAsync; blocks until durable"

    def open(self, setting: Setting) -> None:
        self._no_dist = not setting.ranks.distributed

    def save(self, state: State, path: Path) -> Pending:
        dcp.save(
            state,
            storage_writer=FileSystemWriterAsync(path),
            planner=self._planner_type(),
            no_dist=self._no_dist,
        )
        return Durable()


def own_contenders(shape: str = "large") -> list[Contender]:
    """All of nostall's for a shape, the main one first."""
    known: list[Contender] = []
    if shape == "many":
        known = [OwnAsyncSave(plans_once=True), OwnSyncSave(plans_once=True)]
    return [
        SplitSave("nostall", "split plan/schedule/finalise with AsyncCallsQueue and plan cache"),
        SplitSave(
            "nostall overlapped",
            "the same with staging='overlapped': the copy runs behind the call",
            staging="overlapped",
        ),
        CompressedSave(),
        OwnAsyncSave(),
        OwnSyncSave(),
        *known,
    ]
