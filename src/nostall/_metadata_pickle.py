"""The unpickler of DCP metadata: exactly the classes that it consists of, and nothing that they could do.

A pickle gets hold of no class and no function of others. What it makes instances of is a stand-in, which cannot be called
and makes bare instances of the class that it stands for; what it calls looks at the arguments first. A program was
scanned before (:mod:`nostall._pickle_scan`), so state is given to instances only. What can be hashed is small: numbers,
texts, the tuples that the scan lets pass, sizes, and instances with attributes of the types that they are declared with.
"""

from __future__ import annotations

import gc
import io
import os
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, NoneType
from typing import Any, Final, NoReturn

import torch
from torch.distributed.checkpoint import metadata, planner

from nostall import _torch
from nostall._pickle_scan import scan
from nostall.errors import UnknownMetadataError

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
        ScanError: It is a program that DCP metadata has no use for.
        UnknownMetadataError: It names or calls something that DCP metadata does not consist of.
        Exception: Anything that a broken pickle can raise.
    """
    program = scan(content)
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None:
            _refuse(f"the name {module}.{name}")
        return known


def _refuse(what: str) -> NoReturn:
    raise UnknownMetadataError(
        f"the metadata has {what}, which is not part of DCP metadata in torch {torch.__version__}",
        phase="read",
        hint=HINT,
    )


# --- instances --------------------------------------------------------------------------------------------------------


class _StandIn(type):
    """A class that a pickle can make bare instances of and do nothing else with."""

    def __call__(cls, *_arguments: Any, **_named: Any) -> Any:
        _refuse(f"a call of the class {cls.__name__}")


def _stand_in(kind: type) -> _StandIn:
    def bare(_stand_in: type) -> Any:
        return object.__new__(kind)

    return _StandIn(kind.__name__, (), {"__slots__": (), "__new__": bare})


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


def _typed_stand_in(kind: type, types: Mapping[str, tuple[type, ...]]) -> _StandIn:
    """The instance is one of a class with another way of taking its state until it has taken it."""
    needed = tuple(types.items())

    def set_state(self: Any, state: Any) -> None:
        if type(state) is not dict:
            _refuse(f"a {kind.__name__} without named attributes")
        for name, wanted in needed:
            if name in state and type(state[name]) not in wanted:
                _refuse(f"a {kind.__name__} with a {type(state[name]).__name__} as its {name}")
        self.__dict__.update(state)
        object.__setattr__(self, "__class__", kind)

    return _stand_in(type(kind.__name__, (kind,), {"__setstate__": set_state}))


def _properties_stand_in(kind: type[metadata.TensorProperties]) -> _StandIn:
    def set_state(self: Any, state: Any) -> None:
        if type(state) is not tuple or tuple(map(type, state[:5])) != _PROPERTIES:
            _refuse("tensor properties of another form")
        own = _torch.own_properties(state)
        if own is None or not all(map(_is_plain, own[5:])):
            _refuse(f"tensor properties with {len(state)} values")
        self.__class__ = kind
        self.__setstate__(own)

    return _stand_in(type(kind.__name__, (kind,), {"__setstate__": set_state}))


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (
        type(value) is tuple and all(type(each) is int for each in value)
    )


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
    plain = [
        *(metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata, metadata.Metadata),
        *(metadata.StorageMeta, metadata.TensorStorageMetadata),
        *(_torch.StorageInfo, _torch.StoragePrefix),
    ]
    known |= {(kind.__module__, kind.__name__): _stand_in(kind) for kind in plain}
    for kind, types in _TYPES.items():
        known[kind.__module__, kind.__name__] = _typed_stand_in(kind, types)
    properties = metadata.TensorProperties
    known[properties.__module__, properties.__name__] = _properties_stand_in(properties)
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
