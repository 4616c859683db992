"""The committed checkpoints in a directory or below an address, the last one first.

Nothing here imports torch.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
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
from nostall._storage.locations import is_address, storage_at
from nostall._storage.port import leaves_open, may_have, open_to_read, reason
from nostall.errors import ReadError

_THREADS = 8
_SHOWN, _MOST_SEARCHED = 3, 1000
Order: TypeAlias = tuple[float, bool, int, str]


def committed_latest_first(root: str) -> list[str]:
    """The directories in ``root`` with a metadata file, last committed first; also behind links.
    ``ReadError`` if ``root`` is not a directory, or cannot be read.
    """
    return _committed_of(directories_in(root))


def directories_in(root: str) -> list[str]:
    """The directories and links in ``root``; all that is below an address; none if it is absent.
    ``ReadError`` if it is not a directory, or cannot be read.
    """
    try:
        if is_address(root):
            return [f"{root}/{name}" for name in storage_at(root).list() if name != METADATA_NAME]
        with os.scandir(root) as entries:
            found = [each for each in entries if each.is_symlink() or each.is_dir()]
        return [each.path for each in found if each.name != OF_FILE_SYSTEM]
    except OSError as error:
        is_file = isinstance(error, NotADirectoryError)
        # If the path does not exist, the file is in place of a directory above it.
        is_absent = isinstance(error, FileNotFoundError) or (is_file and not os.path.lexists(root))
        if is_absent and not is_address(root):
            return []
        raise ReadError(
            f"cannot list checkpoints: {reason(error)}",
            errno=error.errno,
            phase="read",
            path=root,
            hint="pass the parent directory of the checkpoint directories"
            if is_file
            else "check it, and the right to list it",
        ) from error


def _committed_of(paths: Iterable[str]) -> list[str]:
    """The directories with a metadata file, last committed first."""
    below = list(paths)
    if any(map(is_address, below)):  # each takes requests
        with ThreadPoolExecutor(_THREADS, "nostall-latest") as pool:
            candidates = list(pool.map(_candidate, below))
    else:  # starting a thread takes longer
        candidates = list(map(_candidate, below))
    found = [each for each in candidates if each is not None]
    return [path for _, path in sorted(found, reverse=True)]


def _candidate(path: str) -> tuple[Order, str] | None:
    """A directory with its place in the order; ``None`` if it has no metadata file."""
    if is_address(path):
        has_metadata = may_have(storage_at(path), METADATA_NAME)
    else:
        has_metadata = _may_be_file(f"{path}/{METADATA_NAME}")
    if not has_metadata:
        return None
    at_s = _committed_at_s(path) or inf  # unknown: looked at first, so that it is named
    return order_of_commit(path, at_s, is_link=os.path.islink(path)), path


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
            inner = filter(os.path.isdir, directories_in(path))
            below = _committed_of(each for outer in inner for each in directories_in(outer))
        if below:
            shown = [os.path.relpath(each, path) for each in below]
            return f"; below it, the newest first: {some(shown, _SHOWN)}"
    return ""


def _may_be_file(path: str) -> bool:
    """Whether a regular file has this name; also true if storage does not say."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        return leaves_open(error)


def committed_at_s(directory: str) -> float:
    """When a checkpoint was committed: by its manifest, or else by the clock of storage.

    ``OSError`` if there is none.
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
