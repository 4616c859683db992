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
from typing import Any

from nostall import _torch
from nostall._read.pickled_calls import (
    CALLS,
    COPIED_ATTRIBUTES,
    COPYING,
    MOST_PARTS,
    QUANTIZERS,
    SPARSE,
    Global,
    Made,
    elements_of,
    fits,
    flat,
    has_own_setstate,
    is_usual_state,
    kind_of,
    size_of,
    size_of_result,
)

_MOST_KEY = 100
"""Characters of the number of a storage."""
_FREE = 1 << 20
"""Elements and characters that calls may copy, whatever the length of the archive."""
_COPIES = 4
"""That calls may make of each byte of the archive."""


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


_SCALARS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE")


class _Machine:
    """torch's unpickler, with notes in place of objects; it knows the same instructions."""

    def __init__(self, archive_nbytes: int) -> None:
        self._stack: list[object] = []
        self._outer: list[list[object]] = []
        self._memo: dict[int, object] = {}
        self._archive_nbytes = archive_nbytes
        self._may_copy = _FREE + _COPIES * archive_nbytes
        self._allowed = _torch.safe_globals()
        self._instructions: dict[str, Callable[[Any], object]] = {
            **dict.fromkeys(_SCALARS, self._stack_up),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._put),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), self._get),
            "PROTO": lambda _: None,
            "NONE": lambda _: self._stack_up(None),
            "NEWTRUE": lambda _: self._stack_up(True),
            "NEWFALSE": lambda _: self._stack_up(False),
            "SHORT_BINSTRING": lambda text: self._stack_up(text.encode("latin-1").decode()),
            "GLOBAL": lambda name: self._stack_up(Global(_path(name))),
            "MARK": lambda _: self._mark(),
            "EMPTY_LIST": lambda _: self._stack_up([]),
            "EMPTY_DICT": lambda _: self._stack_up(Made("dict")),
            "EMPTY_SET": lambda _: self._stack_up(Made("set")),
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
        _require(kind_of(target) == "dict", "sets an item of what is not a dictionary")
        assert isinstance(target, Made)
        for key in keys_and_values[::2]:
            _require_short(key)
        target.parts.extend(keys_and_values)

    def _load_storage(self) -> None:
        named = self._pop()
        is_named = fits((named,), "tuple") and fits(named, "text global text text number")
        _require(is_named, "refers to a storage without a name")
        assert isinstance(named, tuple)
        kind, _, key, _, size = named
        is_number = len(key) <= _MOST_KEY and key.isascii() and key.isdigit()
        _require(kind == "storage" and is_number, "refers to a storage without a number")
        _require(0 <= size <= self._archive_nbytes, "has a storage longer than the archive")
        self._stack.append(Made("storage"))

    def _reduce(self) -> None:
        arguments, called = self._pop(), self._pop()
        self._stack.append(self._called(called, arguments))

    def _new_object(self) -> None:
        arguments, called = self._pop(), self._pop()
        _require(
            isinstance(called, Global) and called.path not in CALLS,
            "makes an object that torch.save writes otherwise",
        )
        self._stack.append(self._called(called, arguments, is_new=True))

    def _called(self, called: object, arguments: object, *, is_new: bool = False) -> object:
        """What a call returns."""
        is_call = isinstance(called, Global) and isinstance(arguments, tuple)
        _require(is_call, "calls something that is not a function")
        assert isinstance(called, Global)
        assert isinstance(arguments, tuple)
        if called.path not in CALLS:
            return self._called_as_allowed(called.path, arguments, is_new=is_new)
        call = CALLS[called.path]
        is_usual = fits(arguments, call.arguments)
        _require(is_usual, f"calls {called.path} with arguments that torch.save does not write")
        return self._returned(called.path.rpartition(".")[2], call.result, arguments)

    def _called_as_allowed(self, path: str, arguments: tuple[object, ...], *, is_new: bool) -> Made:
        _require(path in self._allowed, f"makes an object of {path}, which is not allowed")
        is_written = is_new or not path.startswith("torch.distributed.")
        _require(is_written, f"calls {path}, which joins a process group")
        return Made("object", [*arguments], maker=self._allowed[path])

    def _returned(self, name: str, kind: str, arguments: tuple[Any, ...]) -> object:
        """What a function of torch or Python returns, after a look at what it would do."""
        match name:
            case "Size":
                return arguments[0]
            case "encode":
                text, encoding = arguments
                _require(encoding == "latin1", "encodes text as torch.save does not")
                self._copy(len(text))
                return Made(kind, size=len(text))
            case "bytearray":
                self._copy(sum(map(size_of, arguments)))
            case "set":
                for part in arguments[0]:
                    _require_short(part)
                self._copy(len(arguments[0]))
            case "Counter":
                self._copy(len(arguments[0].parts))
                return Made(kind, [*arguments[0].parts])
            case _ if kind == "tensor":
                return self._tensor(name, arguments)
        return Made(kind)

    def _tensor(self, name: str, arguments: tuple[Any, ...]) -> Made:
        if name in COPYING:
            self._copy(sum(size_of(part) for part in flat(arguments)))
        match name:
            case "tensor_of_type":
                function, made_of, values, state = arguments
                made = self._called(function, values)
                _require(kind_of(made) in ("tensor", "object"), "has a tensor that is not one")
                if not has_own_setstate(self._allowed.get(made_of.path)):
                    _require_state_of_tensor(state)
                return Made("tensor", size=size_of(made))
            case "parameter_with_state":
                _require_state_of_tensor(arguments[-1])
            case "quantized_tensor":
                is_usual = any(fits(arguments[4], each) for each in QUANTIZERS)
                _require(is_usual, "has an unknown quantizer")
                self._copy(elements_of(arguments[2]))
            case "sparse_tensor":
                is_usual = any(fits(arguments[1], each) for each in SPARSE)
                _require(is_usual, "has an unknown sparse tensor")
        return Made("tensor", size=size_of_result(name, arguments))

    def _copy(self, elements: int) -> None:
        self._may_copy -= elements
        _require(self._may_copy >= 0, "asks for more memory than the archive explains")

    def _build(self) -> None:
        state, target = self._pop(), self._stack[-1]
        _require(isinstance(target, Made), "gives a state to what has none")
        assert isinstance(target, Made)
        _require(target.kind in ("dict", "object"), f"gives a state to a {target.kind}")
        maker = target.maker
        if target.kind == "dict":
            _require(kind_of(state) == "dict", "has a state that is not a dictionary")
        elif not is_usual_state(state) and not has_own_setstate(maker):
            _require_short(state)
        self._copy(sum(len(part.parts) for part in flat((state,)) if isinstance(part, Made)))
        if target.kind == "object":
            target.parts.append(state)


def _path(argument: str) -> str:
    """The name of a global in Python 3, for a function of torch our own word.

    Pickles of protocol 2 have the names of Python 2.
    """
    module, _, name = argument.encode("latin-1", "replace").decode("utf-8").partition(" ")
    module, name = _compat_pickle.NAME_MAPPING.get(
        (module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
    )
    path = f"{module}.{name}"
    return _torch.PICKLED_CALLS.get(path, path)


def _require(is_harmless: object, otherwise: str) -> None:
    if not is_harmless:
        raise Harmful(f"its pickle {otherwise}")


def _require_short(hashed: object) -> None:
    """Require few parts of what is hashed, with the parts of its parts."""
    count, rest = 1, [hashed]
    while rest:
        part = rest.pop()
        if isinstance(part, Made):
            part = part.parts
        if isinstance(part, tuple | list):
            count += len(part)
            _require(count <= MOST_PARTS, f"has a key of more than {MOST_PARTS} parts")
            rest += part


def _require_state_of_tensor(state: object) -> None:
    """Require what ``torch.save`` writes of the attributes of a tensor."""
    _require(is_usual_state(state), "has a tensor with an unusual state")
    for part in state if isinstance(state, tuple) else (state,):
        names = part.parts[::2] if isinstance(part, Made) else []
        is_usual = not any(isinstance(each, str) and each in COPIED_ATTRIBUTES for each in names)
        _require(is_usual, "sets the elements of a tensor")
