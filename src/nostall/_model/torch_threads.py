"""Daemon threads that call torch, such as its stores: the interpreter ends after them.

Returning from torch to an ended interpreter aborts the process, with exit status -6. An executor's
thread would be waited for without a limit.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger("nostall")

_AT_EXIT_TIMEOUT_S = 20.0
"""Enough to copy 100 GB and more; a thread that waits for something else is left behind then."""


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


# Before the hooks of other modules, which import this: hooks run in reverse order.
atexit.register(_finish_at_exit)
