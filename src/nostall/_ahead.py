"""Metadata that is written before the save is: of a structure that was saved before, all but a little is known by then.

What a commit writes is what training waits for. Most of the metadata of a known structure says what the last one said; that
goes into a temporary file while the writer process writes the shard files. The commit adds what belongs to this one checkpoint,
and publishes the file. If anything turns out otherwise, the file is removed and the commit writes its own.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid

from nostall._metadata import Publication
from nostall._storage.posix import UnfinishedFile, remove_files

_log = logging.getLogger("nostall")

WORTH_IT_NBYTES = 1 << 20
"""Less than this a commit writes in about a millisecond."""


class WrittenAhead:
    """The temporary file of one save, and the thread that writes it.

    Args:
        directory: The checkpoint directory.
        metadata_name: What the metadata will be called.
        publication: What is expected to be published.
        sync: Whether the device is to have it, too.
    """

    def __init__(
        self, directory: str, metadata_name: str, publication: Publication, *, sync: bool
    ) -> None:
        # A name of its own: another process that saves to this directory must not publish half a file.
        name = f".{uuid.uuid4().hex[:8]}{metadata_name}.tmp"
        self._path = os.path.join(directory, name)
        self._publication = publication
        self._sync = sync
        self._lock = threading.Lock()
        self._written = threading.Event()
        self._was_started = False
        self._is_over = False
        self._file: UnfinishedFile | None = None

    def start(self) -> None:
        """Begin to write. Once, and not any more when the save is over."""
        with self._lock:
            if self._was_started or self._is_over:
                return
            self._was_started = True
        # Storage may hang, and the interpreter has to end all the same.
        thread = threading.Thread(target=self._write, name="nostall-ahead", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread to give
            self._written.set()

    def take(self, publication: Publication, *, timeout_s: float) -> UnfinishedFile | None:
        """The file with all of the publication's program in it, now the caller's; ``None`` if there is none.

        Args:
            publication: What is going to be published. If it is not what was expected, the file is removed.
            timeout_s: How long to wait for the file.
        """
        if not self._was_started or publication is not self._publication:
            self.drop()
            return None
        self._written.wait(timeout_s)
        file = self._end()
        if file is not None and not file.has_its_name():  # somebody has tidied up
            file.close()
            return None
        return file

    def drop(self) -> None:
        """Remove the file, now or as soon as storage lets go of it. Idempotent."""
        _remove(self._end())

    def _end(self) -> UnfinishedFile | None:
        with self._lock:
            file, self._file, self._is_over = self._file, None, True
        return file

    def _write(self) -> None:
        file: UnfinishedFile | None = None
        try:
            file = UnfinishedFile(self._path)
            file.append(self._publication.program)
            if self._sync:
                file.sync()
        except Exception as error:  # the commit writes it, and tells of what is wrong with storage
            _log.debug("metadata is not written ahead path=%s: %s", self._path, error)
        else:
            with self._lock:
                if not self._is_over:
                    self._file, file = file, None
        _remove(file)
        self._written.set()


def _remove(file: UnfinishedFile | None) -> None:
    if file is not None:
        remove_files([file.path])
        file.close()
