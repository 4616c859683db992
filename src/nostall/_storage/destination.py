"""The checkpoint path: checked, made absolute, and made a directory that can be saved to."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nostall._storage.deadlines import in_time
from nostall._storage.places import (
    is_address,
    normal,
    resolved,
    set_storage_options,
    storage_at,
)
from nostall._storage.port import may_have
from nostall.errors import CheckpointExistsError, OptionError, WriteError
from nostall.options import EngineOptions

_FILE = "file://"
_LOST_SLASH = re.compile(r"(s3|gs|az|msc|file):/[^/]")


def require_possible(path: str | os.PathLike[str]) -> None:
    """Refuse a path that cannot name a checkpoint directory.

    Raises:
        OptionError: It is not a path, is empty or contains a null character.
    """
    if not isinstance(path, str | os.PathLike):
        raise OptionError(
            f"the checkpoint path is {path!r}", hint="pass a string or a pathlib.Path"
        )
    if not os.fspath(path):
        raise OptionError("the checkpoint path is empty", hint="'.' is the current directory")
    if "\0" in str(path):
        raise OptionError(
            f"the checkpoint path {path!r} contains a null character", hint="remove it"
        )
    if _LOST_SLASH.match(str(path)):
        raise OptionError(
            "the path was an address, but one of its slashes is lost, as in a pathlib.Path",
            path=str(path),
            hint="pass addresses as strings: s3://bucket/key",
        )


def place_of(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> str:
    """The place that a user names: an absolute path, or an address.

    Args:
        path: What the user names.
        storage_options: Options for the client of its bucket, from now on.

    Raises:
        OptionError: It cannot name a checkpoint, :func:`absolute` raises it, or the client of the
            object store is not installed.
    """
    require_possible(path)
    text = os.fspath(path)
    if text.startswith(_FILE):
        text = text.removeprefix(_FILE)
        if not text.startswith("/"):
            raise OptionError(
                "the address of a directory has three slashes", path=str(path), hint="file:///path"
            )
    place = resolved(normal(text)) if is_address(text) else str(absolute(text))
    set_storage_options(place, storage_options)
    return place


def is_place(path: object) -> bool:
    """Whether :func:`place_of` accepts a path or address; true for every ``msc://``."""
    try:
        place_of(path)  # type: ignore[arg-type]  # it refuses other types
    except OptionError:
        return str(path).startswith("msc://")  # frameworks probe it without the client
    return True


def local_tier_of(path: str | os.PathLike[str]) -> str:
    """The directory that a user names as ``local_staging_dir``.

    Raises:
        OptionError: As :func:`place_of`, or it is in an object store.
    """
    if is_address(path) and not os.fspath(path).startswith(_FILE):
        raise OptionError(
            "local_staging_dir does not support object stores",
            path=str(path),
            hint="use a path on a disk",
        )
    return place_of(path)


def absolute(path: str | os.PathLike[str]) -> Path:
    """The absolute form of a path: trainer and writer process have different working directories.

    It leads where the system finds the path, whose ``..`` is not what is written before it if that
    is a link.

    Raises:
        OptionError: The path is relative and the working directory was removed.
        SaveTimeoutError: It has a ``..``, and storage did not answer.
    """
    try:
        parts = os.fspath(path).split("/")
        if ".." in parts:
            last = len(parts) - parts[::-1].index("..")
            path = os.path.join(without_links("/".join(parts[:last])), *parts[last:])
        return Path(os.path.abspath(path))
    except OSError as error:
        raise OptionError(
            f"the path is relative, and the working directory is gone: {error.strerror}",
            path=os.fsdecode(path),
            hint="pass an absolute path, or change to an existing directory",
        ) from error


def without_links(path: str) -> str:
    """The path that links in it lead to.

    Raises:
        SaveTimeoutError: Storage did not answer.
    """
    return in_time(
        lambda: os.path.realpath(path),
        timeout_s=EngineOptions().save_timeout_s,  # there may be no engine yet
        doing="following links",
        phase="plan",
        path=path,
    )


def require_directory(path: str) -> None:
    """Refuse a path that is not a directory and cannot become one. Looks at storage.

    Raises:
        OptionError: Something else has its name, or that of a directory above it.
    """
    hint = None if is_address(path) else _why_no_directory(path, None)
    if hint is not None:
        raise OptionError("the path is not that of a directory", path=path, hint=hint)


def make_ready(
    place: str,
    metadata_name: str,
    others: Sequence[str],
    *,
    overwrite: bool,
    rank: int | None,
    timeout_s: float,
) -> bool:
    """Make a checkpoint directory, and check that it holds no checkpoint that must not be replaced.

    Args:
        place: The directory, or its address.
        metadata_name: Name of the metadata file that the save will publish.
        others: Names of metadata files that it will not replace.
        overwrite: Whether a checkpoint may be replaced.
        rank: This rank, for errors.
        timeout_s: How long storage may take.

    Returns:
        Whether any of the metadata files may be there.

    Raises:
        CheckpointExistsError: It holds a checkpoint, and ``overwrite`` is false.
        WriteError: The directory cannot be made.
        SaveTimeoutError: Storage did not answer within ``timeout_s`` seconds.
    """

    def make() -> bool:
        storage = storage_at(place)
        try:
            storage.make_place()
        except OSError as error:
            raise WriteError(
                f"cannot make the checkpoint directory: {error.strerror}",
                errno=error.errno,
                rank=rank,
                phase="plan",
                path=place,
                hint=_why_no_directory(place, error.errno),
            ) from error
        is_taken = may_have(storage, metadata_name)
        if is_taken and not overwrite:
            raise must_stay(place, rank)
        return is_taken or any(may_have(storage, name) for name in others)

    return in_time(
        make,
        timeout_s=timeout_s,
        doing="making the checkpoint directory",
        phase="plan",
        path=place,
        rank=rank,
    )


def may_hold(
    place: str, metadata_names: Sequence[str], *, rank: int | None, timeout_s: float
) -> bool:
    """Whether a place may hold a checkpoint; true if storage cannot tell.

    Raises:
        SaveTimeoutError: Storage did not answer within ``timeout_s`` seconds.
    """

    def look() -> bool:
        storage = storage_at(place)
        return any(may_have(storage, name) for name in metadata_names)

    return in_time(
        look,
        timeout_s=timeout_s,
        doing="looking for an existing checkpoint",
        phase="plan",
        path=place,
        rank=rank,
    )


def must_stay(place: str, rank: int | None) -> CheckpointExistsError:
    """The error that a place holds a checkpoint that must not be replaced."""
    return CheckpointExistsError(
        # Stock's words, which programs look for.
        "Checkpoint already exists and self.overwrite=False, or storage cannot say that none does",
        rank=rank,
        phase="plan",
        path=place,
        hint="choose another directory or pass overwrite=True",
    )


def _why_no_directory(path: str, code: int | None) -> str | None:
    """What is in the way, and what to do about it, if that is known."""
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.exists(path):
        return f"{path} is a broken symbolic link; remove it or choose another path"
    if not os.path.isdir(path):
        return f"{path} is a file; choose another path"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
        return f"user {os.geteuid()} may not make directories in {path}; choose another path"
    return None
