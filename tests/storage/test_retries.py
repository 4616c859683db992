"""Storage that fails for a while, and jobs that rather go on without a checkpoint."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.errors import OptionError
from nostall.options import EngineOptions
from support.faults import Fault, inject
from support.states import (
    PLAIN_WAYS,
    blobs,
    save_now,
    save_split,
    schedule,
    shard_files,
    small_state,
)


@pytest.mark.parametrize("way", PLAIN_WAYS.values(), ids=PLAIN_WAYS)
@pytest.mark.parametrize("point", ["open", "chunk", "fsync"])
def test_a_failure_that_passes_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: Callable[..., None], point: str
) -> None:
    """File by file, as often as is allowed; the checkpoint is right, and the log has the cause."""
    with (
        inject(Fault.errno(point, errno.EIO, file="__0_1.distcp", times=2)),
        caplog.at_level("WARNING", "nostall"),
    ):
        way(tmp_path / "tried again", small_state(), thread_count=3)
    way(tmp_path / "without", small_state(), thread_count=3)
    assert shard_files(tmp_path / "tried again") == shard_files(tmp_path / "without")
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
        save_now(tmp_path / "stale", small_state())
    with (
        inject(Fault.errno("chunk", errno.ENOSPC, times=1)),
        pytest.raises(CheckpointException, match="No space left"),
    ):
        save_now(tmp_path / "full", small_state())
    with inject(Fault.errno("chunk", errno.ESTALE, times=1)):
        save_now(tmp_path / "in the end", small_state())
    assert list((tmp_path / "stale").iterdir()) == []
    assert nostall.verify(tmp_path / "in the end").ok


def test_a_save_through_a_ring_is_tried_again_from_its_first_chunk(tmp_path: Path) -> None:
    """A retry reuses nothing that the failed attempt passed from chunk to chunk."""
    state = {f"t{number}": torch.arange(3000.0) for number in range(20)}
    nostall.configure(EngineOptions(chunk_nbytes=4096, io_threads=3))
    with inject(Fault.errno("chunk", errno.EIO, after=17, times=1)):
        save_now(tmp_path / "again", state)
    assert nostall.verify(tmp_path / "again").ok
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert blobs(tmp_path / "again") == blobs(tmp_path / "stock")


def test_a_job_can_go_on_without_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``on_error="warn"`` logs and counts failed saves and functions; later saves are right."""

    def fail() -> None:
        raise LookupError("nobody to tell")

    with AsyncCallsQueue(on_error="warn") as queue:
        with inject(Fault.errno("open", errno.ENOSPC)):
            schedule(queue, tmp_path / "0", small_state(0))
            assert queue.wait() == []
        queue.schedule_async_request(AsyncRequest(None, [], [fail]))
        for number in (2, 3):
            schedule(queue, tmp_path / f"{number}", small_state(number))
        assert queue.wait() == [2, 3]
    assert queue.failures == 2
    assert "request 0 has failed" in caplog.text
    assert "No space left" in caplog.text
    assert nostall.latest_complete(tmp_path) == str(tmp_path / "3")
    assert not nostall.is_complete(tmp_path / "0")


def test_what_cannot_be_meant_is_refused_where_it_is_passed() -> None:
    """An unknown way to treat errors, and a time that never ends."""
    with pytest.raises(OptionError, match="on_error='ignore'"):
        AsyncCallsQueue(on_error="ignore")  # type: ignore[arg-type]  # on purpose
    with AsyncCallsQueue() as queue, pytest.raises(OptionError, match="timeout"):
        queue.wait(float("inf"))


def test_the_errno_of_a_users_exception_may_be_anything(tmp_path: Path) -> None:
    """``OSError`` takes whatever it is given for one; the cause reaches the user all the same."""

    def open_file(path: str, mode: str) -> Any:
        raise OSError("cannot reach the store", "bucket 7")

    with pytest.raises(CheckpointException, match="bucket 7"):
        save_split(tmp_path / "saved", small_state(), open_file=open_file)
