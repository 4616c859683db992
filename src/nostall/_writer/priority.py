"""Lower the priority of a background process below training."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def lower_priority(pid: int, cpu_priority: int | None, io_priority: int | None) -> None:
    """Set niceness and I/O class of each thread of a process.

    On Linux both are per thread, and a new thread inherits those of its creator; so the threads are
    listed again until no new one appears. Errors are ignored (raising a priority needs privileges):
    the save is the same either way.
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
