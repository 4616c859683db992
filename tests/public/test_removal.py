"""Removing a checkpoint: all of it, and nothing else; crashes are in ``test_crash_consistency``."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import nostall
from nostall.errors import OptionError, WriteError
from nostall.filesystem_async import FileSystemWriterAsync
from support.permissions import without_permission
from support.ranks import run_python
from support.states import small_state


def saved(path: Path, writer: type[FileSystemWriter] = FileSystemWriterAsync) -> Path:
    dcp.save(small_state(1), storage_writer=writer(path, thread_count=3), no_dist=True)
    return path


@pytest.mark.parametrize("writer", [FileSystemWriterAsync, FileSystemWriter])
def test_a_checkpoint_is_removed_with_its_directory(
    tmp_path: Path, writer: type[FileSystemWriter]
) -> None:
    """Stock DCP's, too; a second call finds nothing to do."""
    nostall.remove_checkpoint(saved(tmp_path / "save", writer))
    assert os.listdir(tmp_path) == []
    nostall.remove_checkpoint(tmp_path / "save")


@pytest.mark.parametrize(
    ("gone", "more"),
    [
        ([".metadata"], []),
        ([".metadata", "__0_0.distcp"], ["__0.metadata", "__11.metadata"]),
        (["__0_1.distcp"], []),
    ],
)
def test_what_is_left_of_a_checkpoint_is_removed(
    tmp_path: Path, gone: list[str], more: list[str]
) -> None:
    """The rest of an interrupted removal, or of a damaged or an unfinished checkpoint."""
    path = saved(tmp_path / "save")
    for name in gone:
        (path / name).unlink()
    for name in (".metadata.tmp", ".0123abcd.metadata.tmp", *more):
        (path / name).touch()
    nostall.remove_checkpoint(str(path))
    assert os.listdir(tmp_path) == []


def test_files_of_others_stay(tmp_path: Path) -> None:
    """And the directory with them."""
    path = saved(tmp_path / "save")
    (path / "config.json").write_text("{}")
    nostall.remove_checkpoint(path)
    assert os.listdir(path) == ["config.json"]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    """A directory of other things, a file, a link however it is written, and no path stay."""
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "notes.txt").touch()
    saved(tmp_path / "another")
    (tmp_path / "link").symlink_to(tmp_path / "another")
    before = sorted(tmp_path.rglob("*"))
    for name in ("save", "save/notes.txt", "link", "link/", "link/."):
        with pytest.raises(OptionError) as caught:
            nostall.remove_checkpoint(f"{tmp_path}/{name}")
        assert str(caught.value.path).rstrip("/.") == f"{tmp_path}/{name}".rstrip("/.")
    for nothing in ("", "nowhere://bucket/checkpoint"):
        with pytest.raises(OptionError):
            nostall.remove_checkpoint(nothing)
    assert sorted(tmp_path.rglob("*")) == before


def test_metadata_that_cannot_be_removed_keeps_the_checkpoint(tmp_path: Path) -> None:
    """Nothing else is touched then, and the error says which file it is and why."""
    path = saved(tmp_path / "save")
    (path / ".metadata").unlink()
    (path / ".metadata").mkdir()
    with pytest.raises(WriteError) as caught:
        nostall.remove_checkpoint(path)
    assert (caught.value.phase, caught.value.errno) == ("remove", errno.EISDIR)
    assert caught.value.path == str(path / ".metadata")
    assert (path / "__0_0.distcp").exists()


def test_a_directory_that_may_not_be_removed_is_named(tmp_path: Path) -> None:
    """The checkpoint is gone all the same, and the error does not deny it."""
    path = saved(tmp_path / "root" / "save")
    with without_permission(tmp_path / "root", 0o555), pytest.raises(WriteError) as caught:
        nostall.remove_checkpoint(path)
    assert "the checkpoint is removed, but its empty directory stays" in str(caught.value)
    assert os.listdir(path) == []
    nostall.remove_checkpoint(path)
    assert not path.exists()


SWAP = """
import os, sys
import nostall

path, moved, another = sys.argv[1:]

def swap(event, arguments):
    if event in ("os.remove", "os.rmdir") and not os.path.lexists(moved) and EVENT == event:
        os.rename(path, moved)
        os.symlink(another, path)

EVENT = os.environ["SWAP_AT"]
sys.addaudithook(swap)
nostall.remove_checkpoint(path)
"""


@pytest.mark.parametrize("event", ["os.remove", "os.rmdir"])
def test_a_directory_that_becomes_a_link_meanwhile_does_not_lead_to_another(
    tmp_path: Path, event: str
) -> None:
    """Whatever has its name later, only what was looked at is removed."""
    path, another = saved(tmp_path / "save"), saved(tmp_path / "another")
    moved = tmp_path / "moved"
    ended = run_python("-c", SWAP, path, moved, another, timeout_s=60, SWAP_AT=event)
    assert nostall.verify(another).ok
    assert path.is_symlink()
    assert os.listdir(moved) == []
    assert "its empty directory stays" in ended.stderr
