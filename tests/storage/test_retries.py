"""Storage that fails for a while, and jobs that rather go on without a checkpoint."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.errors import OptionError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from support.faults import Fault, inject
from support.states import blobs, schedule, small_state


@pytest.fixture(autouse=True)
def options() -> Iterator[None]:
    """Whatever a test configures is undone."""
    yield
    nostall.configure(EngineOptions())


def split_save(path: Path, thread_count: int) -> None:
    with AsyncCallsQueue() as queue:
        schedule(queue, path, small_state(), thread_count=thread_count)


def async_save(path: Path, thread_count: int) -> None:
    writer = FileSystemWriterAsync(path, thread_count=thread_count)
    future = dcp.async_save(small_state(), storage_writer=writer, no_dist=True)
    assert isinstance(future, Future)
    future.result(60)


def sync_save(path: Path, thread_count: int) -> None:
    writer = FileSystemWriterAsync(path, thread_count=thread_count)
    dcp.save(small_state(), storage_writer=writer, no_dist=True)


Way = Callable[[Path, int], None]


def saved_file_by_file(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.distcp")}


@pytest.mark.parametrize("way", [split_save, async_save, sync_save])
@pytest.mark.parametrize("point", ["open", "chunk", "fsync"])
def test_a_failure_that_passes_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: Way, point: str
) -> None:
    """File by file, as often as is allowed; the checkpoint is right, and the log has the cause."""
    with (
        inject(Fault.errno(point, errno.EIO, file="__0_1.distcp", times=2)),
        caplog.at_level("WARNING", "nostall"),
    ):
        way(tmp_path / "tried again", 3)
    way(tmp_path / "without", 3)
    assert saved_file_by_file(tmp_path / "tried again") == saved_file_by_file(tmp_path / "without")
    (said,) = [record.getMessage() for record in caplog.records if "retries=" in record.msg]
    assert "__0_1.distcp" in said
    assert "retries=2" in said
    assert "Input/output error" in said


def test_a_failure_that_does_not_pass_is_raised_after_the_retries(tmp_path: Path) -> None:
    """And one that cannot pass, such as a full disk, at once."""
    nostall.configure(EngineOptions(write_retries=1))
    with (
        inject(Fault.errno("chunk", errno.ESTALE, times=2)),
        pytest.raises(CheckpointException, match="Stale file handle"),
    ):
        sync_save(tmp_path / "stale", 1)
    with (
        inject(Fault.errno("chunk", errno.ENOSPC, times=1)),
        pytest.raises(CheckpointException, match="No space left"),
    ):
        sync_save(tmp_path / "full", 1)
    with inject(Fault.errno("chunk", errno.ESTALE, times=1)):
        sync_save(tmp_path / "in the end", 1)
    assert list((tmp_path / "stale").iterdir()) == []
    assert nostall.verify(tmp_path / "in the end").ok


def test_a_save_through_a_ring_is_tried_again_from_its_first_chunk(tmp_path: Path) -> None:
    """A retry reuses nothing that the failed attempt passed from chunk to chunk."""
    state = {f"t{number}": torch.arange(3000.0) for number in range(20)}
    nostall.configure(EngineOptions(chunk_nbytes=4096, io_threads=3))
    with inject(Fault.errno("chunk", errno.EIO, after=17, times=1)):
        dcp.save(state, storage_writer=FileSystemWriterAsync(tmp_path / "again"), no_dist=True)
    assert nostall.verify(tmp_path / "again").ok
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert blobs(tmp_path / "again") == blobs(tmp_path / "stock")


def test_a_job_can_go_on_without_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With ``on_error="warn"`` a failed save is logged and counted; later saves are right."""
    done = []
    with AsyncCallsQueue(on_error="warn") as queue:
        with inject(Fault.errno("open", errno.ENOSPC)):
            schedule(queue, tmp_path / "0", small_state(0))
            assert queue.wait() == []
        for number in (1, 2, 3):
            schedule(queue, tmp_path / f"{number}", small_state(number))
            done += queue.wait()
    assert done == [1, 2, 3]
    assert queue.failures == 1
    assert "request 0 has failed" in caplog.text
    assert "No space left" in caplog.text
    assert nostall.latest_complete(tmp_path) == str(tmp_path / "3")
    assert not nostall.is_complete(tmp_path / "0")


def test_an_unknown_way_to_treat_errors_is_refused() -> None:
    """Where it is passed."""
    with pytest.raises(OptionError, match="on_error='ignore'"):
        AsyncCallsQueue(on_error="ignore")  # type: ignore[arg-type]  # on purpose


def test_a_finalize_function_that_fails_is_a_failure_like_any_other() -> None:
    """With ``on_error="warn"`` it is counted, and what is behind it is finalised."""
    finalized: list[str] = []

    def fail() -> None:
        raise LookupError("nobody to tell")

    with AsyncCallsQueue(on_error="warn") as queue:
        queue.schedule_async_request(AsyncRequest(None, [], [fail]))
        queue.schedule_async_request(AsyncRequest(None, [], [lambda: finalized.append("second")]))
        assert queue.wait() == [1]
    assert (queue.failures, finalized) == (1, ["second"])


def test_the_errno_of_a_users_exception_may_be_anything(tmp_path: Path) -> None:
    """``OSError`` takes whatever it is given for one; the cause reaches the user all the same."""

    def open_file(path: str, mode: str) -> Any:
        raise OSError("cannot reach the store", "bucket 7")

    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "saved", small_state(), open_file=open_file)
        with pytest.raises(CheckpointException, match="bucket 7"):
            queue.wait()


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    """Before anything is waited for."""
    with AsyncCallsQueue() as queue, pytest.raises(OptionError, match="timeout"):
        queue.wait(timeout)
