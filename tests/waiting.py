"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

DEADLINE_S = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when it holds; that it does not within a minute is a failure."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()
