"""Other people's libraries, where they are installed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from nostall._bench.contender import (
    Contender,
    Pending,
    Setting,
    SyncedAfterwards,
    why_not_importable,
)
from nostall._bench.ours import load_with_dcp
from nostall._bench.workloads import State


class TorchSnapshot:
    """``torchsnapshot.Snapshot.async_take``; it does not fsync, so the benchmark does."""

    name = "torchsnapshot"
    description = "Snapshot.async_take, then fsync of its files"
    warmups = 1

    def __init__(self) -> None:
        self._waiter: ThreadPoolExecutor | None = None

    def available(self) -> str | None:
        return why_not_importable("torchsnapshot")

    def open(self, setting: Setting) -> None:
        self._waiter = ThreadPoolExecutor(1, "bench-torchsnapshot")

    def save(self, state: State, path: Path) -> Pending:
        assert self._waiter is not None
        library = import_module("torchsnapshot")
        pending = library.Snapshot.async_take(str(path), {"state": library.StateDict(**state)})
        return SyncedAfterwards(self._waiter.submit(pending.wait), path)

    def load(self, path: Path, into: State) -> State:
        library = import_module("torchsnapshot")
        target = library.StateDict(**into)
        library.Snapshot(str(path)).restore({"state": target})
        return dict(target)

    def close(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.shutdown()


class TorchCheckpointing:
    """``torch_checkpointing.CheckpointManager`` with its shared-memory stager, fsynced here."""

    name = "torch_checkpointing"
    description = "CheckpointManager.save, shared-memory staging, then fsync of its files"
    warmups = 3

    def __init__(self) -> None:
        self._manager: Any = None

    def available(self) -> str | None:
        return why_not_importable("torch_checkpointing")

    def open(self, setting: Setting) -> None:
        config = import_module("torch_checkpointing.config")
        staging = import_module("torch_checkpointing.staging").CheckpointStagerConfig(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        # Its O_DIRECT writer fails on ext4, where the length of a file is not a multiple of the
        # block size.
        storage = import_module("torch_checkpointing.storage.filesystem")
        manager = import_module("torch_checkpointing.checkpoint_manager").CheckpointManager
        self._manager = manager(
            manager.Config(
                save=config.AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save(self, state: State, path: Path) -> Pending:
        future: Future[Any] = self._manager.save(str(path), {"state": state})
        return SyncedAfterwards(future, path)

    def load(self, path: Path, into: State) -> State:
        loaded: State = self._manager.load(str(path), into={"state": into})["state"]
        return loaded

    def close(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()


class Nvrx:
    """NVIDIA Resiliency Extension's asynchronous saves, driven as its documentation does."""

    name = "nvrx"
    description = "nvidia_resiliency_ext FileSystemWriterAsync with its persistent worker"
    warmups = 3
    _ROOT = "nvidia_resiliency_ext.checkpointing.async_ckpt"

    def __init__(self) -> None:
        self._queue: Any = None
        self._no_dist = True

    def available(self) -> str | None:
        reason = why_not_importable(f"{self._ROOT}.core", f"{self._ROOT}.filesystem_async")
        if reason is None and not torch.cuda.is_available():
            return "it synchronises with CUDA in every save, and there is no CUDA device here"
        return reason

    def open(self, setting: Setting) -> None:
        self._no_dist = not setting.ranks.distributed
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
        return _NvrxPending(self._queue)

    def load(self, path: Path, into: State) -> State:
        return load_with_dcp(path, into, no_dist=self._no_dist)

    def close(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.close()


class _NvrxPending:
    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def poll(self) -> bool:
        self._queue.maybe_finalize_async_calls(blocking=False)
        return bool(self._queue.get_num_unfinalized_calls() == 0)

    def wait_staged(self) -> None:
        return None


def peer_contenders() -> list[Contender]:
    """Everything that might be installed."""
    return [TorchSnapshot(), TorchCheckpointing(), Nvrx()]
