"""Removal of files that no metadata refers to, by their paths, wherever they are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress

from nostall._model.names import METADATA_SUFFIX
from nostall._storage.places import storage_at
from nostall._storage.port import Files
from nostall._storage.reading import open_to_read, read_metadata
from nostall.errors import NostallError

_OF_RANK = re.compile(r"__(\d+)_\d+[^/]*\Z")


def remove_unnamed(paths: Iterable[str]) -> None:
    """Remove files of a save that has failed, but those that a checkpoint has; errors are ignored.

    A later save may have got the same names. All files stay if metadata cannot be read.
    """
    by_place: dict[str, list[str]] = {}
    for path in paths:
        place, name = os.path.split(path)
        by_place.setdefault(place, []).append(name)
    for place, names in by_place.items():
        ranks = {found[1] for found in map(_OF_RANK.search, names) if found is not None}
        with suppress(OSError, NostallError):
            storage = storage_at(place)
            metadata = [
                _content(storage, name)
                for name in (METADATA_SUFFIX, *(f"__{rank}{METADATA_SUFFIX}" for rank in ranks))
            ]
            storage.remove(
                name for name in names if not any(name.encode() in content for content in metadata)
            )


def _content(storage: Files, name: str) -> bytes:
    """What a metadata file says: names are in it as they are."""
    try:
        with open_to_read(storage, name) as stream:
            return read_metadata(stream, storage.where(name))
    except (FileNotFoundError, NotADirectoryError):
        return b""
