"""Functions for background processes to call. Without torch, which takes seconds to import."""

from __future__ import annotations

import os
from pathlib import Path


def note_pid(path: str) -> None:
    """Write down which process this is."""
    Path(path).write_text(str(os.getpid()))


def wait_then_note_pid(fifo: str, path: str) -> None:
    """Do it once a writer has opened the FIFO."""
    Path(fifo).read_bytes()
    note_pid(path)


def explode(message: str) -> None:
    raise ValueError(message)


def leave(code: int) -> None:
    os._exit(code)
