"""A checkpoint's description: its items, their parts and their places in files. Imports torch.

Metadata is read through the allow-list; it may have been written by stock DCP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from nostall import _torch
from nostall._cli.arguments import NotThere
from nostall._cli.checkpoints.listing import elsewhere, require_no_file, why_not_there
from nostall._cli.output import progress
from nostall._commit.manifest import Manifest, split
from nostall._commit.metadata import extents_of, load_metadata
from nostall._storage.places import storage_at
from nostall._storage.reading import open_to_read, read_metadata
from nostall.errors import DamagedCheckpointError, ReadError
from nostall.integrity import State, verify, why_damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stored part of an item."""

    offsets: tuple[int, ...]
    """Its place in the tensor; empty for an object."""
    sizes: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    """Its length in the file."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A tensor or an object."""

    key: Any
    """Its name in the metadata, usually a text."""
    dtype: torch.dtype | None
    """``None`` for an object."""
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.key)

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor."""
        return self.dtype is not None

    @property
    def kind(self) -> str:
        """Its dtype, or ``object``."""
        return "object" if self.dtype is None else str(self.dtype).removeprefix("torch.")

    @cached_property
    def nbytes(self) -> int:
        """Bytes in files."""
        return sum(part.nbytes for part in self.parts)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names of its files, sorted."""
        return tuple(sorted({part.file for part in self.parts}))

    @property
    def sharding(self) -> str:
        """Parts along each dimension, as in ``4x1``; empty if there is one part."""
        if len(self.parts) < 2:
            return ""
        grid = [
            len({part.offsets[dimension] for part in self.parts})
            for dimension in range(len(self.shape))
        ]
        if math.prod(grid) != len(self.parts):
            return f"{len(self.parts)} parts"
        return "x".join(map(str, grid))

    @property
    def form(self) -> str:
        """Dtype and shape, as in ``float32 [3, 4]``."""
        return f"{self.kind} {list(self.shape)}" if self.is_tensor else self.kind

    def require_covered(self, path: str) -> None:
        """Check that the parts of a tensor are the whole tensor.

        Raises:
            DamagedCheckpointError: Elements are missing.
        """
        stored = sum(math.prod(part.sizes) for part in self.parts)
        if self.is_tensor and stored < math.prod(self.shape):
            raise DamagedCheckpointError(f"{self.name!r} has missing parts", path=path)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint."""

    path: str
    metadata: Metadata
    manifest: Manifest | None
    items: tuple[Item, ...]
    """In the order of the metadata."""

    @cached_property
    def by_name(self) -> Mapping[str, Item]:
        """The items by name."""
        return {item.name: item for item in self.items}


def read_checkpoint(path: str) -> Checkpoint:
    """The description of a committed checkpoint.

    Raises:
        NotThere: No checkpoint was committed in this directory.
        DamagedCheckpointError: The metadata fails its checksum, or an item has no place.
        UnknownMetadataError: The metadata has parts that DCP metadata does not have.
        UntrustedMetadataError: The metadata is malformed.
        ReadError: The metadata is too large, or a symbolic link in the path is broken.
        OSError: It cannot be read.
        OptionError: The path is that of a file.
    """
    require_no_file(path)
    files = storage_at(path)
    where = files.where(_torch.METADATA_NAME)
    try:
        with open_to_read(files, _torch.METADATA_NAME) as stream:
            content = read_metadata(stream, where)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotThere(f"{path}: {why_not_there(path)}{elsewhere(path)}") from error
    pickled, manifest = split(content, path=where)
    metadata = load_metadata(pickled, path=where)
    extents_of(metadata, path=where)  # refuses files outside the directory
    items = tuple(
        _item(key, entry, metadata.storage_data, where)
        for key, entry in metadata.state_dict_metadata.items()
    )
    return Checkpoint(path=path, metadata=metadata, manifest=manifest, items=items)


def _item(key: Any, entry: Any, storage_data: Mapping[MetadataIndex, Any], path: str) -> Item:
    if not isinstance(entry, TensorStorageMetadata):
        part = _part(MetadataIndex(key), (), storage_data, path)
        return Item(key=key, dtype=None, shape=(), parts=(part,))
    dtype = getattr(getattr(entry, "properties", None), "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpointError(f"the tensor {key!r:.80} has no dtype", path=path)
    parts = (
        _part(MetadataIndex(key, chunk.offsets), tuple(chunk.sizes), storage_data, path)
        for chunk in entry.chunks
    )
    return Item(key=key, dtype=dtype, shape=tuple(entry.size), parts=tuple(parts))


def _part(
    index: MetadataIndex,
    sizes: tuple[int, ...],
    storage_data: Mapping[MetadataIndex, Any],
    path: str,
) -> Part:
    place = storage_data.get(index)
    if place is None:
        raise DamagedCheckpointError(f"{index.fqn!r:.80} has no place in a file", path=path)
    return Part(
        offsets=tuple(index.offset or ()),
        sizes=sizes,
        file=place.relative_path,
        offset=place.offset,
        nbytes=place.length,
    )


def damage_of(checkpoint: Checkpoint) -> DamagedCheckpointError | None:
    """What is wrong with the files of a checkpoint: one is missing, or has another size.

    Raises:
        ReadError: Storage does not answer at present.
        UnknownMetadataError: The metadata was replaced meanwhile by one that is not understood.
    """
    why = why_damaged(checkpoint.path)
    if why is None:
        return None
    return DamagedCheckpointError(
        f"the checkpoint is damaged: {why}",
        path=checkpoint.path,
        hint=f"`nostall verify {checkpoint.path}` lists all damage",
    )


def require_complete(checkpoint: Checkpoint) -> None:
    """Require that all files are there and have their sizes.

    Raises:
        DamagedCheckpointError: They are not.
        ReadError, UnknownMetadataError: As :func:`damage_of`.
    """
    damage = damage_of(checkpoint)
    if damage is not None:
        raise damage


def require_undamaged(checkpoint: Checkpoint) -> None:
    """Require that every byte is as it was written, as far as there are checksums.

    What is converted gets new checksums, so damage could not be found later.

    Raises:
        DamagedCheckpointError: One is not.
        ReadError, UnknownMetadataError: As :func:`damage_of`.
    """
    require_complete(checkpoint)
    with progress("verifying") as report:
        found = verify(checkpoint.path, progress=report)
    if not found.ok:
        what = ", ".join(map(str, found.damages)) or found.note
        if found.state is State.UNREADABLE:
            raise ReadError(
                f"the checkpoint cannot be read: {what}",
                path=checkpoint.path,
                hint="try again when storage answers, and no save replaces it",
            )
        raise DamagedCheckpointError(f"the checkpoint is damaged: {what}", path=checkpoint.path)


def in_file_order(items: Mapping[str, Item]) -> Iterator[Item]:
    """Items in the order in which they lie in files, which is that of the fastest reading."""
    return iter(
        sorted(items.values(), key=lambda item: [(part.file, part.offset) for part in item.parts])
    )
