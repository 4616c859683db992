"""The unpickler of DCP metadata: an allow-list of its classes, and no code that a pickle chooses.

Python's unpickler in C runs the pickle. It gets a stand-in for each class and function that a
pickle may name; calls of it make what the original makes, and nothing can set its attributes: a
pickle could otherwise change a class for the whole process. Nothing limits the time and memory that
a hostile pickle takes.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from types import NoneType
from typing import Any, Final, NoReturn

import torch
from torch.distributed.checkpoint import metadata, planner

from nostall import _torch
from nostall._model.names import counted
from nostall._model.threads import gc_paused
from nostall.errors import UnknownMetadataError

HINT = (
    "a newer torch or a planner may have written it; if you trust it, read it with torch's own"
    " FileSystemReader"
)
_ALLOW_HINT = (
    "a newer torch or a planner may have written it; if you trust it, pass a planner's own class to"
    " torch.serialization.add_safe_globals, or read it with torch's own FileSystemReader"
)
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
NAMES = (str, int, float, bool, NoneType)
"""Types of item names: with ``flatten_state_dict=False`` they are the keys of the state dict."""
_BUFFER_NBYTES = 1 << 16
"""Without a buffer the unpickler reads a pickle without frames instruction by instruction."""


def unpickle(content: bytes) -> Any:
    """The object pickled at the beginning of ``content``.

    ``UnknownMetadataError`` if it has parts that DCP metadata does not have; a broken pickle can
    raise any exception.
    """
    try:
        with gc_paused():
            return _Unpickler(io.BufferedReader(io.BytesIO(content), _BUFFER_NBYTES)).load()
    finally:
        for member, own in _MEMBERS:
            if vars(member) != own:  # all metadata of this process shares it
                vars(member).clear()
                vars(member).update(own)
                _refuse("state for a member of an enumeration")


def _refuse(what: str, hint: str = HINT) -> NoReturn:
    raise UnknownMetadataError(
        f"the metadata has {what}, which is not part of DCP metadata in torch {torch.__version__}",
        phase="read",
        hint=hint,
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BufferedReader) -> None:
        super().__init__(stream)
        # Not what torch's own modules allow: some of these classes join a process group.
        self._allowed = {
            path: each
            for path, each in _torch.safe_globals().items()
            if not path.startswith("torch.")
        }

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None and f"{module}.{name}" in self._allowed:
            known = _for_allowed(self._allowed[f"{module}.{name}"])
        if known is None:
            _refuse(f"the name {module:.80}.{name:.80}", _ALLOW_HINT)
        return known


class _StandIn(type):
    """The class of stand-ins. They are classes, as a pickle makes instances of nothing else."""

    original: Any
    called: Callable[..., Any]

    def __call__(cls, *arguments: Any) -> Any:
        return cls.called(*arguments)

    def __setstate__(cls, state: object) -> None:
        _refuse("state for a function or class")


def _stand_in(
    original: Any, called: Callable[..., Any], new: Callable[..., Any] | None = None
) -> _StandIn:
    """A stand-in for a class or function, in whose place a pickle calls ``called``.

    ``new`` makes an instance, from the stand-in and arguments; without it, a call does.
    """
    body = {
        "original": original,
        "called": staticmethod(called),
        "__new__": new or (lambda _, *arguments: called(*arguments)),
    }
    return _StandIn("StandIn", (), body)


def _for_class(cls: type) -> _StandIn:
    """A stand-in for a class whose instances are made without arguments."""
    make = object.__new__
    return _stand_in(cls, lambda *_: _refuse(f"a call of {cls.__name__}"), lambda _: make(cls))


def _for_allowed(original: Any) -> _StandIn:
    """A stand-in for what the program has given to ``add_safe_globals``."""

    def call(*arguments: Any) -> Any:
        return original(*_originals(arguments))

    if not isinstance(original, type):
        return _stand_in(original, call)
    make: Any = original.__new__
    return _stand_in(original, call, lambda _, *given: make(original, *_originals(given)))


def _originals(arguments: tuple[Any, ...]) -> list[Any]:
    return [each.original if type(each) is _StandIn else each for each in arguments]


class _Properties(metadata.TensorProperties):
    """Tensor properties until they have their state, perhaps one of another torch."""

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or tuple(map(type, state[:5])) != PROPERTIES:
            _refuse("tensor properties of another form")
        own = _torch.own_properties(state)
        if own is None or not all(map(_is_plain, own[5:])):
            _refuse(f"tensor properties with {counted(len(state), 'value')}")
        super().__setstate__(own)  # type: ignore[no-untyped-call]  # torch's
        self.__class__ = metadata.TensorProperties  # type: ignore[assignment]  # as it was saved


PROPERTIES = (torch.dtype, torch.layout, bool, _torch.MemoryFormat, bool)
"""State of tensor properties in all versions of torch; newer ones append values."""


def _is_plain(value: Any) -> bool:
    return type(value) in NAMES or (
        type(value) is tuple and all(type(each) is int for each in value)
    )


def _of_known_values(function: Callable[..., Any]) -> _StandIn:
    """A stand-in for what is called with a number or short texts, of which others are unknown."""
    name = getattr(function, "__name__", function)

    def call(*arguments: Any) -> Any:
        if not all(type(each) in (int, str) for each in arguments):
            _refuse(f"a call of {name} with unsupported arguments")
        try:
            return function(*arguments)
        except Exception:  # a member of another version of torch
            _refuse(f"a call of {name} with a value that it does not know")

    return _stand_in(function, call)


def _member(of: Any, name: Any) -> Any:
    """A member of an enumeration, as Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickles it:
    ``getattr(class, name)``.
    """
    kind = of.original if type(of) is _StandIn else None
    members = kind.__members__ if isinstance(kind, type) and issubclass(kind, Enum) else {}
    if type(name) is not str or name not in members:
        _refuse("an attribute that is not a member of an enumeration")
    return members[name]


_CLASSES: Final = (
    *(metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata, metadata.Metadata),
    *(metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorStorageMetadata),
    *(planner.SavePlan, planner.TensorWriteData, planner.BytesIOWriteData, planner.WriteItem),
    *(_torch.StorageInfo, _torch.StoragePrefix),
)
_ENUMERATIONS: Final = (_torch.MemoryFormat, planner.WriteItemType)
_MEMBERS: Final = [(each, dict(vars(each))) for kind in _ENUMERATIONS for each in kind]
"""Members, and their own attributes."""


def _known() -> Mapping[tuple[str, str], Any]:
    """The objects that a pickle may name, by module and name."""
    known: dict[tuple[str, str], Any] = {
        ("torch", name): value for name, value in vars(torch).items() if type(value) is torch.dtype
    }
    known |= {(kind.__module__, kind.__name__): _for_class(kind) for kind in _CLASSES}
    for function in (torch.device, _torch.layout_called, *_ENUMERATIONS):
        known[function.__module__, function.__name__] = _of_known_values(function)
    properties = metadata.TensorProperties
    known[properties.__module__, properties.__name__] = _for_class(_Properties)
    for module in ("builtins", "__builtin__"):  # the latter in protocol 2
        known[module, "getattr"] = _stand_in(getattr, _member)
        known[module, "list"] = list  # of local plans (``_commit/columns.py``)
    for old, new in _torch.OLD_METADATA_NAMES.items():
        known[old] = known[new.__module__, new.__name__]
    # Types of C, whose attributes nothing can set.
    known["torch", "Size"] = torch.Size
    known["collections", "OrderedDict"] = OrderedDict
    # Megatron-core 0.15 and older: as the declared ones, with one more attribute.
    known[_MEGATRON, "MCoreMetadata"] = _for_class(metadata.Metadata)
    known[_MEGATRON, "MCoreSavePlan"] = _for_class(planner.SavePlan)
    path = _stand_in(pathlib.Path, pathlib.Path)
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath"):
            known[module, name] = path
    return known


_KNOWN: Final = _known()
