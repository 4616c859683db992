"""Nobody waits for ever, and nothing is announced that is not there."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall.core import AsyncCallsQueue
from nostall.errors import SaveTimeoutError, WriteError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.testing import Hold, inject
from states import schedule, small_state

DEADLINE_S = 60.0


@pytest.fixture
def held(tmp_path: Path) -> Iterator[AsyncCallsQueue]:
    """A queue whose only save stands still, on its way to ``tmp_path / "held"``."""
    with Hold("chunk") as hold:
        queue = AsyncCallsQueue()
        with inject(hold.fault):
            schedule(queue, tmp_path / "held", small_state())
        hold.wait_reached()
        yield queue
        queue.close(abort=True)


@pytest.fixture
def impatient() -> Iterator[None]:
    """Nobody waits for a save for longer than a second."""
    nostall.configure(EngineOptions(save_timeout_s=1.0))
    yield
    nostall.configure(EngineOptions())


@pytest.mark.usefixtures("impatient")
def test_a_loop_that_only_polls_learns_of_a_save_that_does_not_end(held: AsyncCallsQueue) -> None:
    """Once it took longer than a save may take, though nobody ever waited for it."""

    def train() -> None:
        began_s = time.monotonic()
        while time.monotonic() - began_s < DEADLINE_S:
            held.poll()

    with pytest.raises(CheckpointException, match="not done within 1 s"):
        train()
    assert held.pending == 0


def test_closing_waits_no_longer_than_it_is_told(held: AsyncCallsQueue, tmp_path: Path) -> None:
    """What is not done by then is given up, and is not there."""
    with pytest.raises(
        SaveTimeoutError, match=r"1 of 1 requests are not done .* after 0\.1 s"
    ) as late:
        held.close(timeout=0.1)
    assert late.value.hint == "what was scheduled has been given up"
    assert held.pending == 0
    assert os.listdir(tmp_path / "held") == []


def _split(path: Path) -> None:
    with AsyncCallsQueue() as queue:
        schedule(queue, path, small_state())


def _sync(path: Path) -> None:
    dcp.save(small_state(), storage_writer=FileSystemWriterAsync(path))


def _remove_file(path: Path) -> None:
    os.unlink(path / "__0_0.distcp")


@pytest.mark.parametrize("save", [_split, _sync])
@pytest.mark.parametrize("remove", [shutil.rmtree, _remove_file])
def test_what_is_removed_while_it_is_written_is_not_announced(
    tmp_path: Path, save: Callable[[Path], None], remove: Callable[[Path], None]
) -> None:
    """A directory, or a file, that somebody removes under a save's hands fails it, with the file's name."""
    path = tmp_path / "saved"
    with Hold("fsync") as hold, inject(hold.fault):
        failure = _while_held(hold, lambda: save(path), lambda: remove(path))
    assert isinstance(failure, WriteError)
    assert failure.errno == errno.ENOENT
    assert failure.path == str(path / "__0_0.distcp")
    assert not (path / ".metadata").exists()
    save(path)
    assert nostall.verify(path).ok


def _while_held(hold: Hold, save: Callable[[], None], act: Callable[[], None]) -> BaseException:
    """The failure of a save that was stopped for a moment."""
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save)
        hold.wait_reached()
        act()
        hold.release()
        error = saving.exception(DEADLINE_S)
    assert isinstance(error, CheckpointException)
    return error.failures[0][0]
