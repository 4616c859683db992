"""The unpickler of DCP metadata: only its classes, and no code of theirs that a pickle can choose.

A pickle is a program. Even with an allow-list of classes, Python's unpickler in C allocates any
memo index and hashes any tuple as a key: 9 bytes take gigabytes, 1 KiB keeps it busy for ever, and
1 MiB ends the process (docs/decisions/0025-guarded-program.md). So the program is changed before it
runs. It may have only the instructions in pickles of metadata, with lengths and memo indices that
the file's length allows. Where it would make a tuple, call a function, or set the state of an
object, it calls :meth:`_Unpickler.persistent_load`, which checks the objects first. C code makes
only texts, numbers, lists, dictionaries, and instances without state.

Hashable objects are therefore small: numbers, texts, tuples of few parts, sizes, and instances with
attributes of their declared types.
"""

from __future__ import annotations

import gc
import io
import os
import pathlib
import pickle
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType, MappingProxyType, NoneType
from typing import Any, Final, NoReturn

import torch
from torch.distributed.checkpoint import metadata, planner

from nostall import _torch
from nostall.errors import UnknownMetadataError, UntrustedMetadataError

_MOST_TUPLE_PARTS = 1000
"""Counts a shared part once per reference; also limits the nesting of tuples."""
_MOST_DIMENSIONS = 64
_MOST_PATH_NCHARS = 4096
MOST_NBYTES = 1 << 62
"""Beyond the capacity of any file system; the sum of two is still a file offset."""
NAMES = (str, int, float, bool, NoneType)
"""Types of item names: with ``flatten_state_dict=False`` they are the keys of the state dict."""
HINT = (
    "a newer torch or a planner may have written it; if you trust it, read it with torch's own"
    " FileSystemReader"
)


def unpickle(content: bytes) -> Any:
    """The object pickled at the beginning of ``content``.

    Raises:
        UnknownMetadataError: It has parts that DCP metadata does not have.
        UntrustedMetadataError: The pickle is not complete.
        Exception: A broken pickle can raise any exception.
    """
    if content[:1] != pickle.PROTO or int.from_bytes(content[1:2], "little") not in _PROTOCOLS:
        _damaged("has a pickle protocol that DCP does not use")
    program = _guarded(content)
    with no_collection():
        return _Unpickler(io.BytesIO(program)).load()


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause garbage collection, which would take most of the time while many objects are made.

    Concurrent readers may resume it for each other, which is harmless.
    """
    was_enabled = gc.isenabled()
    if was_enabled:
        _pauses.append(None)
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
            _pauses.pop()


_pauses: list[None] = []
"""One entry per thread that has disabled garbage collection and will enable it."""


def _after_fork_in_child() -> None:
    if _pauses:  # by threads that the child does not have
        _pauses.clear()
        gc.enable()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _refuse(what: str) -> NoReturn:
    raise UnknownMetadataError(
        f"the metadata has {what}, which is not part of DCP metadata in torch {torch.__version__}",
        phase="read",
        hint=HINT,
    )


def _damaged(what: str) -> NoReturn:
    raise UntrustedMetadataError(f"the metadata {what}", phase="read")


# --- the program ------------------------------------------------------------------------------


def _guarded(content: bytes) -> bytes:
    """The program at the beginning of ``content``, changed as above, in a single frame."""
    # A memo entry takes 16 bytes of memory, and the instruction that fills it 5 bytes of the file.
    match = _run_of_harmless(max(16, (len(content) // 5).bit_length())).match
    program = bytearray(content[:_PROTO_NBYTES] + pickle.FRAME + bytes(8))
    begin = at = _PROTO_NBYTES
    while True:
        end = match(content, at).end()  # type: ignore[union-attr]  # an empty one is a match
        op = content[end : end + 1]
        if op in _GUARDED:
            program += content[begin:end]
            program += _GUARDED[op]
            begin = at = end + 1
        elif op == pickle.STOP:
            program += content[begin : end + 1]
            struct.pack_into("<Q", program, _FRAME_AT, len(program) - _FRAME_AT - 8)
            return bytes(program)
        elif op in _SIZED:
            at = _end_of_sized(content, end)
        elif end > at:
            at = end  # a match has a limited length
        elif len(content) - end < _LENGTHS.get(op, 0):
            _damaged("is cut off")
        else:
            _refuse(f"the instruction {content[end : end + 5]!r}")


def _end_of_sized(content: bytes, at: int) -> int:
    begin = at + 1 + _SIZED[content[at : at + 1]]
    end = begin + int.from_bytes(content[at + 1 : begin], "little")
    if end > len(content):
        _damaged("is cut off, or has a length beyond its end")
    return end


@lru_cache
def _run_of_harmless(index_nbits: int) -> re.Pattern[bytes]:
    """A pattern for instructions that are safe in C, with memo indices of ``index_nbits`` bits."""
    nbytes, nbits = divmod(index_nbits, 8)
    index = [b"."] * nbytes + [rb"[\0-\x%02x]" % ((1 << nbits) - 1)] + [rb"\0"] * 4
    put = rb"\x94|q.|r" + b"".join(index[:4])
    number = rb"(?:K.|M..|J....)"
    instructions = (
        # Tuples of numbers only, and argument tuples, which are checked with the call.
        number + rb"(?:\x85|%s(?:\x86|%s\x87)?)?" % (number, number),
        rb"\(%s{1,64}t" % number,
        rb"[\x85\x86\x87t](?:%s)?(?=R)" % put,
        rb"\)\x81",  # an instance without arguments
        put,
        rb"[N\x88\x89)}\](eausl\x93]|h.|j....|G.{8}|\x95.{8}",
        rb"c[^\n]{1,255}\n[^\n]{1,255}\n",
        *(_sized(pickle.BINUNICODE, 256), _sized(pickle.SHORT_BINUNICODE, 256)),
        _sized(pickle.LONG1, 9),
    )
    return re.compile(b"(?:%s)%s" % (b"|".join(instructions), _MANY), re.DOTALL)


def _sized(op: bytes, many: int) -> bytes:
    """A pattern for an instruction with less than ``many`` bytes; matches in a few steps."""
    high = rb"\0" * (_SIZED[op] - 1)
    sixteens = []
    for least in range(0, many, 16):
        lengths = range(least, min(least + 16, many))
        each = b"|".join(rb"\x%02x%s.{%d}" % (length, high, length) for length in lengths)
        sixteens.append(rb"(?=[\x%02x-\x%02x])(?:%s)" % (least, lengths[-1], each))
    return rb"\x%02x(?:%s)" % (op[0], b"|".join(sixteens))


_MANY: Final = b"*+" if sys.version_info >= (3, 11) else b"{0,1000}"
"""Any number; a limited one on Python versions where each repetition takes memory."""
_PROTOCOLS: Final = range(2, 6)
_PROTO_NBYTES: Final = 2
_FRAME_AT: Final = 3
"""Offset of the length of the frame."""
_LENGTHS: Final = {
    b"": 1,
    **dict.fromkeys((pickle.BININT1, pickle.BINGET, pickle.BINPUT), 2),
    pickle.BININT2: 3,
    **dict.fromkeys((pickle.BININT, pickle.LONG_BINGET, pickle.LONG_BINPUT), 5),
    **dict.fromkeys((pickle.BINFLOAT, pickle.FRAME), 9),
    pickle.GLOBAL: 513,
}
"""Largest length of an instruction, in bytes; with fewer bytes left, the pickle is cut off."""
_SIZED: Final = {
    pickle.SHORT_BINUNICODE: 1,
    pickle.BINUNICODE: 4,
    pickle.BINUNICODE8: 8,
    pickle.SHORT_BINBYTES: 1,
    pickle.BINBYTES: 4,
    pickle.BINBYTES8: 8,
    pickle.LONG1: 1,
}
"""Instructions that push a text, bytes or a number: the length of their length field."""


def _call(number: int) -> bytes:
    return pickle.BININT1 + bytes([number]) + pickle.TUPLE2 + pickle.BINPERSID


_MADE, _REDUCED, _BUILT = range(3)
_GUARDED: Final = {
    pickle.TUPLE1: pickle.TUPLE1 + _call(_MADE),
    pickle.TUPLE2: pickle.TUPLE2 + _call(_MADE),
    pickle.TUPLE3: pickle.TUPLE3 + _call(_MADE),
    pickle.TUPLE: pickle.TUPLE + _call(_MADE),
    pickle.REDUCE: pickle.TUPLE2 + _call(_REDUCED),
    pickle.BUILD: pickle.TUPLE2 + _call(_BUILT),
}
"""Replacements: C pairs the operands with a number, and passes the pair to ``persistent_load``."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._nested: dict[int, tuple[tuple[Any, ...], int]] = {}
        """Tuples that contain tuples, by id, with their number of parts."""

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None:
            _refuse(f"the name {module:.80}.{name:.80}")
        return known

    def persistent_load(self, pid: Any) -> Any:
        operands, number = pid
        if number == _MADE:
            if len(operands) > _MOST_TUPLE_PARTS or tuple in map(type, operands):
                self._count(operands)
            return operands
        target, operand = operands
        if number == _BUILT:
            set_state = _STATES.get(type(target))
            if set_state is None:
                _refuse(f"state for a {type(target).__name__}")
            set_state(target, operand)
            return target
        if type(target) is not FunctionType or type(operand) is not tuple:
            _refuse(f"a call of a {type(target).__name__}")
        return target(*operand)

    def _count(self, made: tuple[Any, ...]) -> None:
        parts = 1 + len(made) + sum(self._inner(each) for each in made if type(each) is tuple)
        if parts > _MOST_TUPLE_PARTS:
            _refuse(f"a tuple of more than {_MOST_TUPLE_PARTS} parts")
        self._nested[id(made)] = made, parts

    def _inner(self, part: tuple[Any, ...]) -> int:
        if id(part) in self._nested:
            return self._nested[id(part)][1]
        # An unknown tuple that contains a tuple holds the arguments of a size.
        return len(part) + (_MOST_DIMENSIONS if tuple in map(type, part[:1]) else 0)


# --- instances --------------------------------------------------------------------------------


_BYTES_DATA: Final[type | None] = getattr(planner, "BytesIOWriteData", None)
"""``None`` with older versions of torch."""
_TYPES: Final[Mapping[type, Mapping[str, tuple[type, ...]]]] = MappingProxyType(
    {
        metadata.MetadataIndex: {
            "fqn": NAMES,
            "offset": (NoneType, torch.Size),
            "index": (NoneType, int),
        },
        **({_BYTES_DATA: {"nbytes": (int,)}} if _BYTES_DATA is not None else {}),
        planner.TensorWriteData: {
            "chunk": (metadata.ChunkStorageMetadata,),
            "properties": (metadata.TensorProperties,),
            "size": (torch.Size,),
        },
        planner.WriteItem: {
            "index": (metadata.MetadataIndex,),
            "type": (planner.WriteItemType,),
            "bytes_io_data": (NoneType,) if _BYTES_DATA is None else (NoneType, _BYTES_DATA),
            "tensor_data": (NoneType, planner.TensorWriteData),
        },
        planner.SavePlan: {"items": (list,)},
    }
)
"""Attribute types of hashable instances, so that a hash visits only a few parts."""
_PROPERTIES = (torch.dtype, torch.layout, bool, _torch.MemoryFormat, bool)
"""State of tensor properties in all versions of torch; newer ones append values."""
_PLAIN = (NoneType, bool, int, float, str)


def _set_attributes(instance: Any, state: Any) -> None:
    if type(state) is not dict:
        _refuse(f"a {type(instance).__name__} without named attributes")
    instance.__dict__.update(state)


def _set_typed(instance: Any, state: Any) -> None:
    if type(state) is dict:
        for name, wanted in _TYPES[type(instance)].items():
            if name in state and type(state[name]) not in wanted:
                what = f"a {type(state[name]).__name__} as its {name}"
                _refuse(f"a {type(instance).__name__} with {what}")
    _set_attributes(instance, state)


def _set_properties(instance: metadata.TensorProperties, state: Any) -> None:
    if type(state) is not tuple or tuple(map(type, state[:5])) != _PROPERTIES:
        _refuse("tensor properties of another form")
    own = _torch.own_properties(state)
    if own is None or not all(map(_is_plain, own[5:])):
        _refuse(f"tensor properties with {len(state)} values")
    instance.__setstate__(own)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (
        type(value) is tuple and all(type(each) is int for each in value)
    )


_STATES: Final[Mapping[type, Callable[[Any, Any], None]]] = {
    **dict.fromkeys(_TYPES, _set_typed),
    metadata.BytesStorageMetadata: _set_attributes,
    metadata.ChunkStorageMetadata: _set_attributes,
    metadata.Metadata: _set_attributes,
    metadata.StorageMeta: _set_attributes,
    metadata.TensorStorageMetadata: _set_attributes,
    _torch.StorageInfo: _set_attributes,
    _torch.StoragePrefix: _set_attributes,
    metadata.TensorProperties: _set_properties,
}
"""The classes of DCP metadata, and the functions that set the state of their instances."""


# --- calls ------------------------------------------------------------------------------------


def _size(numbers: Any = ()) -> torch.Size:
    if type(numbers) is not tuple or len(numbers) > _MOST_DIMENSIONS:
        _refuse(f"a size that is not a tuple of at most {_MOST_DIMENSIONS} numbers")
    for number in numbers:
        if type(number) is not int or not 0 <= number <= MOST_NBYTES:
            _refuse("a size that is impossible")
    return torch.Size(numbers)


def _of_simple(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, restricted to a few numbers and short texts as arguments."""
    name = getattr(function, "__name__", function)

    def call(*arguments: Any) -> Any:
        if len(arguments) > _MOST_DIMENSIONS or not all(map(_is_simple, arguments)):
            _refuse(f"a call of {name} with unsupported arguments")
        try:
            return function(*arguments)
        except (KeyError, ValueError, RuntimeError):  # a member of another version of torch
            _refuse(f"a call of {name} with a value that it does not know")

    return call


def _is_simple(value: Any) -> bool:
    return type(value) is int or (type(value) is str and len(value) <= _MOST_PATH_NCHARS)


def _ordered() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _path(*parts: Any) -> pathlib.PurePath:
    if (
        sum(len(part) if type(part) is str else _MOST_PATH_NCHARS for part in parts)
        > _MOST_PATH_NCHARS
    ):
        _refuse(f"a path of more than {_MOST_PATH_NCHARS} characters")
    return pathlib.Path(*parts)


def _known() -> dict[tuple[str, str], Any]:
    """The objects that a pickle may name, by module and name."""
    known: dict[tuple[str, str], Any] = {
        ("torch", name): value for name, value in vars(torch).items() if type(value) is torch.dtype
    }
    known |= {(kind.__module__, kind.__name__): kind for kind in _STATES}
    for function in (
        _torch.MemoryFormat,
        planner.WriteItemType,
        _torch.layout_called,
        torch.device,
    ):
        known[function.__module__, function.__name__] = _of_simple(function)
    known["torch", "Size"] = _size
    known["collections", "OrderedDict"] = _ordered
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath"):
            known[module, name] = _path
    return known


_KNOWN: Final = _known()
