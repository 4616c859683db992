"""The public names as users call them: checked by type checkers in the types session, never run.

An ignored error is one that must be found: a comment that ignores nothing is an error itself.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from typing_extensions import assert_type

import nostall
from nostall.manager import Restored
from nostall.state_dict_saver import CheckpointMetadataCache

STATE = {"weight": torch.zeros(1)}


def saves(path: Path) -> None:
    dcp.save(STATE, storage_writer=nostall.FileSystemWriterAsync(path, thread_count=2))
    future = dcp.async_save(STATE, storage_writer=nostall.FileSystemWriterAsync(path))
    assert isinstance(future, Future)
    writer = nostall.FileSystemWriterAsync(path, staging="overlapped")
    response = dcp.async_save(STATE, storage_writer=writer, async_stager=writer)
    assert isinstance(response, AsyncSaveResponse)
    assert_type(writer.wait_staged(timeout=1.0), None)
    assert_type(writer.stats, nostall.SaveStats | None)


def every_option(path: Path, mode: nostall.options.StagingMode) -> None:
    nostall.FileSystemWriterAsync(path, True, False, 2, 10_000_000, False, True, None)
    nostall.FileSystemWriterAsync(
        str(path),
        single_file_per_rank=False,
        sync_files=False,
        thread_count=2,
        per_thread_copy_ahead=0,
        cache_staged_state_dict=False,
        overwrite=False,
        _extensions=[],
        serialization_format=SerializationFormat.TORCH_SAVE,
        staging=mode,
        separation_hint="optimizer",
        use_msc=False,
        is_multiproc_io=True,
        use_cached_data_structure=True,
        use_cpu_shm_for_gpu_tensors=True,
        open_file=open,
    )


class Subclass(nostall.FileSystemWriterAsync):
    def __init__(self, path: Path, *args: Any, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)


# Each `type: ignore` is a mistake that type checkers have to see; one that they miss is an error.
def mistakes(path: Path) -> None:
    nostall.FileSystemWriterAsync(path, thread_cuont=2)  # type: ignore[call-arg]
    nostall.FileSystemWriterAsync(path, staging="overlaped")  # type: ignore[arg-type]
    nostall.FileSystemReader(path, verify="crc32")  # type: ignore[arg-type]
    nostall.FileSystemWriterAsync(path, thread_count="2")  # type: ignore[arg-type]
    nostall.FileSystemWriterAsync(path, open_file="open")  # type: ignore[arg-type]
    nostall.FileSystemWriterAsync()  # type: ignore[call-arg]
    nostall.FileSystemWriterAsync(path).stage()  # type: ignore[call-arg]
    nostall.EngineOptions(io_threds=4)  # type: ignore[call-arg]
    nostall.EngineOptions(io_threads="4")  # type: ignore[arg-type]
    nostall.configure({"io_threads": 4})  # type: ignore[arg-type]
    nostall.configure(io_threads=4)  # type: ignore[call-arg]
    nostall.AsyncCallsQueue(on_error="wran")  # type: ignore[arg-type]
    nostall.verfiy(path)  # type: ignore[attr-defined]
    nostall.TorchAsyncCheckpoint().async_save(STATE)  # type: ignore[call-arg]
    nostall.TorchAsyncCheckpoint().async_save(STATE, path, protocol=2)  # type: ignore[call-arg]


def split(path: Path) -> None:
    writer = nostall.FileSystemWriterAsync(path)
    cache = CheckpointMetadataCache()
    planned = nostall.save_state_dict_async_plan(
        STATE, writer, enable_cache=True, metadata_cache=cache
    )
    save_fn, preload_fn, arguments = writer.get_save_function_and_args()
    finalize = [lambda: nostall.save_state_dict_async_finalize(*planned)]
    with nostall.AsyncCallsQueue() as queue:
        request = nostall.AsyncRequest(save_fn, arguments, finalize, preload_fn=preload_fn)
        assert_type(queue.schedule_async_request(request), int)
        assert_type(queue.maybe_finalize_async_calls(blocking=False), list[int])
        assert_type(queue.pending, int)


def whole_files(path: Path) -> None:
    checkpoint = nostall.TorchAsyncCheckpoint()
    checkpoint.async_save(STATE, path)
    checkpoint.finalize_async_save(blocking=True)
    checkpoint.close()


def looking(path: Path) -> None:
    assert_type(nostall.is_complete(path), bool)
    assert_type(nostall.latest_complete(path), str | None)
    found = nostall.verify(path)
    assert_type(found, nostall.integrity.Verification)
    if not found.ok:
        nostall.remove_checkpoint(path)
    reader = nostall.CachedMetadataFileSystemReader(path, cache_metadata=False)
    assert_type(reader, nostall.CachedMetadataFileSystemReader)
    dcp.load(STATE, storage_reader=nostall.FileSystemReader(path, verify="crc", threads=2))
    assert_type(nostall.load(STATE, path, keys=["model"], strict=False), nostall.LoadStats)
    assert_type(nostall.load(STATE, path, blocking=False), nostall.loading.Loading)
    nostall.FileSystemReader(path, process_group=dist.group.WORLD)
    nostall.FileSystemReader(path, process_group="gloo")  # type: ignore[arg-type]


def managing(root: Path) -> None:
    keep = [nostall.KeepLatest(2), nostall.KeepBest(1, "loss"), nostall.KeepEvery(steps=100)]
    with nostall.CheckpointManager(root, keep=keep, save_every=10) as manager:
        restored = manager.restore(STATE)
        assert_type(restored, Restored | None)
        assert_type(manager.should_save(10), bool)
        handle = manager.save(10, STATE, metrics={"loss": 0.5}, extra={"note": 1})
        assert_type(handle.done, bool)
        assert_type(handle.result(timeout=60.0), str)
        assert_type(handle.stats, nostall.SaveStats | None)
        assert_type(manager.all_steps(), list[int])
        assert_type(manager.best_step("loss"), int | None)
        manager.wait()


def engine() -> None:
    nostall.configure(nostall.EngineOptions(io_threads=4, save_timeout_s=60.0))
    nostall.warmup(1 << 30)
    for each in nostall.status():
        assert_type(each.path, str)
    nostall.drain_on_sigterm(grace_s=30.0)
    nostall.abort_all()


def failures(path: Path) -> None:
    try:
        dcp.save(STATE, storage_writer=nostall.FileSystemWriterAsync(path))
    except nostall.errors.WriteError as error:
        assert_type(error.rank, int | None)
        assert_type(error.path, str | None)
        assert_type(error.phase, str | None)
        assert_type(error.hint, str | None)
