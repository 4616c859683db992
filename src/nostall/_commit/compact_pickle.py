"""The pickle of metadata, made from the columns of its index.

``pickle`` makes each object of DCP's metadata by itself, with some 60 instructions per item. Here
the instructions of all items are rows of one form, filled column by column. What they share is
pickled once, before: classes, names, the values of properties, and sizes and offsets, of which
equal ones are one object when the metadata is loaded. All else is as ``pickle`` would make it.
"""

from __future__ import annotations

import io
import pickle
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, compress, groupby, repeat
from typing import Any, NamedTuple, TypeAlias

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
from nostall._commit.index.columns import ItemIndex
from nostall._commit.index.indexing import Indexed, picked

PROTOCOL = 3
"""Later ones divide a pickle into frames with a length."""
PROTO_NBYTES = 2
_STACK_ROWS = 1000
"""Items per batch, which bounds the stack of the unpickler, as ``pickle`` does."""
_Parts: TypeAlias = "tuple[bytes | array[int], ...]"
"""Instructions of rows: bytes are the same in all of them, a column has a number for each."""
_Bytes: TypeAlias = "bytes | memoryview"


def compact_pickle(rest: Metadata, indexed: Indexed) -> bytes:
    """Pickled metadata, without the STOP instruction.

    Args:
        rest: The metadata without its entries and their places.
        indexed: The entries and their places.

    Raises:
        OverflowError: A number has more than 63 bits.
    """
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, PROTOCOL)
    index, attributes = indexed.index, _ATTRIBUTES.values()
    sizes = [torch.Size(shape) for shape in index.shapes]
    states = [properties.__getstate__() for properties in indexed.properties]
    parts = (_CLASSES, attributes, index.files, states, sizes, index.names)
    pickler.dump(list(chain.from_iterable(parts)))
    nbytes = stream.tell()
    shared = _Shared(pickler)
    pickler.dump(rest)
    content = stream.getvalue()
    return b"".join(
        (
            *(content[: nbytes - len(pickle.STOP)], pickle.POP),
            content[nbytes + PROTO_NBYTES : -len(pickle.STOP)],
            *(pickle.EMPTY_DICT, pickle.MARK),
            *(shared.attribute("state_dict_metadata"), *_entries(index, sizes, states, shared)),
            *(shared.attribute("storage_data"), *_places(indexed, sizes, shared)),
            _END,
        )
    )


class _Shared:
    """Instructions that push what was pickled before."""

    def __init__(self, pickler: pickle.Pickler) -> None:
        memo: dict[int, tuple[int, Any]] = pickler.memo.copy()
        self._number = {each: number for each, (number, _) in memo.items()}

    def attribute(self, name: str) -> bytes:
        return self._push(_ATTRIBUTES[name])

    def column(self, objects: Sequence[object], numbers: Sequence[int] | None = None) -> _Parts:
        """An object per row.

        Args:
            objects: Those of the rows; all are in the memo.
            numbers: For each row, the number of the object; without it each is in one row.
        """
        pickled = [self._number[id(each)] for each in objects]
        column = pickled if numbers is None else map(pickled.__getitem__, numbers)
        return pickle.LONG_BINGET, array("I", column)

    def instance(self, cls: type, **attributes: _Parts) -> _Parts:
        """An instance per row, with these attributes; without any, it has no state yet."""
        made = self._push(cls) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        if not attributes:
            return (made,)
        pairs = [(self.attribute(name), *value) for name, value in attributes.items()]
        return made, pickle.EMPTY_DICT + pickle.MARK, *chain.from_iterable(pairs), _END

    def _push(self, pickled: object) -> bytes:
        number = self._number[id(pickled)]
        if number < 1 << 8:
            return pickle.BINGET + bytes([number])
        return pickle.LONG_BINGET + number.to_bytes(4, "little")


def _entries(
    index: ItemIndex, sizes: Sequence[torch.Size], states: Sequence[Any], shared: _Shared
) -> Iterator[_Bytes]:
    """The dictionary from names to entries."""
    names = shared.column(index.names)
    # There is a row for each item. Those of objects, of kind 0, are not used: any class fills them.
    state = shared.column([TensorProperties, *states], index.kind)
    properties = *shared.instance(TensorProperties), *state, pickle.BUILD
    # Without its end: chunks are appended to the list before.
    *head, _ = shared.instance(
        TensorStorageMetadata,
        properties=properties,
        size=shared.column(sizes, index.size),
        chunks=(pickle.EMPTY_LIST,),
    )
    chunk = shared.instance(
        ChunkStorageMetadata,
        offsets=shared.column(sizes, index.begin),
        sizes=shared.column(sizes, index.extent),
    )
    tensors, chunks = _Rows(*names, *head), _Rows(*chunk)
    objects = _Rows(*names, *shared.instance(BytesStorageMetadata))
    yield pickle.EMPTY_DICT
    for first in range(0, len(index.names), _STACK_ROWS):
        yield pickle.MARK
        for row in range(first, min(first + _STACK_ROWS, len(index.names))):
            if index.kind[row] == 0:
                yield objects.get(row, row + 1)
                continue
            yield tensors.get(row, row + 1)
            begin = index.first_places[row]
            yield from chunks.in_batches(begin, begin + index.count[row], pickle.APPENDS)
            yield _END
        yield pickle.SETITEMS


def _places(indexed: Indexed, sizes: Sequence[torch.Size], shared: _Shared) -> Iterator[_Bytes]:
    """The dictionary from items to their places, in its order."""
    count = indexed.index.count
    items = list(chain.from_iterable(map(repeat, range(len(count)), count)))
    forms = _forms(indexed, items)
    rows = {}
    for form in set(forms):
        chosen = [each == form for each in forms]
        places = list(compress(indexed.order, chosen))
        hints = list(compress(indexed.hints, chosen))
        rows[form] = _place_rows(form, items, places, hints, indexed.index, sizes, shared)
    done = dict.fromkeys(rows, 0)
    yield pickle.EMPTY_DICT
    for first in range(0, len(forms), _STACK_ROWS):
        yield pickle.MARK
        for form, run in groupby(forms[first : first + _STACK_ROWS]):
            begin, done[form] = done[form], done[form] + len(list(run))
            yield rows[form].get(begin, done[form])
        yield pickle.SETITEMS


class _Form(NamedTuple):
    """What the key of a place has; without an offset it is that of an object."""

    offset: bool
    hint: bool


def _forms(indexed: Indexed, items: Sequence[int]) -> list[_Form]:
    """The form of each place, in the order of the dictionary."""
    kind = indexed.index.kind
    if 0 not in kind and None not in indexed.hints:
        return [_Form(offset=True, hint=True)] * len(indexed.order)
    return [
        _Form(offset=kind[items[place]] > 0, hint=hint is not None)
        for place, hint in zip(indexed.order, indexed.hints, strict=True)
    ]


def _place_rows(
    form: _Form,
    items: Sequence[int],
    places: Sequence[int],
    hints: Sequence[int],
    index: ItemIndex,
    sizes: Sequence[torch.Size],
    shared: _Shared,
) -> _Rows:
    """A key and a value per row, for some places."""

    def of(column: Sequence[int]) -> list[int]:
        return picked(column, places)

    key = {"fqn": shared.column(index.names, of(items))}
    if form.offset:  # otherwise the class has it
        key["offset"] = shared.column(sizes, of(index.begin))
    key["index"] = _integers(hints) if form.hint else (pickle.NONE,)
    value = shared.instance(
        _torch.StorageInfo,
        relative_path=shared.column(index.files, of(index.file)),
        offset=_integers(of(index.offset)),
        length=_integers(of(index.length)),
    )
    return _Rows(*shared.instance(MetadataIndex, **key), *value)


def _integers(column: Sequence[int]) -> _Parts:
    """A number per row."""
    if not column or -(1 << 31) <= min(column) <= max(column) < 1 << 31:
        return pickle.BININT, array("i", column)
    return pickle.LONG1 + b"\x08", array("q", column)


class _Rows:
    """Instructions in rows of one form."""

    def __init__(self, *parts: bytes | array[int]) -> None:
        form = b"".join(part if isinstance(part, bytes) else bytes(part.itemsize) for part in parts)
        columns = [part for part in parts if isinstance(part, array)]
        rows = bytearray(form * len(columns[0]))
        at = 0
        for part in parts:
            if isinstance(part, bytes):
                at += len(part)
                continue
            column = part[:]
            if sys.byteorder == "big":
                column.byteswap()
            raw = column.tobytes()
            for byte in range(part.itemsize):
                rows[at :: len(form)] = raw[byte :: part.itemsize]
                at += 1
        self._rows = memoryview(rows)
        self._width = len(form)

    def get(self, begin: int, end: int) -> memoryview:
        """The rows from ``begin`` to ``end``."""
        return self._rows[begin * self._width : end * self._width]

    def in_batches(self, begin: int, end: int, instruction: bytes) -> Iterator[_Bytes]:
        """The same; the instruction takes a part of them from the stack."""
        for first in range(begin, end, _STACK_ROWS):
            yield pickle.MARK
            yield self.get(first, min(end, first + _STACK_ROWS))
            yield instruction


_CLASSES = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    _torch.StorageInfo,
)
# The memo is by identity: each name is the object that was pickled.
_ATTRIBUTES = {
    name: name
    for name in (
        *("state_dict_metadata", "properties", "size", "chunks", "offsets", "sizes"),
        *("storage_data", "fqn", "offset", "index", "relative_path", "length"),
    )
}
_END = pickle.SETITEMS + pickle.BUILD
