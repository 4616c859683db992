"""Daemon threads for work that may have to be abandoned."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nostall._model.interrupts import start, uninterruptible


def start_apart(name: str, work: Callable[[], object]) -> threading.Thread | None:
    """Run ``work`` on a new daemon thread.

    Returns:
        The thread; ``None`` if none could be started, as at exit: ``work`` is done then.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        start(thread)
    except RuntimeError:
        work()
        return None
    return thread


def run_apart(name: str, work: Callable[[], object]) -> None:
    """Run ``work`` on a new daemon thread; returns at once.

    Raises:
        RuntimeError: The system cannot start one.
    """
    with uninterruptible():
        threading.Thread(target=work, name=name, daemon=True).start()
