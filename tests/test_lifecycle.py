"""How a process ends that has saves under way: at its own end, at SIGTERM, with an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

import nostall
from ranks import TESTS, run_ranks
from states import blobs, schedule, small_state

PROGRAM = TESTS / "programs" / "endings.py"


def run(function: str, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A trainer that ends; nothing that it has started may be left."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), function, str(out), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert not [each for each in psutil.process_iter() if str(out) in " ".join(_command(each))]
    return done


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def saved(path: Path, seed: int) -> bool:
    expected = path.parent / f"expected {seed}"
    with nostall.AsyncCallsQueue() as queue:
        schedule(queue, expected, small_state(seed))
    return nostall.verify(path).ok and blobs(path) == blobs(expected)


@pytest.mark.parametrize(("how", "status"), [("returns", 0), ("raises", 1), ("exits", 3)])
def test_saves_that_are_pending_at_exit_are_completed(
    tmp_path: Path, how: str, status: int
) -> None:
    """However the script ends, and although nobody holds the queue any more; the exit status is the script's own."""
    done = run("ends", tmp_path, how)
    assert done.returncode == status
    assert "2 requests that are not finalised" in done.stderr
    assert ("the error in the body" in done.stderr) is (how == "raises")
    assert saved(tmp_path / "first", 1)
    assert saved(tmp_path / "second", 2)


def test_a_save_that_is_lost_at_exit_is_told_by_the_exit_status(tmp_path: Path) -> None:
    """And by a message; the one behind it is completed all the same, and what was printed is not lost."""
    done = run("ends", tmp_path, "returns", "fails")
    assert done.returncode == 1
    assert "lost at exit" in done.stderr
    assert "No space left" in done.stderr
    assert "the last line" in done.stdout
    assert not nostall.is_complete(tmp_path / "first")
    assert saved(tmp_path / "second", 2)


@pytest.mark.parametrize(("fault", "why"), [("hangs", "not done"), ("dies", "killed by SIGKILL")])
def test_a_writer_that_is_stuck_or_dead_does_not_keep_a_process_from_ending(
    tmp_path: Path, fault: str, why: str
) -> None:
    """It ends in bounded time, with status 1, and leaves nothing that looks like a checkpoint."""
    done = run("ends", tmp_path, "returns", fault)
    assert done.returncode == 1
    assert why in done.stderr
    assert nostall.latest_complete(tmp_path) is None


def test_ranks_complete_their_save_together_at_exit(tmp_path: Path) -> None:
    """Both are in the interpreter's end then."""
    run_ranks(2, "endings:ends_on_ranks", tmp_path, "together")
    assert nostall.verify(tmp_path / "first").damages == ()


@pytest.mark.parametrize("how", ["one without the others", "without a group"])
def test_a_rank_that_cannot_complete_its_save_at_exit_ends_with_an_error(
    tmp_path: Path, how: str
) -> None:
    """In bounded time: the other ranks are gone, or the process group is."""
    out = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(TESTS / "rank_main.py"), "endings:ends_on_ranks"),
            *(str(tmp_path), how),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert out.returncode != 0
    assert "lost at exit" in out.stderr
    assert not nostall.is_complete(tmp_path / "first")


@pytest.mark.parametrize("how", ["in time", "with a handler"])
def test_sigterm_finishes_what_is_scheduled(tmp_path: Path, how: str) -> None:
    """And then ends the process, or calls the handler that was there before."""
    done = run("gets_sigterm", tmp_path, how)
    assert saved(tmp_path / "save", 0)
    if how == "with a handler":
        assert (done.returncode, done.stdout) == (0, "training goes on [15] 0\n")
    else:
        assert (done.returncode, done.stdout) == (143, "")


def test_sigterm_ends_a_process_with_nothing_to_do_at_once(tmp_path: Path) -> None:
    """With the status that SIGTERM gives."""
    assert run("gets_sigterm", tmp_path, "with nothing to do").returncode == 143


def test_sigterm_ends_a_process_whose_save_does_not_end(tmp_path: Path) -> None:
    """When the grace period is over; the save is not committed."""
    done = run("gets_sigterm", tmp_path, "too late")
    assert done.returncode == 143
    assert not nostall.is_complete(tmp_path / "save")


def test_sigterm_on_one_rank_lets_all_finish_at_the_next_poll(tmp_path: Path) -> None:
    """Without any other communication; the rank that was asked ends, the other goes on."""
    first, second = run_ranks(2, "endings:gets_sigterm_on_ranks", tmp_path)
    assert first == {"ended": None, "polls": 1, "pending": 0}
    assert second == {"ended": 143, "polls": 1, "pending": 0}
    loaded = {"rank0": torch.zeros(1000), "rank1": torch.zeros(1000)}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path / "save", no_dist=True)
    assert all(bool((each == 1).all()) for each in loaded.values())
