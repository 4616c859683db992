"""Pickles in archives of ``torch.save``, looked through before torch's own unpickler runs them.

``weights_only`` keeps a pickle from running code. It does not keep it from hashing or printing
tuples that contain each other (2**depth steps), from nesting them until C code overflows the stack,
or from making objects of any size. All of these take a few hundred bytes. So the pickle is followed
first. Numbers, text, tuples and lists stand for themselves; anything else is a note of what it
would be. A function of torch may be called with arguments such as ``torch.save`` writes. A function
or class that the program has given to ``torch.serialization.add_safe_globals`` may be called with
any.
"""

from __future__ import annotations

import _compat_pickle
import pickletools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch

_MOST_PARTS = 1000
"""Of what is hashed, shared ones counted once per reference: also limits its nesting."""
_MOST_KEY = 100
"""Characters of the number of a storage."""
_FREE = 1 << 20
"""Elements and characters that calls may copy, whatever the length of the archive."""
_COPIES = 4
"""That calls may make of each byte of the archive."""
_ANY_SIZE = 1 << 63


class Harmful(Exception):  # a finding; the reader makes an error of it
    """A pickle that ``weights_only`` would not run in time and memory of its own size."""


class Broken(Exception):  # another one
    """Not a complete pickle."""


def require_harmless(pickled: bytes, archive_nbytes: int) -> None:
    """Follow a pickle.

    Args:
        pickled: The pickle.
        archive_nbytes: Length of the archive that it is in.

    Raises:
        Harmful: It would take time or memory out of proportion, or has instructions or calls that
            ``torch.save`` does not write.
        Broken: It is not complete.
    """
    machine = _Machine(archive_nbytes)
    try:
        for op, argument, _ in pickletools.genops(pickled):
            machine.do(op.name, argument)
    except Harmful:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise Broken("its pickle is not complete") from error


@dataclass(eq=False, slots=True)
class _Made:
    """An object that is not a number, text, tuple or list."""

    kind: str
    parts: list[object] = field(default_factory=list)
    """That are hashed with it; of a dictionary the keys and values in turn."""
    size: int = _ANY_SIZE
    """Elements of a tensor, or bytes."""
    maker: object = None
    """What the program has allowed, and has made it."""


@dataclass(eq=False, frozen=True, slots=True)
class _Global:
    path: str


class _Call(NamedTuple):
    """A function of torch."""

    arguments: str
    """Their kinds; those with a question mark may be absent."""
    result: str


_TENSOR = "storage number size size number dict"
_CALLS = {
    "_codecs.encode": _Call("text text", "bytes"),
    "builtins.bytearray": _Call("bytes?", "bytearray"),
    "builtins.complex": _Call("float float", "complex"),
    "builtins.set": _Call("list", "set"),
    "collections.Counter": _Call("dict", "dict"),
    "collections.OrderedDict": _Call("", "dict"),
    "torch.Size": _Call("size", "size"),
    "torch.device": _Call("text number?", "device"),
    "torch.serialization._get_layout": _Call("text", "layout"),
    "torch._tensor._rebuild_from_type_v2": _Call("global global tuple any", "tensor"),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _Call(
        "tensor global text number", "tensor"
    ),
    "torch._utils._rebuild_device_tensor_from_numpy": _Call("object global text number", "tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": _Call("global size size number", "tensor"),
    "torch._utils._rebuild_nested_tensor": _Call("tensor tensor tensor tensor", "tensor"),
    "torch._utils._rebuild_parameter": _Call("tensor number dict", "tensor"),
    "torch._utils._rebuild_parameter_with_state": _Call("tensor number dict any", "tensor"),
    "torch._utils._rebuild_qtensor": _Call(
        "storage number size size tuple number dict", "tensor"
    ),
    "torch._utils._rebuild_sparse_tensor": _Call("layout tuple", "tensor"),
    "torch._utils._rebuild_tensor_v2": _Call(f"{_TENSOR} dict?", "tensor"),
    "torch._utils._rebuild_tensor_v3": _Call(f"{_TENSOR} global dict?", "tensor"),
    "torch._utils._rebuild_wrapper_subclass": _Call(
        "global global size size number layout device number", "tensor"
    ),
}  # fmt: skip
"""By name; torch allows more, which ``torch.save`` does not write into an archive."""
_COPYING = frozenset(
    {
        "_rebuild_device_tensor_from_cpu_tensor",
        "_rebuild_nested_tensor",
        "_rebuild_qtensor",
        "_rebuild_sparse_tensor",
    }
)
"""Functions that may copy the tensors that they are called with."""
_COPIED_ATTRIBUTES = frozenset({"real", "imag"})
"""Of a tensor: setting one copies elements."""
_KINDS: dict[type, str] = {
    bool: "number",
    int: "number",
    float: "float",
    str: "text",
    bytes: "bytes",
    tuple: "tuple",
    list: "list",
    _Global: "global",
    type(None): "none",
}
_SCALARS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE")


class _Machine:
    """torch's unpickler, with notes in place of objects; it knows the same instructions."""

    def __init__(self, archive_nbytes: int) -> None:
        self._stack: list[object] = []
        self._outer: list[list[object]] = []
        self._memo: dict[int, object] = {}
        self._archive_nbytes = archive_nbytes
        self._may_copy = _FREE + _COPIES * archive_nbytes
        self._allowed = _allowed_by_the_program()
        self._instructions: dict[str, Callable[[Any], object]] = {
            **dict.fromkeys(_SCALARS, self._stack_up),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._put),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), self._get),
            "PROTO": lambda _: None,
            "NONE": lambda _: self._stack_up(None),
            "NEWTRUE": lambda _: self._stack_up(True),
            "NEWFALSE": lambda _: self._stack_up(False),
            "SHORT_BINSTRING": lambda text: self._stack_up(text.encode("latin-1").decode()),
            "GLOBAL": lambda name: self._stack_up(_Global(_path(name))),
            "MARK": lambda _: self._mark(),
            "EMPTY_LIST": lambda _: self._stack_up([]),
            "EMPTY_DICT": lambda _: self._stack_up(_Made("dict")),
            "EMPTY_SET": lambda _: self._stack_up(_Made("set")),
            "EMPTY_TUPLE": lambda _: self._stack_up(()),
            "TUPLE1": lambda _: self._stack_up(self._last(1)),
            "TUPLE2": lambda _: self._stack_up(self._last(2)),
            "TUPLE3": lambda _: self._stack_up(self._last(3)),
            "TUPLE": lambda _: self._stack_up(tuple(self._from_mark())),
            "APPEND": lambda _: self._extend(self._last(1)),
            "APPENDS": lambda _: self._extend(self._from_mark()),
            "SETITEM": lambda _: self._set_items(self._last(2)),
            "SETITEMS": lambda _: self._set_items(self._from_mark()),
            "REDUCE": lambda _: self._reduce(),
            "NEWOBJ": lambda _: self._new_object(),
            "BUILD": lambda _: self._build(),
            "BINPERSID": lambda _: self._load_storage(),
            "STOP": lambda _: self._pop(),
        }

    def do(self, name: str, argument: object) -> None:
        """Do one instruction."""
        _require(name in self._instructions, f"has the instruction {name}")
        self._instructions[name](argument)

    def _stack_up(self, value: object) -> None:
        self._stack.append(value)

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _last(self, count: int) -> tuple[object, ...]:
        parts, self._stack[-count:] = tuple(self._stack[-count:]), []
        if len(parts) != count:
            raise IndexError(count)
        return parts

    def _pop(self) -> object:
        return self._stack.pop()

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _from_mark(self) -> list[object]:
        since, self._stack = self._stack, self._outer.pop()
        return since

    def _extend(self, parts: Sequence[object]) -> None:
        target = self._stack[-1]
        _require(isinstance(target, list), "appends to what is not a list")
        assert isinstance(target, list)
        target.extend(parts)

    def _set_items(self, keys_and_values: Sequence[object]) -> None:
        target = self._stack[-1]
        _require(_kind(target) == "dict", "sets an item of what is not a dictionary")
        assert isinstance(target, _Made)
        for key in keys_and_values[::2]:
            _require_short(key)
        target.parts.extend(keys_and_values)

    def _load_storage(self) -> None:
        named = self._pop()
        is_named = _fits((named,), "tuple") and _fits(named, "text global text text number")
        _require(is_named, "refers to a storage without a name")
        assert isinstance(named, tuple)
        kind, _, key, _, size = named
        is_number = len(key) <= _MOST_KEY and key.isascii() and key.isdigit()
        _require(kind == "storage" and is_number, "refers to a storage without a number")
        _require(0 <= size <= self._archive_nbytes, "has a storage longer than the archive")
        self._stack.append(_Made("storage"))

    def _reduce(self) -> None:
        arguments, called = self._pop(), self._pop()
        self._stack.append(self._called(called, arguments))

    def _new_object(self) -> None:
        arguments, called = self._pop(), self._pop()
        _require(
            isinstance(called, _Global) and called.path not in _CALLS,
            "makes an object that torch.save writes otherwise",
        )
        self._stack.append(self._called(called, arguments, is_new=True))

    def _called(self, called: object, arguments: object, *, is_new: bool = False) -> object:
        """What a call returns."""
        is_call = isinstance(called, _Global) and isinstance(arguments, tuple)
        _require(is_call, "calls something that is not a function")
        assert isinstance(called, _Global)
        assert isinstance(arguments, tuple)
        if called.path not in _CALLS:
            return self._called_as_allowed(called.path, arguments, is_new=is_new)
        call = _CALLS[called.path]
        is_usual = _fits(arguments, call.arguments)
        _require(is_usual, f"calls {called.path} with arguments that torch.save does not write")
        return self._returned(called.path.rpartition(".")[2], call.result, arguments)

    def _called_as_allowed(
        self, path: str, arguments: tuple[object, ...], *, is_new: bool
    ) -> _Made:
        _require(path in self._allowed, f"makes an object of {path}, which is not allowed")
        is_written = is_new or not path.startswith("torch.distributed.")
        _require(is_written, f"calls {path}, which joins a process group")
        return _Made("object", [*arguments], maker=self._allowed[path])

    def _returned(self, name: str, kind: str, arguments: tuple[Any, ...]) -> object:
        """What a function of torch or Python returns, after a look at what it would do."""
        match name:
            case "Size":
                return arguments[0]
            case "encode":
                text, encoding = arguments
                _require(encoding == "latin1", "encodes text as torch.save does not")
                self._copy(len(text))
                return _Made(kind, size=len(text))
            case "bytearray":
                self._copy(sum(map(_size, arguments)))
            case "set":
                for part in arguments[0]:
                    _require_short(part)
                self._copy(len(arguments[0]))
            case "Counter":
                self._copy(len(arguments[0].parts))
                return _Made(kind, [*arguments[0].parts])
            case _ if kind == "tensor":
                return self._tensor(name, arguments)
        return _Made(kind)

    def _tensor(self, name: str, arguments: tuple[Any, ...]) -> _Made:
        if name in _COPYING:
            self._copy(sum(_size(part) for part in _flat(arguments)))
        match name:
            case "_rebuild_from_type_v2":
                function, made_of, values, state = arguments
                made = self._called(function, values)
                _require(_kind(made) in ("tensor", "object"), "has a tensor that is not one")
                if not _has_own_setstate(self._allowed.get(made_of.path)):
                    _require_state_of_tensor(state)
                return _Made("tensor", size=_size(made))
            case "_rebuild_parameter_with_state":
                _require_state_of_tensor(arguments[-1])
            case "_rebuild_qtensor":
                is_usual = any(_fits(arguments[4], each) for each in _QUANTIZERS)
                _require(is_usual, "has an unknown quantizer")
                self._copy(_elements(arguments[2]))
            case "_rebuild_sparse_tensor":
                is_usual = any(_fits(arguments[1], each) for each in _SPARSE)
                _require(is_usual, "has an unknown sparse tensor")
        return _Made("tensor", size=_size_of_result(name, arguments))

    def _copy(self, elements: int) -> None:
        self._may_copy -= elements
        _require(self._may_copy >= 0, "asks for more memory than the archive explains")

    def _build(self) -> None:
        state, target = self._pop(), self._stack[-1]
        _require(isinstance(target, _Made), "gives a state to what has none")
        assert isinstance(target, _Made)
        _require(target.kind in ("dict", "object"), f"gives a state to a {target.kind}")
        maker = target.maker
        if target.kind == "dict":
            _require(_kind(state) == "dict", "has a state that is not a dictionary")
        elif not _is_usual_state(state) and not _has_own_setstate(maker):
            _require_short(state)
        self._copy(sum(len(part.parts) for part in _flat((state,)) if isinstance(part, _Made)))
        if target.kind == "object":
            target.parts.append(state)


_QUANTIZERS = ("global float number", "global tensor tensor number")
_SPARSE = (
    "tensor tensor size",
    "tensor tensor size number",
    "tensor tensor size none",
    "tensor tensor tensor size",
)


def _allowed_by_the_program() -> dict[str, object]:
    """Functions and classes by name: given to ``add_safe_globals``, by torch's modules also."""
    allowed: dict[str, object] = {}
    for each in torch.serialization.get_safe_globals():
        if isinstance(each, tuple):
            allowed[each[1]] = each[0]
        else:
            allowed[f"{each.__module__}.{each.__qualname__}"] = each
    return allowed


def _path(argument: str) -> str:
    """The name of a global in Python 3; pickles of protocol 2 have those of Python 2."""
    module, _, name = argument.encode("latin-1", "replace").decode("utf-8").partition(" ")
    module, name = _compat_pickle.NAME_MAPPING.get(
        (module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
    )
    return f"{module}.{name}"


def _require(is_harmless: object, otherwise: str) -> None:
    if not is_harmless:
        raise Harmful(f"its pickle {otherwise}")


def _kind(value: object) -> str:
    return value.kind if isinstance(value, _Made) else _KINDS[type(value)]


def _fits(values: object, kinds: str) -> bool:
    """Whether values are of kinds, as in :class:`_Call`."""
    wanted = kinds.split()
    fewest = sum(not kind.endswith("?") for kind in wanted)
    if not isinstance(values, tuple) or not fewest <= len(values) <= len(wanted):
        return False
    return all(_is_of(value, kind.rstrip("?")) for value, kind in zip(values, wanted, strict=False))


def _is_of(value: object, kind: str) -> bool:
    if kind == "size":
        return _is_size(value)
    # What the program has allowed may be a tensor.
    return kind == "any" or _kind(value) in ((kind, "object") if kind == "tensor" else (kind,))


def _is_size(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) > _MOST_PARTS:
        return False
    return all(isinstance(part, int) and abs(part) < _ANY_SIZE for part in value)


def _elements(shape: Sequence[object]) -> int:
    """Of a tensor; a dimension of no length counts as one."""
    return prod(max(1, part) for part in shape if isinstance(part, int))


def _size(value: object) -> int:
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, _Made) and value.kind in ("tensor", "object", "bytes"):
        return value.size
    return 0


def _flat(arguments: tuple[object, ...]) -> list[object]:
    """Arguments, and the parts of tuples among them."""
    flat: list[object] = []
    for argument in arguments:
        flat += argument if isinstance(argument, tuple) else [argument]
    return flat


def _size_of_result(name: str, arguments: tuple[object, ...]) -> int:
    match name, arguments:
        case "_rebuild_tensor_v2" | "_rebuild_tensor_v3" | "_rebuild_qtensor", [_, _, shape, *_]:
            return _elements(shape) if isinstance(shape, tuple) else _ANY_SIZE
        case _, [_Made(kind="tensor" | "object") as first, *_]:
            return first.size
    return _ANY_SIZE


def _require_short(hashed: object) -> None:
    """Require few parts of what is hashed, with the parts of its parts."""
    count, rest = 1, [hashed]
    while rest:
        part = rest.pop()
        if isinstance(part, _Made):
            part = part.parts
        if isinstance(part, tuple | list):
            count += len(part)
            _require(count <= _MOST_PARTS, f"has a key of more than {_MOST_PARTS} parts")
            rest += part


def _is_usual_state(state: object) -> bool:
    """Whether it is as of most objects: attributes by name, and values of slots."""
    if isinstance(state, tuple) and len(state) == 2:
        return all(_kind(part) in ("dict", "none") for part in state)
    return _kind(state) in ("dict", "none")


def _has_own_setstate(maker: object) -> bool:
    own = getattr(maker, "__setstate__", None) if isinstance(maker, type) else None
    return own not in (None, torch.Tensor.__setstate__)


def _require_state_of_tensor(state: object) -> None:
    """Require what ``torch.save`` writes of the attributes of a tensor."""
    _require(_is_usual_state(state), "has a tensor with an unusual state")
    for part in state if isinstance(state, tuple) else (state,):
        names = part.parts[::2] if isinstance(part, _Made) else []
        is_usual = not any(isinstance(each, str) and each in _COPIED_ATTRIBUTES for each in names)
        _require(is_usual, "sets the elements of a tensor")
