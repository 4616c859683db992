"""Names of files: storage assigns them, saves touch only their own files, and none are left."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from nostall._save import publish as publishing
from nostall._storage import posix
from nostall.core import AsyncCallsQueue
from nostall.errors import NotDurableError, SaveError, WriteError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.integrity import verify
from nostall.removal import remove_checkpoint
from programs.names import Stale
from stress.mounted import Mount, ask, fault, why_not
from support.faults import Fault, Hold, inject
from support.ranks import run_ranks
from support.states import read_metadata, save_now, save_split, save_stock_way, schedule
from support.waiting import AwayOs

mounts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def state_of(seed: int) -> dict[str, Any]:
    return {"large": torch.full((40_000,), float(seed)), "small": torch.arange(5) + seed}


def own_open(path: str, mode: str) -> IO[Any]:
    return open(path, mode)


def loaded_from(path: Path) -> int:
    """Which save stock finds there, whole."""
    state = state_of(0)
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    seed = int(state["large"][0])
    assert all(torch.equal(value, state_of(seed)[name]) for name, value in state.items())
    return seed


def names_in(path: Path) -> set[str]:
    return set(os.listdir(path))


def files_of(path: Path) -> set[str]:
    """Names of the shard files of the checkpoint that is there."""
    return {info.relative_path for info in read_metadata(path).storage_data.values()}


# --- a checkpoint that a host does not see --------------------------------------------------------

WAYS: dict[str, Callable[..., None]] = {
    "save": save_now,
    "queue": save_split,
    "streams": partial(save_now, open_file=own_open),
}
FAULTS = {
    "full": Fault.errno("chunk", errno.ENOSPC),
    "cannot open": Fault.errno("open", errno.EACCES),
    "cannot open for a moment": Fault.errno("open", errno.EIO),
    "exception": Fault.raising("report", "out of luck"),
    "killed": Fault.kill("start", signal.SIGKILL),
    "killed with files": Fault.kill("chunk", signal.SIGKILL),
}
CASES = [(way, kind) for way in WAYS for kind in FAULTS if way == "queue" or "killed" not in kind]
"""A synchronous save has no other process that could die."""


@pytest.mark.parametrize(("way", "kind"), CASES)
def test_a_save_that_fails_beside_a_checkpoint_that_it_does_not_see_leaves_it(
    tmp_path: Path, way: str, kind: str
) -> None:
    """Whatever a cache of names says, only what the save has made is removed or written into."""
    save_stock_way(tmp_path, state_of(1))
    before = {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)}
    with (
        patch.object(posix, "os", Stale()),
        inject(FAULTS[kind], Fault.raising("report", "out of luck")),
        pytest.raises(CheckpointException),
    ):
        WAYS[way](tmp_path, state_of(2))
    assert {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)} == before
    assert loaded_from(tmp_path) == 1


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_save_over_a_checkpoint_that_it_does_not_see_replaces_it(
    tmp_path: Path, way: Callable[..., None]
) -> None:
    """The unseen checkpoint is replaced, and the metadata names the files by their final names."""
    save_stock_way(tmp_path, state_of(1))
    with patch.object(posix, "os", Stale()):
        way(tmp_path, state_of(2))
    assert loaded_from(tmp_path) == 2
    assert verify(tmp_path).ok
    assert files_of(tmp_path) | {".metadata"} == names_in(tmp_path)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The findings of ``programs/names.py`` on each rank."""
    return run_ranks(2, "names:everything", tmp_path_factory.mktemp("ranks"))


def test_a_rank_that_does_not_see_the_checkpoint_leaves_it(of_ranks: list[dict[str, Any]]) -> None:
    """One rank looks for all."""
    for facts in (each["stale"] for each in of_ranks):
        assert facts["kept"]
        assert facts["committed"] == [False, True]
        assert facts["there"] == [".metadata", *facts["named"]]
        assert all("-" in name for name in facts["named"])


@mounts
@pytest.mark.parametrize("code", [errno.ENOSPC, None], ids=["full", "saved"])
def test_a_host_with_a_cache_leaves_the_checkpoint_of_another_one(
    tmp_path: Path, code: int | None
) -> None:
    """It looked before the other host saved; its kernel denies the checkpoint for a minute."""
    with Mount(tmp_path, cache_s=60) as one, Mount(tmp_path, cache_s=60) as other:
        os.mkdir(other.path / "saved")
        assert not (other.path / "saved" / ".metadata").exists()
        save_now(one.path / "saved", state_of(1))
        assert not (other.path / "saved" / ".metadata").exists()
        if code is None:
            save_now(other.path / "saved", state_of(2))
        else:
            full = Fault.errno("chunk", code)
            with inject(full), pytest.raises(CheckpointException):
                save_now(other.path / "saved", state_of(2))
    assert loaded_from(tmp_path / "saved") == (2 if code is None else 1)


# --- a directory that is new ----------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("remove", [shutil.rmtree, remove_checkpoint])
def test_a_directory_whose_checkpoint_was_removed_is_a_new_one(
    tmp_path: Path, way: Callable[..., None], remove: Callable[[Path], object]
) -> None:
    """Files have stock's names there, every time: comparisons of directories expect it."""
    for seed in (1, 2):
        way(tmp_path / "saved", state_of(seed))
        assert names_in(tmp_path / "saved") == {".metadata", "__0_0.distcp"}
        remove(tmp_path / "saved")


# --- a rename in doubt ----------------------------------------------------------------------------


class DoneAndRefused(Stale):
    """Storage that renames, answers with an error, and then does not see what it has done."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self._code = code

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)
        raise OSError(self._code, os.strerror(self._code))


@pytest.mark.parametrize("way", [save_now, save_split])
@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.ENOENT])
@pytest.mark.parametrize("old", [None, 1], ids=["new", "overwritten"])
def test_a_rename_that_was_done_and_answered_with_an_error_loses_nothing(
    tmp_path: Path, way: Callable[..., None], code: int, old: int | None
) -> None:
    """The save fails as one that may be there, and it is: complete."""
    path = tmp_path / "saved"
    if old is not None:
        save_stock_way(path, state_of(old))
    with (
        patch.object(posix, "os", DoneAndRefused(code)),
        pytest.raises(CheckpointException) as caught,
    ):
        way(path, state_of(2))
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, NotDurableError)
    assert error.errno == code
    assert loaded_from(path) == 2


@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
def test_a_rename_that_was_not_done_is_asked_for_again(tmp_path: Path, code: int) -> None:
    """A hiccup when a checkpoint is published does not cost it."""
    with patch.object(posix, "os", AwayOs("replace", code=code, times=1)):
        save_now(tmp_path, state_of(1))
    assert loaded_from(tmp_path) == 1


@mounts
@pytest.mark.parametrize("cache_s", [0, 60])
@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
def test_a_mounted_file_system_that_renames_and_says_no_loses_nothing(
    tmp_path: Path, code: int, cache_s: float
) -> None:
    """Its kernel goes on seeing what was there before; the save fails or not, and is there."""
    with Mount(tmp_path, cache_s=cache_s) as mount:
        path = mount.path / "saved"
        save_now(path, state_of(1))
        for seed in (2, 3):
            once = fault("rename", "errno-after", errno=code, times=1)
            ask(mount.control, faults=[once])
            try:
                save_now(path, state_of(seed))
            except CheckpointException as caught:
                ((error, _),) = caught.failures.values()
                assert isinstance(error, NotDurableError)
            assert loaded_from(tmp_path / "saved") == seed


# --- files without a checkpoint -------------------------------------------------------------------


def test_a_commit_that_fails_leaves_no_file_of_any_rank(of_ranks: list[dict[str, Any]]) -> None:
    """In every way of saving; and the next save is committed."""
    first, second = (each["failing"] for each in of_ranks)
    assert first == second
    for way, seen in first.items():
        assert [each["committed"] for each in seen] == [False, True] * 2, way
        unpublished, committed, unpublished_again, last = seen
        assert unpublished["there"] == []
        assert unpublished_again["there"] == committed["there"]
        for each in (committed, last):
            assert each["there"] == [".metadata", *each["named"]]


def written(path: Path, seed: int) -> Callable[[], None]:
    """Write the files of a save by hand; finishing it is left to do."""
    planner, writer = DefaultSavePlanner(), FileSystemWriterAsync(path)
    planner.set_up_planner(state_of(seed), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    return lambda: writer.finish(metadata, [results])


def test_saves_that_are_finished_by_hand_in_another_order_are_not_torn(tmp_path: Path) -> None:
    """Finishing the first save after the second raises; what is committed stays."""
    finish_first, finish_second = written(tmp_path, 1), written(tmp_path, 2)
    finish_second()
    assert loaded_from(tmp_path) == 2
    with pytest.raises(SaveError, match="were removed"):
        finish_first()
    assert loaded_from(tmp_path) == 2


def test_finishing_once_more_does_not_remove_what_another_save_has_made(tmp_path: Path) -> None:
    """A save whose commit has failed has no files any more, and its names may be another one's."""
    finish = written(tmp_path, 1)
    with inject(Fault.errno("publish", errno.ENOSPC)), pytest.raises(WriteError):
        finish()
    assert names_in(tmp_path) == set()
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path, state_of(2))
        for call in queue._caller._calls:
            call.outcome.result(60)
        with pytest.raises(SaveError, match="were removed"):
            finish()
    assert loaded_from(tmp_path) == 2


@pytest.mark.parametrize("way", [save_now, save_split])
def test_files_of_saves_that_were_killed_are_removed(
    tmp_path: Path, way: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next committed save, if they are too old to belong to a save in progress."""
    young = "__5_0.distcp"
    (tmp_path / young).write_bytes(b"of another process, a moment ago")
    way(tmp_path, state_of(1))
    assert young in names_in(tmp_path)
    monkeypatch.setattr(publishing, "_SAVES_PER_AGE", 0)  # otherwise an hour
    killed = {"__0_0.distcp", "__3_1-89abcdef.distcp", "group__0_0-89abcdef-01234567.distcp"}
    for name in killed | {"model.distcp", "__0_0.distcp.bak", "notes"}:
        (tmp_path / name).write_bytes(b"of a save that was killed")
    way(tmp_path, state_of(2))
    strangers = names_in(tmp_path) - files_of(tmp_path)
    assert strangers == {".metadata", "model.distcp", "__0_0.distcp.bak", "notes"}
    assert loaded_from(tmp_path) == 2


@pytest.mark.parametrize("damaged", [False, True])
def test_files_of_a_checkpoint_with_metadata_of_another_name_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, damaged: bool
) -> None:
    """However old they are, and also if that metadata cannot be read."""
    monkeypatch.setattr(publishing, "_SAVES_PER_AGE", 0)
    writer = FileSystemWriterAsync(tmp_path)
    dcp.save(state_of(1), storage_writer=writer, no_dist=True, use_collectives=False)
    if damaged:
        (tmp_path / "__0.metadata").write_bytes(b"?")
    of_one_rank = names_in(tmp_path)
    save_now(tmp_path, state_of(2))
    save_now(tmp_path, state_of(3))
    assert of_one_rank < names_in(tmp_path)
    assert loaded_from(tmp_path) == 3


def test_files_of_a_save_that_is_under_way_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes: those of this process are known."""
    monkeypatch.setattr(publishing, "_SAVES_PER_AGE", 0)
    with Hold("fsync") as hold, AsyncCallsQueue() as queue:
        with inject(hold.fault):
            schedule(queue, tmp_path, state_of(1))
            hold.wait_reached()
        under_way = names_in(tmp_path)
        save_now(tmp_path, state_of(2))
        assert under_way < names_in(tmp_path)
        hold.release()
        queue.wait()
    assert loaded_from(tmp_path) == 1
