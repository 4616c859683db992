"""Removal of files that no metadata refers to, by their paths, wherever they are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress

from nostall._model.names import METADATA_SUFFIX
from nostall._storage import posix
from nostall._storage.places import is_address, storage_at
from nostall._storage.port import Files
from nostall._storage.reading import open_to_read, read_metadata
from nostall.errors import NostallError

_OF_RANK = re.compile(r"__(\d+)_\d+[^/]*\Z")


def remove_files(paths: Iterable[str]) -> None:
    """Remove files that no metadata will name, by their paths; errors are ignored.

    Nothing may get one of these paths again in an object store: a removal may be done after its
    answer was lost.

    Args:
        paths: Their paths.
    """
    in_stores: dict[str, list[str]] = {}
    for path in paths:
        if is_address(path):
            place, _, name = path.rpartition("/")
            in_stores.setdefault(place, []).append(name)
        else:
            posix.remove_files([path])
    for place, names in in_stores.items():
        with suppress(OSError):
            storage_at(place).remove(names)


def remove_unnamed(paths: Iterable[str]) -> None:
    """Remove files of a save that has failed, but those that a checkpoint has; errors are ignored.

    A later save may have got the same names. All
    files stay if metadata cannot be read.
    """
    by_place: dict[str, list[str]] = {}
    for path in paths:
        by_place.setdefault(os.path.dirname(path), []).append(path)
    for place, here in by_place.items():
        ranks = {found[1] for found in map(_OF_RANK.search, here) if found is not None}
        with suppress(OSError, NostallError):
            storage = storage_at(place)
            metadata = [
                _content(storage, name)
                for name in (METADATA_SUFFIX, *(f"__{rank}{METADATA_SUFFIX}" for rank in ranks))
            ]
            remove_files(
                path
                for path in here
                if not any(os.path.basename(path).encode() in content for content in metadata)
            )


def _content(storage: Files, name: str) -> bytes:
    """What a metadata file says: names are in it as they are."""
    try:
        with open_to_read(storage, name) as stream:
            return read_metadata(stream, storage.where(name))
    except (FileNotFoundError, NotADirectoryError):
        return b""
