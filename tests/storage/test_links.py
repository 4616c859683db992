"""Links: a checkpoint directory may be one, and nothing is ever written through one in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._storage.locations import place_of
from nostall.errors import WriteError
from nostall.filesystem_async import FileSystemWriterAsync
from support.states import read_metadata, save_now, save_split

SAVES = pytest.mark.parametrize("save", [save_now, save_split])


def holding(value: float) -> dict[str, Any]:
    return {"weight": torch.full((1000,), value)}


def value_in(path: Path) -> float:
    state = holding(0.0)
    dcp.load(state, checkpoint_id=path)
    return float(state["weight"][0])


@SAVES
def test_a_link_to_a_directory_is_followed(tmp_path: Path, save: Callable[..., None]) -> None:
    """The checkpoint is in the directory, the link stays one, and the next save replaces it."""
    (tmp_path / "volume").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "volume", target_is_directory=True)
    save(link, holding(1.0))
    save(link, holding(2.0))
    assert link.is_symlink()
    assert value_in(tmp_path / "volume") == 2.0
    assert len(os.listdir(tmp_path / "volume")) == 2
    assert nostall.verify(link).ok


@SAVES
def test_the_directory_above_a_link_is_that_above_what_it_leads_to(
    tmp_path: Path, save: Callable[..., None]
) -> None:
    """``link/..`` is the target's parent for saves, readers and removal, as for the system."""
    (tmp_path / "data" / "code").mkdir(parents=True)
    (tmp_path / "project").symlink_to(tmp_path / "data" / "code", target_is_directory=True)
    save_now(tmp_path / "x", holding(1.0))
    path = tmp_path / "project" / ".." / "x"
    save(path, holding(2.0))
    assert value_in(path) == value_in(tmp_path / "data" / "x") == 2.0
    assert nostall.verify(path).ok
    nostall.remove_checkpoint(path)
    assert not (tmp_path / "data" / "x").exists()
    assert value_in(tmp_path / "x") == 1.0


@pytest.mark.parametrize("path", ["..a/b..", ".../x", "a/./b//c", "a/../b/..c"])
def test_other_paths_are_those_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Dots in names are no directories."""
    monkeypatch.chdir(tmp_path)
    assert place_of(path) == os.path.abspath(path)
    assert place_of(f"/tmp/../{path}") == os.path.abspath(f"/{path}")


@SAVES
def test_a_link_to_nowhere_is_an_error(tmp_path: Path, save: Callable[..., None]) -> None:
    """It is not taken for a directory that is to be made."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "link", holding(1.0))
    (failure, _) = caught.value.failures[0]
    assert isinstance(failure, WriteError)
    assert failure.path == str(tmp_path / "link")
    assert not (tmp_path / "nowhere").exists()


@SAVES
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_what_a_name_leads_to_is_never_written_into(
    tmp_path: Path, save: Callable[..., None], link: Callable[[Path, Path], None]
) -> None:
    """Where a link of either kind has the name of a save's file, the file gets another name."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "precious").write_text("of somebody else")
    link(tmp_path / "precious", tmp_path / "saved" / "__0_0.distcp")
    save(tmp_path / "saved", holding(1.0))
    assert value_in(tmp_path / "saved") == 1.0
    assert (tmp_path / "precious").read_text() == "of somebody else"
    (name,) = {
        info.relative_path for info in read_metadata(tmp_path / "saved").storage_data.values()
    }
    assert name.startswith("__0_0-")
    mode = (tmp_path / "saved" / name).lstat()
    assert stat.S_ISREG(mode.st_mode)
    assert mode.st_nlink == 1


@SAVES
def test_a_relative_path_is_what_it_was_when_the_writer_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[..., None]
) -> None:
    """Although the trainer changes its directory, and the writer process has an earlier one."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    save(Path("saved"), holding(1.0))
    monkeypatch.chdir(tmp_path / "two")
    save(Path("saved"), holding(2.0))
    writer = FileSystemWriterAsync("third")
    monkeypatch.chdir(tmp_path)
    dcp.save(holding(3.0), storage_writer=writer)
    assert value_in(tmp_path / "one" / "saved") == 1.0
    assert value_in(tmp_path / "two" / "saved") == 2.0
    assert value_in(tmp_path / "two" / "third") == 3.0


def test_metadata_that_is_a_link_is_replaced_by_a_file(tmp_path: Path) -> None:
    """A save replaces the link itself; its target keeps its content."""
    save_now(tmp_path / "saved", holding(1.0))
    (tmp_path / "saved" / ".metadata").rename(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    (tmp_path / "saved" / ".metadata").symlink_to(tmp_path / "elsewhere")
    save_now(tmp_path / "saved", holding(2.0))
    assert not (tmp_path / "saved" / ".metadata").is_symlink()
    assert (tmp_path / "elsewhere").read_bytes() == before
    assert value_in(tmp_path / "saved") == 2.0
