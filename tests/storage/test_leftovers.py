"""Files that a killed job has left: removed by the next save, if nobody else can need them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from nostall._storage.places import is_address, storage_at
from nostall.core import AsyncCallsQueue
from nostall.errors import OptionError
from nostall.filesystem_async import FileSystemWriterAsync
from programs.save_once import save
from support.object_store import S3Server, is_loaded
from support.ranks import run_script
from support.states import schedule, small_state
from support.waiting import wait_until

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


def save_in_another_process(place: str, seed: int, *how: str, cwd: Path) -> None:
    done = run_script("programs/save_once.py", place, str(seed), *how, cwd=cwd, timeout_s=60)
    assert done.returncode == (-signal.SIGKILL if "report" in how else 0), done.stderr


@pytest.mark.parametrize("before", [(), (1,)], ids=["first save", "over a checkpoint"])
@pytest.mark.parametrize("how", [(), ("exclusive",)], ids=["one of many", "exclusive"])
def test_whole_files_of_a_job_that_was_killed(
    place: str, tmp_path: Path, before: tuple[int, ...], how: tuple[str, ...]
) -> None:
    """They may be of another job's save, which is about to commit: only the user knows."""
    for seed in before:
        save(place, seed)
    there = names_at(place)
    save_in_another_process(place, 2, "report", cwd=tmp_path)
    left = names_at(place) - there
    assert left
    newest_s = max(storage_at(place).stat(name).changed_s for name in left)
    wait_until(lambda: time.time() > newest_s + ROUNDED_S)
    save_in_another_process(place, 3, *how, cwd=tmp_path)
    assert len(names_at(place)) == (2 if how else 2 + len(left))
    assert is_loaded(place, 3)


def test_an_exclusive_save_leaves_later_ones_of_its_job_alone(place: str) -> None:
    """They may be under way when it is committed, and need their files."""
    with AsyncCallsQueue() as queue:
        for seed in (1, 2, 3):
            schedule(queue, place, small_state(seed), exclusive=True)
        queue.wait()
    assert len(names_at(place)) == 2


@pytest.mark.parametrize("how", [(), ("exclusive",)], ids=["one of many", "exclusive"])
def test_a_link_to_an_old_file_is_a_young_file(tmp_path: Path, how: tuple[str, ...]) -> None:
    """As those of frozen items, in a save that another process is about to commit."""
    place, old = tmp_path / "saved", tmp_path / "old"
    old.write_bytes(b"frozen")
    os.utime(old, (1e9, 1e9))
    place.mkdir()
    link = place / "__3_0-89abcdef.distcp"
    os.link(old, link)
    save(str(place), 1, exclusive=bool(how))
    assert link.exists()


def test_exclusive_is_a_switch(tmp_path: Path) -> None:
    """Not a text, which would be true."""
    with pytest.raises(OptionError, match="exclusive='no'"):
        FileSystemWriterAsync(tmp_path, exclusive="no")  # type: ignore[arg-type]  # the error
