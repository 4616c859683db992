"""Metadata that ``dcp.save`` returns on every rank, without sending all of it.

Stock DCP sends the coordinator's metadata object to all ranks, though few programs look at it. This
one is sent as a note of where it is published; a rank that looks reads it there.
"""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from nostall._commit.metadata import load_metadata
from nostall._engine import default_engine
from nostall._storage.deadlines import in_time
from nostall._storage.locations import storage_at
from nostall._storage.port import open_to_read, read_metadata
from nostall.errors import ReadError

_FIELDS = frozenset(each.name for each in fields(Metadata))
_WHERE = "_where"
"""The attribute of both classes: directory, name of the file, and the save's id."""
_lock = threading.Lock()
"""Held by a thread that reads; another may look at the same object."""


class PublishedMetadata(Metadata):
    """On the coordinator, until ``dcp.save`` has sent it: pickled once, as a note."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        where = vars(self).pop(_WHERE, None)
        self.__class__ = Metadata  # type: ignore[assignment]  # what dcp.save returns
        return self.__reduce_ex__(protocol) if where is None else (SentMetadata, where)


def send_as_note(metadata: Metadata, directory: str, name: str, save_id: str) -> None:
    """Let published metadata be sent as a note.

    Args:
        metadata: The object that ``dcp.save`` sends next.
        directory: That of the checkpoint.
        name: The name of the metadata file.
        save_id: That of the save.
    """
    vars(metadata)[_WHERE] = directory, name, save_id
    metadata.__class__ = PublishedMetadata


class SentMetadata(Metadata):
    """On other ranks: read from the checkpoint when a field is first looked at.

    Args:
        directory: That of the checkpoint.
        name: The name of the metadata file.
        save_id: That of the save.

    Raises:
        ReadError: From a field: the metadata cannot be read, or is that of a later save.
        SaveTimeoutError: From a field: storage did not answer in time.
    """

    def __init__(self, directory: str, name: str, save_id: str) -> None:
        object.__setattr__(self, _WHERE, (directory, name, save_id))

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS:
            _read(self)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIELDS:
            _read(self)
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        _read(self)
        return self == other

    __hash__ = None  # type: ignore[assignment]  # as of stock's

    def __reduce_ex__(self, protocol: Any) -> Any:
        where = vars(self).get(_WHERE)
        return super().__reduce_ex__(protocol) if where is None else (SentMetadata, where)


def _read(sent: SentMetadata) -> None:
    with _lock:
        if type(sent) is not SentMetadata:  # another thread has read it
            return
        directory, name, save_id = vars(sent)[_WHERE]
        storage = storage_at(directory)
        path = storage.where(name)

        def read() -> Metadata:
            with open_to_read(storage, name) as stream:
                return load_metadata(read_metadata(stream, path), path=path)

        try:
            metadata = in_time(
                read,
                timeout_s=default_engine().options.save_timeout_s,
                doing="reading the metadata that dcp.save returned",
                phase="read",
                path=path,
            )
        except OSError as error:
            raise _gone(
                f"cannot be read from this rank: {error.strerror or error}", path
            ) from error
        if metadata.storage_meta is None or metadata.storage_meta.save_id != save_id:
            raise _gone("was replaced by a later save", path)
        attributes = vars(sent)
        attributes.update(vars(metadata))
        sent.__class__ = Metadata  # type: ignore[assignment]  # what dcp.save returns
        del attributes[_WHERE]


def _gone(how: str, path: str) -> ReadError:
    return ReadError(
        f"the checkpoint whose metadata dcp.save returned {how}",
        phase="read",
        path=path,
        hint="look at the returned metadata before the checkpoint is replaced or removed",
    )
