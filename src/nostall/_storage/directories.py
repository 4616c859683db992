"""What this process is doing in checkpoint directories: which files its saves have made there, and who commits.

A directory that is committed to is known by where its path leads, not by how that is written, and whichever engine a save
belongs to.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from weakref import WeakSet, WeakValueDictionary

from nostall.errors import SaveTimeoutError

_KEPT = 8
"""Saves that are remembered when they may be over: what older ones have left is removed when it is old."""


class Visit:
    """One rank's part of one save in a checkpoint directory.

    Args:
        directory: The checkpoint directory.
        created: Paths of the files that the save has made there so far.
    """

    def __init__(self, directory: str, created: Set[str]) -> None:
        self._directory = directory
        self._created = created
        self._thread: threading.Thread | None = None
        self._was_left = False
        self.is_removed = False
        """Whether files of it were removed, so that it must not be committed."""
        with _state.lock:
            _state.visits.add(self)

    def hand_over(self) -> None:
        """All is written; the coordinator commits it. This rank does not learn how that ends, but its thread goes on then."""
        with _state.lock:
            self._thread = threading.current_thread()
            _state.kept.append(self)

    def end(self, *, committed: bool) -> None:
        """The save is over. Idempotent."""
        with _state.lock:
            self._was_left = True
            if committed:
                _state.visits.discard(self)
            elif self not in _state.kept:
                _state.kept.append(self)

    def left_before(self) -> tuple[str, ...]:
        """Names of what earlier saves of this process have made in the same directory, unless they are known to be committed.

        Those saves are over. Their files may be a checkpoint's, or gone; the coordinator knows, once it has committed another one.
        """
        with _state.lock:
            over = {visit for visit in _state.visits if visit is not self and visit._is_over()}
            busy = [visit for visit in _state.visits if visit not in over]
        left = _created(visit for visit in over if visit._directory == self._directory)
        return tuple(sorted(map(os.path.basename, left - _created(busy))))

    def _is_over(self) -> bool:
        """Whether the thread that it was written in has gone on; once that was seen it stays so, for other threads, too."""
        thread = self._thread
        if thread is threading.current_thread() or (thread is not None and not thread.is_alive()):
            self._was_left = True
        return self._was_left


class _State:
    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """Also in a forked child, where a lock may be held by a thread that the child does not have."""
        self.lock = threading.Lock()
        self.visits: WeakSet[Visit] = WeakSet()
        """All but those that are known to be committed."""
        self.kept: deque[Visit] = deque(maxlen=_KEPT)
        """Those that nobody else may hold any more."""
        self.committing: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()


_state = _State()


def _created(visits: Iterable[Visit]) -> set[str]:
    return set[str]().union(*(visit._created for visit in visits))


def note_removed(paths: Iterable[str]) -> None:
    """Files of saves that were taken for over are going to be removed."""
    gone = set(paths)
    with _state.lock:
        for visit in _state.visits:
            visit.is_removed |= not gone.isdisjoint(visit._created)


def names_in_use(directory: str) -> set[str]:
    """Names of the files of saves of this process that are under way in a directory."""
    where = os.path.realpath(directory)
    with _state.lock:
        busy = [visit for visit in _state.visits if not visit._is_over()]
    here = [visit for visit in busy if os.path.realpath(visit._directory) == where]
    return set(map(os.path.basename, _created(here)))


@contextmanager
def committing(directory: str, *, timeout_s: float) -> Iterator[None]:
    """While inside, no other thread of this process commits to this directory.

    Raises:
        SaveTimeoutError: Another one has been at it for ``timeout_s`` seconds.
    """
    where = os.path.realpath(directory)
    with _state.lock:
        lock = _state.committing.setdefault(where, threading.Lock())
    if not lock.acquire(timeout=timeout_s):
        raise SaveTimeoutError(
            f"another save has been committing to this directory for {timeout_s:g} s",
            phase="commit",
            path=directory,
            hint="storage may hang; nothing of this save was committed",
        )
    try:
        yield
    finally:
        lock.release()


os.register_at_fork(after_in_child=_state.start_over)
