"""What pickles of ``torch.save`` call, and what is known of the objects that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch

MOST_PARTS = 1000
"""Of what is hashed, shared ones counted once per reference: also limits its nesting."""
_ANY_SIZE = 1 << 63


@dataclass(eq=False, slots=True)
class Made:
    """An object that is not a number, text, tuple or list."""

    kind: str
    parts: list[object] = field(default_factory=list)
    """That are hashed with it; of a dictionary the keys and values in turn."""
    size: int = _ANY_SIZE
    """Elements of a tensor, or bytes."""
    maker: object = None
    """What the program has allowed, and has made it."""


@dataclass(eq=False, frozen=True, slots=True)
class Global:
    """A function or class."""

    path: str
    """Module and name; of a function of torch the word in ``_torch.PICKLED_CALLS``."""


class _Call(NamedTuple):
    """A function of torch."""

    arguments: str
    """Their kinds; those with a question mark may be absent."""
    result: str


_TENSOR = "storage number size size number dict"
CALLS = {
    "_codecs.encode": _Call("text text", "bytes"),
    "builtins.bytearray": _Call("bytes?", "bytearray"),
    "builtins.complex": _Call("float float", "complex"),
    "builtins.set": _Call("list", "set"),
    "collections.Counter": _Call("dict", "dict"),
    "collections.OrderedDict": _Call("", "dict"),
    "torch.Size": _Call("size", "size"),
    "torch.device": _Call("text number?", "device"),
    "layout": _Call("text", "layout"),
    "tensor_of_type": _Call("global global tuple any", "tensor"),
    "moved_tensor": _Call(
        "tensor global text number", "tensor"
    ),
    "tensor_of_array": _Call("object global text number", "tensor"),
    "tensor_without_values": _Call("global size size number", "tensor"),
    "nested_tensor": _Call("tensor tensor tensor tensor", "tensor"),
    "parameter": _Call("tensor number dict", "tensor"),
    "parameter_with_state": _Call("tensor number dict any", "tensor"),
    "quantized_tensor": _Call(
        "storage number size size tuple number dict", "tensor"
    ),
    "sparse_tensor": _Call("layout tuple", "tensor"),
    "typed_tensor": _Call(f"{_TENSOR} dict?", "tensor"),
    "untyped_tensor": _Call(f"{_TENSOR} global dict?", "tensor"),
    "wrapped_tensor": _Call(
        "global global size size number layout device number", "tensor"
    ),
}  # fmt: skip
"""By name, or as in ``_torch.PICKLED_CALLS``; torch allows more, which ``torch.save`` does not
write into an archive."""
COPYING = frozenset(
    {
        "moved_tensor",
        "nested_tensor",
        "quantized_tensor",
        "sparse_tensor",
    }
)
"""Functions that may copy the tensors that they are called with."""
COPIED_ATTRIBUTES = frozenset({"real", "imag"})
"""Of a tensor: setting one copies elements."""
_KINDS: dict[type, str] = {
    bool: "number",
    int: "number",
    float: "float",
    str: "text",
    bytes: "bytes",
    tuple: "tuple",
    list: "list",
    Global: "global",
    type(None): "none",
}
QUANTIZERS = ("global float number", "global tensor tensor number")
SPARSE = (
    "tensor tensor size",
    "tensor tensor size number",
    "tensor tensor size none",
    "tensor tensor tensor size",
)


def kind_of(value: object) -> str:
    return value.kind if isinstance(value, Made) else _KINDS[type(value)]


def fits(values: object, kinds: str) -> bool:
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
    return kind == "any" or kind_of(value) in ((kind, "object") if kind == "tensor" else (kind,))


def _is_size(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) > MOST_PARTS:
        return False
    return all(isinstance(part, int) and abs(part) < _ANY_SIZE for part in value)


def elements_of(shape: Sequence[object]) -> int:
    """Of a tensor; a dimension of no length counts as one."""
    return prod(max(1, part) for part in shape if isinstance(part, int))


def size_of(value: object) -> int:
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Made) and value.kind in ("tensor", "object", "bytes"):
        return value.size
    return 0


def flat(arguments: tuple[object, ...]) -> list[object]:
    """Arguments, and the parts of tuples among them."""
    flat: list[object] = []
    for argument in arguments:
        flat += argument if isinstance(argument, tuple) else [argument]
    return flat


def size_of_result(name: str, arguments: tuple[object, ...]) -> int:
    match name, arguments:
        case "typed_tensor" | "untyped_tensor" | "quantized_tensor", [_, _, shape, *_]:
            return elements_of(shape) if isinstance(shape, tuple) else _ANY_SIZE
        case _, [Made(kind="tensor" | "object") as first, *_]:
            return first.size
    return _ANY_SIZE


def is_usual_state(state: object) -> bool:
    """Whether it is as of most objects: attributes by name, and values of slots."""
    if isinstance(state, tuple) and len(state) == 2:
        return all(kind_of(part) in ("dict", "none") for part in state)
    return kind_of(state) in ("dict", "none")


def has_own_setstate(maker: object) -> bool:
    own = getattr(maker, "__setstate__", None) if isinstance(maker, type) else None
    return own not in (None, torch.Tensor.__setstate__)
