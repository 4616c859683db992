"""Checkpoint directories in use by this process: files made by its saves, and commits in progress.

A directory is identified by its resolved path, however it is written and whichever engine a save
belongs to. :func:`remove_unnamed` removes what failed saves have left in one.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from weakref import WeakSet, WeakValueDictionary

from nostall._model.names import METADATA_SUFFIX
from nostall._storage.locations import identity, storage_at
from nostall._storage.port import Files, open_to_read, read_metadata
from nostall.errors import NostallError, SaveTimeoutError

_OF_RANK = re.compile(r"__(\d+)_\d+[^/]*\Z")
_KEPT = 8
"""Finished saves that are remembered; files of earlier ones are removed once they are old."""


class Visit:
    """One rank's part of one save in a directory; ``created`` has the paths of its files so far."""

    def __init__(self, directory: str, created: Set[str]) -> None:
        self._directory = directory
        self._created = created  # other threads add to it: no loop of Python's may read it
        self._thread: threading.Thread | None = None
        self._was_left = False
        """Whether the save has ended: committed, given up, or continued by its thread."""
        self.is_removed = False
        """Whether files of this save were removed, so that it must not be committed."""
        with _state.lock:
            _state.visits.add(self)

    def hand_over(self) -> None:
        """Leave the commit to the coordinator; all files of this rank are written.

        This rank does not learn the outcome; its thread continues once the commit has ended.
        """
        with _state.lock:
            self._thread = threading.current_thread()
            _state.kept.append(self)

    def end(self, *, committed: bool) -> None:
        """Mark the save as over. Idempotent."""
        with _state.lock:
            self._was_left = True
            if committed:
                _state.visits.discard(self)
                return
            _state.failed_in.add(self._directory)
            if self not in _state.kept:
                _state.kept.append(self)

    def left_before(self) -> tuple[str, ...]:
        """Names of files that finished saves of this process made in this directory.

        Files known to be committed are left out. The others may belong to a checkpoint, or no
        longer exist; the coordinator knows once it has committed another one.
        """
        with _state.lock:
            over = {visit for visit in _state.visits if visit is not self and visit._is_over()}
            busy = [visit for visit in _state.visits if visit not in over]
        here = (visit._created for visit in over if visit._directory == self._directory)
        left = set[str]().union(*here).difference(*(visit._created for visit in busy))
        return tuple(sorted(map(os.path.basename, left)))

    def _is_over(self) -> bool:
        """Whether the writing thread has continued; once true, it stays true for all threads."""
        thread = self._thread
        if thread is threading.current_thread() or (thread is not None and not thread.is_alive()):
            self._was_left = True
        return self._was_left


class _State:
    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """Also called in a forked child, where the lock may be held by a thread of the parent."""
        self.lock = threading.Lock()
        self.visits: WeakSet[Visit] = WeakSet()
        """All visits except those known to be committed."""
        self.kept: deque[Visit] = deque(maxlen=_KEPT)
        """Visits that may have no other reference."""
        self.failed_in: set[str] = set()
        """Directories of saves that were not committed, as users wrote their paths."""
        self.committing: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()


_state = _State()


def note_removed(paths: Iterable[str]) -> None:
    """Record that files of saves assumed to be over are about to be removed."""
    gone = set(paths)
    with _state.lock:
        for visit in _state.visits:
            visit.is_removed |= not gone.isdisjoint(visit._created)


def has_failed_in(directory: str) -> bool:
    """Whether a save of this process to a directory was not committed.

    Its calls that storage answers late must not hit a later save's files of the same names.
    """
    with _state.lock:
        return directory in _state.failed_in


def names_in_use(directory: str) -> set[str]:
    """Names of files in a directory that belong to saves of this process in progress."""
    created = set[str]().union(*(visit._created for visit in busy_in(directory)))
    return set(map(os.path.basename, created))


def busy_in(directory: str) -> set[Visit]:
    """Saves of this process to a directory that are in progress, with files in it or not yet."""
    with _state.lock:
        busy = {visit for visit in _state.visits if not visit._is_over()}
    if all(visit._directory == directory for visit in busy):
        return busy
    where = identity(directory)  # only then: it looks at each directory of the path
    return {visit for visit in busy if identity(visit._directory) == where}


@contextmanager
def committing(directory: str, *, timeout_s: float) -> Iterator[None]:
    """Hold the directory's commit lock: one thread of this process commits at a time.

    ``SaveTimeoutError`` if another thread keeps it for ``timeout_s`` seconds.
    """
    where = identity(directory)
    with _state.lock:
        lock = _state.committing.setdefault(where, threading.Lock())
    if not lock.acquire(timeout=timeout_s):
        raise SaveTimeoutError(
            f"another save has been committing to this directory for {timeout_s:g} s",
            phase="commit",
            path=directory,
            hint="storage may hang; this save was not committed",
        )
    try:
        yield
    finally:
        lock.release()


def remove_unnamed(paths: Iterable[str]) -> None:
    """Remove files of a save that has failed, unless a checkpoint names them; errors are ignored.

    A later save may have got the same names. All files stay if metadata cannot be read.
    """
    by_place: dict[str, list[str]] = {}
    for path in paths:
        place, name = os.path.split(path)
        by_place.setdefault(place, []).append(name)
    for place, names in by_place.items():
        ranks = {found[1] for found in map(_OF_RANK.search, names) if found is not None}
        with suppress(OSError, NostallError):
            storage = storage_at(place)
            metadata = [
                _content(storage, name)
                for name in (METADATA_SUFFIX, *(f"__{rank}{METADATA_SUFFIX}" for rank in ranks))
            ]
            storage.remove(
                name for name in names if not any(name.encode() in content for content in metadata)
            )


def _content(storage: Files, name: str) -> bytes:
    """The content of a metadata file, in which names stand as they are."""
    with suppress(FileNotFoundError, NotADirectoryError), open_to_read(storage, name) as stream:
        return read_metadata(stream, storage.where(name))
    return b""


os.register_at_fork(after_in_child=_state.start_over)
