"""Daemon threads: storage may hang, and the interpreter has to exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from nostall._model.interrupts import uninterrupted


def spawn(name: str, work: Callable[[], object]) -> threading.Thread:
    """Run ``work`` on a new daemon thread; returns at once.

    Raises:
        RuntimeError: The system cannot start one, or the interpreter is ending.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    with uninterrupted():
        thread.start()
    return thread


def spawn_or_run(name: str, work: Callable[[], object]) -> threading.Thread | None:
    """Run ``work`` on a new daemon thread, or here if none can be started, as at exit.

    Returns:
        The thread, if there is one.
    """
    try:
        return spawn(name, work)
    except RuntimeError:
        work()
        return None


def work_together(
    work: Callable[[int], None],
    count: int,
    *,
    give_up: Callable[[], None],
    name: str = "nostall-io",
) -> None:
    """Do work on this thread and on others; returns when all have ended.

    Args:
        work: Called with 0 on this thread, and with 1, 2, ... on others; returns if there is
            nothing left to do.
        count: Number of threads. If the system allows fewer, those do the work.
        give_up: Called after an error of this thread; makes all return soon.
        name: Of the threads, followed by their numbers.
    """
    threads: list[threading.Thread] = []
    try:
        for number in range(1, count):
            try:
                threads.append(spawn(f"{name}-{number}", partial(work, number)))
            except RuntimeError:  # no more threads: those running do the work
                break
        work(0)
    except BaseException:  # passed on
        give_up()
        raise
    finally:
        for thread in threads:  # their memory is freed next
            thread.join()
