"""What saves leave behind in a place, and which of it may be removed.

Files that no metadata refers to may belong to a save that is about to commit. They are removed if
they belong to the replaced checkpoint, to a save that is known to be over, or are too old for any.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress

from nostall._commit.manifest import manifest_alone
from nostall._commit.metadata import referenced_files
from nostall._commit.publication import Publication
from nostall._model.names import (
    METADATA_SUFFIX,
    is_draft,
    is_given_to_shards,
    is_ours_to_remove,
)
from nostall._model.values import RankFiles
from nostall._storage import directories
from nostall._storage.deadlines import remove_in_time
from nostall._storage.port import Files
from nostall._storage.reading import open_to_read, read_metadata
from nostall.errors import ReadError

_log = logging.getLogger("nostall")

_LONG_S = 600.0
_SAVES_PER_AGE = 2
"""A file older than this many times ``save_timeout_s`` (or ``_LONG_S``, if longer) is of no save
under way."""


def files_of(storage: Files, name: str) -> set[str]:
    """Names of the shard files of a checkpoint; empty without trustworthy metadata."""
    try:
        return files_named_by(storage, name)
    except OSError:
        return set()


def files_named_by(storage: Files, name: str) -> set[str]:
    """As :func:`files_of`.

    Raises:
        OSError: The metadata cannot be read.
    """
    with open_to_read(storage, name) as stream:
        manifest = manifest_alone(stream)
        if manifest is None:
            path = storage.where(name)
            files = referenced_files(read_metadata(stream, path), path=path)
        else:  # much faster to read than the metadata
            files = {file.name for file in manifest.files}
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

    Args:
        files: The checkpoint's files.
        metadata_name: Name of the metadata file.
        publication: The publication.
        replaced: Names of the replaced checkpoint's files.
        left: Names of files that ranks of this save made for earlier saves that are over.
        save_timeout_s: Longest duration of a save.
    """
    used = publication.files | directories.names_in_use(files.where())
    yield from replaced - used
    try:
        names = files.list()
        strangers = unreferenced(files, names, metadata_name) - used - replaced
        yield from strangers & left
        # Commits of this process to a directory take turns, so none of these is under way in it. A
        # process whose draft is gone fails cleanly, or makes another one.
        yield from filter(is_draft, names)
        longest_s = _SAVES_PER_AGE * max(save_timeout_s, _LONG_S)
        yield from _old_ones(files, metadata_name, strangers - left, longest_s)
    except OSError:  # not fatal: the next save looks again
        where = files.where()
        _log.debug("files of other saves cannot be listed: path=%s", where, exc_info=True)


def unreferenced(files: Files, names: Sequence[str], own: str) -> set[str]:
    """Names of shard files that no metadata refers to.

    Args:
        files: The checkpoint's files.
        names: All their names.
        own: Name of metadata that do not count.
    """
    strangers = {name for name in names if is_given_to_shards(name)}
    for name in names:
        if name.endswith(METADATA_SUFFIX) and name != own:
            referenced = files_of(files, name)
            if not referenced:  # it may be unreadable
                return set()
            strangers -= referenced
    return strangers


def _old_ones(files: Files, own: str, names: Set[str], longest_s: float) -> Iterator[str]:
    """The files too old for any save under way to commit, by the clock of the storage."""
    rank = own.removesuffix(METADATA_SUFFIX)  # empty if all ranks saved together
    if not names:
        return
    oldest_s = files.stat(own).modified_s - longest_s
    for name in sorted(names):
        is_of_rank = not rank or f"{rank}_" in name
        with suppress(ReadError):  # not a regular file
            if is_of_rank and files.stat(name).changed_s < oldest_s:
                yield name


def remove_unpublished(
    path: str, names: Sequence[Set[str]], written: Sequence[RankFiles | None]
) -> None:
    """Remove all ranks' files of a save whose metadata was certainly not published.

    Args:
        path: The metadata file.
        names: Those of each rank's files.
        written: The files and directory of each rank; files elsewhere, or unknown, stay.
    """
    directory = os.path.dirname(path)
    here = {
        name
        for of_rank, each in zip(names, written, strict=True)
        if each is not None and each.directory == directory
        for name in of_rank
    }
    remove_in_time(
        [os.path.join(directory, name) for name in sorted(filter(is_ours_to_remove, here))]
    )
