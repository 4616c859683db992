"""The items of an index as DCP's metadata has them."""

from __future__ import annotations

from typing import Any, BinaryIO, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nostall import _torch
from nostall._commit.index.columns import InvalidIndexError, ItemIndex, Properties
from nostall._commit.index.parsing import parsed
from nostall._commit.manifest import DAMAGED_HINT, Manifest, index_alone
from nostall._commit.metadata_pickle import HINT
from nostall.errors import UnknownMetadataError, UntrustedMetadataError

Entries: TypeAlias = dict[str, TensorStorageMetadata | BytesStorageMetadata]
Places: TypeAlias = dict[MetadataIndex, _torch.StorageInfo]


def read_index(stream: BinaryIO, *, path: str) -> tuple[ItemIndex, Manifest] | None:
    """Index and manifest of a ``.metadata`` file, without its pickle; ``None`` without an index.

    Args:
        stream: The file.
        path: For errors.

    Raises:
        DamagedCheckpointError: The index or the manifest fails its checksum.
        UntrustedMetadataError: The index is not one, or is one of other files.
        OSError: The file cannot be read.
    """
    found = index_alone(stream, path=path)
    if found is None:
        return None
    content, manifest = found
    try:
        index = parsed(content, {file.name: file.nbytes for file in manifest.files})
    except InvalidIndexError as error:
        raise UntrustedMetadataError(
            str(error), phase="read", path=path, hint=DAMAGED_HINT
        ) from error
    return None if index is None else (index, manifest)


def _made(plain: Properties, path: str) -> TensorProperties:
    state = _state(plain)
    if state is None:
        raise UnknownMetadataError(
            f"the metadata has tensors of {plain.dtype!r:.80} and {plain.layout!r:.80}, which torch"
            f" {torch.__version__} does not know",
            phase="read",
            path=path,
            hint=HINT,
        )
    properties: Any = object.__new__(TensorProperties)
    properties.__setstate__(_torch.own_properties(state))
    made: TensorProperties = properties
    return made


_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if type(value) is torch.dtype
}
"""By name. ``getattr(torch, name)`` would import modules of torch for some names."""


def _state(plain: Properties) -> tuple[Any, ...] | None:
    """The state of properties, as in a pickle; ``None`` if this torch does not know a value."""
    try:
        dtype = _DTYPES[plain.dtype]
        layout = _torch.layout_called(f"torch.{plain.layout}")  # type: ignore[no-untyped-call]  # torch's
        memory_format = _torch.MemoryFormat(plain.memory_format)
    except (KeyError, ValueError):
        return None
    state = dtype, layout, plain.requires_grad, memory_format, plain.pin_memory
    return state if plain.stride is None else (*state, plain.stride)


class Items:
    """Objects of DCP for the items of an index. Sizes are shared, as they cannot be changed.

    Raises:
        UnknownMetadataError: It has a dtype or another value that this torch does not know.
    """

    def __init__(self, index: ItemIndex, *, path: str) -> None:
        self.index = index
        self._sizes = list(map(torch.Size, index.shapes))
        self._properties = [vars(_made(plain, path)) for plain in index.properties]

    def entry(self, row: int) -> TensorStorageMetadata | BytesStorageMetadata:
        """The kind, size and chunks of an item."""
        index, sizes, new = self.index, self._sizes, object.__new__
        kind = index.kind[row]
        if not kind:
            return new(BytesStorageMetadata)
        chunks: list[ChunkStorageMetadata] = []
        first = index.first_places[row]
        for at in range(first, first + index.count[row]):
            chunk = new(ChunkStorageMetadata)
            chunk.__dict__ = {"offsets": sizes[index.begin[at]], "sizes": sizes[index.extent[at]]}
            chunks.append(chunk)
        properties = new(TensorProperties)
        properties.__dict__.update(self._properties[kind - 1])
        entry = new(TensorStorageMetadata)
        entry.__dict__ = {
            "properties": properties,
            "size": sizes[index.size[row]],
            "chunks": chunks,
        }
        return entry

    def key(self, row: int) -> tuple[int, ...]:
        """Equal for items whose entries are equal; an item in several chunks has its own."""
        index = self.index
        if index.count[row] != 1:
            return (row,)
        first = index.first_places[row]
        return index.kind[row], index.size[row], index.begin[first], index.extent[first]

    def only_place(self, row: int, begin: torch.Size | None) -> int | None:
        """The place of a tensor in one chunk that begins there; otherwise ``None``."""
        index = self.index
        if index.count[row] != 1 or not index.kind[row]:
            return None
        first = index.first_places[row]
        return first if self._sizes[index.begin[first]] == begin else None

    def places_by_begin(self, row: int) -> dict[torch.Size | None, int]:
        """The numbers of an item's places, by the offsets of its chunks; ``None`` of an object."""
        index = self.index
        first = index.first_places[row]
        if not index.kind[row]:
            return {None: first}
        places = range(first, first + index.count[row])
        return {self._sizes[index.begin[at]]: at for at in places}

    def info(self, place: int) -> _torch.StorageInfo:
        """File, offset and length of a place."""
        index = self.index
        info = object.__new__(_torch.StorageInfo)
        info.__dict__ = {
            "relative_path": index.files[index.file[place]],
            "offset": index.offset[place],
            "length": index.length[place],
            "transform_descriptors": None if index.transforms is None else list(index.transforms),
        }
        return info


def entries_and_places(index: ItemIndex, *, path: str) -> tuple[Entries, Places]:
    """What ``state_dict_metadata`` and ``storage_data`` are in metadata with this index.

    Raises:
        UnknownMetadataError: As :class:`Items`.
    """
    items, new = Items(index, path=path), object.__new__
    entries: Entries = {}
    places: Places = {}
    at = 0
    for row, name in enumerate(index.names):
        entries[name] = entry = items.entry(row)
        if type(entry) is TensorStorageMetadata:
            for number, chunk in enumerate(entry.chunks):
                key = new(MetadataIndex)
                key.__dict__.update(fqn=name, index=number, offset=chunk.offsets)
                places[key] = items.info(at)
                at += 1
        else:
            key = new(MetadataIndex)
            key.__dict__.update(fqn=name, index=None)
            places[key] = items.info(at)
            at += 1
    return entries, places
