"""DCP's metadata as an index of items, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nostall import _torch
from nostall._commit.guarded_program import HINT
from nostall._commit.item_index import (
    InvalidIndexError,
    ItemIndex,
    Properties,
    WrittenIndex,
    parsed,
    written,
)
from nostall._commit.manifest import DAMAGED_HINT, Manifest, index_alone
from nostall._commit.metadata_pickle import no_collection
from nostall.errors import UnknownMetadataError, UntrustedMetadataError

Entries: TypeAlias = dict[str, TensorStorageMetadata | BytesStorageMetadata]
Places: TypeAlias = dict[MetadataIndex, _torch.StorageInfo]


# --- writing --------------------------------------------------------------------------------------


class _CannotBeSaid(Exception):
    """The metadata has something for which the index has no place."""


def index_of(metadata: Metadata) -> WrittenIndex | None:
    """The index of metadata with locations; ``None`` if it cannot say all of them."""
    try:
        with no_collection():
            columns = _Indexing(metadata.storage_data).index_of(metadata.state_dict_metadata)
            return written(columns)
    except (_CannotBeSaid, AttributeError, KeyError, UnicodeEncodeError, OverflowError):
        return None  # the metadata has more parts, or lacks some


class _Indexing:
    """The columns of an index while they are filled.

    Raises:
        _CannotBeSaid: A location has parts that the index does not have.
    """

    def __init__(self, storage_data: Mapping[Any, Any]) -> None:
        self._shapes: dict[tuple[int, ...], int] = {(): 0}
        self._files: dict[str, int] = {}
        self._properties: dict[Properties, int] = {}
        self._known: dict[tuple[Any, ...], int] = {}
        """Number of properties by the values of their attributes."""
        self._places: dict[str, dict[tuple[int, ...] | None, tuple[int, int, int]]] = {}
        for index, info in storage_data.items():
            self._take(index, info)

    def _take(self, index: Any, info: Any) -> None:
        if type(index) is not MetadataIndex or type(info) is not _torch.StorageInfo:
            raise _CannotBeSaid
        file, offset, length = info.relative_path, info.offset, info.length
        if info.transform_descriptors is not None or len(vars(info)) > _PLACE_PARTS:
            raise _CannotBeSaid
        if type(file) is not str or type(offset) is not int or type(length) is not int:
            raise _CannotBeSaid
        number = self._files.setdefault(file, len(self._files))
        place = number, offset, length
        self._places.setdefault(index.fqn, {})[index.offset] = place

    def index_of(self, entries: Mapping[Any, Any]) -> ItemIndex:
        kind, size, count, begin, extent = [], [], [], [], []
        places: list[tuple[int, int, int]] = []
        for name, entry in entries.items():
            located = self._places.pop(name, {})
            if type(name) is not str:
                raise _CannotBeSaid
            if type(entry) is BytesStorageMetadata:
                if vars(entry) or located.keys() != {None}:
                    raise _CannotBeSaid
                kind.append(0)
                size.append(0)
                count.append(1)
                begin.append(0)
                extent.append(0)
                places.append(located[None])
                continue
            if type(entry) is not TensorStorageMetadata or len(vars(entry)) != _TENSOR_PARTS:
                raise _CannotBeSaid
            kind.append(1 + self._number_of_properties(entry.properties))
            size.append(self._number_of_shape(entry.size))
            count.append(len(entry.chunks))
            for chunk in entry.chunks:
                if type(chunk) is not ChunkStorageMetadata or len(vars(chunk)) != _CHUNK_PARTS:
                    raise _CannotBeSaid
                begin.append(self._number_of_shape(chunk.offsets))
                extent.append(self._number_of_shape(chunk.sizes))
                places.append(located[chunk.offsets])
            if len({chunk.offsets for chunk in entry.chunks}) != len(located):
                raise _CannotBeSaid
        if self._places:
            raise _CannotBeSaid  # a location of an item that is not there
        return ItemIndex(
            names=list(entries),
            kind=kind,
            size=size,
            count=count,
            shapes=list(self._shapes),
            begin=begin,
            extent=extent,
            file=[file for file, _, _ in places],
            offset=[offset for _, offset, _ in places],
            length=[length for _, _, length in places],
            properties=list(self._properties),
            files=list(self._files),
        )

    def _number_of_shape(self, shape: object) -> int:
        if type(shape) is not torch.Size:
            raise _CannotBeSaid
        return self._shapes.setdefault(shape, len(self._shapes))

    def _number_of_properties(self, properties: object) -> int:
        if type(properties) is not TensorProperties:
            raise _CannotBeSaid
        try:
            key = tuple(vars(properties).items())
            number = self._known.get(key)
        except TypeError as error:  # an unknown value, which has no hash
            raise _CannotBeSaid from error
        if number is None:
            plain = _plain(properties)
            number = self._properties.setdefault(plain, len(self._properties))
            self._known[key] = number
        return number


_PLACE_PARTS = 4
_TENSOR_PARTS = 3
_CHUNK_PARTS = 2
"""Numbers of attributes that the classes declare; others would be lost."""


def _plain(properties: TensorProperties) -> Properties:
    """Properties in plain values.

    Raises:
        _CannotBeSaid: They have another form, or other values.
    """
    try:
        dtype, layout, requires_grad, memory_format, pin_memory, *more = properties.__getstate__()
    except (AttributeError, RuntimeError, ValueError) as error:
        raise _CannotBeSaid from error
    stride = more[0] if more else None
    kinds = tuple(map(type, (dtype, layout, requires_grad, memory_format, pin_memory)))
    if kinds != (torch.dtype, torch.layout, bool, _torch.MemoryFormat, bool) or len(more) > 1:
        raise _CannotBeSaid
    if stride is not None and not (
        isinstance(stride, tuple) and all(type(each) is int and each >= 0 for each in stride)
    ):
        raise _CannotBeSaid
    plain = Properties(
        dtype=_word(dtype),
        layout=_word(layout),
        memory_format=memory_format.value,
        requires_grad=requires_grad,
        pin_memory=pin_memory,
        stride=None if stride is None else tuple(stride),
    )
    if len(vars(properties)) != len(properties.__getstate__()):
        raise _CannotBeSaid  # attributes that a pickle does not have, either
    return plain


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")


# --- reading --------------------------------------------------------------------------------------


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


def _state(plain: Properties) -> tuple[Any, ...] | None:
    """The state of properties, as in a pickle; ``None`` if this torch does not know a value."""
    dtype = getattr(torch, plain.dtype, None)
    try:
        layout = _torch.layout_called(f"torch.{plain.layout}")  # type: ignore[no-untyped-call]  # torch's
        memory_format = _torch.MemoryFormat(plain.memory_format)
    except (KeyError, ValueError):
        return None
    if type(dtype) is not torch.dtype:
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
            "transform_descriptors": None,
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
