"""Threads that read: they end with the load, whatever interrupts it, and keep nothing."""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from nostall._read.inflight import Workers
from nostall.errors import ReadError
from support.ranks import run_script
from support.waiting import SOON_S


def reading_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("nostall-read")]


class Interrupted(Exception):
    """By a signal that is not Ctrl-C."""


@contextmanager
def signalled_when(happens: Callable[[FrameType, str], bool], number: int) -> Iterator[None]:
    """SIGALRM, whose handler raises, when something happens for the ``number``-th time."""
    count = 0

    def look(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        if happens(frame, event):
            count += 1
            if count == number:
                signal.raise_signal(signal.SIGALRM)

    def raise_it(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, raise_it)
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGALRM, before)


def has_started(frame: FrameType, event: str) -> bool:
    return event == "return" and frame.f_code is threading.Thread.start.__code__


def submit_three(workers: Workers) -> None:
    for _ in range(3):
        workers.submit(lambda: None)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_thread_whose_start_was_interrupted_ends(number: int) -> None:
    """Though nobody has noted that it was started: by a time limit's alarm, or by SIGTERM."""
    with pytest.raises(Interrupted), Workers(3) as workers, signalled_when(has_started, number):
        submit_three(workers)
    for thread in reading_threads():  # it may be between its last task and its end
        thread.join(SOON_S)
    assert not reading_threads()


def test_ctrl_c_before_the_end_is_begun_does_not_keep_the_process(tmp_path: Path) -> None:
    """No line of Python can close this gap; so the interpreter's exit does not wait for threads."""
    done = run_script("programs/interrupted_workers.py", cwd=tmp_path, timeout_s=SOON_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "interrupted\n"


class Memory:
    """Something to be kept."""


def test_a_thread_that_waits_keeps_nothing() -> None:
    """Memory beside a target would stay until this thread reads again."""
    memory = Memory()
    kept = weakref.ref(memory)

    def use(memory: Memory = memory) -> None:
        assert memory is not None

    with Workers(1) as workers:
        task = workers.submit(use)
        workers.wait(task)
        del use, memory
        assert kept() is None


def test_what_cannot_have_all_threads_has_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on processes is no reason to fail, unless there is not even one."""
    start, left = threading.Thread.start, 2
    done: list[int] = []

    def start_two(thread: threading.Thread) -> None:
        nonlocal left
        if not left:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with Workers(4) as workers:
        for task in [workers.submit(lambda: done.append(1)) for _ in range(8)]:
            workers.wait(task)
        assert len(reading_threads()) == workers.threads == 2
    assert len(done) == 8
    with Workers(4) as workers, pytest.raises(ReadError, match="cannot start a thread to read"):
        workers.submit(lambda: None)
