"""Metadata that is written ahead of the commit, for structures that were saved before.

Training waits for the commit's writes. Most metadata of a known structure equals that of the last
save; it goes to a temporary file while the writer process writes the shard files. The commit
appends the part of this checkpoint and publishes the file. If the expected metadata differs, the
file is removed and the commit writes its own.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from enum import Enum, auto
from weakref import WeakSet

from nostall._commit.metadata import Publication
from nostall._storage.deadlines import remove_in_time
from nostall._storage.posix import UnfinishedFile, remove_files

_log = logging.getLogger("nostall")

WORTH_IT_NBYTES = 1 << 20
"""A commit writes less than this in about 1 ms."""
_REMOVAL_TIMEOUT_S = 1.0
"""Short: the caller has already waited for the save's files, and may have other reports to read."""


class _State(Enum):
    WAITING = auto()
    """For the snapshot to be taken."""
    WRITING = auto()
    """The thread owns the file."""
    WRITTEN = auto()
    """The first of commit and removal takes the file."""
    OVER = auto()


def is_worth_it(publication: Publication) -> bool:
    """Whether the metadata is so long that writing it early shortens the commit."""
    return publication.nbytes >= WORTH_IT_NBYTES


class WrittenAhead:
    """The temporary file of one save, and the thread that writes it.

    Args:
        directory: The checkpoint directory.
        metadata_name: Name of the metadata file.
        publication: The expected metadata.
        sync: Whether to fsync the file.
    """

    def __init__(
        self, directory: str, metadata_name: str, publication: Publication, *, sync: bool
    ) -> None:
        # A unique name: another process that saves to this directory must not publish half a file.
        name = f".{uuid.uuid4().hex[:8]}{metadata_name}.tmp"
        self._path = os.path.join(directory, name)
        self._publication = publication
        self._sync = sync
        self._lock = threading.Lock()
        self._state = _State.WAITING
        self.settled = threading.Event()
        """Set when no thread works on the file any more."""
        self._file: UnfinishedFile | None = None
        _all.add(self)

    def start(self) -> None:
        """Begin to write; at most once, and not after the end of the save."""
        if not self._move(_State.WAITING, _State.WRITING):
            return
        # A daemon: the interpreter has to end even if storage hangs.
        thread = threading.Thread(target=self._write, name="nostall-ahead", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system cannot start a thread
            self._end()
            self.settled.set()

    def take(self, publication: Publication, *, timeout_s: float) -> UnfinishedFile | None:
        """The file with the whole program of the publication, now owned by the caller, or ``None``.

        Args:
            publication: The metadata to publish. The file is removed if it differs from the
                expected one.
            timeout_s: How long to wait for the file.
        """
        if publication is self._publication:
            if self._state is _State.WRITING:
                self.settled.wait(timeout_s)
            if self._move(_State.WRITTEN, _State.OVER):
                return self._handed_over()
        self.drop()
        return None

    def _handed_over(self) -> UnfinishedFile | None:
        file = self._file
        if file is None or not file.is_untouched():  # removed or replaced from outside
            self._discard()
            return None
        self._file = None
        return file

    def drop(self) -> None:
        """Remove the file. Idempotent; if storage hangs, the removal ends in the background."""
        match self._end():
            case _State.WAITING:
                self.settled.set()
            case _State.WRITING:
                remove_in_time([self._path], timeout_s=_REMOVAL_TIMEOUT_S)
            case _State.WRITTEN:
                remove_in_time(
                    [self._path],
                    remove=lambda _: self._discard(),
                    timeout_s=_REMOVAL_TIMEOUT_S,
                )

    def _move(self, before: _State, after: _State) -> bool:
        with self._lock:
            if self._state is not before:
                return False
            self._state = after
            return True

    def _end(self) -> _State:
        with self._lock:
            was, self._state = self._state, _State.OVER
            return was

    def _write(self) -> None:
        is_whole = False
        try:
            file = self._file = UnfinishedFile(self._path)
            if self._state is _State.WRITING:
                file.append(self._publication.program)
                if self._sync:
                    file.sync()
                is_whole = True
        except Exception as error:  # the commit writes the file again and reports storage errors
            _log.debug("metadata is not written ahead path=%s: %s", self._path, error)
        finally:
            if not is_whole or not self._move(_State.WRITING, _State.WRITTEN):
                self._end()
                self._discard()
            self.settled.set()

    def _discard(self) -> None:
        remove_files([self._path])
        self.let_go()

    def let_go(self) -> None:
        """Close the descriptor, if any; also in a forked child, which has a copy."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


_all: WeakSet[WrittenAhead] = WeakSet()


def _let_go_after_fork() -> None:
    """Otherwise a data loader's worker keeps a removed file's blocks (on NFS: its directory)."""
    for ahead in list(_all):
        ahead.let_go()


os.register_at_fork(after_in_child=_let_go_after_fork)
