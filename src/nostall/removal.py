"""Removal of a checkpoint; no crash leaves an incomplete one with metadata.

Order: metadata, then all other files. No other file is touched before the removal of the metadata
is durable.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING

from nostall._model.names import METADATA_NAME, is_metadata_of_one_rank, is_ours_to_remove
from nostall._storage.locations import is_address, object_storage_at, place_of
from nostall._storage.posix import HeldDirectory
from nostall.errors import OptionError, WriteError

if TYPE_CHECKING:
    from nostall._storage.object_storage import ObjectStorage

__all__ = ["remove_checkpoint"]


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, or the rest of one, and its directory.

    A crash at any moment leaves the unchanged checkpoint or none. A second call finishes an
    interrupted one; a directory that does not exist is not an error. Files that do not belong to a
    checkpoint stay, and with them the directory. Call it on one rank, and not during a save or a
    promotion to that directory.

    Args:
        path: Checkpoint directory, or an address in an object store.

    Raises:
        OptionError: It is not the directory of a checkpoint.
        WriteError: Storage refused; see ``path`` and ``errno``.
    """
    directory = place_of(path)  # without a slash at its end, which would follow a link
    what = "the checkpoint could not be opened"
    try:
        opened = _opened(directory)
        if opened is None:
            return
        with opened as place:
            what = "the checkpoint could not be removed"
            names = sorted(place.list())
            # Each rank's own is of saves without coordination.
            metadata = [n for n in names if n == METADATA_NAME or is_metadata_of_one_rank(n)]
            # Files of unfinished saves, too, and metadata that was not published.
            drafts = f"{METADATA_NAME}.tmp"
            rest = [n for n in names if is_ours_to_remove(n) or n.endswith(drafts)]
            others = sorted({*names} - {*metadata, *rest})
            if others and not metadata and not rest:
                raise _no_checkpoint(directory, f"a directory that holds {others[:3]}")
            place.remove(metadata)
            # Even without metadata: an interrupted call may not have reached this line.
            place.flush()
            place.remove(rest)
            if not others:
                what = "the checkpoint is removed, but its empty directory stays"
                place.remove_place()
    except OSError as error:
        raise WriteError(
            f"{what}: {error.strerror or error}",
            errno=error.errno,
            phase="remove",
            path=error.filename or directory,
            hint="fix the cause, then remove it again",
        ) from error


def _opened(directory: str) -> AbstractContextManager[HeldDirectory | ObjectStorage] | None:
    """The files there; ``None`` if the directory does not exist."""
    if is_address(directory):
        return nullcontext(object_storage_at(directory))
    try:
        return closing(HeldDirectory(directory))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        if not os.path.islink(directory):
            raise _no_checkpoint(directory, "a file") from None
        raise OptionError(
            "a symbolic link is not removed", path=directory, hint="pass the directory itself"
        ) from None


def _no_checkpoint(directory: str, what: str) -> OptionError:
    return OptionError(
        f"this is {what}, not a checkpoint",
        path=directory,
        hint="nothing was removed; pass the directory of one checkpoint",
    )
