"""The manager on storage that does not answer, or refuses to: typed errors, and nothing is lost."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import nostall
from nostall import CheckpointManager, KeepEvery, KeepLatest
from nostall._manager import steps
from nostall._manager.retention import Retention
from nostall._storage import posix
from nostall.errors import OptionError, ReadError, SaveTimeoutError
from nostall.integrity import Verification
from nostall.options import EngineOptions
from support.waiting import AwayOs, HangingOs, error_of, impatient, stands_in, wait_until


def numbered(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step))}


def saved(root: Path, *numbers: int) -> None:
    with CheckpointManager(root) as manager:
        for step in numbers:
            manager.save(step, numbered(step), metrics={"loss": 0.5})


def nobody_is_left() -> bool:
    """Whether all threads that storage has kept have ended."""
    left = ("nostall-storage", "nostall-retention")
    return not any(thread.name.startswith(left) for thread in threading.enumerate())


CALLS: dict[str, Callable[[CheckpointManager], object]] = {
    "save": lambda manager: manager.save(2, numbered(2)),
    "restore": lambda manager: manager.restore(numbered(0)),
    "restore one": lambda manager: manager.restore(numbered(0), step=1),
    "all_steps": lambda manager: manager.all_steps(),
    "latest_step": lambda manager: manager.latest_step(),
    "best_step": lambda manager: manager.best_step("loss"),
}


@pytest.mark.parametrize("what", CALLS)
def test_no_call_waits_for_storage_for_ever(tmp_path: Path, what: str) -> None:
    """It is an error that names the directory; when storage answers, the same manager goes on."""
    saved(tmp_path, 1)
    manager = CheckpointManager(tmp_path, metrics={"loss": "min"})
    storage = HangingOs("stat" if what == "restore one" else "listdir", str(tmp_path))
    with patch.object(posix, "os", storage), impatient():
        try:
            error = error_of(lambda: CALLS[what](manager))
        finally:
            storage.answer()
        wait_until(nobody_is_left)
    assert isinstance(error, SaveTimeoutError)
    assert error.path == str(tmp_path)
    assert "storage hangs" in str(error.hint)
    manager.save(2, numbered(2)).result()
    manager.close()
    assert manager.all_steps() == [1, 2]


def test_a_removal_that_hangs_keeps_the_step_from_being_saved(tmp_path: Path) -> None:
    """A late removal deletes the crashed save's files, never those of the save that is retried."""
    half = tmp_path / "step-000000002"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    manager = CheckpointManager(tmp_path)
    storage = HangingOs("unlink", half.name)
    with patch.object(posix, "os", storage), impatient():
        try:
            errors = [error_of(lambda: manager.save(2, numbered(2))) for _ in range(2)]
        finally:
            storage.answer()
    path = manager.save(2, numbered(2)).result(60)
    assert [type(error) for error in errors] == [SaveTimeoutError] * 2
    manager.close()
    assert nostall.verify(path).ok


def test_one_removal_runs_at_a_time(tmp_path: Path) -> None:
    """While it hangs, commits begin no other; a wait ends when all that they left is removed."""
    storage, here = HangingOs("unlink", "step-000000001"), threading.current_thread()

    def answer() -> None:
        wait_until(lambda: stands_in(here, Retention.wait))
        storage.answer()

    with patch.object(posix, "os", storage), CheckpointManager(tmp_path, keep=KeepLatest(1)) as it:
        for step in (1, 2, 3, 4):
            it.save(step, numbered(step)).result(60)
        removing = [each for each in threading.enumerate() if each.name == "nostall-retention"]
        left = it.all_steps()
        threading.Thread(target=answer).start()
        it.wait()
        assert it.all_steps() == [4]
    assert len(removing) == 1
    assert left[-3:] == [2, 3, 4]


def test_closing_does_not_wait_for_storage_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves are committed by then: a lock that cannot be released is a warning."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, numbered(1)).result(60)
    storage = HangingOs("close", steps.LOCK_NAME)
    with patch.object(steps, "os", storage), impatient():
        try:
            error = error_of(manager.close)
        finally:
            storage.answer()
        wait_until(nobody_is_left)
    assert error is None
    assert "the lock of the root was not released: storage did not answer" in caplog.text
    assert manager.all_steps() == [1]
    saved(tmp_path, 2)
    assert manager.all_steps() == [1, 2]


@pytest.mark.parametrize("operation", ["stat", "open"])
def test_a_job_does_not_begin_anew_while_storage_is_away(tmp_path: Path, operation: str) -> None:
    """A step that cannot be read at present is not taken for none; an older one is restored."""
    saved(tmp_path / "one", 2)
    saved(tmp_path / "two", 1, 2)
    state = numbered(0)
    storage = AwayOs(operation, "step-000000002/")
    with patch.object(posix, "os", storage):
        for step in (None, 2):
            with pytest.raises(ReadError, match=r"cannot be read.*step-000000002") as caught:
                CheckpointManager(tmp_path / "one").restore(state, step)
            assert caught.value.errno == errno.ESTALE
        restored = CheckpointManager(tmp_path / "two").restore(state)
    again = CheckpointManager(tmp_path / "two").restore(state)
    assert [each and each.step for each in (restored, again)] == [1, 2]


def test_a_root_that_is_a_file_is_a_typed_error(tmp_path: Path) -> None:
    """Every method that looks at the root raises ``ReadError``, the constructor ``OptionError``."""
    manager = CheckpointManager(tmp_path / "root", metrics={"loss": "min"})
    (tmp_path / "root").write_text("")
    for call in CALLS.values():
        with pytest.raises(ReadError):
            call(manager)
    manager.close()
    for root in (tmp_path / "root", tmp_path / "root" / "below"):
        with pytest.raises(OptionError, match=f"{tmp_path / 'root'} is a file"):
            CheckpointManager(root)


def test_what_cannot_be_removed_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither what policies do not keep nor what a crash has left; the next commit tries again."""
    (tmp_path / "step-000000002").mkdir(parents=True)
    (tmp_path / "step-000000002" / "__0_0.distcp").write_bytes(b"half")
    manager = CheckpointManager(tmp_path, keep=KeepLatest(1))
    with patch.object(steps, "remove_checkpoint", side_effect=OSError(5, "bad disk")):
        for step in (3, 4):
            manager.save(step, numbered(step)).result()
        manager._retention.wait(60)
        assert manager.all_steps() == [3, 4]
    assert caplog.text.count("bad disk") >= 2
    assert f"step 3 was not removed below {tmp_path}; the next commit tries again" in caplog.text
    manager.save(5, numbered(5)).result()
    manager.close()
    assert manager.all_steps() == [5]


def test_no_step_is_removed_while_storage_does_not_tell_its_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong time would let a policy remove what has to stay; the next commit looks again."""
    saved(tmp_path, 1, 2)
    with CheckpointManager(tmp_path, keep=KeepEvery(seconds=7000)) as manager:
        away = OSError(errno.EIO, os.strerror(errno.EIO))
        with patch("nostall._commit.commit.open_to_read", side_effect=away):
            manager.save(3, numbered(3))
            manager.wait()
        assert manager.all_steps() == [1, 2, 3]
        assert "steps were not removed" in caplog.text
        manager.save(4, numbered(4))
        manager.wait()
        assert manager.all_steps() == [1, 4]


def test_verification_has_no_deadline_of_storage(tmp_path: Path) -> None:
    """It reads for as long as the files are; undamaged steps are restored."""
    saved(tmp_path, 1)
    read = nostall.verify

    def slow(*arguments: Any, **options: Any) -> Verification:
        threading.Event().wait(0.5)
        return read(*arguments, **options)

    nostall.configure(EngineOptions(save_timeout_s=0.4))
    with patch("nostall.integrity.verify", slow):
        restored = CheckpointManager(tmp_path).restore(numbered(0), verify=True)
    assert restored is not None
    assert restored.step == 1
