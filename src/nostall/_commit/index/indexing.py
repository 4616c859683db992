"""The index of the items in DCP's metadata."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
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
from nostall._commit.result_columns import Numbers, ResultColumns, StorageData, columns_of

T = TypeVar("T")


class _NotRepresentableError(Exception):
    """The metadata has something that an index cannot represent."""


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """Entries of metadata and their places."""

    index: ItemIndex
    written: WrittenIndex
    """The bytes of the index."""


def indexed(metadata: Metadata) -> Indexed | None:
    """The index of metadata with locations; ``None`` if it cannot represent all of it.

    Nor is there an index that its reader would refuse, such as one with a duplicate chunk.
    """
    try:
        return _Indexing(_columns_in(metadata)).indexed(metadata.state_dict_metadata)
    except (
        _NotRepresentableError,
        AttributeError,  # a part is missing
        InvalidIndexError,
        KeyError,  # a location is missing
        OverflowError,
        TypeError,  # one has no hash
        UnicodeEncodeError,
    ):
        return None


def _columns_in(metadata: Metadata) -> Iterator[ResultColumns]:
    """Items and their places."""
    places = metadata.storage_data
    for part in places.parts if isinstance(places, StorageData) else [places]:
        columns = part if isinstance(part, ResultColumns) else columns_of(part.items())
        if columns is None:
            raise _NotRepresentableError
        yield columns


class _Indexing:
    """The columns of an index while they are filled.

    Args:
        ranks: Items and their places, which have nothing that an index does not have.

    Raises:
        _NotRepresentableError: An item has two places.
    """

    def __init__(self, ranks: Iterable[ResultColumns]) -> None:
        self._shapes = Numbers({(): 0})
        self._files = Numbers()
        self._file: list[int] = []
        self._offset: list[int] = []
        self._length: list[int] = []
        self._properties: dict[Properties, int] = {}
        self._known: dict[tuple[Any, ...], int] = {}
        """Number of properties by the values of their attributes."""
        self._transforms: set[tuple[str, ...] | None] = set()
        self._places = defaultdict[str, dict[tuple[int, ...] | None, int]](dict)
        """Numbers of places, by name and offset."""
        for columns in ranks:
            begins = map(columns.begins.__getitem__, columns.begin_of)
            for number, (name, begin) in enumerate(
                zip(columns.names, begins, strict=True), len(self._file)
            ):
                self._places[name][begin] = number
            files = [self._files[name] for name in columns.files]
            self._file += map(files.__getitem__, columns.file_of)
            self._offset += columns.offsets
            self._length += columns.lengths
            if columns.names:
                self._transforms.add(columns.transforms)
        if sum(map(len, self._places.values())) != len(self._file):
            raise _NotRepresentableError  # two places of one item

    def indexed(self, entries: Mapping[Any, Any]) -> Indexed:
        kind, size, count, begin, extent = [], [], [], [], []
        places: list[int] = []
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
            size += self._numbers_of_shapes([entry.size])
            count.append(len(entry.chunks))
            if type(entry.chunks) is not list:
                raise _NotRepresentableError
            _require_only(ChunkStorageMetadata, map(type, entry.chunks))
            _require_only(_CHUNK_PARTS, map(len, map(vars, entry.chunks)))
            offsets = [chunk.offsets for chunk in entry.chunks]
            begin += self._numbers_of_shapes(offsets)
            extent += self._numbers_of_shapes([chunk.sizes for chunk in entry.chunks])
            places += map(located.__getitem__, offsets)
            if len(set(offsets)) != len(located):
                raise _NotRepresentableError
        if self._places:
            raise _NotRepresentableError  # a location of an item that is not there
        _require_only(int, map(type, chain.from_iterable(self._shapes)))
        index = ItemIndex(
            names=list(entries),
            kind=kind,
            size=size,
            count=count,
            shapes=list(self._shapes),
            begin=begin,
            extent=extent,
            file=_picked(self._file, places),
            offset=_picked(self._offset, places),
            length=_picked(self._length, places),
            properties=list(self._properties),
            files=list(self._files),
            transforms=self._transforms_of_all(),
        )
        return Indexed(index=index, written=written(index))

    def _transforms_of_all(self) -> tuple[str, ...] | None:
        transforms = self._transforms or {None}
        if len(transforms) > 1 or not transforms.issubset(TRANSFORMS.values()):
            raise _NotRepresentableError
        return transforms.pop()

    def _numbers_of_shapes(self, shapes: list[Any]) -> list[int]:
        _require_only(torch.Size, map(type, shapes))
        return [self._shapes[shape] for shape in shapes]

    def _number_of_properties(self, properties: object) -> int:
        if type(properties) is not TensorProperties:
            raise _NotRepresentableError
        try:
            key = tuple((name, type(value), value) for name, value in vars(properties).items())
            number = self._known.get(key)
        except TypeError as error:  # an unknown value, which has no hash
            raise _NotRepresentableError from error
        if number is None:
            number = self._properties.setdefault(_plain(properties), len(self._properties))
            self._known[key] = number
        return number


_TENSOR_PARTS = 3
_CHUNK_PARTS = 2
"""Numbers of attributes that instances have, without the optional one; others would be lost."""


def _picked(column: Sequence[T], places: Sequence[int]) -> list[T]:
    """The values at these places, in a third of the time that it takes one by one."""
    # With less than two places, the result would not be a tuple.
    return list(itemgetter(0, 0, *places)(column)[2:]) if column else []


def _require_only(wanted: Any, found: Iterable[Any]) -> None:
    """Require that all that was found is what is wanted."""
    if not set(found) <= {wanted}:
        raise _NotRepresentableError


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
