"""An index of items from bytes that nobody vouches for. Imports no torch.

An index that was parsed has only numbers of things that it has, chunks inside of their tensors, and
places inside the files of the manifest, of which no two overlap.
"""

from __future__ import annotations

import json
import operator
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, islice, pairwise, repeat
from typing import Any, NoReturn

from nostall._commit.index.columns import (
    HEADER,
    MARK,
    TRANSFORMS,
    InvalidIndexError,
    ItemIndex,
    Properties,
)
from nostall._model.jobs import MOST_NBYTES

_MOST_DIMENSIONS = 64


def parsed(content: bytes, nbytes_of: Mapping[str, int]) -> ItemIndex | None:
    """The index in ``content``; ``None`` if it has a format that is not known here.

    Args:
        content: All bytes of the index.
        nbytes_of: Length of each file that the checkpoint has.

    Raises:
        InvalidIndexError: It is not an index, or it is one of other files.
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
    names = _split(_text(columns.bytes(names_nbytes)), nchars)
    files, properties = _tables(columns.rest())
    _require_below("property", kind, len(properties) + 1)
    _require_below("file", file, len(files))
    for column in (size, begin, extent):
        _require_below("shape", column, nshapes)
    if sum(count) != nplaces:
        _refuse("not as many places as its items have")
    index = ItemIndex(
        names=names,
        kind=kind,
        size=size,
        count=count,
        shapes=_shapes(dimensions, ndim),
        begin=begin,
        extent=extent,
        file=file,
        offset=offset,
        length=length,
        properties=properties,
        files=files,
        transforms=TRANSFORMS[number],
    )
    if len(index.rows) != nitems:
        _refuse("a duplicate name")
    _require_chunks(index)
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


def _split(text: str, nchars: Sequence[int]) -> list[str]:
    ends = accumulate(nchars, initial=0)
    names = [text[begin:end] for begin, end in pairwise(ends)]
    if sum(nchars) != len(text):
        _refuse("not as many names as items")
    return names


def _require_below(what: str, numbers: Sequence[int], end: int) -> None:
    if len(numbers) and max(numbers) >= end:
        _refuse(f"a {what} that it does not have")


def _shapes(dimensions: array[int], ndim: Sequence[int]) -> list[tuple[int, ...]]:
    if sum(ndim) != len(dimensions):
        _refuse("not as many dimensions as its shapes have")
    if len(ndim) and max(ndim) > _MOST_DIMENSIONS:
        _refuse(f"a shape of more than {_MOST_DIMENSIONS} dimensions")
    if len(dimensions) and max(dimensions) > MOST_NBYTES:
        _refuse("a size that is impossible")
    numbers = dimensions.tolist()
    return [tuple(numbers[begin:end]) for begin, end in pairwise(accumulate(ndim, initial=0))]


def _tables(content: memoryview) -> tuple[list[str], list[Properties]]:
    try:
        plain: Any = json.loads(_text(content))
        if type(plain) is not dict or plain.keys() != {"files", "properties"}:
            _refuse("unknown tables")
        files, rows = plain["files"], plain["properties"]
        if not all(type(name) is str for name in files) or len(set(files)) != len(files):
            _refuse("file names that are not strings, or a duplicate one")
        return files, [_properties(row) for row in rows]
    except InvalidIndexError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidIndexError(
            f"the tables of the index cannot be read: {error!r:.200}"
        ) from error


def _properties(row: Any) -> Properties:
    dtype, layout, memory_format, requires_grad, pin_memory, stride = row
    kinds = tuple(map(type, row[:5]))
    if kinds != (str, str, int, bool, bool) or not (stride is None or type(stride) is list):
        _refuse("properties of another form")
    if stride is not None:
        if not all(type(each) is int and 0 <= each <= MOST_NBYTES for each in stride):
            _refuse("a stride that is impossible")
        stride = tuple(stride)
    return Properties(dtype, layout, memory_format, requires_grad, pin_memory, stride)


def _require_chunks(index: ItemIndex) -> None:
    """Require that objects have one place, and that chunks lie inside of their tensors."""
    shapes = index.shapes
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
    for row, count in enumerate(index.count):
        at = index.first_places[row]
        if count > 1 and not (are_unique and len(set(index.begin[at : at + count])) == count):
            repeated |= _repeated_of(index, index.names[row], range(at, at + count))
    return repeated


def _repeated_of(index: ItemIndex, name: str, places: range) -> set[int]:
    begins: set[tuple[int, ...]] = set()
    known: dict[tuple[int, ...], tuple[int, int, int]] = {}
    repeated = set()
    for at in places:
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


def _ascend(
    files: Sequence[int], begins: Sequence[int], ends: Sequence[int], file_count: int
) -> bool:
    """Whether each place begins behind those of its file that come before; then none overlap."""
    done = [0] * file_count
    for file, begin, end in zip(files, begins, ends, strict=True):
        if begin < done[file]:
            return False
        done[file] = end
    return True


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
    if _ascend(index.file, index.offset, ends, len(index.files)):
        return
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
