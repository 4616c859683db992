"""Metadata that ``dcp.save`` returns on every rank, without sending all of it.

Stock DCP sends the coordinator's metadata object to all ranks, though few programs look at it. This
one is sent as a note of where it is published; a rank that looks reads it there.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from nostall._commit.metadata import load_metadata
from nostall._storage.places import storage_at
from nostall._storage.reading import open_to_read, read_metadata
from nostall.errors import ReadError

_FIELDS = frozenset(each.name for each in fields(Metadata))
_WHERE = "_where"
"""The attribute of both classes: directory, name of the file, and the save's id."""


class PlannedMetadata(Metadata):
    """On the coordinator: pickled once as a note, if it is published, and stock's after that."""

    def __init__(self, metadata: Metadata) -> None:
        vars(self).update(vars(metadata))

    def plain(self) -> Metadata:
        """An object of stock's class with the same attributes."""
        return _plain({name: value for name, value in vars(self).items() if name != _WHERE})

    def note_published(self, directory: str, name: str, save_id: str | None) -> None:
        """Note where other ranks find it."""
        vars(self)[_WHERE] = directory, name, save_id

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        where = vars(self).pop(_WHERE, None)
        self.__class__ = Metadata  # type: ignore[assignment]  # what dcp.save returns
        return (_plain, (dict(vars(self)),)) if where is None else (SentMetadata, where)


def _plain(attributes: dict[str, Any]) -> Metadata:
    metadata = Metadata.__new__(Metadata)
    vars(metadata).update(attributes)
    return metadata


class SentMetadata(Metadata):
    """On other ranks: read from the checkpoint when a field is first looked at.

    Args:
        directory: That of the checkpoint.
        name: The name of the metadata file.
        save_id: That of the save.

    Raises:
        ReadError: From a field: the metadata cannot be read, or is that of a later save.
    """

    def __init__(self, directory: str, name: str, save_id: str | None) -> None:
        object.__setattr__(self, _WHERE, (directory, name, save_id))

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS:
            _read(self)
        return object.__getattribute__(self, name)

    def __eq__(self, other: object) -> bool:
        _read(self)
        return self == other

    __hash__ = None  # type: ignore[assignment]  # as of stock's

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return SentMetadata, object.__getattribute__(self, _WHERE)


def _read(sent: SentMetadata) -> None:
    directory, name, save_id = object.__getattribute__(sent, _WHERE)
    storage = storage_at(directory)
    path = storage.where(name)
    try:
        with open_to_read(storage, name) as stream:
            metadata = load_metadata(read_metadata(stream, path), path=path)
    except FileNotFoundError as error:
        raise _gone("was removed", path) from error
    if metadata.storage_meta is None or metadata.storage_meta.save_id != save_id:
        raise _gone("was replaced by a later save", path)
    attributes = vars(sent)
    attributes.clear()
    attributes.update(vars(metadata))
    sent.__class__ = Metadata  # type: ignore[assignment]


def _gone(how: str, path: str) -> ReadError:
    return ReadError(
        f"the checkpoint whose metadata dcp.save returned {how}",
        phase="read",
        path=path,
        hint="look at the returned metadata before that",
    )
