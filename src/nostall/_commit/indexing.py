"""DCP's metadata as an index of items, and the items of an index as DCP's metadata has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain, count
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
from nostall._commit.columns import ResultColumns, columns_of, parts_of
from nostall._commit.index import (
    TRANSFORMS,
    IndexBytes,
    InvalidIndexError,
    ItemIndex,
    Properties,
    index_bytes,
    parsed,
)
from nostall._commit.manifest import DAMAGED_HINT, Manifest, index_alone
from nostall._commit.metadata_pickle import HINT, PROPERTIES
from nostall.errors import UnknownMetadataError, UntrustedMetadataError

Entries: TypeAlias = dict[str, TensorStorageMetadata | BytesStorageMetadata]
Places: TypeAlias = dict[MetadataIndex, _torch.StorageInfo]

# --- from metadata --------------------------------------------------------------------------------


def indexed(metadata: Metadata) -> IndexBytes | None:
    """The index of metadata with locations; ``None`` if it cannot represent all of it, or its
    reader would refuse it, for a duplicate chunk, say.
    """
    try:
        return index_bytes(_Indexing(metadata.storage_data).table(metadata.state_dict_metadata))
    except (  # entries of a planner of a user's may be anything
        AttributeError,  # a part is missing
        KeyError,  # a location is missing
        OverflowError,
        RuntimeError,
        TypeError,  # one has no hash
        ValueError,  # with InvalidIndexError and UnicodeEncodeError
    ):
        return None


class _Indexing:
    """The places of items, from ``storage_data``, and from them the columns of an index.

    ``InvalidIndexError`` if an index cannot represent them, or an item has two.
    """

    def __init__(self, places: Any) -> None:
        self._files = defaultdict[str, int](count().__next__)
        self._file: list[int] = []
        self._offset: list[int] = []
        self._length: list[int] = []
        self._located = defaultdict[str, dict[tuple[int, ...] | None, int]](dict)
        """Numbers of places, by name and offset."""
        transforms: set[tuple[str, ...] | None] = set()
        for part in parts_of(places):
            columns = part if isinstance(part, ResultColumns) else columns_of(part.items())
            if columns is None:
                raise InvalidIndexError("places of an unusual form")
            begins = map(columns.begins.__getitem__, columns.begin_of)
            for number, (name, begin) in enumerate(
                zip(columns.names, begins, strict=True), len(self._file)
            ):
                self._located[name][begin] = number
            files = [self._files[name] for name in columns.files]
            self._file += map(files.__getitem__, columns.file_of)
            self._offset += columns.offsets
            self._length += columns.lengths
            if columns.names:
                transforms.add(columns.transforms)
        if sum(map(len, self._located.values())) != len(self._file):
            raise InvalidIndexError("two places of one item")
        if len(transforms) > 1 or not transforms.issubset(TRANSFORMS.values()):
            raise InvalidIndexError("transforms of an unusual form")
        self._transforms = transforms.pop() if transforms else None

    def table(self, entries: Mapping[Any, Any]) -> ItemIndex:
        """The index of these entries, or ``InvalidIndexError``; uses the places up."""
        shapes = defaultdict[tuple[int, ...], int](count(1).__next__, {(): 0})
        properties: dict[Properties, int] = {}
        known: dict[tuple[Any, ...], int] = {}  # numbers of properties, by their attributes
        kind, size, counts, begin, extent = [], [], [], [], []
        places: list[int] = []
        forms: set[Any] = {torch.Size, (ChunkStorageMetadata, _CHUNK_PARTS)}
        usual = len(forms)
        for name, entry in entries.items():
            if type(name) is not str:
                raise InvalidIndexError("a name that is no text")
            located = self._located.pop(name, {})
            begins: list[Any] = [None]
            numbers = [0, 0, 0]
            if type(entry) is BytesStorageMetadata and not vars(entry):
                kind.append(0)
            elif type(entry) is TensorStorageMetadata and len(vars(entry)) == _TENSOR_PARTS:
                found = entry.properties
                key = type(found), *((at, type(each), each) for at, each in vars(found).items())
                if key not in known:
                    known[key] = properties.setdefault(_plain(found), len(properties))
                kind.append(1 + known[key])
                if type(entry.chunks) is not list:
                    raise InvalidIndexError("chunks of an unusual form")
                forms.update((type(chunk), len(vars(chunk))) for chunk in entry.chunks)
                begins = [chunk.offsets for chunk in entry.chunks]
                whole = [entry.size, *begins, *(chunk.sizes for chunk in entry.chunks)]
                forms.update(map(type, whole))
                numbers = [shapes[each] for each in whole]
            else:
                raise InvalidIndexError("an entry of an unusual form")
            size.append(numbers[0])
            counts.append(len(begins))
            begin += numbers[1 : 1 + len(begins)]
            extent += numbers[1 + len(begins) :]
            places += map(located.__getitem__, begins)
            if len(set(begins)) != len(located):
                raise InvalidIndexError("a chunk with two places, or places with one chunk")
        if self._located:
            raise InvalidIndexError("a location of an item that does not exist")
        if len(forms) > usual or not set(map(type, chain.from_iterable(shapes))) <= {int}:
            raise InvalidIndexError("chunks or shapes of an unusual form")
        return ItemIndex(
            names=list(entries),
            kind=kind,
            size=size,
            count=counts,
            shapes=list(shapes),
            begin=begin,
            extent=extent,
            file=list(map(self._file.__getitem__, places)),
            offset=list(map(self._offset.__getitem__, places)),
            length=list(map(self._length.__getitem__, places)),
            properties=list(properties),
            files=list(self._files),
            transforms=self._transforms,
        )


_TENSOR_PARTS = 3
_CHUNK_PARTS = 2
"""Numbers of attributes that instances have, without the optional one; others would be lost."""


def _plain(properties: object) -> Properties:
    """Properties in plain values; ``InvalidIndexError`` if they have another form or values."""
    if type(properties) is not TensorProperties:
        raise InvalidIndexError("properties of another class")
    state = properties.__getstate__()
    dtype, layout, requires_grad, memory_format, pin_memory, *more = state
    if tuple(map(type, state[: len(PROPERTIES)])) != PROPERTIES or len(more) > 1:
        raise InvalidIndexError("properties of another form")
    stride = more[0] if more else None
    if stride is not None and not (
        isinstance(stride, tuple) and all(type(each) is int and each >= 0 for each in stride)
    ):
        raise InvalidIndexError("a stride of another form")
    if len(vars(properties)) != len(state):
        raise InvalidIndexError("properties with attributes that a pickle does not have, either")
    return Properties(
        dtype=str(dtype).removeprefix("torch."),
        layout=str(layout).removeprefix("torch."),
        memory_format=memory_format.value,
        requires_grad=requires_grad,
        pin_memory=pin_memory,
        stride=None if stride is None else tuple(stride),
    )


# --- from bytes -----------------------------------------------------------------------------------


def read_index(stream: BinaryIO, *, path: str) -> tuple[ItemIndex, Manifest] | None:
    """Index and manifest of a ``.metadata`` file, without its pickle; ``None`` without an index, or
    with one of an unknown format.

    ``DamagedCheckpointError`` if one of them fails its checksum; ``UntrustedMetadataError`` if the
    index is not one, or is one of other files.
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
    try:
        dtype = _DTYPES[plain.dtype]
        layout = _torch.layout_called(f"torch.{plain.layout}")  # type: ignore[no-untyped-call]  # torch's
        memory_format = _torch.MemoryFormat(plain.memory_format)
    except (KeyError, ValueError):
        raise UnknownMetadataError(
            f"the metadata has tensors of {plain.dtype!r:.80} and {plain.layout!r:.80}, which torch"
            f" {torch.__version__} does not know",
            phase="read",
            path=path,
            hint=HINT,
        ) from None
    state = dtype, layout, plain.requires_grad, memory_format, plain.pin_memory
    strides = () if plain.stride is None else (plain.stride,)
    properties: Any = object.__new__(TensorProperties)
    properties.__setstate__(_torch.own_properties((*state, *strides)))
    made: TensorProperties = properties
    return made


_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if type(value) is torch.dtype
}
"""By name. ``getattr(torch, name)`` would import modules of torch for some names."""


class Items:
    """Objects of DCP for the items of an index. Sizes are shared, as they cannot be changed.

    ``UnknownMetadataError`` if it has a dtype or another value that this torch does not know.
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
    """The ``state_dict_metadata`` and ``storage_data`` of metadata with this index.

    Raises ``UnknownMetadataError``, as :class:`Items` does.
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
