"""Metadata that is written ahead of the commit, for structures that were saved before.

Training waits for the commit's writes. The pickle of a known structure, and the index up to its
tables, are known before the files are written, but for the names of files. They go to a draft while
the shard files are written, and the writer process writes all of it that grows with the number of
items. The commit writes the rest, and what is not as expected, and publishes the draft.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum, auto

from nostall._commit.publication import Publication
from nostall._model.interrupts import is_done
from nostall._model.shared_bytes import Piece, PlacedPiece
from nostall._model.threads import run_apart
from nostall._storage.deadlines import remove_in_time
from nostall._storage.places import storage_at
from nostall._storage.port import Draft, Elsewhere

_log = logging.getLogger("nostall")

WORTH_IT_NBYTES = 1 << 20
"""A commit writes less than this in about 1 ms."""
_PATIENCE_S = 10.0
"""How long a commit waits for a draft, which a process may write that is stopped or starved."""
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
        content: The expected content, as far as it is known before the files are written.
        elsewhere: Has another process write parts of it.
        sync: Whether the draft has to be durable.
    """

    def __init__(
        self,
        directory: str,
        metadata_name: str,
        content: Sequence[Piece],
        elsewhere: Elsewhere | None = None,
        *,
        sync: bool,
    ) -> None:
        self._draft: Draft = storage_at(directory, sync=sync).draft(metadata_name)
        self._content = content
        self._elsewhere = elsewhere
        self._lock = threading.Lock()
        self._state = _State.WAITING
        self.settled: Future[None] = Future()
        """Done when no thread works on the draft any more."""
        self._may_be_removed: Future[None] = Future()
        """Done when the thread has made the draft, or will not."""

    def start(self) -> None:
        """Begin to write; at most once, and not after the end of the save."""
        if not self._move(_State.WAITING, _State.WRITING):
            return
        try:
            run_apart("nostall-ahead", self._write)
        except RuntimeError:  # the system cannot start a thread
            self._end()
            self.settled.set_result(None)

    def take(self, timeout_s: float) -> Draft | None:
        """The draft, now the caller's; ``None`` if there is none.

        Args:
            timeout_s: How long the caller has for the commit; it waits for a part of that.
        """
        if self._state is _State.WRITING:
            is_done(self.settled, min(_PATIENCE_S, timeout_s / 4))
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
                self.settled.set_result(None)
            case _State.WRITING:
                # Not for its end: this may be the thread that hears of what is written elsewhere.
                is_done(self._may_be_removed, _REMOVAL_TIMEOUT_S)
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
                self._draft.write(self._content, elsewhere=self._write_elsewhere)
                is_whole = True
        except Exception as error:  # the commit writes it again and reports storage errors
            _log.debug("metadata is not written ahead: path=%s: %s", self._draft.where, error)
        finally:
            if not is_whole or not self._move(_State.WRITING, _State.WRITTEN):
                self._end()
                self._discard()
            self._note_made()
            self.settled.set_result(None)

    def _write_elsewhere(self, fd: int, pieces: list[PlacedPiece]) -> list[PlacedPiece]:
        self._note_made()
        return pieces if self._elsewhere is None else self._elsewhere(fd, pieces)

    def _note_made(self) -> None:
        if not self._may_be_removed.done():
            self._may_be_removed.set_result(None)

    def _discard(self) -> None:
        self._draft.remove()
        self._draft.close()
