r"""The index of a checkpoint's items: what the pickle says of them, as arrays.

It stands between the pickle and the manifest of a ``.metadata`` file, and the manifest has its
length and checksum. All numbers are little endian::

    \n#nostall-index\n                              16 bytes
    u64  format, items, places, shapes, dimensions, bytes of the names
    u64  dimensions[dimensions], offset[places], length[places]
    u32  nchars[items], kind[items], size[items], count[items], ndim[shapes],
         begin[places], extent[places], file[places]
    the names, in UTF-8, one after the other; nchars has their lengths in characters
    the tables: {"files": [name, ...], "properties": [[...], ...]} in JSON, up to the end

Format 1 is for archives of ``torch.save`` and objects, format 2 for tensors in files of
safetensors. A shape is ``ndim`` of the dimensions. ``kind`` is 0 for an object, otherwise one more
than the number of the item's properties in the table; ``size`` is the number of a shape. An item
has ``count`` places: an object one, a tensor one per chunk. ``begin`` and ``extent`` are the
numbers of the shapes that are a chunk's offsets and sizes; ``file`` is the number of a file in the
table.

An index that is read or written has only numbers of what it has, chunks inside of their tensors,
and places inside the files of the manifest, of which no two overlap.

Imports no torch.
"""

from __future__ import annotations

import json
import operator
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, islice, pairwise, repeat
from types import NoneType
from typing import NamedTuple, NoReturn

from nostall._model import checksum
from nostall._model.jobs import MOST_NBYTES
from nostall._model.names import AS_SAFETENSORS

MARK = b"\n#nostall-index\n"
TRANSFORMS: Mapping[int, tuple[str, ...] | None] = {1: None, 2: AS_SAFETENSORS}
"""By format, what metadata names as the transforms of all places."""
HEADER = struct.Struct(f"<{len(MARK)}s6Q")
_MOST_DIMENSIONS = 64


class InvalidIndexError(ValueError):
    """Bytes or columns do not form an index."""


class Properties(NamedTuple):
    """The dtype of a tensor and what else DCP stores of it, in plain values."""

    dtype: str
    """Without ``torch.``; ``layout``, too."""
    layout: str
    memory_format: int
    requires_grad: bool
    pin_memory: bool
    stride: tuple[int, ...] | None
    """Since torch 2.15."""


@dataclass(frozen=True, kw_only=True)
class ItemIndex:
    """The items of a checkpoint; the columns are those in the description of the module."""

    names: Sequence[str]
    kind: Sequence[int]
    size: Sequence[int]
    count: Sequence[int]
    shapes: Sequence[tuple[int, ...]]
    begin: Sequence[int]
    extent: Sequence[int]
    file: Sequence[int]
    offset: Sequence[int]
    length: Sequence[int]
    properties: Sequence[Properties]
    files: Sequence[str]
    transforms: tuple[str, ...] | None = None
    """One of the values of :data:`TRANSFORMS`."""

    @cached_property
    def rows(self) -> Mapping[str, int]:
        """The number of each item."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @cached_property
    def first_places(self) -> Sequence[int]:
        """The number of the first place of each item, and at the end that of all places."""
        return list(accumulate(self.count, initial=0))


# --- the bytes ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class IndexBytes:
    """The bytes of an index."""

    body: bytes
    """All but the tables."""
    body_crc32: int
    properties: Sequence[Properties]
    files: Sequence[str]
    ends: Sequence[int]
    """Where the last place of each file ends."""

    @cached_property
    def tables(self) -> bytes:
        """The end of the index."""
        plain = {"files": self.files, "properties": self.properties}
        return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()

    @property
    def crc32(self) -> int:
        """CRC-32 of the index."""
        return checksum.crc32(self.tables, self.body_crc32)

    def fits(self, nbytes_of: Mapping[str, int]) -> bool:
        """Whether all places are in files of these lengths."""
        return all(
            end <= nbytes_of.get(name, -1) for name, end in zip(self.files, self.ends, strict=True)
        )

    def renamed(self, names: Mapping[str, str]) -> IndexBytes:
        """A copy with the present names of its files, given by the earlier ones."""
        return replace(self, files=[names[name] for name in self.files])


def index_bytes(index: ItemIndex) -> IndexBytes:
    """The bytes of an index; ``InvalidIndexError`` if its reader would refuse it.

    ``OverflowError`` if it has a number that is negative or too large; ``UnicodeEncodeError`` if a
    name has a character that UTF-8 cannot represent.
    """
    made = encoded(index)
    _tables_in(made.tables)
    _require_possible(index)
    _require_inside(index, dict(zip(made.files, made.ends, strict=True)))
    return made


def encoded(index: ItemIndex) -> IndexBytes:
    """The bytes of an index, whatever it says; :func:`index_bytes` checks that, too."""
    names = "".join(index.names).encode()
    dimensions = list(chain.from_iterable(index.shapes))
    counts = len(index.names), len(index.file), len(index.shapes), len(dimensions), len(names)
    number = next(each for each, named in TRANSFORMS.items() if named == index.transforms)
    pieces = [HEADER.pack(MARK, number, *counts)]
    of_names, of_shapes = list(map(len, index.names)), list(map(len, index.shapes))
    for code, columns in (
        ("Q", (dimensions, index.offset, index.length)),
        ("I", (of_names, index.kind, index.size, index.count, of_shapes)),
        ("I", (index.begin, index.extent, index.file)),
    ):
        for numbers in columns:
            column = array(code, numbers)
            if sys.byteorder == "big":
                column.byteswap()
            pieces.append(column.tobytes())
    body = b"".join([*pieces, names])
    ends = dict.fromkeys(range(len(index.files)), 0)
    for file, end in zip(index.file, map(operator.add, index.offset, index.length), strict=True):
        if end > ends.get(file, 0):
            ends[file] = end
    return IndexBytes(
        body=body,
        body_crc32=checksum.crc32(body),
        properties=index.properties,
        files=index.files,
        ends=[ends[number] for number in range(len(index.files))],
    )


def parsed(content: bytes, nbytes_of: Mapping[str, int]) -> ItemIndex | None:
    """The index in ``content``, all of its bytes; ``None`` if its format is not known here.

    ``InvalidIndexError`` if it is not an index, or one of files of other names or lengths.
    """
    if len(content) < HEADER.size:
        _refuse("too short")
    mark, number, *counts = HEADER.unpack_from(content)
    if mark != MARK:
        _refuse("no mark")
    if number not in TRANSFORMS:
        return None
    nitems, nplaces, nshapes, ndimensions, names_nbytes = counts
    columns = _Columns(content)
    dimensions = columns.take("Q", ndimensions)
    offset, length = columns.take("Q", nplaces), columns.take("Q", nplaces)
    nchars, kind, size, count = (columns.take("I", nitems) for _ in range(4))
    ndim = columns.take("I", nshapes)
    begin, extent, file = (columns.take("I", nplaces) for _ in range(3))
    names, tables = _text(columns.bytes(names_nbytes)), _text(columns.rest())
    if sum(nchars) != len(names):
        _refuse("not as many names as items")
    if sum(ndim) != ndimensions:
        _refuse("not as many dimensions as its shapes have")
    files, properties = _tables_in(tables)
    numbers = dimensions.tolist()
    index = ItemIndex(
        names=[names[at:end] for at, end in pairwise(accumulate(nchars, initial=0))],
        kind=kind,
        size=size,
        count=count,
        shapes=[tuple(numbers[at:end]) for at, end in pairwise(accumulate(ndim, initial=0))],
        begin=begin,
        extent=extent,
        file=file,
        offset=offset,
        length=length,
        properties=properties,
        files=files,
        transforms=TRANSFORMS[number],
    )
    _require_possible(index)
    _require_inside(index, nbytes_of)
    return index


def _refuse(what: str) -> NoReturn:
    raise InvalidIndexError(f"the index of the items is invalid: {what}")


class _Columns:
    """The parts of an index, from its front."""

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)
        self._at = HEADER.size

    def bytes(self, nbytes: int) -> memoryview:
        if nbytes > len(self._content) - self._at:
            _refuse("cut off")
        self._at += nbytes
        return self._content[self._at - nbytes : self._at]

    def take(self, code: str, length: int) -> array[int]:
        column = array(code)
        column.frombytes(self.bytes(length * column.itemsize))
        if sys.byteorder == "big":
            column.byteswap()
        return column

    def rest(self) -> memoryview:
        return self._content[self._at :]


def _text(content: memoryview) -> str:
    try:
        return str(content, "utf-8")
    except UnicodeDecodeError:
        _refuse("names or tables that are not UTF-8")


# --- its checks, of what is read and of what is written -------------------------------------------


def _tables_in(content: bytes | str) -> tuple[list[str], list[Properties]]:
    """Files and properties in JSON that may be anything."""
    properties = []
    try:
        plain = json.loads(content)
        if type(plain) is not dict or plain.keys() != {"files", "properties"}:
            _refuse("unknown tables")
        files = plain["files"]
        if type(files) is not list or {*map(type, files)} - {str} or len(set(files)) != len(files):
            _refuse("file names that are not strings, or a duplicate one")
        for dtype, layout, memory_format, requires_grad, pin_memory, stride in plain["properties"]:
            flags = requires_grad, pin_memory
            kinds = tuple(map(type, (dtype, layout, memory_format, *flags)))
            if kinds != (str, str, int, bool, bool) or type(stride) not in (NoneType, list):
                _refuse("properties of another form")
            if not all(type(each) is int and 0 <= each <= MOST_NBYTES for each in stride or ()):
                _refuse("a stride that is impossible")
            strides = None if stride is None else tuple(stride)
            properties.append(Properties(dtype, layout, memory_format, *flags, strides))
    except InvalidIndexError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidIndexError(
            f"the tables of the index cannot be read: {error!r:.200}"
        ) from error
    return files, properties


def _require_possible(index: ItemIndex) -> None:
    """Require numbers of what it has, objects in one place, and chunks inside of their tensors."""
    shapes = index.shapes
    numbers_of_shapes = index.size, index.begin, index.extent
    for what, numbers, end in (
        ("property", index.kind, len(index.properties) + 1),
        ("file", index.file, len(index.files)),
        *(("shape", column, len(shapes)) for column in numbers_of_shapes),
    ):
        if max(numbers, default=-1) >= end:
            _refuse(f"a {what} that it does not have")
    if sum(index.count) != len(index.file):
        _refuse("not as many places as its items have")
    if max(map(len, shapes), default=0) > _MOST_DIMENSIONS:
        _refuse(f"a shape of more than {_MOST_DIMENSIONS} dimensions")
    if max(chain.from_iterable(shapes), default=0) > MOST_NBYTES:
        _refuse("a size that is impossible")
    if len(index.rows) != len(index.names):
        _refuse("a duplicate name")
    for kind, size, count in set(zip(index.kind, index.size, index.count, strict=True)):
        if kind == 0 and (count != 1 or shapes[size]):
            _refuse("an object that has a shape, or not one place")
    sizes = [each for many in map(repeat, index.size, index.count) for each in many]
    for size, begin, extent in set(zip(sizes, index.begin, index.extent, strict=True)):
        whole, first, length = shapes[size], shapes[begin], shapes[extent]
        if not len(whole) == len(first) == len(length):
            _refuse("a chunk that differs from its tensor in dimensions")
        if any(map(operator.gt, map(operator.add, first, length), whole)):
            _refuse("a chunk outside of its tensor")


def _repeated(index: ItemIndex) -> set[int]:
    """Numbers of places that name the place of another chunk of the tensor.

    No two chunks begin alike, unless they are empty or single values: those share a place.
    """
    # As nostall writes it: different numbers are then different shapes.
    are_unique = len(set(index.shapes)) == len(index.shapes)
    repeated: set[int] = set()
    for name, (first, end) in zip(index.names, pairwise(index.first_places), strict=True):
        count = end - first
        if count < 2 or (are_unique and len(set(index.begin[first:end])) == count):
            continue
        known: dict[tuple[int, ...], tuple[int, int, int]] = {}
        begins: set[tuple[int, ...]] = set()
        for at in range(first, end):
            begin, extent = index.shapes[index.begin[at]], index.shapes[index.extent[at]]
            place = index.file[at], index.offset[at], index.length[at]
            if begin in known:
                repeated.add(at)
            if known.setdefault(begin, place) != place:
                _refuse(f"two places of a chunk of {name!r:.80}")
            if begin and 0 not in extent:
                if begin in begins:
                    _refuse(f"a duplicate chunk of {name!r:.80}")
                begins.add(begin)
    return repeated


def _require_inside(index: ItemIndex, nbytes_of: Mapping[str, int]) -> None:
    """Require that places lie in files of the checkpoint, and that no two overlap."""
    strange = [name for name in index.files if name not in nbytes_of]
    if strange:
        _refuse(f"the file {strange[0]!r:.200}, which the manifest does not have")
    nbytes = [nbytes_of[name] for name in index.files]
    ends = list(map(operator.add, index.offset, index.length))
    if any(map(operator.gt, ends, map(nbytes.__getitem__, index.file))):
        _refuse("a place beyond the end of its file")
    repeated = _repeated(index)
    done = [0] * len(index.files)
    for file, begin, end in zip(index.file, index.offset, ends, strict=True):
        if begin < done[file]:
            break
        done[file] = end
    else:
        return  # each place begins behind those of its file that come before: none overlap
    spans: list[list[tuple[int, int]]] = [[] for _ in index.files]
    places: Iterable[tuple[int, int, int]] = zip(index.file, index.offset, ends, strict=True)
    if repeated:
        places = (place for at, place in enumerate(places) if at not in repeated)
    for file, begin, end in places:
        spans[file].append((begin, end))
    for file, in_file in enumerate(spans):
        in_file.sort()
        begins = map(operator.itemgetter(0), islice(in_file, 1, None))
        if any(map(operator.gt, map(operator.itemgetter(1), in_file), begins)):
            _refuse(f"places that overlap in {index.files[file]!r:.200}")
