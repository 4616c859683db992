"""The unpickler of DCP metadata: exactly the classes that it consists of, and nothing that they could do.

A pickle is a program. Python's unpickler in C, whichever classes it may find, makes room for any memo index and hashes
any tuple as a key: 9 bytes take gigabytes, a kilobyte keeps it busy for ever, and a megabyte ends the process
(docs/decisions/0025-guarded-program.md). So the program is changed before it runs. It may have the instructions that pickles of metadata
have, with lengths and memo indices that the file's own length allows; and where it would make a tuple, call something,
or give state to something, it hands that to :meth:`_Unpickler.persistent_load`, which looks at the objects first. What
is left to C makes texts, numbers, lists, dictionaries, and instances without state.

What can be hashed is small, then: numbers, texts, tuples of few parts, sizes, and instances with attributes of the types
that they are declared with.
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
"""Shared ones count as often as they are reached; it bounds how deep tuples are nested, too."""
_MOST_DIMENSIONS = 64
_MOST_PATH_NCHARS = 4096
MOST_NBYTES = 1 << 62
"""What no file system can hold; a sum of two is still a file offset."""
NAMES = (str, int, float, bool, NoneType)
"""What an item can be called: with ``flatten_state_dict=False`` whatever the keys of the state dict are."""
HINT = "a newer torch or a planner may have written it; if you trust it, read it with torch's own FileSystemReader"


def unpickle(content: bytes) -> Any:
    """The object that ``content`` begins with.

    Raises:
        UnknownMetadataError: It has something that DCP metadata does not consist of.
        UntrustedMetadataError: It is not the whole of a pickle.
        Exception: Anything that a broken pickle can raise.
    """
    if content[:1] != pickle.PROTO or int.from_bytes(content[1:2], "little") not in _PROTOCOLS:
        _damaged("is of a protocol that DCP does not use")
    program = _guarded(content)
    with no_collection():
        return _Unpickler(io.BytesIO(program)).load()


@contextmanager
def no_collection() -> Iterator[None]:
    """Looking for cycles again and again takes most of the time when many objects are made and none is given up.

    Threads that read at the same time may let each other be interrupted by it, which does no harm.
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
"""One for each thread that has switched garbage collection off and is going to switch it on."""


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


# --- the program ------------------------------------------------------------------------------------------------------


def _guarded(content: bytes) -> bytes:
    """The program that ``content`` begins with, changed as said above, in one frame, which C reads at once."""
    # Each entry of the memo takes 16 bytes, and an instruction to fill it 5.
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
            at = end  # only so many are matched at once
        elif len(content) - end < _LENGTHS.get(op, 0):
            _damaged("is cut off")
        else:
            _refuse(f"the instruction {content[end : end + 5]!r}")


def _end_of_sized(content: bytes, at: int) -> int:
    begin = at + 1 + _SIZED[content[at : at + 1]]
    end = begin + int.from_bytes(content[at + 1 : begin], "little")
    if end > len(content):
        _damaged("is cut off, or announces more than there is")
    return end


@lru_cache
def _run_of_harmless(index_nbits: int) -> re.Pattern[bytes]:
    """What matches some instructions that C may follow, with memo indices of so many bits."""
    nbytes, nbits = divmod(index_nbits, 8)
    index = [b"."] * nbytes + [rb"[\0-\x%02x]" % ((1 << nbits) - 1)] + [rb"\0"] * 4
    put = rb"\x94|q.|r" + b"".join(index[:4])
    number = rb"(?:K.|M..|J....)"
    instructions = (
        # Tuples of numbers alone, and arguments, which are looked at with the call.
        number + rb"(?:\x85|%s(?:\x86|%s\x87)?)?" % (number, number),
        rb"\(%s{1,64}t" % number,
        rb"[\x85\x86\x87t](?:%s)?(?=R)" % put,
        rb"\)\x81",  # an instance, made without arguments
        put,
        rb"[N\x88\x89)}\](eausl\x93]|h.|j....|G.{8}|\x95.{8}",
        rb"c[^\n]{1,255}\n[^\n]{1,255}\n",
        *(_sized(pickle.BINUNICODE, 256), _sized(pickle.SHORT_BINUNICODE, 256)),
        _sized(pickle.LONG1, 9),
    )
    return re.compile(b"(?:%s)%s" % (b"|".join(instructions), _MANY), re.DOTALL)


def _sized(op: bytes, many: int) -> bytes:
    """Matches an instruction with less than so many bytes, of any number in a few steps."""
    high = rb"\0" * (_SIZED[op] - 1)
    sixteens = []
    for least in range(0, many, 16):
        lengths = range(least, min(least + 16, many))
        each = b"|".join(rb"\x%02x%s.{%d}" % (length, high, length) for length in lengths)
        sixteens.append(rb"(?=[\x%02x-\x%02x])(?:%s)" % (least, lengths[-1], each))
    return rb"\x%02x(?:%s)" % (op[0], b"|".join(sixteens))


_MANY: Final = b"*+" if sys.version_info >= (3, 11) else b"{0,1000}"
"""As many as there are; or some, where each takes memory."""
_PROTOCOLS: Final = range(2, 6)
_PROTO_NBYTES: Final = 2
_FRAME_AT: Final = 3
"""Where the length of the frame is."""
_LENGTHS: Final = {
    b"": 1,
    **dict.fromkeys((pickle.BININT1, pickle.BINGET, pickle.BINPUT), 2),
    pickle.BININT2: 3,
    **dict.fromkeys((pickle.BININT, pickle.LONG_BINGET, pickle.LONG_BINPUT), 5),
    **dict.fromkeys((pickle.BINFLOAT, pickle.FRAME), 9),
    pickle.GLOBAL: 513,
}
"""What an instruction takes, at the most; with less it is cut off."""
_SIZED: Final = {
    pickle.SHORT_BINUNICODE: 1,
    pickle.BINUNICODE: 4,
    pickle.BINUNICODE8: 8,
    pickle.SHORT_BINBYTES: 1,
    pickle.BINBYTES: 4,
    pickle.BINBYTES8: 8,
    pickle.LONG1: 1,
}
"""What pushes a text, bytes or a number, and the length of its length."""


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
"""What is done instead: C makes a pair of what is on the stack and the number, and calls ``persistent_load`` with it."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._nested: dict[int, tuple[tuple[Any, ...], int]] = {}
        """Tuples that hold tuples, by id, and the number of their parts."""

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
        # One that holds a tuple and is not known is the arguments of a size.
        return len(part) + (_MOST_DIMENSIONS if tuple in map(type, part[:1]) else 0)


# --- instances --------------------------------------------------------------------------------------------------------


_BYTES_DATA: Final[type | None] = getattr(planner, "BytesIOWriteData", None)
"""Older torch has none."""
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
"""What the attributes of instances that can be hashed are, so that none of their hashes visits more than a few parts."""
_PROPERTIES = (torch.dtype, torch.layout, bool, _torch.MemoryFormat, bool)
"""What every torch pickles of them; newer ones add to it."""
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
"""The classes of DCP metadata, and what gives state to their instances."""


# --- calls ------------------------------------------------------------------------------------------------------------


def _size(numbers: Any = ()) -> torch.Size:
    if type(numbers) is not tuple or len(numbers) > _MOST_DIMENSIONS:
        _refuse("a size that is no row of a few numbers")
    for number in numbers:
        if type(number) is not int or not 0 <= number <= MOST_NBYTES:
            _refuse("a size that cannot be")
    return torch.Size(numbers)


def _of_simple(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for a few numbers and short texts as arguments."""
    name = getattr(function, "__name__", function)

    def call(*arguments: Any) -> Any:
        if len(arguments) > _MOST_DIMENSIONS or not all(map(_is_simple, arguments)):
            _refuse(f"a call of {name} with what it never takes")
        try:
            return function(*arguments)
        except (KeyError, ValueError, RuntimeError):  # a member that another torch has added
            _refuse(f"a call of {name} with what it does not know")

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
        _refuse("a path of more than any path has")
    return pathlib.Path(*parts)


def _known() -> dict[tuple[str, str], Any]:
    """What may be named, by module and name."""
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
