"""Where a checkpoint is to go: what path can be one, and a directory that is ready for it."""

from __future__ import annotations

import os
from pathlib import Path

from nostall._storage.deadlines import in_time
from nostall._storage.posix import make_directory, may_be_there
from nostall.errors import CheckpointExistsError, OptionError, WriteError


def require_possible(path: str | os.PathLike[str]) -> None:
    """Refuse what cannot be the path of a checkpoint directory.

    Raises:
        OptionError: It is empty, or has a null character in it.
    """
    if not os.fspath(path):
        raise OptionError("the checkpoint path is empty", hint="'.' is the current directory")
    if "\0" in str(path):
        raise OptionError(
            f"there is a null character in the checkpoint path {path!r}", hint="take it out"
        )


def require_file_system(path: object) -> None:
    """Refuse what is not on a file system.

    Raises:
        OptionError: It is in an object store.
    """
    if "://" in str(path):
        raise OptionError(
            "object stores and the multi-storage client are not supported yet",
            path=str(path),
            hint="write to a file system path and copy from there",
        )


def absolute(path: str | os.PathLike[str]) -> Path:
    """Where a path leads now: the trainer may change its directory, and its writer process has one of its own.

    Raises:
        OptionError: The path is relative to a working directory that is gone.
    """
    try:
        return Path(os.path.abspath(path))
    except OSError as error:
        raise OptionError(
            f"the path is relative, and the working directory is gone: {error.strerror}",
            path=os.fsdecode(path),
            hint="pass an absolute path, or change to a directory that is there",
        ) from error


def make_ready(
    directory: str, metadata_path: str, *, overwrite: bool, rank: int | None, timeout_s: float
) -> None:
    """Make a checkpoint directory, and see whether there is a checkpoint in it that must not be replaced.

    Raises:
        CheckpointExistsError: There is one, and ``overwrite`` is false.
        WriteError: The directory cannot be made.
        SaveTimeoutError: Storage does not answer within ``timeout_s`` seconds.
    """
    in_time(
        lambda: _make_ready(directory, metadata_path, overwrite=overwrite, rank=rank),
        timeout_s=timeout_s,
        doing="making the checkpoint directory",
        phase="plan",
        path=directory,
        rank=rank,
    )


def _make_ready(directory: str, metadata_path: str, *, overwrite: bool, rank: int | None) -> None:
    try:
        make_directory(directory)
    except OSError as error:
        raise WriteError(
            f"the checkpoint directory cannot be made: {error.strerror}",
            errno=error.errno,
            rank=rank,
            phase="plan",
            path=directory,
            hint=_why_no_directory(directory),
        ) from error
    if not overwrite and may_be_there(metadata_path):
        raise CheckpointExistsError(
            "a committed checkpoint is there, or may be, and overwrite=False",
            rank=rank,
            phase="plan",
            path=directory,
            hint="choose another directory or pass overwrite=True",
        )


def _why_no_directory(path: str) -> str | None:
    """What is in the way, if it is a file or a link."""
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.exists(path):
        return f"{path} is a link that leads nowhere"
    return None if os.path.isdir(path) else f"{path} is a file"
