"""The end of a process as an interpreter does it, but for taking torch apart: 0.25 s each.

``python -m support.ending SCRIPT ...`` runs a script and ends so. DTensor's caches keep the group
of a device mesh, and a thread of gloo that frees a tensor while the interpreter is taken apart
aborts the process, with stock PyTorch, too. On one CPU, with gloo's threads at the lowest priority,
that happened to 13 of 48 processes whose last act was a collective.
"""

from __future__ import annotations

import atexit
import os
import runpy
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


if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    end()
