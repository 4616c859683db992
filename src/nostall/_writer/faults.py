"""Injected faults, for tests: an error, a death, a pause or a delay at a named point of a write.

A fault is plain data in the job. Points are ``start``, ``open``, ``chunk``, ``fsync`` and
``report``, in the trainer ``stage``, and in the coordinator ``commit`` and ``publish``. ``file``
limits a fault to shard files whose name contains it, ``after`` skips that many passages, ``times``
ends it after so many.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any


class Faults:
    """The faults of one job; thread-safe, and without cost if there are none."""

    def __init__(self, faults: Sequence[Mapping[str, Any]]) -> None:
        self._faults = tuple(faults)
        self._passages = [0] * len(self._faults)
        self._lock = threading.Lock()

    def at(self, point: str, file: str = "") -> None:
        """Pass a named point and trigger the faults set there.

        Raises:
            OSError: The fault has an errno.
            RuntimeError: The fault asks for an ordinary exception.
        """
        for position, fault in enumerate(self._faults):
            if fault["point"] != point or fault.get("file", "") not in file:
                continue
            with self._lock:
                self._passages[position] += 1
                number = self._passages[position] - fault.get("after", 0)
                due = 0 < number <= fault.get("times", number)
            if due:
                _trigger(fault, file)


def _trigger(fault: Mapping[str, Any], file: str) -> None:
    match fault["do"]:
        case "errno":
            raise OSError(fault["errno"], os.strerror(fault["errno"]), file or None)
        case "raise":
            raise RuntimeError(fault["message"])
        case "exit":
            os._exit(fault["code"])
        case "kill":
            signal.raise_signal(fault["signal"])  # delivered before this thread continues
        case "delay":
            time.sleep(fault["seconds"])
        case "hold":
            with suppress(OSError):  # the test may have ended, with its pipes or without
                _hold(fault["reached"], fault["go"])
        case other:
            raise ValueError(f"unknown fault {other!r}")


def _hold(reached: str, go: str) -> None:
    """A pause without a clock: writes one byte when it begins, ends when one byte arrives."""
    # Before the byte is written, as the test may end right after it.
    go_fd = os.open(go, os.O_RDONLY | os.O_NONBLOCK)
    try:
        reached_fd = os.open(reached, os.O_WRONLY | os.O_NONBLOCK)
        os.write(reached_fd, b"1")
        os.close(reached_fd)
        os.set_blocking(go_fd, True)
        os.read(go_fd, 1)  # also ends when the test does, with its pipe
    finally:
        os.close(go_fd)
