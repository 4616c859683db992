"""Threads that are in torch when the interpreter ends: it waits for them.

A thread of ours that comes back from torch, such as from its stores, and takes the lock of an ended
interpreter aborts the process, with exit status -6.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future

from nostall._model.interrupts import is_done, uninterrupted
from nostall._model.threads import spawn

_log = logging.getLogger("nostall")

_AT_EXIT_TIMEOUT_S = 20.0
"""Enough to copy 100 GB and more; a thread that waits for something else is left behind then."""
_under_way: dict[Future[None], str] = {}
"""What an ending interpreter waits for, with the names of the threads."""


def spawn_in_torch(name: str, work: Callable[[], object]) -> Future[None]:
    """Run ``work`` on a daemon thread; an ending interpreter waits for its end, 20 s at most.

    Returns:
        Done when the work has ended, and references to it are dropped.

    Raises:
        RuntimeError: The system cannot start a thread.
    """
    ended: Future[None] = Future()
    only = [work]  # dropped when it is called: its tensors are freed before the end is known
    del work

    def run() -> None:
        try:
            only.pop()()
        finally:
            _under_way.pop(ended, None)
            ended.set_result(None)

    with uninterrupted():  # what has begun is waited for
        _under_way[ended] = name
        try:
            spawn(name, run)
        except RuntimeError:  # passed on; it has not begun
            _under_way.pop(ended, None)
            raise
    return ended


def _finish_at_exit() -> None:
    deadline_s = time.monotonic() + _AT_EXIT_TIMEOUT_S
    under_way = dict(_under_way)
    left = sorted(
        name
        for ended, name in under_way.items()
        if not is_done(ended, max(0.0, deadline_s - time.monotonic()))
    )
    if left:
        _log.warning("threads still run %g s after exit began: %s", _AT_EXIT_TIMEOUT_S, left)


# Before the hooks of other modules, which import this: hooks run in reverse order.
atexit.register(_finish_at_exit)
os.register_at_fork(after_in_child=_under_way.clear)
