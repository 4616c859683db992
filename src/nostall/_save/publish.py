"""Publish the metadata of a checkpoint whose files are all complete: the last step of a save.

Runs on the coordinator. After a failure before the publication it is certain that no metadata
refers to the files. Files that no metadata refers to afterwards may belong to a save that is about
to commit. They are removed if they belong to the replaced checkpoint, to a save that is known to be
over, or are too old for any.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from nostall import _torch
from nostall._commit.commit import commit
from nostall._commit.manifest import manifest_alone
from nostall._commit.metadata import referenced_files
from nostall._commit.publication import Publication
from nostall._engine import default_engine
from nostall._model.jobs import Faults
from nostall._model.names import METADATA_SUFFIX, is_draft, is_given_to_shards, is_ours_to_remove
from nostall._model.values import RankFiles
from nostall._storage import directories
from nostall._storage.deadlines import REMOVAL_TIMEOUT_S, call_with_deadline, remove_with_deadline
from nostall._storage.locations import storage_at
from nostall._storage.port import Files, may_have, open_to_read, read_metadata
from nostall.errors import (
    NotDurableError,
    ReadError,
    SaveAbortedError,
    SaveTimeoutError,
    WriteError,
)

if TYPE_CHECKING:
    from nostall._save.rank_save import RankSave

_log = logging.getLogger("nostall")

_LOCK_GRACE_S = 1.0
"""Lets a wait for another save's commit raise its own error before that of hanging storage."""
_LONG_S = 600.0
_SAVES_PER_AGE = 2
"""A file older than this many times ``save_timeout_s`` (or ``_LONG_S``, if longer) is of no save in
progress.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSave:
    """A save that only has to be published."""

    metadata: Metadata
    """The object that the publication was made from."""
    publication: Publication
    content: Sequence[bytes]
    """The content of the metadata file, in pieces."""
    storage_meta: StorageMeta | None
    """DCP's part that is specific to this save."""
    left: frozenset[str]
    """Names of files that ranks made for earlier saves of unknown outcome."""


def publish(save: RankSave, finished: FinishedSave) -> None:
    """Publish finished metadata, and remove the files of the checkpoint that it replaces.

    The visit of ``save`` ends before another save may commit here. Metadata that stock ``dcp.save``
    has passed is completed, as by stock.

    ``WriteError`` if the metadata could not be published, or the directory was removed and made
    again meanwhile. ``SaveTimeoutError`` if another save was committing to the same directory all
    the time, or storage hangs: nothing is published. ``NotDurableError`` if storage hangs, and the
    metadata may be published.
    """
    engine, settings, visit = default_engine(), save.settings, save.state.visit
    directory, name = settings.directory, settings.metadata_name
    path, timeout_s = os.path.join(directory, name), engine.options.save_timeout_s
    storage = storage_at(directory, sync=settings.sync_files)
    metadata, publication = finished.metadata, finished.publication
    is_stocks_object = metadata.storage_data is None
    mine = [each.name for each in save.state.receipts[:1] if settings.stream is None]
    point = _PointOfNoReturn(storage, mine, Faults(engine.faults))

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
                at=point.at,
            )
            directories.note_removed([storage.where(each) for each in names])
            if visit is not None:
                visit.end(committed=True)
            return names

    began_s = time.monotonic()
    with save.timeline.measure("publish"):
        obsolete = _run_with_deadline(run, point, path, timeout_s)
        left_s = max(REMOVAL_TIMEOUT_S, timeout_s - (time.monotonic() - began_s))
        paths = [storage.where(each) for each in obsolete]
        try:
            remove_with_deadline(paths, remove=lambda _: storage.remove(obsolete), timeout_s=left_s)
        except Exception:  # the checkpoint is published and must not be reported as lost
            _log.exception("files of the replaced checkpoint stay: path=%s", directory)
    save.after_commit()
    if is_stocks_object:
        metadata.version = _torch.DCP_VERSION
        metadata.storage_data = publication.storage_data
        metadata.storage_meta = finished.storage_meta


def _run_with_deadline(
    run: Callable[[], tuple[str, ...]], point: _PointOfNoReturn, path: str, timeout_s: float
) -> tuple[str, ...]:
    """Run a commit; if storage hangs, the error says whether it may still take effect."""
    try:
        return call_with_deadline(
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

    A checkpoint that is reported as lost never appears later. ``mine`` are names of files of the
    save, which must be in ``storage``.
    """

    def __init__(self, storage: Files, mine: Sequence[str], faults: Faults) -> None:
        self._storage = storage
        self._mine = mine
        self._faults = faults
        self._lock = threading.Lock()
        self._is_given_up = False
        self._is_passed = False

    def at(self, point: str) -> None:
        """Pass a point of the commit: ``SaveAbortedError`` if the commit was given up, ``OSError``
        if a file no longer exists.
        """
        # The temporary file is already in the directory: both are in the same one.
        for name in self._mine if point == "publish" else ():
            if not may_have(self._storage, name):
                where = self._storage.where(name)
                raise OSError(errno.ENOENT, "the files of this save no longer exist", where)
        self._faults.at(point)
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


# --- files that no metadata refers to -------------------------------------------------------------


def files_of(storage: Files, name: str) -> set[str]:
    """Names of the shard files of a checkpoint; empty without trustworthy metadata."""
    try:
        with open_to_read(storage, name) as stream:
            manifest = manifest_alone(stream)
            if manifest is None:
                path = storage.where(name)
                files = referenced_files(read_metadata(stream, path), path=path)
            else:  # much faster to read than the metadata
                files = {file.name for file in manifest.files}
    except OSError:
        return set()
    return set(filter(is_ours_to_remove, files))


def unused(
    files: Files,
    metadata_name: str,
    publication: Publication,
    replaced: Set[str],
    left: Set[str],
    save_timeout_s: float,
) -> Iterator[str]:
    """Names of files that no metadata refers to after the publication; lists them lazily.

    They are files of the replaced checkpoint (``replaced``), files that ranks of this save made for
    earlier saves that are over (``left``), drafts, and files too old for any save.
    """
    used = publication.files | directories.names_in_use(files.where())
    yield from replaced - used
    try:
        names = files.list()
        strangers = unreferenced(files, names, metadata_name) - used - replaced
        yield from strangers & left
        # Commits of this process to a directory take turns, so none of these is in progress in it.
        # A process whose draft was deleted fails cleanly, or makes another one.
        yield from filter(is_draft, names)
        rank = metadata_name.removesuffix(METADATA_SUFFIX)  # empty if all ranks saved together
        unknown = sorted(name for name in strangers - left if not rank or f"{rank}_" in name)
        longest_s = _SAVES_PER_AGE * max(save_timeout_s, _LONG_S)
        # By the clock of the storage.
        oldest_s = files.stat(metadata_name).modified_s - longest_s if unknown else 0.0
        for name in unknown:
            with suppress(ReadError):  # not a regular file
                if files.stat(name).changed_s < oldest_s:
                    yield name
    except OSError:  # not fatal: the next save looks again
        where = files.where()
        _log.debug("files of other saves cannot be listed: path=%s", where, exc_info=True)


def unreferenced(files: Files, names: Sequence[str], own: str) -> set[str]:
    """Names of shard files, among all ``names``, that no metadata refers to; metadata named ``own``
    does not count. Empty if other metadata may be unreadable.
    """
    strangers = {name for name in names if is_given_to_shards(name)}
    for name in names:
        if name.endswith(METADATA_SUFFIX) and name != own:
            referenced = files_of(files, name)
            if not referenced:  # it may be unreadable
                return set()
            strangers -= referenced
    return strangers


def remove_unpublished(
    directory: str, names: Sequence[Set[str]], written: Sequence[RankFiles | None]
) -> None:
    """Remove all ranks' files of a save whose metadata was certainly not published.

    ``names`` and ``written`` are by rank. Files elsewhere than in ``directory``, or of an unknown
    place, stay.
    """
    here = {
        name
        for of_rank, each in zip(names, written, strict=True)
        if each is not None and each.directory == directory
        for name in of_rank
    }
    remove_with_deadline(
        [os.path.join(directory, name) for name in sorted(filter(is_ours_to_remove, here))]
    )
