"""Checkpoints that are directories with several saves: one commit, and what crashes leave."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from nostall.errors import SaveTimeoutError, WriteError
from nostall.integrations import _saves
from nostall.integrations._saves import DirectorySaves
from programs.adapters import commit_directory, save_directory
from support.faults import Fault, Hold, inject
from support.ranks import run_ranks
from support.states import names
from support.waiting import AwayOs, HangingOs, error_of, impatient


@pytest.fixture
def saves() -> Iterator[DirectorySaves]:
    opened = DirectorySaves(None)
    yield opened
    opened.close()


def _step(path: Path) -> int:
    """The step that all parts of a checkpoint have."""
    found: dict[str, torch.Tensor] = {}
    for part in ("model", "optimizer"):
        found[part] = torch.zeros(100)
        dcp.load({part: found[part]}, checkpoint_id=path / part)
    steps = {int(value) for weight in found.values() for value in weight.tolist()}
    (step,) = steps | {int((path / "step").read_text())}
    return step


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_checkpoint_appears_when_all_its_parts_are_committed(
    tmp_path: Path, saves: DirectorySaves, part: str
) -> None:
    """While a part is being written there is no directory of that name, and the older one stays."""
    save_directory(saves, tmp_path / "1", 1)
    saves.poll(wait=True)
    with Hold("chunk") as hold:
        with inject(Fault({**hold.fault.plain, "file": f"/{part}/"})):
            save_directory(saves, tmp_path / "2", 2)
        hold.wait_reached()
        saves.poll()
        assert names(tmp_path) == ["1", "_saving-2"]
        hold.release()
        saves.close()
    assert names(tmp_path) == ["1", "2"]
    assert [_step(tmp_path / name) for name in ("1", "2")] == [1, 2]


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_failed_part_commits_nothing(tmp_path: Path, saves: DirectorySaves, part: str) -> None:
    """If a part cannot be written, the checkpoint of that name stays as it was."""
    save_directory(saves, tmp_path / "last", 1)
    saves.poll(wait=True)
    with Hold("start") as hold:
        full = Fault.errno("chunk", errno.ENOSPC, file=f"/{part}/")
        with inject(hold.fault, full):
            save_directory(saves, tmp_path / "last", 2)
        hold.release()
        with pytest.raises(CheckpointException, match="No space left"):
            saves.poll(wait=True)
    saves.poll(wait=True)
    assert _step(tmp_path / "last") == 1
    save_directory(saves, tmp_path / "last", 3)
    saves.close()
    assert _step(tmp_path / "last") == 3
    assert names(tmp_path) == ["last"]


def test_a_checkpoint_is_replaced_while_another_save_of_it_is_pending(
    tmp_path: Path, saves: DirectorySaves
) -> None:
    """Two saves to one directory do not mix."""
    for step in (1, 2, 3):
        save_directory(saves, tmp_path / "last", step)
    saves.close()
    assert _step(tmp_path / "last") == 3
    assert names(tmp_path) == ["last"]


def test_leftovers_of_a_crash_are_removed_once(tmp_path: Path, saves: DirectorySaves) -> None:
    """Recovery removes a killed run's uncommitted directories; checkpoints and other files stay."""
    for name in ("1", "_saving-2/2/model", "_removed-00ff", "others"):
        (tmp_path / name).mkdir(parents=True)
    saves.recover(str(tmp_path), str(tmp_path))
    saves.close()
    assert names(tmp_path) == ["1", "others"]


@pytest.mark.parametrize(("before", "step"), [(1, 1), (2, 1), (3, 2)])
def test_a_crash_during_a_replacement_leaves_one_whole_checkpoint(
    tmp_path: Path, saves: DirectorySaves, before: int, step: int
) -> None:
    """Before each of the renames the process is killed: the older one or the newer one is found."""
    run_ranks(1, "adapters:replaced", tmp_path / "run", str(before), check=False)
    saves.recover(str(tmp_path / "run"), str(tmp_path / "run"))
    saves.close()
    assert names(tmp_path / "run") == ["last"]
    assert _step(tmp_path / "run" / "last") == step


def test_rotation_keeps_what_is_protected(tmp_path: Path, saves: DirectorySaves) -> None:
    """The newest and the best checkpoint count, and are not removed."""
    paths = [str(tmp_path / name) for name in "123456"]
    for path in paths:
        Path(path).mkdir()
    saves.rotate(paths, str(tmp_path), keep=3, protected={paths[1], f"{tmp_path}/./4"})
    saves.close()
    assert names(tmp_path) == ["2", "4", "6"]
    saves.rotate([str(tmp_path / name) for name in "246"], str(tmp_path), keep=1, protected=[])
    saves.close()
    assert names(tmp_path) == ["6"]


def test_other_saves_are_not_taken(tmp_path: Path, saves: DirectorySaves) -> None:
    """A save of the block to another directory is carried out at once."""
    elsewhere = dcp.FileSystemWriter(tmp_path / "elsewhere")
    with saves.save(str(tmp_path / "1"), str(tmp_path)) as directory:
        dcp.save({"weight": torch.ones(3)}, storage_writer=elsewhere)
        assert (tmp_path / "elsewhere" / ".metadata").exists()
        writer = dcp.FileSystemWriter(Path(directory, "model"))
        dcp.save({"weight": torch.ones(3)}, storage_writer=writer)


@pytest.fixture(name="impatient")
def _impatient() -> Iterator[None]:
    with impatient():
        yield


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("operation", "part", "phase"),
    [
        pytest.param("makedirs", "_saving-last", "commit", id="making it"),
        pytest.param("fsync", "last/step", "fsync", id="fsync of a file beside the saves"),
        pytest.param("rename", "/last", "commit", id="replacing the older one"),
        pytest.param("rename", "_saving-last/last", "commit", id="publishing it"),
    ],
)
def test_a_save_does_not_wait_for_storage_for_ever(
    tmp_path: Path, saves: DirectorySaves, operation: str, part: str, phase: str
) -> None:
    """Nor does the next one; nothing committed is lost, and when storage answers, saves go on."""
    path = tmp_path / "last"
    commit_directory(saves, path, 1)
    storage = HangingOs(operation, part)
    with patch.object(_saves, "os", storage):
        try:
            errors = [error_of(partial(commit_directory, saves, path, step)) for step in (2, 3)]
            older = path if path.exists() else tmp_path / "_saving-last" / "_replaced"
            assert _step(older) == 1
        finally:
            storage.answer()
        commit_directory(saves, path, 4)
    for error in errors:
        assert isinstance(error, SaveTimeoutError)
        assert (error.rank, error.path, error.phase) == (0, str(path), phase)
    saves.close()
    assert _step(path) == 4
    assert names(tmp_path) == ["last"]


Recovery = Callable[[DirectorySaves, Path], None]
RECOVERIES: dict[str, tuple[Recovery, str]] = {
    "recover": (lambda saves, run: saves.recover(str(run), str(run)), ""),
    "recover_one": (lambda saves, run: saves.recover_one(str(run / "1"), str(run)), "/1"),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("recover", "named"), RECOVERIES.values(), ids=RECOVERIES)
def test_recovery_does_not_wait_for_storage_for_ever(
    tmp_path: Path, saves: DirectorySaves, recover: Recovery, named: str
) -> None:
    """When storage answers, it is carried out."""
    (tmp_path / "_saving-1" / "1").mkdir(parents=True)
    storage = HangingOs("listdir", str(tmp_path))
    with patch.object(_saves, "os", storage):
        try:
            error = error_of(lambda: recover(saves, tmp_path))
        finally:
            storage.answer()
        recover(saves, tmp_path)
    assert isinstance(error, SaveTimeoutError)
    assert error.path == f"{tmp_path}{named}"
    saves.close()
    assert names(tmp_path) == []


@pytest.mark.parametrize("recover", [recover for recover, _ in RECOVERIES.values()], ids=RECOVERIES)
def test_recovery_that_storage_refuses_can_be_tried_again(
    tmp_path: Path, saves: DirectorySaves, recover: Recovery
) -> None:
    """A directory that storage fails to list is neither removed nor forgotten."""
    commit_directory(saves, tmp_path / "1", 1)
    (tmp_path / "_saving-1").mkdir()
    (tmp_path / "1").rename(tmp_path / "_saving-1" / "_replaced")
    with (
        patch.object(_saves, "os", AwayOs("listdir", str(tmp_path))),
        pytest.raises(WriteError, match="Stale file handle") as caught,
    ):
        recover(saves, tmp_path)
    assert caught.value.errno == errno.ESTALE
    recover(saves, tmp_path)
    saves.close()
    assert names(tmp_path) == ["1"]
    assert _step(tmp_path / "1") == 1


def test_a_part_that_cannot_be_looked_at_is_an_error(tmp_path: Path, saves: DirectorySaves) -> None:
    """It is not taken for one that was not saved, which would end without any error."""
    path = tmp_path / "last"
    commit_directory(saves, path, 1)
    with (
        patch.object(_saves, "os", AwayOs("stat", "/.metadata")),
        pytest.raises(WriteError, match="Stale file handle") as caught,
    ):
        commit_directory(saves, path, 2)
    assert caught.value.errno == errno.ESTALE
    assert _step(path) == 1


@pytest.mark.parametrize(
    ("what", "code", "rank", "phase", "named"),
    [
        ("making", errno.ENOTDIR, 0, "commit", "_saving-last/last"),
        ("fsync", errno.ENOENT, 1, "fsync", "_saving-last/last/rng_state_1.pth"),
        ("replacing", errno.ENOTEMPTY, 0, "commit", "last"),
        ("publishing", None, 0, "commit", "last"),
    ],
)
def test_trouble_with_storage_on_one_rank_is_an_error_on_all_ranks(
    tmp_path: Path, what: str, code: int | None, rank: int, phase: str, named: str
) -> None:
    """All learn of rank, path and cause; a refusal leaves the older checkpoint; saving goes on."""
    told = run_ranks(2, "adapters:troubled_directories", tmp_path, what)
    kind = "SaveTimeoutError" if code is None else "WriteError"
    place = {"rank": rank, "phase": phase, "path": str(tmp_path / "run" / named)}
    assert told == [{"kind": kind, "errno": code, **place}] * 2
    assert _step(tmp_path / "run" / "last") == 3
    assert names(tmp_path / "run") == ["last"]
