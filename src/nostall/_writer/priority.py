"""Make a background process give way to training."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def lower_priority(pid: int, cpu_priority: int | None, io_priority: int | None) -> None:
    """Set niceness and I/O class of a process, that is, of each of its threads.

    On Linux both belong to threads, and a new thread has those of the one that made it; so this looks again until it
    finds no thread that it has not seen. Silent where the system does not permit it (raising a niceness back needs
    rights): the save is the same either way.
    """
    done: set[int] = set()
    with suppress(OSError, ValueError, psutil.Error):
        while new := {int(name) for name in os.listdir(f"/proc/{pid}/task")} - done:
            for thread in sorted(new):
                _lower_thread(thread, cpu_priority, io_priority)
            done |= new


def _lower_thread(thread: int, cpu_priority: int | None, io_priority: int | None) -> None:
    with suppress(OSError, ValueError, psutil.Error):
        if cpu_priority is not None:
            os.setpriority(os.PRIO_PROCESS, thread, cpu_priority)
        if io_priority is not None:
            psutil.Process(thread).ionice(io_priority)
