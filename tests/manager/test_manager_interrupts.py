"""Ctrl-C in a call of the manager: it goes on, and what it says agrees with the disk."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as the module that is tested
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import nostall
from nostall import CheckpointManager, KeepLatest
from nostall._model.threads import (
    interruptible,
    is_done,
    is_uninterrupted,
    uninterrupted,
)
from nostall.manager import SaveHandle
from support.faults import Hold, inject
from support.interrupts import calls_ours, interrupt_the_wait, interrupted, takes_a_lock
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("python_handles_ctrl_c")


def state(step: int) -> dict[str, Any]:
    return {f"weight{number}": torch.full((500,), float(step)) for number in range(20)}


def require_agreement(
    manager: CheckpointManager, root: Path, handles: list[SaveHandle], step: int
) -> None:
    """The next save works; every handle says what is on disk, and nothing else is there."""
    manager.wait()
    handles.append(manager.save(step, state(step)))
    manager.wait()
    for handle in handles:
        assert handle.done
        if (Path(handle.path) / ".metadata").exists():
            assert nostall.verify(handle.result()).ok
        else:
            assert "failed" in repr(handle)
    assert step in manager.all_steps()
    wait_until(lambda: nostall.status() == ())  # of saves that were committed just now
    left = [path for path in root.glob("step-*") if not (path / ".metadata").exists()]
    assert [path for path in left if list(path.iterdir())] == []


def test_a_signal_at_any_call_of_a_save_leaves_a_working_manager(tmp_path: Path) -> None:
    """While an earlier save is in progress; the interrupted one is committed, or leaves nothing."""
    with CheckpointManager(tmp_path / "counted") as manager:
        manager.save(1, state(1)).result()
        with interrupted(0, calls_ours) as calls:
            manager.save(2, state(2))
    (total,), interrupts = calls, 0
    assert total > 50
    manager = CheckpointManager(tmp_path / "root")
    handles = [manager.save(1, state(1))]
    for number, at in enumerate(range(1, total, total // 20)):
        step = 10 * number + 10
        handles.append(manager.save(step, state(step)))
        try:
            with interrupted(at, calls_ours):
                handles.append(manager.save(step + 1, state(step + 1)))
        except KeyboardInterrupt:
            interrupts += 1
        require_agreement(manager, tmp_path / "root", handles[-3:], step + 2)
    assert interrupts >= 10
    manager.close()


@pytest.mark.parametrize("call", [CheckpointManager.poll, CheckpointManager.wait])
def test_a_signal_inside_of_a_future_leaves_no_lock_taken(
    tmp_path: Path, call: Callable[[CheckpointManager], None]
) -> None:
    """The thread that settles it would wait for ever, and the save would never end."""
    manager = CheckpointManager(tmp_path)
    number, taken = 0, [0]
    while taken[0] >= number:
        number += 1
        step = 10 * number
        with Hold("fsync") as hold, inject(hold.fault):
            handles = [manager.save(step, state(step))]
            hold.wait_reached()
            releasing = threading.Thread(target=hold.release)
            releasing.start()
            with suppress(KeyboardInterrupt), interrupted(number, takes_a_lock) as taken:
                call(manager)
            releasing.join()
        require_agreement(manager, tmp_path, handles, step + 1)
    assert number > 1
    manager.close()


def test_a_signal_while_a_step_is_removed(tmp_path: Path) -> None:
    """The removal goes on, and the next call waits for it."""
    manager = CheckpointManager(tmp_path, keep=KeepLatest(1))
    step, taken = 0, [0]
    while taken[0] >= step:
        step += 1
        manager.save(step, state(step))
        wait_until(lambda: all(each.state == "written" for each in nostall.status()))
        with suppress(KeyboardInterrupt), interrupted(step, takes_a_lock) as taken:
            manager.wait()
        manager.wait()
        assert manager.all_steps() == [step]
    assert step > 1
    manager.close()


def test_a_signal_waits_for_the_end_of_a_block() -> None:
    """That of the outermost, however often it comes, or of the one in a user's function."""
    reached: list[str] = []
    handler = signal.getsignal(signal.SIGINT)

    def run_in(outer: AbstractContextManager[None]) -> None:
        with outer:
            with uninterrupted():
                for _ in range(3):
                    signal.raise_signal(signal.SIGINT)
                reached.append("the block")
            reached.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        run_in(uninterrupted())
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        run_in(interruptible())
    assert reached == ["the block", "the rest", "the block"]
    assert signal.getsignal(signal.SIGINT) is handler
    assert not is_uninterrupted()


def test_a_second_signal_interrupts_a_finalize_function() -> None:
    """It may be a user's, and never return; the first one waits until it does."""
    reached = []

    def finalize() -> None:
        for number in range(2):
            signal.raise_signal(signal.SIGINT)
            reached.append(number)

    with nostall.AsyncCallsQueue() as queue:
        queue.schedule_async_request(nostall.AsyncRequest(None, [], [finalize]))
        with pytest.raises(KeyboardInterrupt):
            queue.wait()
        assert queue.pending == 0
    assert reached == [0]


@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize("comes", ["before the wait", "in the wait"])
def test_a_wait_is_interrupted(patience: int, comes: str) -> None:
    """At once, or by a second signal while something is completed; a wait behind it is whole."""
    never: Future[None] = Future()

    def wait() -> None:
        with uninterrupted(patience=patience):
            try:
                if comes == "before the wait":
                    for _ in range(patience):
                        signal.raise_signal(signal.SIGINT)
                else:
                    interrupt_the_wait(patience)
                is_done(never, 60.0)
            finally:
                assert not is_done(never, 0.1)

    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert time.monotonic() - began_s < 30


def test_signals_while_a_step_becomes_a_committed_one(tmp_path: Path) -> None:
    """The handle says that it is committed, whatever interrupts the call."""

    class Noted(list[int]):
        def append(self, step: int) -> None:
            super().append(step)
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

    manager = CheckpointManager(tmp_path)
    handle = manager.save(1, state(1))
    manager._retention.own = Noted()
    with suppress(KeyboardInterrupt):
        manager.wait()
    manager.wait()
    assert manager.all_steps() == [1]
    assert handle.result() == manager.path(1)
    manager.close()


def test_blocks_are_known_where_sigint_is_ignored() -> None:
    """A job that a shell has put into the background ignores it; SIGTERM must not raise there."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            assert is_uninterrupted()
        assert not is_uninterrupted()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_while_a_block_begins_leaves_the_handler_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The block may begin in a user's function that a framework runs without one."""
    handler, real = signal.getsignal(signal.SIGINT), _signal.signal

    def install(number: int, function: Any) -> Any:
        found = real(number, function)
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(_signal, "signal", install)
    with pytest.raises(KeyboardInterrupt), interruptible(), uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is handler
    assert not is_uninterrupted()
