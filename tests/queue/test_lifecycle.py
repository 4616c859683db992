"""How a process ends that has saves in progress: at its own end, at SIGTERM, with an error."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

import nostall
from nostall._queue import ending
from support.ranks import RanksFailed, on_ranks, run_ranks, run_script
from support.states import blobs, schedule, small_state
from support.waiting import wait_until


def run(function: str, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A trainer that ends; nothing that it has started may be left."""
    program = ("programs/endings.py", function, str(out), *arguments)
    done = run_script(*program, cwd=out, timeout_s=90, STARTED_FOR=str(out))
    wait_until(lambda: not any(was_started_for(out, each) for each in psutil.process_iter()))
    return done


def was_started_for(out: Path, process: psutil.Process) -> bool:
    """Whether it, or what has started it, was started by :func:`run`."""
    try:
        return process.environ().get("STARTED_FOR") == str(out)
    except psutil.Error:
        return False


def saved(path: Path, seed: int) -> bool:
    expected = path.parent / f"expected {seed}"
    with nostall.AsyncCallsQueue() as queue:
        schedule(queue, expected, small_state(seed))
    return nostall.verify(path).ok and blobs(path) == blobs(expected)


@pytest.mark.parametrize(("how", "status"), [("raises", 1), ("exits", 3)])
def test_saves_that_are_pending_at_exit_are_completed(
    tmp_path: Path, how: str, status: int
) -> None:
    """However the script ends, and even if its queue is gone; the exit status is its own."""
    done = run("ends", tmp_path, how)
    assert done.returncode == status
    assert "2 saves not committed yet" in done.stderr
    assert ("the error in the body" in done.stderr) is (how == "raises")
    assert saved(tmp_path / "first", 1)
    assert saved(tmp_path / "second", 2)


def test_the_exit_status_reports_a_save_that_is_lost_at_exit(tmp_path: Path) -> None:
    """And by a message; the next save is completed all the same, and no output is lost."""
    done = run("ends", tmp_path, "returns", "fails")
    assert done.returncode == 1
    assert "requests were lost at exit" in done.stderr
    assert "No space left" in done.stderr
    assert "the last line" in done.stdout
    assert not nostall.is_complete(tmp_path / "first")
    assert saved(tmp_path / "second", 2)


@pytest.mark.parametrize(
    ("fault", "why"), [("hangs", "did not finish"), ("dies", "killed by SIGKILL")]
)
def test_a_writer_that_is_stuck_or_dead_does_not_keep_a_process_from_ending(
    tmp_path: Path, fault: str, why: str
) -> None:
    """It ends in bounded time, with status 1, and leaves nothing that looks like a checkpoint."""
    done = run("ends", tmp_path, "returns", fault)
    assert done.returncode == 1
    assert why in done.stderr
    assert nostall.latest_complete(tmp_path) is None


@pytest.mark.parametrize("how", ["one without the others", "without a group"])
def test_a_rank_that_cannot_complete_its_save_at_exit_ends_with_an_error(
    tmp_path: Path, how: str
) -> None:
    """In bounded time: the other ranks are gone, or the process group is."""
    with pytest.raises(RanksFailed, match="requests were lost at exit"):
        run_ranks(2, "endings:ends_on_ranks", tmp_path, how, whole_end=True)
    assert not nostall.is_complete(tmp_path / "save")


@pytest.mark.parametrize(
    ("how", "status", "printed"),
    [("too late to ask", 1, ""), ("asked", 0, "CheckpointException\n")],
)
def test_a_failure_of_dcp_async_save_is_not_silent(
    tmp_path: Path, how: str, status: int, printed: str
) -> None:
    """The log says what and why; so does the status where no caller can ask the future."""
    done = run("ends_in_dcp", tmp_path, how)
    assert (done.returncode, done.stdout) == (status, printed)
    assert f"a save has failed: path={tmp_path / 'save'}" in done.stderr
    assert os.strerror(errno.ENOSPC) in done.stderr
    assert not nostall.is_complete(tmp_path / "save")


def test_queues_are_finished_in_the_same_order_on_all_ranks(tmp_path: Path) -> None:
    """At the interpreter's end, in the order of first requests: each has its own checkpoint."""
    run_ranks(
        2, "endings:queues_are_finished_in_the_same_order_on_all_ranks", tmp_path, whole_end=True
    )
    for number in range(6):
        assert nostall.verify(tmp_path / f"{number}").ok
        loaded = {"rank0": torch.zeros(9), "rank1": torch.zeros(9)}
        dcp.load(loaded, checkpoint_id=tmp_path / f"{number}", no_dist=True)
        assert all(bool((each == number).all()) for each in loaded.values())


@pytest.mark.parametrize(
    ("how", "status", "printed"),
    [
        ("at a poll", 143, []),
        ("with a handler", 0, ["handled [15]"]),
        ("without a poll", 143, []),
        ("from another thread", 143, ["finished 0"]),
        ("in a synchronous save", 143, []),
        ("after a failure", 1, []),  # with the exception that the queue raises
    ],
)
def test_sigterm_finishes_what_is_scheduled(
    tmp_path: Path, how: str, status: int, printed: list[str]
) -> None:
    """It then ends the process, or calls the earlier handler, whatever the process is doing."""
    done = run("gets_sigterm", tmp_path, how)
    assert (done.returncode, done.stdout.splitlines()) == (status, ["training goes on", *printed])
    assert saved(tmp_path / "save", 0)
    assert not nostall.is_complete(tmp_path / "lost")


def test_sigterm_ends_a_process_with_nothing_to_do_at_once(tmp_path: Path) -> None:
    """With the status that SIGTERM gives."""
    done = run("gets_sigterm", tmp_path, "with nothing to do")
    assert (done.returncode, done.stdout) == (143, "")
    assert "finishing" not in done.stderr


@pytest.mark.parametrize(
    ("how", "status"), [("returns", 0), ("exits", 0), ("raises", 1), ("raises in a block", 1)]
)
def test_a_program_that_ends_by_itself_after_sigterm_has_lost_nothing(
    tmp_path: Path, how: str, status: int
) -> None:
    """Its save is committed, nothing is said to be lost, and the exit status is its own."""
    done = run("gets_sigterm", tmp_path, how)
    assert done.returncode == status
    assert "SystemExit" not in done.stderr
    assert "lost" not in done.stderr
    assert ("a worker got the signal" in done.stderr) is ("raises" in how)
    assert saved(tmp_path / "save", 0)


def test_sigterm_at_any_moment_of_close_and_of_the_end_loses_nothing(tmp_path: Path) -> None:
    """Nor is anything said to be lost. ``NOSTALL_TEST_MOMENTS`` makes them more than a sample."""
    moments = int(os.environ.get("NOSTALL_TEST_MOMENTS", "10"))
    step = 4000 // moments
    done = run("gets_sigterm_at", tmp_path, "1", f"{moments}", f"{step}")
    ended = [line.split() for line in done.stdout.splitlines()]
    assert len(ended) == moments, done.stderr
    assert {status for _, status in ended} <= {"0", "143"}
    for word in ("lost", "Traceback", "SystemExit"):
        assert word not in done.stderr
    for number in range(moments):
        assert nostall.verify(tmp_path / f"{number}" / "closed").ok
        assert number % 2 == 0 or nostall.verify(tmp_path / f"{number}" / "left").ok


@pytest.mark.parametrize(
    "how", ["in a block", "at exit", "slow to give up", "several are pending", "asked twice"]
)
def test_sigterm_ends_a_process_whose_save_does_not_end(tmp_path: Path, how: str) -> None:
    """After the grace period, with SIGTERM's status whatever fails before; nothing is committed."""
    done = run("gets_sigterm_too_late", tmp_path, how)
    assert done.returncode == 143
    assert not nostall.is_complete(tmp_path / "save")


def test_a_forked_child_was_not_asked_to_end(tmp_path: Path) -> None:
    """It can be ended by SIGTERM as any process."""
    done = run("forks_when_asked", tmp_path)
    assert (done.returncode, done.stdout) == (143, "-15\n")
    assert saved(tmp_path / "save", 0)


def test_an_interrupted_synchronous_save_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    """Its threads use memory that is given back, and names that the next save uses."""
    done = run("is_interrupted", tmp_path)
    assert (done.returncode, done.stdout) == (0, "interrupted 20\n"), done.stderr
    assert nostall.verify(tmp_path / "save").ok
    loaded = {"t": torch.zeros(4 << 20, dtype=torch.int64)}
    dcp.load(loaded, checkpoint_id=tmp_path / "save", no_dist=True)
    assert torch.equal(loaded["t"], torch.arange(4 << 20) + 20)


class _Refusing:
    """A queue whose finalising fails at once, whatever is tried."""

    pending = 2
    is_distributed = False
    tried = 0

    def _finalize(self, *, until_s: float) -> object:
        del until_s
        self.tried += 1
        raise RuntimeError("Connection closed by peer")

    def close(self, *, abort: bool) -> None: ...


def test_what_fails_at_once_is_not_tried_for_minutes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And its cause is reported."""
    ended: list[int] = []
    queue = _Refusing()
    monkeypatch.setattr(ending, "end_process", ended.append)
    monkeypatch.setattr(ending, "unfinished_queues", {queue: None})
    ending.finish_all_at_exit()
    assert (queue.tried, ended) == (1, [1])
    assert "Connection closed by peer" in caplog.text


@on_ranks("endings:a_poll_does_not_wait_for_ranks_that_poll_later")
def test_a_poll_does_not_wait_for_ranks_that_poll_later(found: list[Any]) -> None:
    """The next poll has their answer."""
    assert found[0]


@on_ranks("endings:a_second_ctrl_c_leaves_the_wait_for_other_ranks")
def test_a_second_ctrl_c_leaves_the_wait_for_other_ranks(found: list[Any]) -> None:
    """The first one is raised when the ranks have finalised together."""
    assert found == ["the wait", "nothing"]


def test_a_rank_ends_though_another_one_never_answers(tmp_path: Path) -> None:
    """With its error, so that the launcher ends the one that hangs."""
    program = "endings:one_raises_after_a_poll_while_the_other_hangs"
    with pytest.raises(RanksFailed, match="ValueError: the error in the loop") as failed:
        run_ranks(2, program, tmp_path, timeout_s=60, whole_end=True)
    assert "were not done after" not in str(failed.value)
    assert "waiting up to" not in str(failed.value)
    assert not nostall.is_complete(tmp_path / "save")


@on_ranks("endings:sigterm_on_one_rank_lets_all_finish_within_two_polls")
def test_sigterm_on_one_rank_lets_all_finish_within_two_polls(found: list[Any]) -> None:
    """Without any other communication; the rank that was asked ends, the other goes on."""
    finished = {"polls": 2, "pending": 0, "ok": True}
    assert found == [{"ended": None, **finished}, {"ended": 143, **finished}]


def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    """Some kills of trainers and writers at random moments; ``nox -s soak`` makes a thousand."""
    done = run_script("stress/soak.py", "--kills", "8", cwd=tmp_path, timeout_s=110)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])  # older Gloo says there that it is connected
    assert counted["kills"] == 8
    assert counted["commits"] > 8
    assert counted["checkpoints checked"] > 8
