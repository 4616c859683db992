"""Threads that are in torch when the interpreter ends: it waits for them.

A thread that comes from torch and takes the lock of an ended interpreter aborts the process, with
exit status -6. Two kinds of threads do: our daemon threads that call torch, such as its stores, and
those of gloo, which free the tensors of the last collectives a moment after the ranks have used
them. ``destroy_process_group()`` ends the latter only if nothing else, such as a model, has the
group.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

_log = logging.getLogger("nostall")

_AT_EXIT_TIMEOUT_S = 20.0
"""Enough to copy 100 GB and more; a thread that waits for something else is left behind then."""
_GLOO = "(pt_gloo_runloop)"
"""Name of the threads, since torch 2.6."""
_GLOO_TIMEOUT_S = 5.0
_LOOK_AGAIN_S = 0.002
"""A thread that waits for the interpreter lock gets it between two looks."""


class TorchThread(threading.Thread):
    """A daemon thread that an ending interpreter waits for, 20 s at most."""

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        super().__init__(target=run, name=name, daemon=True)


def _finish_at_exit() -> None:
    deadline_s = time.monotonic() + _AT_EXIT_TIMEOUT_S
    threads = [each for each in threading.enumerate() if isinstance(each, TorchThread)]
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    left = sorted(thread.name for thread in threads if thread.is_alive())
    if left:
        _log.warning("threads still run %g s after exit began: %s", _AT_EXIT_TIMEOUT_S, left)
    _await_gloo()


def _await_gloo() -> None:
    """Wait until gloo's threads have nothing to do: they sleep, at two looks."""
    deadline_s = time.monotonic() + _GLOO_TIMEOUT_S
    quiet = 0
    while quiet < 2 and (states := list(_states_of_gloo())) and time.monotonic() < deadline_s:
        quiet = quiet + 1 if set(states) == {"S"} else 0
        time.sleep(_LOOK_AGAIN_S)


def _states_of_gloo() -> Iterator[str]:
    """The scheduler's states of its threads; see proc(5)."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended meanwhile
            with open(f"/proc/self/task/{thread}/stat") as file:
                stat = file.read()
            if _GLOO in stat:
                yield stat[stat.rindex(")") + 2]


# Before the hooks of other modules, which import this: hooks run in reverse order.
atexit.register(_finish_at_exit)
