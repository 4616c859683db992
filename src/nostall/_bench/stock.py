"""What comes with torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from nostall import _torch
from nostall._bench.contender import (
    Contender,
    Durable,
    Pending,
    PendingFuture,
    Setting,
    sync,
)
from nostall._bench.workloads import State


class TorchSave:
    """``torch.save`` of each rank's state dict to one file, fsynced."""

    name = "torch.save"
    description = "torch.save to one file per rank, then fsync of file and directory; blocks"
    warmups = 1

    def __init__(self) -> None:
        self._file = "rank0.pt"

    def available(self) -> str | None:
        return None

    def open(self, setting: Setting) -> None:
        self._file = f"rank{setting.ranks.rank}.pt"

    def save(self, state: State, path: Path) -> Pending:
        path.mkdir(parents=True, exist_ok=True)
        with (path / self._file).open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        sync(path)
        return Durable()

    def load(self, path: Path, into: State) -> State:
        loaded: State = torch.load(path / self._file, weights_only=True)
        return loaded

    def close(self) -> None:
        return None


class DcpSave:
    """``dcp.save`` with stock's writer, which fsyncs by default."""

    name = "dcp.save"
    description = "stock dcp.save; blocks"
    warmups = 1

    def __init__(self) -> None:
        self.no_dist = True

    def available(self) -> str | None:
        return None

    def open(self, setting: Setting) -> None:
        self.no_dist = not setting.ranks.distributed

    def save(self, state: State, path: Path) -> Pending:
        dcp.save(state, storage_writer=FileSystemWriter(path), no_dist=self.no_dist)
        return Durable()

    def load(self, path: Path, into: State) -> State:
        dcp.load(into, checkpoint_id=path, no_dist=self.no_dist)
        return into

    def close(self) -> None:
        return None


class DcpAsyncSave(DcpSave):
    """``dcp.async_save`` in its background thread; a given stager is kept, and caches."""

    def __init__(
        self,
        name: str,
        description: str,
        *,
        files: int = 1,
        staging: StagingOptions | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.description = description
        self.warmups = 1 if staging is None else 3
        self._files = files
        self._staging = staging
        self._stager: DefaultStager | None = None

    def open(self, setting: Setting) -> None:
        super().open(setting)
        if self._staging is not None:
            self._stager = DefaultStager(self._staging)

    def save(self, state: State, path: Path) -> Pending:
        return PendingFuture(self._start(state, path, AsyncCheckpointerType.THREAD))

    def close(self) -> None:
        stager, self._stager = self._stager, None
        if stager is not None:
            stager.close()

    def _start(self, state: State, path: Path, kind: AsyncCheckpointerType) -> Future[Any]:
        started = dcp.async_save(
            state,
            storage_writer=FileSystemWriter(path, thread_count=self._files),
            async_checkpointer_type=kind,
            async_stager=self._stager,
            no_dist=self.no_dist,
        )
        assert isinstance(started, Future)  # it is something else only with an asynchronous stager
        return started


class DcpProcessSave(DcpAsyncSave):
    """``dcp.async_save`` with the process checkpointer, which lives from the first save on."""

    def open(self, setting: Setting) -> None:
        super().open(setting)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # where stock asks for the host's name
        lonely = not setting.ranks.distributed
        if lonely:
            # The process is handed a rank and a world size even if it is told to save alone.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            small = {f"rank{setting.ranks.rank}": torch.zeros(1)}
            first = setting.scratch / "start"
            with _without_stderr():  # the process logs every step of every save there
                self._start(small, first, AsyncCheckpointerType.PROCESS).result()
        finally:
            if lonely:
                dist.destroy_process_group()

    def save(self, state: State, path: Path) -> Pending:
        return PendingFuture(self._start(state, path, AsyncCheckpointerType.PROCESS))

    def close(self) -> None:
        super().close()
        # Stock never ends this process before the interpreter does, and its memory would count for
        # whoever comes next.
        _torch.forget_checkpoint_process()


@contextmanager
def _without_stderr() -> Iterator[None]:
    """While inside, what this process and those it starts write to standard error is dropped."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def stock_contenders() -> list[Contender]:
    """torch's, from the plainest to the most elaborate."""

    def staging(*, shared: bool) -> StagingOptions:
        return StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=shared,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )

    return [
        TorchSave(),
        DcpSave(),
        DcpAsyncSave("dcp.async_save", "stock dcp.async_save, default thread"),
        DcpAsyncSave(
            "dcp.async_save 4 files", "the same, FileSystemWriter(thread_count=4)", files=4
        ),
        DcpProcessSave(
            "dcp.async_save process",
            "process checkpointer, DefaultStager with shared memory, kept",
            staging=staging(shared=True),
        ),
        DcpAsyncSave(
            "dcp.async_save stager",
            "thread, DefaultStager without shared memory, kept",
            staging=staging(shared=False),
        ),
        DcpAsyncSave(
            "dcp.async_save shm stager",
            "thread, DefaultStager with shared memory, kept",
            staging=staging(shared=True),
        ),
    ]
