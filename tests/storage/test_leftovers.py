"""Files that a killed job has left: a later save cannot know that nobody needs them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from nostall._storage.locations import is_address, storage_at
from programs.save_once import save
from support.object_store import S3Server, is_loaded
from support.ranks import run_script


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
        save(place, seed)
    there = names_at(place)
    killed = run_script("programs/save_once.py", place, "2", "report", cwd=tmp_path, timeout_s=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = names_at(place) - there
    assert left
    save(place, 3)
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
    save(str(place), 1)
    assert link.exists()
