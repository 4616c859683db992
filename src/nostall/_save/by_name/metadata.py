"""Metadata that ``dcp.save`` returns on every rank, without sending all of it.

Stock DCP sends the coordinator's metadata object to all ranks, though few programs look at it. This
one is sent as a note of where it is published; a rank that looks reads it there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from nostall._commit.description import LazyMetadata, lazy_metadata
from nostall._commit.metadata import load_metadata
from nostall._engine import default_engine
from nostall._storage.deadlines import in_time
from nostall._storage.locations import storage_at
from nostall._storage.port import open_to_read, read_metadata
from nostall.errors import ReadError


def send_as_note(metadata: Metadata, directory: str, name: str, save_id: str) -> None:
    """Let published metadata, which ``dcp.save`` sends next, be sent as a note, once."""

    def reduce_once(_protocol: Any) -> Any:
        del metadata.__reduce_ex__
        return _received, (directory, name, save_id)

    # ``pickle`` asks the object before its class.
    metadata.__reduce_ex__ = reduce_once  # type: ignore[method-assign]  # that is the point


def _received(directory: str, name: str, save_id: str) -> LazyMetadata:
    return lazy_metadata(partial(_read, directory, name, save_id))


def _read(directory: str, name: str, save_id: str) -> dict[str, Any]:
    """The attributes of published metadata; ``ReadError`` if they cannot be read, or are those of a
    later save; ``SaveTimeoutError`` if storage hangs.
    """
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
        raise _gone(f"cannot be read from this rank: {error.strerror or error}", path) from error
    if metadata.storage_meta is None or metadata.storage_meta.save_id != save_id:
        raise _gone("was replaced by a later save", path)
    return vars(metadata)


def _gone(how: str, path: str) -> ReadError:
    return ReadError(
        f"the checkpoint whose metadata dcp.save returned {how}",
        phase="read",
        path=path,
        hint="look at the returned metadata before the checkpoint is replaced or removed",
    )
