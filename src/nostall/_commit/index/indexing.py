"""The index of the items in DCP's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from nostall._commit.index.columns import (
    TRANSFORMS,
    InvalidIndexError,
    ItemIndex,
    Properties,
)
from nostall._commit.index.writing import WrittenIndex, written
from nostall._model.collection import no_collection


class _NotRepresentableError(Exception):
    """The metadata has something that an index cannot represent."""


def index_of(metadata: Metadata) -> WrittenIndex | None:
    """The index of metadata with locations; ``None`` if it cannot represent all of it.

    Nor is there an index that its reader would refuse, such as one with a duplicate chunk.
    """
    try:
        with no_collection():
            columns = _Indexing(metadata.storage_data).index_of(metadata.state_dict_metadata)
            return written(columns)
    except (
        _NotRepresentableError,
        AttributeError,  # a part is missing
        InvalidIndexError,
        KeyError,  # a location is missing
        OverflowError,
        UnicodeEncodeError,
    ):
        return None


class _Indexing:
    """The columns of an index while they are filled.

    Raises:
        _NotRepresentableError: A location has parts that the index does not have.
    """

    def __init__(self, storage_data: Mapping[Any, Any]) -> None:
        self._shapes: dict[tuple[int, ...], int] = {(): 0}
        self._files: dict[str, int] = {}
        self._properties: dict[Properties, int] = {}
        self._known: dict[tuple[Any, ...], int] = {}
        """Number of properties by the values of their attributes."""
        self._transforms: set[tuple[str, ...] | None] = set()
        self._places: dict[str, dict[tuple[int, ...] | None, tuple[int, int, int]]] = {}
        for index, info in storage_data.items():
            self._take(index, info)

    def _take(self, index: Any, info: Any) -> None:
        if type(index) is not MetadataIndex or type(info) is not _torch.StorageInfo:
            raise _NotRepresentableError
        file, offset, length = info.relative_path, info.offset, info.length
        named = info.transform_descriptors
        self._transforms.add(None if named is None else tuple(named))
        if len(vars(info)) > _PLACE_PARTS:
            raise _NotRepresentableError
        if type(file) is not str or type(offset) is not int or type(length) is not int:
            raise _NotRepresentableError
        number = self._files.setdefault(file, len(self._files))
        place = number, offset, length
        self._places.setdefault(index.fqn, {})[index.offset] = place

    def index_of(self, entries: Mapping[Any, Any]) -> ItemIndex:
        kind, size, count, begin, extent = [], [], [], [], []
        places: list[tuple[int, int, int]] = []
        for name, entry in entries.items():
            located = self._places.pop(name, {})
            if type(name) is not str:
                raise _NotRepresentableError
            if type(entry) is BytesStorageMetadata:
                if vars(entry) or located.keys() != {None}:
                    raise _NotRepresentableError
                kind.append(0)
                size.append(0)
                count.append(1)
                begin.append(0)
                extent.append(0)
                places.append(located[None])
                continue
            if type(entry) is not TensorStorageMetadata or len(vars(entry)) != _TENSOR_PARTS:
                raise _NotRepresentableError
            kind.append(1 + self._number_of_properties(entry.properties))
            size.append(self._number_of_shape(entry.size))
            count.append(len(entry.chunks))
            for chunk in entry.chunks:
                if type(chunk) is not ChunkStorageMetadata or len(vars(chunk)) != _CHUNK_PARTS:
                    raise _NotRepresentableError
                begin.append(self._number_of_shape(chunk.offsets))
                extent.append(self._number_of_shape(chunk.sizes))
                places.append(located[chunk.offsets])
            if len({chunk.offsets for chunk in entry.chunks}) != len(located):
                raise _NotRepresentableError
        if self._places:
            raise _NotRepresentableError  # a location of an item that is not there
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
            transforms=self._transforms_of_all(),
        )

    def _transforms_of_all(self) -> tuple[str, ...] | None:
        transforms = self._transforms or {None}
        if len(transforms) > 1 or not transforms.issubset(TRANSFORMS.values()):
            raise _NotRepresentableError
        return transforms.pop()

    def _number_of_shape(self, shape: object) -> int:
        if type(shape) is not torch.Size:
            raise _NotRepresentableError
        return self._shapes.setdefault(shape, len(self._shapes))

    def _number_of_properties(self, properties: object) -> int:
        if type(properties) is not TensorProperties:
            raise _NotRepresentableError
        try:
            key = tuple(vars(properties).items())
            number = self._known.get(key)
        except TypeError as error:  # an unknown value, which has no hash
            raise _NotRepresentableError from error
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
        _NotRepresentableError: They have another form, or other values.
    """
    try:
        dtype, layout, requires_grad, memory_format, pin_memory, *more = properties.__getstate__()
    except (AttributeError, RuntimeError, ValueError) as error:
        raise _NotRepresentableError from error
    stride = more[0] if more else None
    kinds = tuple(map(type, (dtype, layout, requires_grad, memory_format, pin_memory)))
    if kinds != (torch.dtype, torch.layout, bool, _torch.MemoryFormat, bool) or len(more) > 1:
        raise _NotRepresentableError
    if stride is not None and not (
        isinstance(stride, tuple) and all(type(each) is int and each >= 0 for each in stride)
    ):
        raise _NotRepresentableError
    plain = Properties(
        dtype=_word(dtype),
        layout=_word(layout),
        memory_format=memory_format.value,
        requires_grad=requires_grad,
        pin_memory=pin_memory,
        stride=None if stride is None else tuple(stride),
    )
    if len(vars(properties)) != len(properties.__getstate__()):
        raise _NotRepresentableError  # attributes that a pickle does not have, either
    return plain


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")
