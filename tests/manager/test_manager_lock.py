"""Two jobs below one root: the second one is told, and nothing stops a job that restarts."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from pathlib import Path
from threading import enumerate as enumerate_threads
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from nostall import CheckpointManager
from nostall._manager import steps
from nostall._manager.steps import LOCK_NAME, RootLock
from nostall.errors import OptionError
from support import loaded
from support.faults import Hold, inject
from support.ranks import run_python
from support.waiting import wait_until

DEADLINE_S = 60
STATE = {"weight": torch.ones(3)}
OTHER_JOB = """
import os, sys, torch, nostall
manager = nostall.CheckpointManager(sys.argv[1])
manager.save(1, {"weight": torch.ones(3)}).result()
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def locks_held(root: Path) -> list[str]:
    """Lock files of a root that this process has open, removed ones included."""
    opened = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return [path for path in opened if path.startswith(str(root / LOCK_NAME))]


@contextmanager
def started(program: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process, and the id that it prints; it ends with its standard input."""
    command = [*loaded.python(), "-c", program, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())


def other_job(root: Path) -> AbstractContextManager[tuple[subprocess.Popen[bytes], int]]:
    """A job that has saved, and saves no more."""
    return started(OTHER_JOB, str(root))


def is_told_of_this_process(root: Path) -> bool:
    """Whether another job, which saves below the root, learns that this process does."""
    run = run_python("-c", OTHER_JOB, root, timeout_s=DEADLINE_S)
    return f"another process saves below this root: pid {os.getpid()}" in run.stderr


def test_a_second_job_is_an_error_until_the_first_is_killed(tmp_path: Path) -> None:
    """It may restore, though; the error names the process. Its lock dies with it."""
    with other_job(tmp_path) as (_, pid):
        manager = CheckpointManager(tmp_path, save_every=1000)  # told long before that
        assert manager.restore(dict(STATE)) is not None
        for call in (lambda: manager.save(2, STATE), lambda: manager.should_save(1)):
            with pytest.raises(OptionError, match=f"another process saves .* pid {pid}"):
                call()
        os.kill(pid, signal.SIGKILL)
    manager.save(2, STATE)
    manager.close()
    assert sorted(os.listdir(tmp_path)) == [LOCK_NAME, "step-000000001", "step-000000002"]


def test_managers_of_one_process_share_the_lock(tmp_path: Path) -> None:
    """By any name of the root, until the last is closed; reading or copying it changes nothing."""
    root, alias = tmp_path / "root", tmp_path / "alias"
    root.mkdir()
    alias.symlink_to(root)
    first, *others = (CheckpointManager(each) for each in (root, root, alias))
    for step, manager in enumerate((first, *others)):
        manager.save(step, STATE).result()
    for manager in others:
        manager.close()
    (root / LOCK_NAME).read_bytes()
    shutil.copytree(root, tmp_path / "copy")
    assert is_told_of_this_process(root)
    first.close()
    with other_job(root):
        assert not locks_held(root)


@pytest.mark.parametrize("point", ["open", "fsync"])
def test_a_save_of_another_manager_is_not_taken_for_an_interrupted_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, point: str
) -> None:
    """A manager does not remove another manager's unfinished save, even before its first file."""
    with CheckpointManager(tmp_path) as first, Hold(point) as hold:
        with inject(hold.fault):
            first.save(1, STATE)
        hold.wait_reached()
        there = os.listdir(tmp_path / "step-000000001")
        assert ("__0_0.distcp" in there) == (point == "fsync")
        with CheckpointManager(tmp_path) as second:
            second.save(2, STATE)
            wait_until(
                lambda: "nostall-retention" not in map(attrgetter("name"), enumerate_threads())
            )
            assert os.listdir(tmp_path / "step-000000001") == there
            hold.release()
        first.wait()
        assert first.all_steps() == [1, 2]
    assert "interrupted save or removal" not in caplog.text


LINKS: dict[str, Callable[[Path, Path], None]] = {
    "symbolic link": lambda link, notes: link.symlink_to(notes),
    "hard link": lambda link, notes: link.hardlink_to(notes),
    "broken link": lambda link, notes: link.symlink_to(notes.parent / "elsewhere"),
    "FIFO": lambda link, notes: os.mkfifo(link),
}


@pytest.mark.parametrize("kind", LINKS)
def test_what_another_name_leads_to_is_not_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Saves are made; a warning says that the root is not locked."""
    root, notes = tmp_path / "root", tmp_path / "notes"
    root.mkdir()
    notes.write_text("of the user")
    link = root / LOCK_NAME
    LINKS[kind](link, notes)
    before = link.lstat()
    with CheckpointManager(root) as manager:
        manager.save(1, STATE).result()
    assert notes.read_text() == "of the user"
    assert not (tmp_path / "elsewhere").exists()
    assert os.path.samestat(link.lstat(), before)
    assert f"root={root} cannot be locked" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("owner", [0, 12345])
def test_a_lock_file_of_another_user_is_not_written_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, owner: int
) -> None:
    """Unless that user owns the root: as whom the file system sees this process."""
    os.chown(tmp_path, owner, -1)
    (tmp_path / LOCK_NAME).touch()
    os.chown(tmp_path / LOCK_NAME, 12345, -1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE).result()
        assert bool((tmp_path / LOCK_NAME).read_bytes()) == (owner == 12345)
    assert ("cannot be locked: .nostall.lock is a link or another" in caplog.text) == (owner == 0)


def test_a_child_that_outlives_its_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Such as a forked worker of a data loader, after SIGKILL of the trainer."""
    program = f"""
import os, signal, sys, torch, nostall
manager = nostall.CheckpointManager({str(tmp_path)!r})
manager.save(1, {{"weight": torch.ones(3)}}).result()
if os.fork() == 0:
    print(os.getppid(), flush=True)
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""
    with started(program) as (job, pid):
        os.kill(pid, signal.SIGKILL)
        job.wait()
        with CheckpointManager(tmp_path, save_every=1) as manager:
            assert manager.should_save(2)


def test_a_forked_child_has_no_locks(tmp_path: Path) -> None:
    """Closing the manager there neither waits for a thread of the parent nor ends its lock."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, STATE).result()
    with RootLock._changing:
        child = os.fork()
        if child == 0:
            signal.alarm(DEADLINE_S)
            try:
                manager.close()
            except BaseException:  # this process must not go on with the tests
                os._exit(1)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert is_told_of_this_process(tmp_path)
    manager.close()


def locking_raises(error: OSError) -> AbstractContextManager[object]:
    """For the lock of a root, not for other users of ``flock``."""
    refusing = SimpleNamespace(LOCK_EX=0, LOCK_NB=0, flock=Mock(side_effect=error))
    return patch.object(steps, "fcntl", refusing)


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So is a lock of another machine, which may have crashed."""
    with (
        locking_raises(OSError(errno.ENOLCK, "No locks available")),
        CheckpointManager(tmp_path) as manager,
    ):
        manager.save(1, STATE)
    assert "cannot be locked: No locks available" in caplog.text
    (tmp_path / ".nostall.lock").write_text("123 elsewhere\n")
    with (
        locking_raises(BlockingIOError(errno.EAGAIN, "held")),
        CheckpointManager(tmp_path) as manager,
    ):
        manager.save(2, STATE)
    assert "process 123 on elsewhere has locked" in caplog.text
    assert CheckpointManager(tmp_path).all_steps() == [1, 2]


def test_a_closed_manager_saves_no_more(tmp_path: Path) -> None:
    """Another job may have the root; looking at steps and restoring them need no lock."""
    with CheckpointManager(tmp_path, save_every=1) as manager:
        manager.save(1, STATE)
    for call in (
        lambda: manager.save(2, STATE),
        lambda: manager.should_save(2),
        lambda: manager.discard_after(1),
    ):
        with pytest.raises(OptionError, match="the manager is closed"):
            call()
    manager.close()
    assert manager.all_steps() == [1]
    assert manager.restore(dict(STATE)) is not None


def test_a_root_that_was_made_again_is_locked_for_all_its_managers(tmp_path: Path) -> None:
    """Until the last of them is closed; no descriptor is left."""
    root = tmp_path / "root"
    before, after = CheckpointManager(root), CheckpointManager(root)
    before.save(1, STATE).result()
    shutil.rmtree(root)
    after.save(1, STATE).result()
    before.close()
    assert is_told_of_this_process(root)
    after.close()
    assert not locks_held(root)
    assert run_python("-c", OTHER_JOB, root, timeout_s=DEADLINE_S).returncode == 0
