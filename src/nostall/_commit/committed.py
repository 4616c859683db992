"""The committed checkpoints in a directory or below an address, the last one first.

Nothing here imports torch.
"""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf

from nostall._commit.manifest import manifest_alone
from nostall._model.names import METADATA_NAME, OF_FILE_SYSTEM, order_of_commit
from nostall._storage.places import is_address, may_have, storage_at
from nostall._storage.port import leaves_open, reason
from nostall._storage.reading import open_to_read
from nostall.errors import ReadError

_THREADS = 8


def committed_latest_first(root: str) -> list[str]:
    """The directories in ``root`` with a metadata file, last committed first; also behind links.

    Raises:
        ReadError: ``root`` is not a directory, or cannot be read.
    """
    if is_address(root):
        return _committed_in_store_latest_first(root)
    candidates = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if entry.name == OF_FILE_SYSTEM:
                    continue
                metadata = os.path.join(entry.path, METADATA_NAME)
                if _may_be_file(metadata):
                    at_s = _committed_at_s(entry.path)
                    order = order_of_commit(entry.path, at_s, is_link=entry.is_symlink())
                    candidates.append((order, entry.path))
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


def _committed_in_store_latest_first(root: str) -> list[str]:
    def candidate(name: str) -> tuple[tuple[float, bool, int, str], str] | None:
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


def _committed_at_s(directory: str) -> float:
    """When a checkpoint was committed; the next best time if its metadata cannot be read."""
    with suppress(OSError):
        with open_to_read(storage_at(directory), METADATA_NAME) as stream:
            manifest = manifest_alone(stream)
        if manifest is not None:
            return manifest.committed_at_s
    with suppress(OSError):
        return storage_at(directory).stat(METADATA_NAME).modified_s
    with suppress(OSError):
        return os.stat(directory).st_mtime
    return 0.0
