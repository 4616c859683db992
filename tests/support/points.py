"""Faults at points of a save: in any process, as this module imports nothing of nostall's."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


class Planned:
    """One fault, as often as its plain form says; thread-safe.

    ``file`` limits it to shard files whose name contains that, ``after`` skips so many passages,
    ``times`` ends it after so many.
    """

    def __init__(self, plain: Mapping[str, Any]) -> None:
        self._plain = plain
        self._passages = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Planned], tuple[Mapping[str, Any]]]:
        """Each save counts its own passages."""
        return Planned, (self._plain,)

    def at(self, point: str, file: str) -> None:
        plain = self._plain
        if plain["point"] != point or plain.get("file", "") not in file:
            return
        with self._lock:
            self._passages += 1
            number = self._passages - plain.get("after", 0)
            due = 0 < number <= plain.get("times", number)
        if due:
            _trigger(plain, file)


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
