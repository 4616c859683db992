"""The unpickler of DCP metadata: only its classes, and no code of theirs that a pickle can choose.

A pickle is a program. An allow-list of classes does not make it safe, so a guarded program runs in
its place (``guarded_program``), and the objects of each of its steps are checked here.

Hashable objects are small: numbers, texts, tuples of few parts, sizes, and instances with
attributes of their declared types.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from types import FunctionType, MappingProxyType, NoneType
from typing import Any, Final, NoReturn

import torch
from torch.distributed.checkpoint import metadata, planner

from nostall import _torch
from nostall._commit.guarded_program import HINT, Check, guarded
from nostall._model.collection import no_collection
from nostall._model.jobs import MOST_NBYTES
from nostall.errors import UnknownMetadataError

_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_MOST_TUPLE_PARTS = 1000
"""Counts a shared part once per reference; also limits the nesting of tuples."""
_MOST_DIMENSIONS = 64
_MOST_PATH_NCHARS = 4096
_ALLOW_HINT = (
    "a newer torch or a planner may have written it; if you trust it, pass a planner's own class to"
    " torch.serialization.add_safe_globals, or read it with torch's own FileSystemReader"
)
NAMES = (str, int, float, bool, NoneType)
"""Types of item names: with ``flatten_state_dict=False`` they are the keys of the state dict."""


def unpickle(content: bytes) -> Any:
    """The object pickled at the beginning of ``content``.

    Raises:
        UnknownMetadataError: It has parts that DCP metadata does not have.
        UntrustedMetadataError: The pickle is not complete.
        Exception: A broken pickle can raise any exception.
    """
    program = guarded(content)
    with no_collection():
        return _Unpickler(io.BytesIO(program)).load()


def _refuse(what: str, hint: str = HINT) -> NoReturn:
    raise UnknownMetadataError(
        f"the metadata has {what}, which is not part of DCP metadata in torch {torch.__version__}",
        phase="read",
        hint=hint,
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._nested: dict[int, tuple[tuple[Any, ...], int]] = {}
        """Tuples that contain tuples, by id, with their number of parts."""
        # Not what torch's own modules allow: some of these classes join a process group.
        self._allowed = {
            path: each
            for path, each in _torch.safe_globals().items()
            if not path.startswith("torch.")
        }

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name), self._allowed.get(f"{module}.{name}"))
        if known is None:
            _refuse(f"the name {module:.80}.{name:.80}", _ALLOW_HINT)
        return known

    def persistent_load(self, pid: Any) -> Any:
        operands, check = pid
        return _CHECKS[check](self, operands)

    def _made(self, made: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(made) > _MOST_TUPLE_PARTS or tuple in map(type, made):
            self._count(made)
        return made

    def _called(self, operands: tuple[Any, Any]) -> Any:
        function, arguments = operands
        is_known = type(function) is FunctionType or self._is_allowed(function)
        if not is_known or type(arguments) is not tuple:
            _refuse(f"a call of a {type(function).__name__}")
        return function(*arguments)

    def _with_state(self, operands: tuple[Any, Any]) -> Any:
        instance, state = operands
        set_state = _STATES.get(type(instance))
        if set_state is None and self._is_allowed(type(instance)):
            set_state = getattr(type(instance), "__setstate__", _set_attributes)
        if set_state is None:
            _refuse(f"state for a {type(instance).__name__}")
        set_state(instance, state)
        return instance

    def _is_allowed(self, called: Any) -> bool:
        return any(called is each for each in self._allowed.values())

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


_CHECKS: Final[Mapping[int, Callable[[_Unpickler, Any], Any]]] = {
    Check.TUPLE: _Unpickler._made,
    Check.CALL: _Unpickler._called,
    Check.STATE: _Unpickler._with_state,
}


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


def _member(of: Any, name: Any) -> Any:
    """A member of an enumeration, as Python 3.11.0 to 3.11.3 pickles it: ``getattr(class, name)``.

    Debian 12 has 3.11.2.
    """
    kind = _MEMBERS_OF.get(of) if type(of) is FunctionType else None
    if isinstance(of, type) and issubclass(of, Enum):
        kind = of  # the program allows it: others have functions in their place
    if kind is None or type(name) is not str or name not in kind.__members__:
        _refuse("an attribute that is not a member of an enumeration")
    return kind[name]


def _list(items: Any) -> list[Any]:
    """What :class:`~nostall._commit.local_plans.LocalPlans` become in a user's own pickle."""
    if type(items) is not list:
        _refuse(f"a list made of a {type(items).__name__}")
    return items


def _ordered() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _path(*parts: Any) -> pathlib.PurePath:
    if (
        sum(len(part) if type(part) is str else _MOST_PATH_NCHARS for part in parts)
        > _MOST_PATH_NCHARS
    ):
        _refuse(f"a path of more than {_MOST_PATH_NCHARS} characters")
    return pathlib.Path(*parts)


_MEMBERS_OF: Final[Mapping[Callable[..., Any], type[Enum]]] = {
    _of_simple(kind): kind for kind in (_torch.MemoryFormat, planner.WriteItemType)
}
"""The enumerations of DCP metadata, by what a pickle gets for their names."""


def _known() -> dict[tuple[str, str], Any]:
    """The objects that a pickle may name, by module and name."""
    known: dict[tuple[str, str], Any] = {
        ("torch", name): value for name, value in vars(torch).items() if type(value) is torch.dtype
    }
    known |= {(kind.__module__, kind.__name__): kind for kind in _STATES}
    for function in (torch.device, _torch.layout_called):
        known[function.__module__, function.__name__] = _of_simple(function)
    for call, kind in _MEMBERS_OF.items():
        known[kind.__module__, kind.__name__] = call
    for module in ("builtins", "__builtin__"):  # the latter in protocol 2
        known[module, "getattr"] = _member
        known[module, "list"] = _list
    for old, new in _torch.OLD_METADATA_NAMES.items():
        known[old] = known[new.__module__, new.__name__]
    known["torch", "Size"] = _size
    known["collections", "OrderedDict"] = _ordered
    # Megatron-core 0.15 and older: as the declared ones, with one more attribute.
    known[_MEGATRON, "MCoreMetadata"] = metadata.Metadata
    known[_MEGATRON, "MCoreSavePlan"] = planner.SavePlan
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath"):
            known[module, name] = _path
    return known


_KNOWN: Final = _known()
