"""Remove a checkpoint so that no crash leaves one that looks whole and is not.

Order: metadata, fsync of the directory, then everything else. Before the metadata is durably gone no other file is touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from nostall import _torch
from nostall._model.names import METADATA_SUFFIX, SHARD_SUFFIX
from nostall._storage.destination import absolute
from nostall._storage.posix import remove_directory, remove_file, sync_directory
from nostall.errors import OptionError, WriteError

__all__ = ["remove_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """What is in a checkpoint directory, by what it is for."""

    metadata: tuple[str, ...]
    """Every rank's own too, which saves without coordination write."""
    rest: tuple[str, ...]
    """Shard files, of unfinished saves too, and metadata that was never published."""
    others: tuple[str, ...]
    """What no save has put there."""


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, or what is left of one, and its directory.

    A crash at any moment leaves the checkpoint as it was, or none. Calling it again finishes what was interrupted; where nothing
    is, nothing is done. Files that are no part of a checkpoint stay, and the directory with them. Call it on one rank, and not
    while a save to that directory is under way.

    Args:
        path: Checkpoint directory.

    Raises:
        OptionError: It is not the directory of a checkpoint.
        WriteError: Storage refused; ``path`` and ``errno`` say what and why.
    """
    if not os.fspath(path) or "://" in os.fspath(path):
        raise OptionError(
            "this is no directory of this machine", path=os.fspath(path), hint="pass a path"
        )
    directory = str(absolute(path))  # without a slash at its end, which would follow a link
    try:
        contents = _contents(directory)
        if contents is None:
            return
        _remove(directory, contents)
    except OSError as error:
        raise WriteError(
            f"the checkpoint could not be removed: {error.strerror or error}",
            errno=error.errno,
            phase="remove",
            path=error.filename or directory,
            hint="remove it again when the cause is gone",
        ) from error


def _remove(directory: str, contents: _Contents) -> None:
    for name in contents.metadata:
        remove_file(os.path.join(directory, name))
    # Also if there was none: whoever was interrupted may not have come here.
    sync_directory(directory)
    for name in contents.rest:
        remove_file(os.path.join(directory, name))
    if not contents.others:
        remove_directory(directory)
        sync_directory(os.path.dirname(directory))


def _contents(directory: str) -> _Contents | None:
    """What there is to remove; ``None`` if there is no such directory."""
    if os.path.islink(directory):
        raise OptionError(
            "this is a link to a directory", path=directory, hint="pass what it points to"
        )
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise _no_checkpoint(directory, "a file") from None
    contents = _sorted_out(names)
    if contents.others and not contents.metadata and not contents.rest:
        raise _no_checkpoint(directory, f"a directory that holds {contents.others[:3]}")
    return contents


def _sorted_out(names: Iterable[str]) -> _Contents:
    metadata, rest, others = [], [], []
    for name in names:
        if name == _torch.METADATA_NAME or _is_of_one_rank(name):
            metadata.append(name)
        elif name.endswith((SHARD_SUFFIX, f"{METADATA_SUFFIX}.tmp")):
            rest.append(name)
        else:
            others.append(name)
    return _Contents(metadata=tuple(metadata), rest=tuple(rest), others=tuple(others))


def _is_of_one_rank(name: str) -> bool:
    rank = name.removeprefix("__").removesuffix(METADATA_SUFFIX)
    return name == f"__{rank}{METADATA_SUFFIX}" and rank.isdecimal()


def _no_checkpoint(directory: str, what: str) -> OptionError:
    return OptionError(
        f"this is {what}, and not a checkpoint", path=directory, hint="nothing was removed"
    )
