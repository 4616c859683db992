"""Files of replaced checkpoints: their names go at once, their blocks later, on a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from nostall._model.threads import spawn_or_run
from nostall._storage.places import is_address
from nostall._storage.posix import close_all, has_room_for, remove_and_hold
from nostall._storage.unused_files import remove_files

_ROOM_TIMEOUT_S = 60.0
"""For storage to free the blocks of a replaced checkpoint; a terabyte takes longer."""


class RemovedFiles:
    """Files without names that this process holds until a thread has closed them. Thread-safe."""

    def __init__(self) -> None:
        self._held: list[int] = []
        """Descriptors that a thread has still to close."""
        self._closing: list[threading.Thread] = []
        """Threads that close them, if free space is scarce."""
        self._lock = threading.Lock()

    def remove(self, paths: Iterable[str]) -> None:
        """Remove the names of files now; a thread waits for storage to free their blocks."""
        paths = list(paths)
        remove_files(filter(is_address, paths))
        remove_and_hold((path for path in paths if not is_address(path)), self._held)
        if not self._held:
            return
        is_scarce = not has_room_for(self._held)
        thread = spawn_or_run("nostall-closing", self.close_all)
        if thread is not None and is_scarce:
            with self._lock:
                self._closing.append(thread)

    def await_room(self, timeout_s: float) -> None:
        """If space is scarce, wait until storage has freed removed files.

        Args:
            timeout_s: Seconds to wait; 60 at most.
        """
        deadline = time.monotonic() + min(_ROOM_TIMEOUT_S, timeout_s)
        with self._lock:
            closing, self._closing = self._closing, []
        for thread in closing:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close_all(self) -> None:
        """Close what is held here; also for a forked child, which must not wait for the lock."""
        close_all(self._held)
