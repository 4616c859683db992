"""One piece of work done by several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from nostall._model.interrupts import start


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
        give_up: Called after an error or an interrupt of this thread; makes all return soon.
        name: Of the threads, followed by their numbers.
    """
    threads = [
        # Daemons: storage may hang, and the interpreter has to exit.
        threading.Thread(target=work, args=(number,), name=f"{name}-{number}", daemon=True)
        for number in range(1, count)
    ]
    try:
        for thread in threads:
            try:
                start(thread)
            except RuntimeError:  # no more threads: those running do the work
                break
        work(0)
    except BaseException:  # a signal to this thread, in a synchronous save the trainer's
        give_up()
        raise
    finally:
        _join(threads)  # a thread that never started is not alive


def _join(threads: Iterable[threading.Thread]) -> None:
    """Return when no thread works any more, even if interrupted: their memory is freed next."""
    interrupt: BaseException | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:  # raised when no thread works any more
                interrupt = error
    if interrupt is not None:
        raise interrupt
