"""Hostile variations of good input: of bytes, of pickles as programs, and of JSON.

Keys of pickles are shared and nested only as far as the process survives: nothing keeps a pickle
from taking time, memory, or the stack of C code (SECURITY.md).
"""

from __future__ import annotations

import copy
import json
import pickle
import pickletools
import random
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

NUMBERS = [0, 1, 2, 7, 127, 128, 255, 256, 4095, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
NUMBERS += [2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**40]
TEXTS = ["", ".", "..", "../x", "/etc/hostname", "/dev/zero", "a/../../b", ".metadata", "a\0b"]
TEXTS += ["\ud800", "x" * 300, "nul", "__0_0.distcp", "weight", "ä", "a//b", "./a", "%s%n", "\n"]
VALUES: list[Any] = [None, True, False, 1.5, float("inf"), float("nan"), [], {}, [[]], [None]]
VALUES += [*NUMBERS, *(-number for number in NUMBERS), *TEXTS]

Chance = random.Random


# --- bytes ----------------------------------------------------------------------------------------


def changed_bytes(content: bytes, chance: Chance, others: Sequence[bytes]) -> bytes:
    """A few changes of bits, bytes, numbers, pieces, or of the length."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(changed) + 1)
        nbytes = min(chance.choice((1, 2, 4, 8, 16, 64, 500)), len(changed) - at)
        match chance.randrange(8):
            case 0 | 1 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case 2 if at < len(changed):
                changed[at] = chance.randrange(256)
            case 3:
                kind = chance.choice(("<H", "<I", "<Q", ">I"))
                most = (1 << 8 * struct.calcsize(kind)) - 1
                number = struct.pack(kind, min(chance.choice(NUMBERS), most))
                changed[at : at + len(number)] = number
            case 4:
                del changed[at : at + nbytes]
            case 5:
                changed[at:at] = changed[at : at + nbytes] * chance.choice((1, 2, 50))
            case 6:
                other = chance.choice(others)
                begin = chance.randrange(len(other) + 1)
                changed[at : at + nbytes] = other[begin : begin + nbytes * chance.choice((1, 4))]
            case _:
                if chance.random() < 0.3:
                    del changed[at:]
    return bytes(changed)


# --- pickles --------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def instructions(program: bytes) -> tuple[bytes, ...]:
    begins = [at for _, _, at in pickletools.genops(program) if at is not None]
    return tuple(program[i:j] for i, j in zip(begins, [*begins[1:], len(program)], strict=True))


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def _named(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
NAMES = [
    ("builtins", "getattr"),
    *((_METADATA, name) for name in ("MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((_METADATA, name) for name in ("Metadata", "ChunkStorageMetadata", "BytesStorageMetadata")),
    *((_PLANNER, name) for name in ("WriteItem", "SavePlan", "WriteItemType", "TensorWriteData")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch", name) for name in ("Size", "device", "float32", "load", "Tensor", "Storage")),
    *(("builtins", name) for name in ("eval", "exec", "getattr", "set", "range", "bytearray")),
    *(("os", "system"), ("posix", "system"), ("subprocess", "Popen"), ("pathlib", "PosixPath")),
    *(("socket", "create_connection"), ("ctypes", "CDLL"), ("importlib", "import_module")),
    *(("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("antigravity", "x")),
]


def _billion_laughs(chance: Chance) -> bytes:
    """A tuple of tuples that share their parts, as a key."""
    make, count = chance.choice(((pickle.TUPLE2, 2), (pickle.TUPLE3, 3)))
    depth = chance.choice((3, 10))
    get, put = (
        [struct.pack("<cI", op, level) for level in range(depth + 1)]
        for op in (pickle.LONG_BINGET, pickle.LONG_BINPUT)
    )
    levels = b"".join(get[level] * count + make + put[level + 1] for level in range(depth))
    as_key = pickle.EMPTY_DICT + get[depth] + pickle.NONE + pickle.SETITEM
    return pickle.NONE + put[0] + levels + as_key


def _deep(chance: Chance) -> bytes:
    """Something nested very deep, as a key or not."""
    depth = chance.choice((10, 10, 10, 2_000, 2_000))
    nest, end = chance.choice(
        (
            (pickle.TUPLE1, b""),
            (pickle.EMPTY_LIST, pickle.APPEND * depth),
            (pickle.MARK, pickle.TUPLE * depth),
            (pickle.EMPTY_DICT + pickle.NONE, pickle.SETITEM * depth),
        )
    )
    as_key = pickle.NONE + pickle.SETITEM
    return pickle.EMPTY_DICT + pickle.NONE + nest * depth + end + as_key


def _call(chance: Chance) -> bytes:
    """A call of something, with any arguments."""
    arguments = b"".join(_value(chance) for _ in range(chance.randrange(4)))
    use = chance.choice((pickle.REDUCE, pickle.NEWOBJ))
    return _named(*chance.choice(NAMES)) + pickle.MARK + arguments + pickle.TUPLE + use


def _state(chance: Chance) -> bytes:
    """State for something that has none, or of an unexpected form."""
    name = chance.choice(("__class__", "__setstate__", "fqn", "offset", "__dict__", "_value_"))
    state = pickle.EMPTY_DICT + _text(name) + _value(chance) + pickle.SETITEM
    target = chance.choice((b"", _named(*chance.choice(NAMES)), _call(chance)))
    as_slots = chance.random() < 0.3
    return target + (pickle.NONE + state + pickle.TUPLE2 if as_slots else state) + pickle.BUILD


def _recursive(chance: Chance) -> bytes:
    """A container that contains itself."""
    index = chance.choice((200, 70_000))
    put = struct.pack("<cI", pickle.LONG_BINPUT, index)
    get = struct.pack("<cI", pickle.LONG_BINGET, index)
    if chance.random() < 0.5:
        return pickle.EMPTY_LIST + put + get + pickle.APPEND
    return pickle.EMPTY_DICT + put + pickle.NONE + get + pickle.SETITEM


def _huge(chance: Chance) -> bytes:
    """A number, a length or an index without a measure."""
    number = chance.choice((2**8, 2**16, 2**24, 2**31 - 1, 2**32 - 1))
    kinds = [
        struct.pack("<cI", op, number)
        for op in (pickle.LONG_BINGET, pickle.BINUNICODE, pickle.BINBYTES, pickle.LONG4)
    ]
    kinds += [
        struct.pack("<cQ", op, number << chance.choice((0, 20, 31)))
        for op in (pickle.BINUNICODE8, pickle.BINBYTES8, pickle.BYTEARRAY8, pickle.FRAME)
    ]
    kinds.append(pickle.NONE + struct.pack("<cI", pickle.LONG_BINPUT, number))
    kinds.append(pickle.INT + b"9" * chance.choice((10, 20_000)) + b"\n")
    kinds.append(pickle.LONG + b"9" * chance.choice((10, 20_000)) + b"L\n")
    kinds.append(struct.pack("<cI", pickle.LONG4, 10_000) + b"\x7f" * 10_000)
    return chance.choice(kinds)


def _value(chance: Chance) -> bytes:
    match chance.randrange(6):
        case 0:
            return pickle.dumps(chance.choice(NUMBERS), protocol=2)[2:-1]
        case 1:
            return _text(chance.choice(TEXTS))
        case 2:
            return struct.pack("<cB", pickle.BINGET, chance.randrange(200))
        case 3:
            return chance.choice((pickle.NONE, pickle.EMPTY_TUPLE, pickle.EMPTY_LIST))
        case 4:
            return _named(*chance.choice(NAMES))
        case _:
            return pickle.MARK + pickle.BININT1 + b"\3" + pickle.TUPLE


def _restated(chance: Chance) -> bytes:
    """Indices with another one as their name, each once it is sound, the last as a key."""
    depth = chance.choice((2, 8))
    make = _named(_METADATA, "MetadataIndex") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    program = b""
    for level in range(depth):
        get, put = struct.pack("<cI", pickle.LONG_BINGET, max(0, level - 1)), pickle.LONG_BINPUT
        states = [{"fqn": _text("x"), "offset": pickle.NONE, "index": pickle.NONE}]
        states += [{"fqn": get, "offset": get}] * (level > 0)
        program += make + struct.pack("<cI", put, level)
        for state in states:
            items = b"".join(_text(name) + value for name, value in state.items())
            program += pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS + pickle.BUILD
    last = struct.pack("<cI", pickle.LONG_BINGET, depth - 1)
    return program + pickle.EMPTY_DICT + last + pickle.NONE + pickle.SETITEM


GADGETS: list[Callable[[Chance], bytes]] = [
    _billion_laughs,
    _restated,
    _deep,
    *(_call, _call, _call, _state, _state, _state),
    *(_recursive, _huge, _huge, _value, _value, _value),
]


def changed_program(program: bytes, chance: Chance, others: Sequence[bytes]) -> bytes:
    """A pickle with instructions lost, repeated, exchanged, from another one, or made up."""
    changed = list(instructions(program))
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if len(changed) < 2:  # all others are lost
            break
        at = chance.randrange(1, len(changed))
        match chance.randrange(7):
            case 0:
                del changed[at : at + chance.choice((1, 1, 2, 5))]
            case 1:
                changed[at:at] = changed[at : at + chance.choice((1, 2, 5, 30))]
            case 2:
                changed[at] = chance.choice(instructions(chance.choice(others)))
            case 3:
                other = chance.randrange(1, len(changed))
                changed[at], changed[other] = changed[other], changed[at]
            case 4:
                changed[at] = _value(chance)
            case 5:
                changed.insert(at, bytes([chance.randrange(256)]))
            case _:
                # What leaves one value more than there was, and what takes it away again or not.
                gone = chance.choice((b"", pickle.POP, pickle.TUPLE2))
                changed.insert(at, chance.choice(GADGETS)(chance) + gone)
    return b"".join(changed)


# --- JSON -----------------------------------------------------------------------------------------


def changed_json(plain: Any, chance: Chance) -> str:
    """A JSON text with parts replaced, lost, repeated, or nested too deep."""
    changed = copy.deepcopy(plain)
    for _ in range(chance.choice((1, 1, 2, 4))):
        _change_part(changed, chance)
    text = json.dumps(changed, separators=(",", ":"))
    match chance.randrange(40):
        case 0:
            depth = chance.choice((10, 500, 100_000))
            return text.replace("null", "[" * depth + "]" * depth, 1)
        case 1:
            return text.replace("{", text[:-1] + ",", 1)
        case 2:
            return text.replace("0", "9" * chance.choice((20, 400, 10_000)), 1)
        case 3:
            return text.replace("0", "1e999", 1)
        case _:
            return text


def _change_part(changed: Any, chance: Chance) -> None:
    place: Any = changed
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = chance.choice(keys)
        part = place[key]
        if not isinstance(part, dict | list) or chance.random() < 0.2:
            break
        place = part
    match chance.randrange(5):
        case 0:
            del place[key]
        case 1 if isinstance(place, dict):
            place[chance.choice(TEXTS)] = copy.deepcopy(part)
        case 1:
            place.insert(key, copy.deepcopy(part))
        case _:
            place[key] = copy.deepcopy(chance.choice(VALUES))
