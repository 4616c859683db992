"""Publish the metadata of a checkpoint whose files are all durable: the last step of a save.

Runs on the coordinator. After a failure before the publication it is certain that no metadata
refers to the files.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from nostall import _torch
from nostall._commit.publication import Publication
from nostall._commit.publish import commit
from nostall._engine import default_engine
from nostall._save.leftovers import files_of, unused
from nostall._save.rank_save import RankSave
from nostall._storage import directories
from nostall._storage.deadlines import REMOVAL_TIMEOUT_S, in_time, remove_in_time
from nostall._storage.places import storage_at
from nostall._storage.port import may_have
from nostall._writer.faults import Faults
from nostall.errors import (
    NotDurableError,
    SaveAbortedError,
    SaveTimeoutError,
    WriteError,
)

_LOCK_GRACE_S = 1.0
"""Lets a wait for another save's commit raise its own error before that of hanging storage."""


_log = logging.getLogger("nostall")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedMetadata:
    """The content of a metadata file."""

    content: Sequence[bytes]
    """In pieces."""
    storage_meta: StorageMeta | None
    """DCP's part that is specific to this save."""
    left: frozenset[str]
    """Names of files that ranks made for earlier saves of unknown outcome."""


def publish(
    save: RankSave, publication: Publication, metadata: Metadata, finished: FinishedMetadata
) -> None:
    """Publish finished metadata, and remove the files of the checkpoint that it replaces.

    The metadata object that stock ``dcp.save`` passes is completed, as by stock.

    Args:
        save: The save of this rank; its visit ends before another save may commit here.
        publication: The publication.
        metadata: The object that it was made from.
        finished: The content of the metadata file.

    Raises:
        WriteError: The metadata could not be published, or the directory was removed and made again
            meanwhile.
        SaveTimeoutError: Another save was committing to the same directory all the time, or storage
            hangs; nothing is published.
        NotDurableError: Storage hangs, and the metadata may be published.
    """
    engine, settings, visit = default_engine(), save.settings, save.visit
    path, timeout_s = settings.metadata_path, engine.options.save_timeout_s
    directory, name = os.path.split(path)
    storage = storage_at(directory, sync=settings.options.sync_files)
    mine = save.receipts[:1] if settings.stream is None else ()
    is_stocks_object = metadata.storage_data is None
    point = _PointOfNoReturn(Faults(engine.faults).at)

    def at(where: str) -> None:
        # The temporary file is already in the directory: both are in the same one.
        gone = [
            each.name for each in mine if where == "publish" and not may_have(storage, each.name)
        ]
        if gone:
            raise OSError(errno.ENOENT, "the files of this save are gone", storage.where(gone[0]))
        point.at(where)

    def run() -> tuple[str, ...]:
        with directories.committing(directory, timeout_s=timeout_s):
            if visit is not None and visit.is_removed:
                raise WriteError(
                    "a later save to the directory has removed the files of this one",
                    phase="commit",
                    path=path,
                    hint="the later save's checkpoint stays",
                )
            replaced = files_of(storage, name)
            left_over = unused(storage, name, publication, replaced, finished.left, timeout_s)
            names = commit(
                storage,
                finished.content,
                metadata_name=name,
                replaced_files=left_over,
                at=at,
            )
            directories.note_removed([storage.where(each) for each in names])
            if visit is not None:
                visit.end(committed=True)
            return names

    began_s = time.monotonic()
    with save.timeline.measure("publish"):
        to_remove = _run_in_time(run, point, path, timeout_s)
        left_s = max(REMOVAL_TIMEOUT_S, timeout_s - (time.monotonic() - began_s))
        paths = [storage.where(each) for each in to_remove]
        try:
            remove_in_time(paths, remove=lambda _: storage.remove(to_remove), timeout_s=left_s)
        except Exception:  # the checkpoint is published and must not be reported as lost
            _log.exception("files of the replaced checkpoint stay: path=%s", directory)
    save.after_commit()
    if is_stocks_object:
        metadata.version = _torch.DCP_VERSION
        metadata.storage_data = publication.storage_data
        metadata.storage_meta = finished.storage_meta


def _run_in_time(
    run: Callable[[], tuple[str, ...]], point: _PointOfNoReturn, path: str, timeout_s: float
) -> tuple[str, ...]:
    """Run a commit; if storage hangs, the error says whether it may still take effect."""
    try:
        return in_time(
            run,
            timeout_s=timeout_s + _LOCK_GRACE_S,
            doing="publishing the metadata",
            phase="commit",
            path=path,
            give_up=point.give_up,
        )
    except SaveTimeoutError as error:
        if point.give_up():
            raise
        raise NotDurableError(
            f"cannot determine whether the metadata was published: {error.message}",
            phase="commit",
            path=path,
            hint="check the directory when storage answers again",
        ) from error


class _PointOfNoReturn:
    """Separates a commit that can be given up from one that may be published.

    A checkpoint that is reported as lost never appears later.

    Args:
        at: Called with each point of the commit; may raise.
    """

    def __init__(self, at: Callable[[str], None]) -> None:
        self._at = at
        self._lock = threading.Lock()
        self._is_given_up = False
        self._is_passed = False

    def at(self, point: str) -> None:
        """Pass a point of the commit.

        Raises:
            SaveAbortedError: The commit was given up.
        """
        self._at(point)
        with self._lock:
            if self._is_given_up:
                raise SaveAbortedError("the caller no longer waits for the commit", phase="commit")
            self._is_passed = point == "publish"

    def give_up(self) -> bool:
        """Prevent the publication; false if it may have happened already."""
        with self._lock:
            self._is_given_up = not self._is_passed
            return self._is_given_up


def is_unpublished(error: Exception) -> bool:
    """Whether it is certain that no metadata refers to the files.

    Other errors, such as those of a writer's subclass, may come after the commit.
    """
    return isinstance(error, WriteError | SaveTimeoutError)
