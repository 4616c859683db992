"""No wait lasts for ever, and no checkpoint is announced that is not there."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._storage import posix
from nostall.core import AsyncCallsQueue
from nostall.errors import NotDurableError, SaveTimeoutError, WriteError
from nostall.options import EngineOptions
from support.faults import Fault, Hold, inject
from support.ranks import TESTS, run_python
from support.states import save_now, save_split, schedule, small_state
from support.waiting import DEADLINE_S, SOON_S, HangingOs, wait_until


@pytest.fixture
def held(tmp_path: Path, given_up_soon: None) -> Iterator[AsyncCallsQueue]:
    """A queue whose only save stands still, on its way to ``tmp_path / "held"``."""
    with Hold("chunk") as hold:
        queue = AsyncCallsQueue()
        with inject(hold.fault):
            schedule(queue, tmp_path / "held", small_state())
        hold.wait_reached()
        yield queue
        queue.close(abort=True)


@pytest.fixture
def impatient(given_up_soon: None) -> None:
    """No wait for a save lasts longer than a second; its process is there."""
    nostall.configure(EngineOptions(save_timeout_s=1.0))
    nostall.warmup()


@pytest.mark.usefixtures("impatient")
def test_a_loop_that_only_polls_learns_of_a_save_that_does_not_end(held: AsyncCallsQueue) -> None:
    """Once it took longer than a save may take, even if no caller waited for it."""

    def train() -> None:
        began_s = time.monotonic()
        while time.monotonic() - began_s < DEADLINE_S:
            held.poll()

    with pytest.raises(CheckpointException, match="did not finish within 1 s"):
        train()
    assert held.pending == 0


def test_closing_waits_no_longer_than_its_timeout(held: AsyncCallsQueue, tmp_path: Path) -> None:
    """A close that times out gives unfinished saves up, and they leave no file."""
    with pytest.raises(
        SaveTimeoutError, match=r"after 0\.1 s with 1 of 1 request unfinished"
    ) as late:
        held.close(timeout=0.1)
    assert late.value.hint == "all scheduled requests were aborted"
    assert held.pending == 0
    assert os.listdir(tmp_path / "held") == []


SAVES = pytest.mark.parametrize("save", [save_split, save_now])


@SAVES
@pytest.mark.parametrize(
    "remove",
    [shutil.rmtree, lambda path: os.unlink(path / "__0_0.distcp")],
    ids=["directory", "file"],
)
def test_what_is_removed_while_it_is_written_is_not_announced(
    tmp_path: Path, save: Callable[..., None], remove: Callable[[Path], None]
) -> None:
    """A directory or a file that is removed during a save fails it, with the file's name."""
    path = tmp_path / "saved"
    with Hold("fsync") as hold, inject(hold.fault), ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save, path, small_state())
        hold.wait_reached()
        remove(path)
        hold.release()
        failure = _failure_of(saving.exception(DEADLINE_S))
    assert isinstance(failure, WriteError)
    assert failure.errno == errno.ENOENT
    assert failure.path == str(path / "__0_0.distcp")
    assert not (path / ".metadata").exists()
    save(path, small_state())
    assert nostall.verify(path).ok


@SAVES
def test_a_save_that_cannot_be_announced_as_others_remove_its_files_says_so(
    tmp_path: Path, save: Callable[..., None]
) -> None:
    """Two jobs that save to one directory remove what they take for left over."""
    path = tmp_path / "saved"
    with Hold("publish") as hold, inject(hold.fault), ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save, path, small_state())
        hold.wait_reached()
        shutil.rmtree(path)
        hold.release()
        failure = _failure_of(saving.exception(DEADLINE_S))
    assert isinstance(failure, WriteError)
    assert failure.errno == errno.ENOENT
    assert "let one job save to a directory" in str(failure.hint)


def _failure_of(error: BaseException | None) -> BaseException:
    assert isinstance(error, CheckpointException)
    return error.failures[0][0]


def _failure_in_time(save: Callable[..., None], path: Path, go: Callable[[], None]) -> Any:
    """The failure of a save with stuck storage, which answers then; no thread of it is left."""
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save, path, small_state())
        try:
            failure = _failure_of(saving.exception(SOON_S))
        finally:
            go()
    left = ("nostall-storage", "nostall-writer", "nostall-io")
    wait_until(lambda: not any(each.name.startswith(left) for each in threading.enumerate()))
    return failure


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("point", ["chunk", "fsync"])
def test_a_synchronous_save_does_not_wait_for_storage_for_ever(tmp_path: Path, point: str) -> None:
    """It fails in time, says where, and what it had written goes when storage answers."""
    path = tmp_path / "saved"
    with Hold(point) as hold, inject(hold.fault):
        failure = _failure_in_time(save_now, path, hold.release)
    assert isinstance(failure, SaveTimeoutError)
    assert (failure.rank, failure.phase, failure.path) == (0, "write", str(path))
    assert "removed if storage answers" in str(failure.hint)
    assert os.listdir(path) == []
    save_now(path, small_state())
    assert nostall.verify(path).ok


@pytest.mark.usefixtures("impatient")
@SAVES
@pytest.mark.parametrize("point", ["commit", "publish"])
def test_what_was_given_up_before_it_was_published_is_never_published(
    tmp_path: Path, save: Callable[..., None], point: str
) -> None:
    """The commit fails in time; when storage answers, the old checkpoint is there, and alone."""
    path = tmp_path / "saved"
    save(path, small_state())
    before = (path / ".metadata").read_bytes()
    with Hold(point) as hold, inject(hold.fault):
        failure = _failure_in_time(save, path, hold.release)
    assert isinstance(failure, SaveTimeoutError)
    assert (failure.phase, failure.path) == ("commit", str(path / ".metadata"))
    assert (path / ".metadata").read_bytes() == before
    assert not list(path.glob("*.tmp"))
    assert nostall.verify(path).ok


@pytest.mark.usefixtures("impatient")
@SAVES
def test_a_rename_that_storage_does_not_answer_is_not_taken_for_undone(
    tmp_path: Path, save: Callable[..., None]
) -> None:
    """Nothing is removed that the metadata may refer to, and it is there when storage answers."""
    path = tmp_path / "saved"
    with patch.object(posix, "os", HangingOs("replace")) as storage:
        failure = _failure_in_time(save, path, storage.answer)
    assert isinstance(failure, NotDurableError)
    assert nostall.verify(path).ok


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("stuck", ["mkdir", "stat"])
@SAVES
def test_planning_does_not_wait_for_storage_for_ever(
    tmp_path: Path, save: Callable[..., None], stuck: str
) -> None:
    """A directory that cannot be made or looked at in time is an error that names it."""
    path = tmp_path / "saved"
    with patch.object(posix, "os", HangingOs(stuck, "saved")) as storage:
        failure = _failure_in_time(save, path, storage.answer)
    assert isinstance(failure, SaveTimeoutError)
    assert (failure.phase, failure.path) == ("plan", str(path))


@pytest.mark.usefixtures("impatient")
def test_files_that_cannot_be_removed_in_time_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on; the log says what may stay, and it is removed when storage answers."""
    path = tmp_path / "saved"
    full = Fault.errno("fsync", errno.ENOSPC)
    with patch.object(posix, "os", HangingOs("unlink")) as storage, inject(full):
        failure = _failure_in_time(save_split, path, storage.answer)
    assert isinstance(failure, WriteError)
    assert str(path / "__0_0.distcp") in caplog.text
    assert os.listdir(path) == []


def test_an_interpreter_ends_though_storage_hangs(tmp_path: Path) -> None:
    """A save given up in hanging storage does not keep the process from exiting."""
    program = f"""
import os, sys, torch, nostall, torch.distributed.checkpoint as dcp
sys.path.insert(0, {str(TESTS)!r})
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from support.faults import Hold, inject
nostall.configure(EngineOptions(save_timeout_s=0.5))
hold = Hold("chunk")
with inject(hold.fault):
    try:
        dcp.save({{"w": torch.zeros(9)}}, storage_writer=FileSystemWriterAsync({str(tmp_path)!r}))
    except dcp.api.CheckpointException as error:
        print(type(error.failures[0][0]).__name__)
"""
    ended = run_python("-c", program, timeout_s=DEADLINE_S)
    assert (ended.returncode, ended.stdout) == (0, "SaveTimeoutError\n"), ended.stderr
