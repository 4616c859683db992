"""Late effects of a save that was given up hit no file of another save."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._storage.directories import remove_unnamed
from nostall.errors import SaveTimeoutError, WriterDiedError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from support.faults import Fault, Hold, inject
from support.states import shard_files, small_state
from support.waiting import wait_until


def save(path: Path, seed: int) -> None:
    dcp.save(small_state(seed), storage_writer=FileSystemWriterAsync(path), no_dist=True)


def save_in_background(path: Path, seed: int) -> None:
    saving: Any = dcp.async_save(
        small_state(seed), storage_writer=FileSystemWriterAsync(path), no_dist=True
    )
    saving.result()


def failure_of(error: CheckpointException) -> BaseException:
    return error.failures[0][0]


def test_a_thread_that_storage_held_up_removes_no_file_of_the_next_save(tmp_path: Path) -> None:
    """The first save failed by its deadline, and its thread ends when storage answers."""
    nostall.configure(EngineOptions(save_timeout_s=0.5))
    with Hold("chunk") as hold:
        with inject(hold.fault), pytest.raises(CheckpointException) as caught:
            save(tmp_path, 1)
        assert isinstance(failure_of(caught.value), SaveTimeoutError)
        nostall.configure(EngineOptions())
        save(tmp_path, 2)
        hold.release()
    wait_until(lambda: nostall.status() == ())
    save(tmp_path / "another", 3)  # by the same threads, after what the first one had to do
    assert nostall.verify(tmp_path).ok


def test_a_save_after_a_failed_one_gets_other_names(tmp_path: Path) -> None:
    """Removals of the failed save may be pending, so names change; elsewhere they are stock's."""
    kill = Fault.kill("report", signal.SIGKILL)
    with inject(kill), pytest.raises(CheckpointException) as caught:
        save_in_background(tmp_path / "here", 1)
    assert isinstance(failure_of(caught.value), WriterDiedError)
    for name in ("here", "there"):
        save_in_background(tmp_path / name, 2)
    assert "__0_0.distcp" not in shard_files(tmp_path / "here")
    assert shard_files(tmp_path / "there").keys() == {"__0_0.distcp"}


def test_files_that_a_checkpoint_names_stay(tmp_path: Path) -> None:
    """Also if metadata are those of a rank alone, of stock, or cannot be read."""
    save(tmp_path / "together", 1)
    alone = FileSystemWriterAsync(tmp_path / "alone")
    dcp.save(small_state(1), storage_writer=alone, no_dist=True, use_collectives=False)
    dcp.save(small_state(1), checkpoint_id=tmp_path / "stock", no_dist=True)
    (tmp_path / "unreadable" / ".metadata").mkdir(parents=True)
    (tmp_path / "unreadable" / "__0_0.distcp").touch()
    places = [tmp_path / name for name in ("together", "alone", "stock", "unreadable")]
    for place in places:
        (place / "__0_7.distcp").touch()
        remove_unnamed([str(place / name) for name in os.listdir(place) if "distcp" in name])
        assert (place / "__0_0.distcp").exists()
        assert (place / "__0_7.distcp").exists() == (place.name == "unreadable")
    remove_unnamed([str(tmp_path / "nowhere" / "__0_0.distcp")])
