"""Files that saves have left, and what saves do late, harm no other save."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._storage.directories import remove_unnamed
from nostall._storage.locations import is_address, storage_at
from nostall.errors import SaveTimeoutError, WriterDiedError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from programs import save_once
from support.faults import Fault, Hold, inject
from support.object_store import S3Server, is_loaded
from support.ranks import run_script
from support.states import save_in_background, save_now, shard_files, small_state
from support.waiting import wait_until


@pytest.mark.usefixtures("given_up_soon")
def test_a_thread_that_storage_held_up_removes_no_file_of_the_next_save(tmp_path: Path) -> None:
    """The first save failed by its deadline, and its thread ends when storage answers."""
    nostall.configure(EngineOptions(save_timeout_s=0.5))
    with Hold("chunk") as hold:
        with inject(hold.fault), pytest.raises(CheckpointException) as caught:
            save_now(tmp_path, small_state(1))
        assert isinstance(caught.value.failures[0][0], SaveTimeoutError)
        nostall.configure(EngineOptions())
        save_now(tmp_path, small_state(2))
        hold.release()
    wait_until(lambda: nostall.status() == ())
    # By the same threads, after what the first one had to do.
    save_now(tmp_path / "another", small_state(3))
    assert nostall.verify(tmp_path).ok


def test_a_save_after_a_failed_one_gets_other_names(tmp_path: Path) -> None:
    """Removals of the failed save may be pending, so names change; elsewhere they are stock's."""
    kill = Fault.kill("report", signal.SIGKILL)
    with inject(kill), pytest.raises(CheckpointException) as caught:
        save_in_background(tmp_path / "here", small_state(1))
    assert isinstance(caught.value.failures[0][0], WriterDiedError)
    for name in ("here", "there"):
        save_in_background(tmp_path / name, small_state(2))
    assert "__0_0.distcp" not in shard_files(tmp_path / "here")
    assert shard_files(tmp_path / "there").keys() == {"__0_0.distcp"}


def test_files_that_a_checkpoint_names_stay(tmp_path: Path) -> None:
    """Also if metadata are those of a rank alone, of stock, or cannot be read."""
    save_now(tmp_path / "together", small_state(1))
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


# --- killed jobs ----------------------------------------------------------------------------------


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for a checkpoint that does not exist yet: a directory, or an address in S3."""
    if request.param == "directory":
        return str(tmp_path / "saved")
    server: S3Server = request.getfixturevalue("s3")
    return f"s3://{server.new_bucket()}/run/step-1"


def names_at(place: str) -> set[str]:
    """Names of the files at a place; none if it does not exist."""
    return set(storage_at(place).list()) if is_address(place) or os.path.exists(place) else set()


@pytest.mark.parametrize("before", [(), (1,)], ids=["first save", "over a checkpoint"])
def test_whole_files_of_a_job_that_was_killed_stay_while_they_are_young(
    place: str, tmp_path: Path, before: tuple[int, ...]
) -> None:
    """They may be of another job's save, which is about to commit."""
    for seed in before:
        save_once.save(place, seed)
    there = names_at(place)
    killed = run_script("programs/save_once.py", place, "2", "report", cwd=tmp_path, timeout_s=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = names_at(place) - there
    assert left
    save_once.save(place, 3)
    assert names_at(place) >= left
    assert len(names_at(place)) == 2 + len(left)
    assert is_loaded(place, 3)


def test_a_link_to_an_old_file_is_a_young_file(tmp_path: Path) -> None:
    """The age of a file is that of its name, which another process may be about to commit."""
    place, old = tmp_path / "saved", tmp_path / "old"
    old.write_bytes(b"frozen")
    os.utime(old, (1e9, 1e9))
    place.mkdir()
    link = place / "__3_0-89abcdef.distcp"
    os.link(old, link)
    save_once.save(str(place), 1)
    assert link.exists()
