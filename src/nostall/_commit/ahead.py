"""Metadata that is written ahead of the commit, for structures that were saved before.

Training waits for the commit's writes. Most metadata of a known structure equals that of the last
save; it goes to a draft while the writer process writes the shard files. The commit appends the
part of this checkpoint and publishes the draft. If the expected metadata differs, the draft is
removed and the commit writes its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import Enum, auto

from nostall._commit.publication import Publication
from nostall._storage.deadlines import remove_in_time
from nostall._storage.port import Draft
from nostall._storage.posix_storage import PosixStorage

_log = logging.getLogger("nostall")

WORTH_IT_NBYTES = 1 << 20
"""A commit writes less than this in about 1 ms."""
_REMOVAL_TIMEOUT_S = 1.0
"""Short: the caller has already waited for the save's files, and may have other reports to read."""


class _State(Enum):
    WAITING = auto()
    """For the snapshot to be taken."""
    WRITING = auto()
    """The thread owns the draft."""
    WRITTEN = auto()
    """The first of commit and removal takes the draft."""
    OVER = auto()


def is_worth_it(publication: Publication) -> bool:
    """Whether the metadata is so long that writing it early shortens the commit."""
    return publication.nbytes >= WORTH_IT_NBYTES


class WrittenAhead:
    """The draft of one save's metadata, and the thread that writes it.

    Args:
        directory: The checkpoint directory.
        metadata_name: Name of the metadata file.
        publication: The expected metadata.
        sync: Whether the draft has to be durable.
    """

    def __init__(
        self, directory: str, metadata_name: str, publication: Publication, *, sync: bool
    ) -> None:
        self._draft: Draft = PosixStorage(directory, sync=sync).draft(metadata_name)
        self._publication = publication
        self._lock = threading.Lock()
        self._state = _State.WAITING
        self.settled = threading.Event()
        """Set when no thread works on the draft any more."""

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

    def take(self, publication: Publication, *, timeout_s: float) -> Draft | None:
        """The draft with the whole program of the publication, now the caller's, or ``None``.

        Args:
            publication: The metadata to publish. The draft is removed if it differs from the
                expected one.
            timeout_s: How long to wait for the draft.
        """
        if publication is self._publication:
            if self._state is _State.WRITING:
                self.settled.wait(timeout_s)
            if self._move(_State.WRITTEN, _State.OVER):
                if self._draft.is_untouched():
                    return self._draft
                self._discard()  # removed or replaced from outside
        self.drop()
        return None

    def drop(self) -> None:
        """Remove the draft. Idempotent; if storage hangs, the removal ends in the background."""
        match self._end():
            case _State.WAITING:
                self.settled.set()
            case _State.WRITING:
                self._remove_in_time(self._draft.remove)  # the thread closes it
            case _State.WRITTEN:
                self._remove_in_time(self._discard)

    def _remove_in_time(self, remove: Callable[[], object]) -> None:
        remove_in_time([self._draft.where], remove=lambda _: remove(), timeout_s=_REMOVAL_TIMEOUT_S)

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
            if self._state is _State.WRITING:
                self._draft.append(self._publication.program)
                is_whole = True
        except Exception as error:  # the commit writes it again and reports storage errors
            _log.debug("metadata is not written ahead: path=%s: %s", self._draft.where, error)
        finally:
            if not is_whole or not self._move(_State.WRITING, _State.WRITTEN):
                self._end()
                self._discard()
            self.settled.set()

    def _discard(self) -> None:
        self._draft.remove()
        self._draft.close()
