"""The end of a process as an interpreter does it, but for taking torch apart: 0.25 s each."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def end(status: int = 0) -> NoReturn:
    """Wait for threads, call what is registered for the end, and leave.

    Not for programs about the end itself: what threads do while the interpreter is taken apart, or
    after it, does not happen.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
