"""Pickles in archives of ``torch.save``, looked through before torch's own unpickler runs them.

``weights_only`` keeps a pickle from running code. It does not keep it from hashing tuples that
contain each other (2**depth steps), from nesting them until C code overflows the stack, from making
``bytearray`` objects of any size, or from having a whole storage printed into an error message.
All of these take a few hundred bytes. So the pickle is followed first, with a note of what each
object is in place of the object.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

_MOST_PARTS = 1000
"""Of a tuple that is hashed, shared ones counted once per reference: also limits its nesting."""
_COUNTED_PARTS = 1 << 32
"""More are not told apart."""
_HASHING = frozenset({"OrderedDict", "Counter", "defaultdict", "dict", "frozenset", "set"})
"""Names of what hashes things that it is called with."""


class Harmful(Exception):  # a finding; the reader makes an error of it
    """A pickle that ``weights_only`` would not run in time and memory of its own size."""


class Broken(Exception):  # another one
    """Not a complete pickle."""


def require_harmless(pickled: bytes) -> None:
    """Follow a pickle.

    Raises:
        Harmful: It would take time or memory out of proportion, or has instructions that torch's
            unpickler does not know.
        Broken: It is not complete.
    """
    machine = _Machine()
    try:
        for op, argument, _ in pickletools.genops(pickled):
            machine.do(op, argument)
    except Harmful:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise Broken("its pickle is not complete") from error


class _Kind(Enum):
    GLOBAL = auto()
    NUMBER = auto()
    TUPLE = auto()
    OTHER = auto()


class _Note(NamedTuple):
    """What is known of an object."""

    kind: _Kind = _Kind.OTHER
    parts: int = 1
    """That are hashed with it."""
    name: str = ""
    """Of a global."""
    begins_with: _Kind = _Kind.OTHER
    """Of a tuple: its first part."""


_OTHER = _Note()
_NUMBER = _Note(_Kind.NUMBER)
_PUSHED = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _NUMBER),
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "BINUNICODE", "SHORT_BINSTRING"), _OTHER),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), _OTHER),
    "EMPTY_TUPLE": _Note(_Kind.TUPLE),
}
"""What instructions push that need nothing."""
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """torch's unpickler, with notes in place of objects; it knows the same instructions."""

    def __init__(self) -> None:
        self._stack: list[_Note] = []
        self._outer: list[list[_Note]] = []
        self._memo: dict[int, _Note] = {}
        self._most_parts = 0
        self._others: dict[str, Callable[[], object]] = {
            "MARK": self._mark,
            "TUPLE": lambda: self._push_tuple(self._from_mark()),
            "APPEND": self._pop,
            "APPENDS": self._from_mark,
            "SETITEM": self._set_item,
            "SETITEMS": self._set_items,
            "REDUCE": self._call,
            "NEWOBJ": self._call,
            "BUILD": self._pop,
            "BINPERSID": self._load_storage,
            "STOP": self._pop,
        }

    def do(self, op: pickletools.OpcodeInfo, argument: object) -> None:
        """Do one instruction."""
        name = op.name
        if name in _PUSHED:
            self._stack.append(_PUSHED[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            assert isinstance(argument, int)
            self._memo[argument] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            assert isinstance(argument, int)
            self._stack.append(self._memo[argument])
        elif name in _TUPLES:
            parts, self._stack[-_TUPLES[name] :] = self._stack[-_TUPLES[name] :], []
            if len(parts) != _TUPLES[name]:
                raise IndexError(name)
            self._push_tuple(parts)
        elif name == "GLOBAL":
            called = str(argument).rpartition(" ")[2]
            self._stack.append(_Note(_Kind.GLOBAL, name=called))
        elif name in self._others:
            self._others[name]()
        elif name != "PROTO":
            raise Harmful(f"its pickle has the instruction {name}")

    def _pop(self) -> _Note:
        return self._stack.pop()

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _from_mark(self) -> list[_Note]:
        since, self._stack = self._stack, self._outer.pop()
        return since

    def _push_tuple(self, parts: list[_Note]) -> None:
        count = min(_COUNTED_PARTS, 1 + sum(part.parts for part in parts))
        self._most_parts = max(self._most_parts, count)
        first = parts[0].kind if parts else _Kind.OTHER
        self._stack.append(_Note(_Kind.TUPLE, count, begins_with=first))

    def _require_short(self, key: _Note) -> None:
        if key.parts > _MOST_PARTS:
            raise Harmful(f"its pickle has a key of more than {_MOST_PARTS} parts")

    def _set_item(self) -> None:
        self._pop()
        self._require_short(self._pop())

    def _set_items(self) -> None:
        for key in self._from_mark()[::2]:
            self._require_short(key)

    def _require_global(self, called: _Note, arguments: _Note) -> None:
        if called.kind is not _Kind.GLOBAL or arguments.kind is not _Kind.TUPLE:
            raise Harmful("its pickle calls something that is not a function")
        if called.name == "bytearray" and arguments.begins_with is _Kind.NUMBER:
            raise Harmful("its pickle asks for an amount of memory")
        has_contents = arguments.parts > 1
        if called.name in _HASHING and has_contents and self._most_parts > _MOST_PARTS:
            raise Harmful(f"its pickle may hash a tuple of more than {_MOST_PARTS} parts")

    def _call(self) -> None:
        arguments, called = self._pop(), self._pop()
        self._require_global(called, arguments)
        self._stack.append(_Note(parts=arguments.parts))  # a torch.Size is a tuple, too

    def _load_storage(self) -> None:
        named = self._pop()
        if named.kind is not _Kind.TUPLE:
            raise Harmful("its pickle refers to a storage without a name")
        self._stack.append(_OTHER)
