"""Checkpoints that are directories with several saves: one commit, and what crashes leave."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from nostall.integrations._directories import DirectorySaves
from nostall.testing import Fault, Hold, inject
from programs.adapters import save_directory
from support.ranks import run_ranks


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


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


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
        assert _names(tmp_path) == ["1", "_saving-2"]
        hold.release()
        saves.close()
    assert _names(tmp_path) == ["1", "2"]
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
    assert _names(tmp_path) == ["last"]


def test_a_checkpoint_is_replaced_while_another_save_of_it_is_pending(
    tmp_path: Path, saves: DirectorySaves
) -> None:
    """Two saves to one directory do not mix."""
    for step in (1, 2, 3):
        save_directory(saves, tmp_path / "last", step)
    saves.close()
    assert _step(tmp_path / "last") == 3
    assert _names(tmp_path) == ["last"]


def test_leftovers_of_a_crash_are_removed_once(tmp_path: Path, saves: DirectorySaves) -> None:
    """What a killed run has not committed is removed; checkpoints and other files stay."""
    for name in ("1", "_saving-2/2/model", "_removed-00ff", "others"):
        (tmp_path / name).mkdir(parents=True)
    saves.recover(str(tmp_path), str(tmp_path))
    saves.close()
    assert _names(tmp_path) == ["1", "others"]


@pytest.mark.parametrize(("before", "step"), [(1, 1), (2, 1), (3, 2)])
def test_a_crash_during_a_replacement_leaves_one_whole_checkpoint(
    tmp_path: Path, saves: DirectorySaves, before: int, step: int
) -> None:
    """Before each of the renames the process is killed: the older one or the newer one is found."""
    run_ranks(1, "adapters:replaced", tmp_path / "run", str(before), check=False)
    saves.recover(str(tmp_path / "run"), str(tmp_path / "run"))
    saves.close()
    assert _names(tmp_path / "run") == ["last"]
    assert _step(tmp_path / "run" / "last") == step


def test_rotation_keeps_what_is_protected(tmp_path: Path, saves: DirectorySaves) -> None:
    """The newest and the best checkpoint count, and are not removed."""
    paths = [str(tmp_path / name) for name in "123456"]
    for path in paths:
        Path(path).mkdir()
    saves.rotate(paths, str(tmp_path), keep=3, protected={paths[1], f"{tmp_path}/./4"})
    saves.close()
    assert _names(tmp_path) == ["2", "4", "6"]
    saves.rotate([str(tmp_path / name) for name in "246"], str(tmp_path), keep=1, protected=[])
    saves.close()
    assert _names(tmp_path) == ["6"]


def test_other_saves_are_not_taken(tmp_path: Path, saves: DirectorySaves) -> None:
    """A save of the block to another directory is carried out at once."""
    elsewhere = dcp.FileSystemWriter(tmp_path / "elsewhere")
    with saves.save(str(tmp_path / "1"), str(tmp_path)) as directory:
        dcp.save({"weight": torch.ones(3)}, storage_writer=elsewhere)
        assert (tmp_path / "elsewhere" / ".metadata").exists()
        writer = dcp.FileSystemWriter(Path(directory, "model"))
        dcp.save({"weight": torch.ones(3)}, storage_writer=writer)
