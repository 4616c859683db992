"""Files that nobody will come to name: removed at once, if that is certain, and never otherwise."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._storage import basis
from nostall._storage.basis import basis_at
from nostall._storage.places import is_address, storage_at
from nostall._storage.port import Conflict
from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.testing import Hold, inject
from programs.save_once import save, save_in_background, state_of
from support.object_store import S3Server, is_loaded
from support.ranks import run_script
from support.states import schedule
from support.waiting import wait_until

NAME = ".metadata"
ROUNDED_S = 3
"""Stores round times to seconds, which the next save allows for."""


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a checkpoint that does not exist yet."""
    if request.param == "directory":
        return str(tmp_path / "saved")
    server: S3Server = request.getfixturevalue("s3")
    return f"s3://{server.new_bucket()}/run/step-1"


def names_at(place: str) -> set[str]:
    """What is there; nothing if the place does not exist."""
    return set(storage_at(place).list()) if is_address(place) or os.path.exists(place) else set()


def save_in_another_process(place: str, seed: int, *killed_at: str, cwd: Path) -> None:
    done = run_script("programs/save_once.py", place, str(seed), *killed_at, cwd=cwd, timeout_s=60)
    assert done.returncode == (-signal.SIGKILL if killed_at else 0), done.stderr


def grow_old(place: str) -> None:
    """Wait until what is there is older than a process that is started now."""
    storage = storage_at(place)
    newest_s = max(storage.stat(name).changed_s for name in names_at(place))
    wait_until(lambda: time.time() > newest_s + ROUNDED_S)


@pytest.mark.parametrize("before", [(), (1,)], ids=["first save", "over a checkpoint"])
def test_the_next_save_removes_whole_files_of_a_job_that_was_killed(
    place: str, tmp_path: Path, before: tuple[int, ...]
) -> None:
    """Nobody will commit them, so they do not fill the storage for an hour."""
    for seed in before:
        save(place, seed)
    there = names_at(place)
    save_in_another_process(place, 2, "report", cwd=tmp_path)
    left = names_at(place) - there
    assert left
    grow_old(place)
    save_in_another_process(place, 3, cwd=tmp_path)
    assert len(names_at(place)) == 2
    assert is_loaded(place, 3)


@pytest.mark.parametrize("point", ["report", "publish"])
def test_a_save_under_way_keeps_its_files_or_is_not_committed(
    place: str, tmp_path: Path, point: str
) -> None:
    """Of two jobs that save to one place. What is committed is whole, whoever comes first."""
    with Hold(point) as hold:
        with inject(hold.fault):
            future = save_in_background(place, 1)
            hold.wait_reached()
        mine = {name for name in names_at(place) if name.endswith(".distcp")}
        assert mine
        grow_old(place)
        save_in_another_process(place, 2, cwd=tmp_path)
        assert is_loaded(place, 2)
        assert (mine <= names_at(place)) != is_address(place)
        hold.release()
        if is_address(place) or point == "publish":
            with pytest.raises(CheckpointException, match=r"missing|another process"):
                future.result()
            seed = 2
        else:
            future.result()
            seed = 1
    assert is_loaded(place, seed)
    assert nostall.verify(place).ok
    assert len(names_at(place)) == 2 or not is_address(place)


def test_files_of_a_rank_that_saves_alone_stay(place: str, tmp_path: Path) -> None:
    """Its metadata has another name, so nothing compares the two."""
    save_alone = partial(dcp.save, state_of(1), no_dist=True, use_collectives=False)
    with Hold("publish") as hold, ThreadPoolExecutor(1) as pool:
        with inject(hold.fault):
            future = pool.submit(save_alone, storage_writer=FileSystemWriterAsync(place))
            hold.wait_reached()
        mine = names_at(place)
        assert mine
        grow_old(place)
        save_in_another_process(place, 2, cwd=tmp_path)
        assert mine <= names_at(place)
        hold.release()
        future.result()
    assert {"__0.metadata", NAME} < names_at(place)
    assert is_loaded(place, 2)


def test_saves_of_one_process_may_overlap(place: str) -> None:
    """Each replaces the one before, which was not there yet when it began."""
    with AsyncCallsQueue() as queue:
        for seed in (1, 2, 3):
            schedule(queue, place, state_of(seed))
        assert NAME not in names_at(place)
        queue.wait()
    assert is_loaded(place, 3)
    assert len(names_at(place)) == 2


def test_a_later_save_of_the_process_that_is_committed_first_stays(place: str) -> None:
    """The earlier one comes after it, and its files go."""
    with Hold("report") as hold:
        with inject(hold.fault):
            future = save_in_background(place, 1)
            hold.wait_reached()
        save(place, 2)
        hold.release()
        future.result()
    assert is_loaded(place, 1)
    assert len(names_at(place)) == 2


# --- the basis of a save ------------------------------------------------------------------------


def _hold(directory: str, says: Connection) -> None:
    _basis = basis_at(directory, NAME)
    says.send("begun")
    says.recv()


def test_only_the_last_save_under_way_knows_that_it_is(tmp_path: Path) -> None:
    """Whichever process the other one is of, until that ends, in whatever way."""
    directory = str(tmp_path)
    ours, theirs = get_context("spawn").Pipe()
    other = get_context("spawn").Process(target=_hold, args=(directory, theirs))
    other.start()
    assert ours.recv() == "begun"
    assert not basis_at(directory, NAME).settle(None)
    other.kill()
    other.join()
    assert basis_at(directory, NAME).settle(None)
    with closing(basis_at(directory, NAME)):
        assert not basis_at(directory, NAME).settle(None)
    assert basis_at(directory, NAME).settle(None)


def test_a_basis_that_is_closed_or_dropped_holds_nothing(tmp_path: Path) -> None:
    """No descriptor stays, and a closed basis does not know that it was the last one."""
    directory, before = str(tmp_path), psutil.Process().num_fds()
    closed = basis_at(directory, NAME)
    for _ in range(2):
        closed.close()
    assert not closed.settle(None)
    basis_at(directory, NAME)
    assert basis_at(directory, NAME).settle(None)
    assert psutil.Process().num_fds() == before


@pytest.mark.skipif(sys.platform != "linux", reason="Linux knows which file systems are local")
def test_a_fork_neither_ends_nor_prolongs_a_save(tmp_path: Path) -> None:
    """It has the same lock, as a worker of a data loader does."""
    directory = str(tmp_path)
    mine = basis_at(directory, NAME)
    ours, theirs = get_context("fork").Pipe()
    child = get_context("fork").Process(target=_drop, args=(mine, theirs))
    child.start()
    assert ours.recv() == "dropped"
    assert not basis_at(directory, NAME).settle(None)
    mine.close()
    assert basis_at(directory, NAME).settle(None)
    ours.send("end")
    child.join()


def _drop(inherited: basis.Basis, says: Connection) -> None:
    inherited.close()
    says.send("dropped")
    says.recv()


def test_a_lock_tells_nothing_where_other_hosts_may_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems have locks of one host."""
    assert not basis_at("/proc", NAME).settle(None)
    assert basis_at(str(tmp_path), NAME).settle(None)
    monkeypatch.setattr(basis, "_LOCAL", {})
    assert not basis_at(str(tmp_path), NAME).settle(None)


def test_a_name_that_another_job_has_published_since_is_not_replaced(s3: S3Server) -> None:
    """Not even by a save that began before a later one of this process."""
    address = f"s3://{s3.new_bucket()}/run"
    storage = storage_at(address)
    first = basis_at(address, NAME)
    storage.publish(NAME, [b"of another job"])
    later = basis_at(address, NAME)
    assert later.settle(storage.publish(NAME, [b"later"], expected=later.expected()))
    with pytest.raises(Conflict):
        storage.publish(NAME, [b"first"], expected=first.expected())


def test_a_store_that_is_away_when_a_save_begins_is_asked_when_it_ends(s3: S3Server) -> None:
    """The save replaces what is there then."""
    address = f"s3://{s3.new_bucket()}/run"
    s3.inject(
        {"method": "HEAD", "has": NAME, "do": "answer", "status": 403, "code": "AccessDenied"}
    )
    mine = basis_at(address, NAME)
    assert mine.is_taken
    storage_at(address).publish(NAME, [b"since"])
    assert mine.settle(storage_at(address).publish(NAME, [b"mine"], expected=mine.expected()))


def test_a_commit_whose_answer_was_lost_removes_nothing_at_once(s3: S3Server) -> None:
    """It is there, but whether anybody could come between is not known."""
    address = f"s3://{s3.new_bucket()}/run"
    mine = basis_at(address, NAME)
    s3.inject({"method": "PUT", "has": NAME, "do": "lose"})
    published = storage_at(address).publish(NAME, [b"mine"], expected=mine.expected())
    assert not mine.settle(published)
    assert published is not None
    assert published.version == storage_at(address).stat(NAME).version
