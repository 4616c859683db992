"""Where a tensor's values lie in the archive that ``torch.save`` has made of it.

An archive of one tensor has two records that matter: ``data.pkl`` names dtype and shape, ``data/0``
holds the values, uncompressed. All bytes before the values are the same for all tensors of one
form. So one archive of a form is parsed, and later ones are recognised by these bytes. Whatever has
another form is left to ``torch.load``.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

import torch

from nostall import _torch

HEAD_NBYTES = 4096
"""More than ``torch.save`` writes before the values: a kilobyte, which ends at a multiple of 64."""
_MOST_FORMS = 4096
_LOCAL_HEADER = struct.Struct("<6xH18x2H")
"""Of a record: flags, and the lengths of name and extra field, which come before its content."""
_HAS_DESCRIPTOR = 8
"""Flag of a record whose checksum comes after its content."""
DESCRIPTOR = struct.Struct("<4sL")
"""What is after the values: a signature, and their CRC-32, which is zero if there is none."""
_MOST_PICKLE_NBYTES = 4096
_OPERATIONS = frozenset(
    {
        *("PROTO", "FRAME", "STOP", "MARK", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BINPERSID"),
        *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"),
        *("NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    }
)
"""All that pickles of a plain tensor have. None of them hashes or repeats what was made."""
_OF_STORAGE = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
"""By the names that pickles have; the classes are deprecated, and warn."""


class Unusual(Exception):  # an answer, not an error
    """Not an archive of one plain tensor; ``torch.load`` may understand it."""


class Contradictory(Exception):  # a finding; the reader makes an error of it
    """An archive of a tensor that has fewer values than its shape needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What archives of equal tensors, except for their values, have in common."""

    prefix: bytes
    """All bytes before the values."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the values."""
    has_checksum: bool = True
    """Whether a descriptor is after the values, if there are any."""

    @property
    def begin(self) -> int:
        """Where the values begin."""
        return len(self.prefix)

    @property
    def end(self) -> int:
        """Where the values end, and their descriptor begins if there are any."""
        return len(self.prefix) + self.nbytes


def bare_form(dtype: torch.dtype, shape: Sequence[int], nbytes: int) -> Form | None:
    """The form of values without an archive; ``None`` if a tensor has another number of bytes."""
    if not _torch.can_be_viewed(dtype) or math.prod(shape) * dtype.itemsize != nbytes:
        return None
    return Form(prefix=b"", dtype=dtype, shape=tuple(shape), nbytes=nbytes, has_checksum=False)


class Forms:
    """The forms that were seen, by the length of their archives."""

    def __init__(self) -> None:
        self._known: dict[int, list[Form]] = {}
        self._count = 0
        self._several: set[int] = set()
        """Lengths of archives that had another form than was guessed."""

    def known(self, content: bytearray, begin: int, nbytes: int) -> Form | None:
        """The form of an archive, if one like it was parsed before.

        Args:
            content: Contains its first bytes: :data:`HEAD_NBYTES`, or all.
            begin: Where they begin.
            nbytes: The archive's length.
        """
        for form in self._known.get(nbytes, ()):
            if content.startswith(form.prefix, begin):
                return form
        return None

    def guess(self, nbytes: int, shape: Sequence[int], dtype: torch.dtype) -> Form | None:
        """The form that an archive of this length probably has, if one like it was parsed before.

        Args:
            nbytes: The archive's length.
            shape: Of the tensor in it.
            dtype: Of the tensor.
        """
        if nbytes not in self._several:
            for form in self._known.get(nbytes, ()):
                if form.shape == shape and form.dtype is dtype and form.nbytes:
                    return form
        return None

    def note_wrong_guess(self, nbytes: int) -> None:
        """Guess no more forms of archives of this length."""
        self._several.add(nbytes)

    def parse(self, archive: BinaryIO, nbytes: int) -> Form:
        """The form of an archive.

        Raises:
            Unusual: It is not an archive of one plain tensor.
            Contradictory: It has too few values.
            OSError: It cannot be read.
        """
        try:
            form = _parse(archive, nbytes)
        except (Unusual, Contradictory, OSError, MemoryError):
            raise
        except Exception as error:  # damaged archives and pickles can raise anything
            raise Unusual from error
        if self._count < _MOST_FORMS and form.begin <= HEAD_NBYTES:
            self._known.setdefault(nbytes, []).append(form)
            self._count += 1
        return form


def _parse(stream: BinaryIO, nbytes: int) -> Form:
    with zipfile.ZipFile(stream) as archive:
        records = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        pickled, values = records["data.pkl"], records["data/0"]
        order = records.get("byteorder", pickled)
        for each in (pickled, order):
            # What a form is recognised by has to be before the values.
            is_before = each.header_offset < values.header_offset
            if not is_before or each.file_size > _MOST_PICKLE_NBYTES:
                raise Unusual
        if {each.compress_type for each in (pickled, order, values)} != {zipfile.ZIP_STORED}:
            raise Unusual
        if order is not pickled and archive.read(order) != sys.byteorder.encode():
            raise Unusual
        content = archive.read(pickled)
    _require_simple(content)
    plain = _Unpickler(io.BytesIO(content)).load()
    if type(plain) is not _Plain:
        raise Unusual
    stream.seek(values.header_offset)
    header = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    flags, name_nbytes, extra_nbytes = header
    begin = values.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
    needed = math.prod(plain.shape) * plain.dtype.itemsize
    if values.file_size < needed or begin + values.file_size > nbytes:
        # Older versions of torch make up the rest.
        what = f"its values have {values.file_size} bytes, its shape needs {needed}"
        raise Contradictory(what)
    has_descriptor = flags & _HAS_DESCRIPTOR and begin + needed + DESCRIPTOR.size <= nbytes
    if values.file_size > needed or (needed and not has_descriptor):
        raise Unusual
    stream.seek(0)
    return Form(prefix=stream.read(begin), dtype=plain.dtype, shape=plain.shape, nbytes=needed)


def _require_simple(content: bytes) -> None:
    """Require a pickle without instructions that can take much time or memory for few bytes."""
    for op, argument, _ in pickletools.genops(content):
        index = argument if op.name in ("BINPUT", "LONG_BINPUT") else 0
        if op.name not in _OPERATIONS or not isinstance(index, int) or index > len(content):
            raise Unusual


@dataclass(frozen=True, slots=True)
class _Plain:
    """A tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class _Unpickler(pickle.Unpickler):
    """Unpickles a contiguous tensor without attributes to a :class:`_Plain`; makes nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _torch.REBUILDS_TYPED:
            return _of_typed_storage
        if (module, name) == _torch.REBUILDS_UNTYPED:
            return _of_untyped_storage
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return None
        dtype = _OF_STORAGE.get(name) or getattr(torch, name, None)
        if module == "torch" and isinstance(dtype, torch.dtype):
            return dtype
        raise Unusual

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, _ = pid
        if (kind, key) != ("storage", "0"):
            raise Unusual
        return dtype


def _of_typed_storage(
    dtype: Any, offset: Any, size: Any, stride: Any, _grad: Any, hooks: Any, *metadata: Any
) -> _Plain:
    if hooks or any(metadata) or not isinstance(dtype, torch.dtype):
        _refuse()
    return _contiguous(dtype, offset, size, stride)


def _of_untyped_storage(
    _storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    _grad: Any,
    hooks: Any,
    dtype: Any,
    *metadata: Any,
) -> _Plain:
    if hooks or any(metadata) or not isinstance(dtype, torch.dtype):
        _refuse()
    return _contiguous(dtype, offset, size, stride)


def _contiguous(dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> _Plain:
    numbers = (offset, *size, *stride)
    if any(type(number) is not int or number < 0 for number in numbers) or offset != 0:
        _refuse()
    if not is_contiguous(size, stride):
        _refuse()
    return _Plain(dtype, tuple(size))


def is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of a tensor follow each other, the last dimension fastest."""
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= max(1, length)
    return True


def _refuse() -> NoReturn:
    raise Unusual
