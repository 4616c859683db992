"""Names: of files in a checkpoint, in messages, and of keyword arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from enum import Enum
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

METADATA_SUFFIX = ".metadata"
METADATA_NAME = METADATA_SUFFIX
"""The name of the file whose publication commits a checkpoint; stock DCP's."""
OF_FILE_SYSTEM = "lost+found"
"""A directory at the root of a file system, into which only the administrator may look."""
SHARD_SUFFIX = ".distcp"
"""Suffix of shard file names, in stock DCP and here."""
SAFETENSORS_SUFFIX = ".safetensors"
AS_SAFETENSORS = ("safetensors",)
"""The transform that metadata names for a tensor in a file of safetensors: DCP's reader does not
know it, and says so, instead of taking the bytes for an archive."""
_STEP = re.compile(r"(\d+)(\.ckpt)?\Z")
_GIVEN = re.compile(r"__\d+_\d+(-[0-9a-f]{8})*\.(distcp|safetensors)\Z")
_DRAFT = re.compile(r"(\.[0-9a-f]{8})?" + re.escape(METADATA_SUFFIX) + r"\.tmp")
_OF_ONE_RANK = re.compile(r"__\d+" + re.escape(METADATA_SUFFIX))


class FileFormat(Enum):
    """The format of shard files; the value is the suffix of their names."""

    TORCH_SAVE = SHARD_SUFFIX
    """A row of blobs; a tensor's is an archive of ``torch.save``."""
    SAFETENSORS = SAFETENSORS_SUFFIX
    """A header, then the bytes of tensors."""


def is_ours_to_remove(name: str) -> bool:
    """Whether a file named by a replaced checkpoint may be removed: metadata can name any path."""
    return os.sep not in name and (name.endswith(SHARD_SUFFIX) or is_given_to_shards(name))


def is_given_to_shards(name: str) -> bool:
    """Whether a name has the form of a shard file's, with any prefix: ``__3_0-89abcdef.distcp``."""
    return _GIVEN.search(name) is not None


def step_in(path: str) -> int | None:
    """The number at the end of a directory's name, as in ``step-100`` or ``step=100.ckpt``."""
    found = _STEP.search(path)
    return int(found[1]) if found else None


def is_draft(name: str) -> bool:
    """Whether a name is that of metadata that is not published."""
    return _DRAFT.fullmatch(name) is not None


def order_of_commit(path: str, at_s: float, *, is_link: bool) -> tuple[float, bool, int, str]:
    """Sort key of the checkpoints of one directory: the last complete one is to be resumed from.

    Times of commit, in seconds since the epoch, may be equal, as with copies: a link is before a
    directory then, and a lower step before a higher one.
    """
    step = step_in(path)
    return at_s, not is_link, -1 if step is None else step, path


def is_metadata_of_one_rank(name: str) -> bool:
    """Whether a name is that of a rank's own metadata, of a save without coordination."""
    return _OF_ONE_RANK.fullmatch(name) is not None


def is_shard_name(name: str) -> bool:
    """Whether a name lies below the checkpoint directory and is not that of a metadata file."""
    normal = os.path.normpath(name)
    try:
        encoded = os.fsencode(normal)
    except UnicodeEncodeError:
        return False
    return (
        b"\0" not in encoded
        and not os.path.isabs(normal)
        and normal.split(os.sep)[0] not in (os.curdir, os.pardir)
        and not normal.endswith(METADATA_SUFFIX)
    )


def counted(number: int, noun: str) -> str:
    """A number and its noun: ``1 file``, ``2 files``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def some(names: Sequence[str], most: int = 5) -> str:
    """The first of some names, and the number of the others: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def also_named(**other_names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let callers pass a parameter by another keyword, too: ``also_named(ours="theirs")``.

    ``inspect.signature`` shows theirs, for programs that look before they call.
    """
    import inspect  # here, as it delays the start of the writer process

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> T:
            for ours, theirs in other_names.items():
                if theirs in kwargs:
                    kwargs[ours] = kwargs.pop(theirs)
            return function(*args, **kwargs)

        shown = inspect.signature(function)
        renamed = [
            each.replace(name=other_names.get(name, name))
            for name, each in shown.parameters.items()
        ]
        call.__signature__ = shown.replace(parameters=renamed)  # type: ignore[attr-defined]  # see PEP 362
        return call

    return decorate
