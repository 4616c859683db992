"""Make a background process give way to training."""

from __future__ import annotations

import psutil


def lower_priority(pid: int, cpu_priority: int | None, io_priority: int | None) -> None:
    """Set niceness and I/O class of a process.

    Silent where the system does not permit it (raising a niceness back needs rights): the save is the same either way.
    """
    try:
        process = psutil.Process(pid)
        if cpu_priority is not None:
            process.nice(cpu_priority)
        if io_priority is not None:
            process.ionice(io_priority)
    except (psutil.Error, OSError, ValueError):
        return
