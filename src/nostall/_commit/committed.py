"""The committed checkpoints in a directory or below an address, the last one first.

Nothing here imports torch.
"""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from typing import TypeAlias

from nostall._commit.manifest import manifest_alone
from nostall._model.names import (
    METADATA_NAME,
    OF_FILE_SYSTEM,
    is_metadata_of_one_rank,
    is_ours_to_remove,
    order_of_commit,
)
from nostall._model.wording import some
from nostall._storage.places import is_address, may_have, storage_at
from nostall._storage.port import leaves_open, reason
from nostall._storage.reading import open_to_read
from nostall.errors import ReadError

_THREADS = 8
_SHOWN, _MOST_SEARCHED = 3, 1000
Order: TypeAlias = tuple[float, bool, int, str]


def committed_latest_first(root: str) -> list[str]:
    """The directories in ``root`` with a metadata file, last committed first; also behind links.

    Raises:
        ReadError: ``root`` is not a directory, or cannot be read.
    """
    if is_address(root):
        return _committed_in_store_latest_first(root)
    try:
        candidates = _candidates_in(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        if isinstance(error, NotADirectoryError) and not os.path.lexists(root):
            return []  # it is a directory above that is a file
        raise ReadError(
            f"cannot list checkpoints: {reason(error)}",
            errno=error.errno,
            phase="read",
            path=root,
            hint="pass the parent directory of the checkpoint directories",
        ) from error
    return [path for _, path in sorted(candidates, reverse=True)]


def _candidates_in(directory: str) -> list[tuple[Order, str]]:
    candidates = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name != OF_FILE_SYSTEM and _may_be_file(f"{entry.path}/{METADATA_NAME}"):
                at_s = _committed_at_s(entry.path)
                order = order_of_commit(entry.path, at_s, is_link=entry.is_symlink())
                candidates.append((order, entry.path))
    return candidates


def found_instead(path: str) -> str:
    """The end of a message about a directory that is not a checkpoint: what it holds, or nothing.

    Names the checkpoints in it, or else those one level deeper, the last committed one first.
    """
    with suppress(OSError):
        names = storage_at(path).list()
        if any(map(is_metadata_of_one_rank, names)):
            return "; each rank has saved alone here, with use_collectives=False"
        if any(map(is_ours_to_remove, names)):
            return "; it has files of a save that is in progress or was interrupted"
        if len(names) > _MOST_SEARCHED:  # a directory of data, as a rule
            return ""
        below = committed_latest_first(path)
        if not below and not is_address(path):
            inner = [f"{path}/{name}" for name in names if os.path.isdir(f"{path}/{name}")]
            deeper = [each for directory in inner for each in _candidates_in(directory)]
            below = [found for _, found in sorted(deeper, reverse=True)]
        if below:
            shown = [os.path.relpath(each, path) for each in below]
            return f"; below it, the newest first: {some(shown, _SHOWN)}"
    return ""


def _committed_in_store_latest_first(root: str) -> list[str]:
    def candidate(name: str) -> tuple[Order, str] | None:
        place = f"{root}/{name}"
        if not may_have(storage_at(place), METADATA_NAME):
            return None
        at_s = _committed_at_s(place) or inf  # unknown: looked at first, so that it is named
        return order_of_commit(place, at_s, is_link=False), place

    try:
        names = storage_at(root).list()
    except OSError as error:
        raise ReadError(
            f"cannot list checkpoints: {reason(error)}",
            errno=error.errno,
            phase="read",
            path=root,
            hint="check the address, and the rights to list it",
        ) from error
    with ThreadPoolExecutor(_THREADS, "nostall-latest") as pool:  # each takes two requests
        found = [each for each in pool.map(candidate, names) if each is not None]
    return [place for _, place in sorted(found, reverse=True)]


def _may_be_file(path: str) -> bool:
    """Whether a regular file has this name; also true if storage does not say."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        return leaves_open(error)


def committed_at_s(directory: str) -> float:
    """When a checkpoint was committed: by its manifest, or else by the clock of storage.

    Raises:
        OSError: Its metadata cannot be read.
    """
    files = storage_at(directory)
    with open_to_read(files, METADATA_NAME) as stream:
        manifest = manifest_alone(stream)
    return files.stat(METADATA_NAME).modified_s if manifest is None else manifest.committed_at_s


def _committed_at_s(directory: str) -> float:
    """When a checkpoint was committed; the next best time if its metadata cannot be read."""
    with suppress(OSError):
        return committed_at_s(directory)
    with suppress(OSError):
        return storage_at(directory).stat(METADATA_NAME).modified_s
    with suppress(OSError):
        return os.stat(directory).st_mtime
    return 0.0
