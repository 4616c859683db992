"""Threads that are kept hold nothing of what they have done, and take what comes next."""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import Future

import pytest

from nostall._model.threads import run_apart
from nostall._storage.deadlines import in_time
from support.waiting import wait_until


class Memory:
    """Something to be kept."""


def thread_of(name: str) -> int:
    """The thread on which work of this name was done; the system gives numbers in turn."""
    done: Future[int] = Future()
    run_apart(name, lambda: done.set_result(threading.get_native_id()))
    return done.result(60)


def test_a_thread_keeps_nothing_of_what_it_has_done() -> None:
    """Neither the first piece of its work nor a later one, as a snapshot's memory would stay."""
    kept = []
    for _ in range(8):
        memory = Memory()
        kept.append(weakref.ref(memory))
        in_time(
            lambda memory=memory: repr(memory),  # type: ignore[misc]  # of a default
            timeout_s=60,
            doing="nothing",
            phase="test",
            path="",
        )
        del memory
    wait_until(lambda: all(each() is None for each in kept))


def test_a_thread_is_used_again_and_has_the_name_of_its_work() -> None:
    """Not one per call; and a debugger shows what it does."""
    threads = {thread_of("nostall-test") for _ in range(100)}
    assert len(threads) < 50
    names: Future[str] = Future()
    run_apart("nostall-named", lambda: names.set_result(threading.current_thread().name))
    assert names.result(60) == "nostall-named"


def test_work_on_a_kept_thread_may_give_work_to_others() -> None:
    """However many are under way at the same time: none waits for a free thread."""
    deepest = 12

    def nested(depth: int) -> int:
        if depth == 0:
            return 0
        return 1 + in_time(
            lambda: nested(depth - 1), timeout_s=60, doing="nothing", phase="test", path=""
        )

    assert nested(deepest) == deepest


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_none_of_them() -> None:
    """Its parent's threads do not run in it."""
    thread_of("nostall-test")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"." if thread_of("nostall-test") else b"")
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 1) == b"."
    os.close(reading)
    assert os.waitpid(child, 0)[1] == 0
