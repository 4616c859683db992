"""Metadata that is written ahead of the commit, for structures that were saved before.

Training waits for the commit's writes. The pickle of a known structure, and the index up to its
tables, are known before the files are written; they go to a draft while the writer process writes
the shard files. The commit appends the rest and publishes the draft. If the expected metadata
differs, the draft is removed and the commit writes its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum, auto

from torch.distributed.checkpoint.metadata import StorageMeta

from nostall._commit.publication import Publication
from nostall._model.interrupts import is_done, start
from nostall._storage.deadlines import remove_in_time
from nostall._storage.places import storage_at
from nostall._storage.port import Draft

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
        storage_meta: DCP's part that is specific to this save.
        sync: Whether the draft has to be durable.
    """

    def __init__(
        self,
        directory: str,
        metadata_name: str,
        publication: Publication,
        storage_meta: StorageMeta | None,
        *,
        sync: bool,
    ) -> None:
        self._draft: Draft = storage_at(directory, sync=sync).draft(metadata_name)
        self._publication = publication
        self._content = publication.content_before_files(storage_meta)
        self._lock = threading.Lock()
        self._state = _State.WAITING
        self.settled: Future[None] = Future()
        """Done when no thread works on the draft any more."""

    def start(self) -> None:
        """Begin to write; at most once, and not after the end of the save."""
        if not self._move(_State.WAITING, _State.WRITING):
            return
        # A daemon: the interpreter has to end even if storage hangs.
        thread = threading.Thread(target=self._write, name="nostall-ahead", daemon=True)
        try:
            start(thread)
        except RuntimeError:  # the system cannot start a thread
            self._end()
            self.settled.set_result(None)

    def take(
        self, publication: Publication, content: Sequence[bytes], *, timeout_s: float
    ) -> Draft | None:
        """The draft with the first pieces of the content, now the caller's, or ``None``.

        Args:
            publication: The metadata to publish.
            content: The pieces of the file. The draft is removed if they, or the publication,
                differ from the expected ones.
            timeout_s: How long to wait for the draft.
        """
        if publication is self._publication and self._begins(content):
            if self._state is _State.WRITING:
                is_done(self.settled, timeout_s)
            if self._move(_State.WRITTEN, _State.OVER):
                if self._draft.is_untouched():
                    return self._draft
                self._discard()  # removed or replaced from outside
        self.drop()
        return None

    def _begins(self, content: Sequence[bytes]) -> bool:
        return tuple(content[: len(self._content)]) == self._content

    def drop(self) -> None:
        """Remove the draft. Idempotent; if storage hangs, the removal ends in the background."""
        match self._end():
            case _State.WAITING:
                self.settled.set_result(None)
            case _State.WRITING:
                if not is_done(self.settled, _REMOVAL_TIMEOUT_S):  # the thread removes it
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
                self._draft.append(self._content)
                is_whole = True
        except Exception as error:  # the commit writes it again and reports storage errors
            _log.debug("metadata is not written ahead: path=%s: %s", self._draft.where, error)
        finally:
            if not is_whole or not self._move(_State.WRITING, _State.WRITTEN):
                self._end()
                self._discard()
            self.settled.set_result(None)

    def _discard(self) -> None:
        self._draft.remove()
        self._draft.close()
