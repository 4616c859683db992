"""Finish and publish the metadata of a checkpoint from the results of all ranks.

Runs on the coordinator. Steps that can fail before the commit are separate from it: after such a
failure it is certain that no metadata refers to the files.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from nostall._commit.collect import require_all_present
from nostall._commit.manifest import with_manifest
from nostall._commit.metadata import planned_indices
from nostall._commit.publication import Publication, complete_metadata, publication_of
from nostall._commit.publish import commit
from nostall._commit.result_columns import RankResults
from nostall._engine import Engine
from nostall._model import checksum
from nostall._model.collection import no_collection
from nostall._model.values import RankFiles
from nostall._save.leftovers import files_of, unused
from nostall._storage import directories
from nostall._storage.deadlines import REMOVAL_TIMEOUT_S, in_time, remove_in_time
from nostall._storage.directories import Visit
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


def publication_of_results(metadata: Metadata, results: Sequence[RankResults]) -> Publication:
    """The publication of a save, from the results of all ranks.

    Raises:
        IncompleteSaveError: No rank wrote an item of the metadata.
    """
    completed = complete_metadata(metadata, results)
    publication = publication_of(completed)
    if publication.index is None:  # an index has a place of each item, and no other
        require_all_present(planned_indices(completed), completed.storage_data)
    return publication


@no_collection()
def finish_metadata(
    publication: Publication,
    written: Sequence[RankFiles | None],
    storage_meta: StorageMeta | None,
) -> FinishedMetadata:
    """The content of one checkpoint's metadata file.

    Args:
        publication: The publication.
        written: The files of each rank, as far as known, for the manifest.
        storage_meta: DCP's part that is specific to this save.
    """
    content = publication.content(storage_meta)
    known = [each.files for each in written if each is not None and each.files is not None]
    # With a partial manifest the other files would look like foreign ones.
    if len(known) == len(written):
        last = b"".join(content[len(publication.program) :])
        files = tuple(chain.from_iterable(known))
        index = publication.index
        if index is not None and not index.fits({file.name: file.nbytes for file in files}):
            index = None  # readers would refuse it
        content = with_manifest(
            content,
            files,
            crc32=checksum.crc32(last, publication.crc32),
            index=index,
            committed_at_s=time.time(),
        )
    left = chain.from_iterable(each.left for each in written if each is not None)
    return FinishedMetadata(content=content, storage_meta=storage_meta, left=frozenset(left))


def publish(
    path: str,
    publication: Publication,
    finished: FinishedMetadata,
    engine: Engine,
    *,
    sync: bool,
    written_here: str | None,
    visit: Visit | None,
) -> None:
    """Publish finished metadata.

    Args:
        path: The metadata file, in the checkpoint directory.
        publication: The publication.
        finished: The result of :func:`finish_metadata`.
        engine: The engine of the save.
        sync: Whether to fsync.
        written_here: Name of a file that this rank wrote for the checkpoint, if any.
        visit: This rank's part of the save; it ends before another save may commit here.

    Raises:
        WriteError: The metadata could not be published, or the directory was removed and made again
            meanwhile.
        SaveTimeoutError: Another save was committing to the same directory all the time, or storage
            hangs; nothing is published.
        NotDurableError: Storage hangs, and the metadata may be published.
    """
    directory, name = os.path.split(path)
    storage = storage_at(directory, sync=sync)
    timeout_s = engine.options.save_timeout_s
    point = _PointOfNoReturn(Faults(engine.faults).at)

    def at(where: str) -> None:
        # The temporary file is already in the directory: both are in the same one.
        if where == "publish" and written_here is not None and not may_have(storage, written_here):
            gone = storage.where(written_here)
            raise OSError(errno.ENOENT, "the files of this save are gone", gone)
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
    to_remove = _run_in_time(run, point, path, timeout_s)
    left_s = max(REMOVAL_TIMEOUT_S, timeout_s - (time.monotonic() - began_s))
    paths = [storage.where(each) for each in to_remove]
    try:
        remove_in_time(paths, remove=lambda _: storage.remove(to_remove), timeout_s=left_s)
    except Exception:  # the checkpoint is published and must not be reported as lost
        _log.exception("files of the replaced checkpoint were not removed: path=%s", directory)


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
