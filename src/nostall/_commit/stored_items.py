"""The items of a checkpoint, and where they are in its files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from torch.distributed.checkpoint.metadata import Metadata

from nostall._commit.index import ItemIndex
from nostall._commit.indexing import entries_and_places, read_index
from nostall._commit.manifest import DAMAGED_HINT, split
from nostall._commit.metadata import Extent, extents_of, load_metadata, planned_indices
from nostall._storage.reading import read_metadata
from nostall.errors import (
    DamagedCheckpointError,
    ReadError,
    UnknownMetadataError,
    UntrustedMetadataError,
)


def extents_in(
    stream: BinaryIO, *, path: str, is_confirmed: bool
) -> tuple[Mapping[str, Sequence[Extent]], str | None]:
    """The items in a ``.metadata`` file, by the file that they are in.

    Args:
        stream: The file.
        path: For errors.
        is_confirmed: Whether the manifest has confirmed the bytes. Then metadata that cannot be
            used does not raise.

    Returns:
        The items; and ``None``, or why no items are returned for confirmed metadata.

    Raises:
        UnknownMetadataError: The metadata is not understood, and not confirmed.
        UntrustedMetadataError: The metadata is malformed and not confirmed; or the index is.
        DamagedCheckpointError: The metadata is damaged, or an item has no location, and the
            metadata is not confirmed; or the index and the pickle describe different items.
        OSError: The file cannot be read.
    """
    indexed = read_index(stream, path=path)
    try:
        metadata = _metadata_in(stream, path)
        extents = _extents(metadata, path)
    except (DamagedCheckpointError, UntrustedMetadataError) as error:
        if not is_confirmed:
            raise
        return {}, error.message
    if indexed is not None:
        _require_agreement(indexed[0], metadata, path)
    return extents, None


def _metadata_in(stream: BinaryIO, path: str) -> Metadata:
    try:
        content = read_metadata(stream, path)
    except ReadError as error:
        raise UnknownMetadataError(error.message, phase="read", path=path) from error
    pickled, _ = split(content, path=path)
    return load_metadata(pickled, path=path)


def _extents(metadata: Metadata, path: str) -> Mapping[str, list[Extent]]:
    """Locations of the items of a checkpoint, by file."""
    missing = set(planned_indices(metadata)).difference(metadata.storage_data or ())
    if missing:
        named = sorted({str(index.fqn) for index in missing})[:3]
        raise DamagedCheckpointError(
            f"it has no location for {len(missing)} of its items, among them {named}",
            phase="verify",
            path=path,
            hint=DAMAGED_HINT,
        )
    by_file: dict[str, list[Extent]] = defaultdict(list)
    for extent in extents_of(metadata, path=path):
        by_file[extent.file].append(extent)
    return by_file


def _require_agreement(index: ItemIndex, metadata: Metadata, path: str) -> None:
    """Require that the index and the pickle describe the same items and places."""
    try:
        said = entries_and_places(index, path=path)
    except UnknownMetadataError:  # but this torch knows all that the pickle has
        said = None
    if said != (metadata.state_dict_metadata, metadata.storage_data):
        raise DamagedCheckpointError(
            "its index and its pickle describe different items",
            phase="verify",
            path=path,
            hint=DAMAGED_HINT,
        )
