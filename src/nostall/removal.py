"""Removal of a checkpoint; no crash leaves an incomplete one with metadata.

Order: metadata, then all other files. No other file is touched before the removal of the metadata
is durable.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nostall import _torch
from nostall._model.names import METADATA_SUFFIX, is_metadata_of_one_rank, is_ours_to_remove
from nostall._storage.locations import is_address, object_storage_at, place_of
from nostall._storage.posix import HeldDirectory
from nostall.errors import OptionError, WriteError

if TYPE_CHECKING:
    from nostall._storage.object_storage import ObjectStorage

__all__ = ["remove_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """Names in a checkpoint directory, by purpose."""

    metadata: tuple[str, ...]
    """Also each rank's own, from saves without coordination."""
    rest: tuple[str, ...]
    """Shard files, also of unfinished saves, records of these, and unpublished metadata."""
    others: tuple[str, ...]
    """Names that no save has created."""


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
    opened = _opened(directory)
    if opened is None:
        return
    what = "the checkpoint could not be removed"
    with opened as place:
        try:
            contents = _contents(directory, place.list())
            place.remove(contents.metadata)
            # Even without metadata: an interrupted call may not have reached this line.
            place.flush()
            place.remove(contents.rest)
            if not contents.others:
                what = "the checkpoint is removed, but its empty directory stays"
                place.remove_place()
        except OSError as error:
            raise _not_removed(what, error, directory) from error


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
    except OSError as error:
        raise _not_removed("the checkpoint could not be opened", error, directory) from error


def _not_removed(what: str, error: OSError, directory: str) -> WriteError:
    return WriteError(
        f"{what}: {error.strerror or error}",
        errno=error.errno,
        phase="remove",
        path=error.filename or directory,
        hint="fix the cause, then remove it again",
    )


def _contents(directory: str, names: list[str]) -> _Contents:
    """The names in the directory, by purpose."""
    contents = _sorted_out(sorted(names))
    if contents.others and not contents.metadata and not contents.rest:
        raise _no_checkpoint(directory, f"a directory that holds {contents.others[:3]}")
    return contents


def _sorted_out(names: Iterable[str]) -> _Contents:
    """The names by purpose."""
    metadata, rest, others = [], [], []
    for name in names:
        if name == _torch.METADATA_NAME or is_metadata_of_one_rank(name):
            metadata.append(name)
        elif is_ours_to_remove(name) or name.endswith(f"{METADATA_SUFFIX}.tmp"):
            rest.append(name)
        else:
            others.append(name)
    return _Contents(metadata=tuple(metadata), rest=tuple(rest), others=tuple(others))


def _no_checkpoint(directory: str, what: str) -> OptionError:
    return OptionError(
        f"this is {what}, not a checkpoint",
        path=directory,
        hint="nothing was removed; pass the directory of one checkpoint",
    )
