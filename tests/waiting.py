"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when it holds; that it does not within a minute is a failure."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def stands_in(thread: threading.Thread, function: Callable[..., Any]) -> bool:
    """Whether a thread has called a function that has not returned yet."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None
