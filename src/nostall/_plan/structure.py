"""Recognise a state dict whose structure was saved before, so that it is not planned again.

A structure is the keys and types at every level and the forms of all tensors. It holds no tensor
and no value, so old values cannot reach a new checkpoint: it says where to look, and the values are
read again for each save. Recognition takes about 1 us per tensor; planning takes some hundred times
as long.

Names and order are those of DCP's ``flatten_state_dict``, which :func:`learn_structure` checks.
It refuses state dicts with leaves other than plain tensors, objects, DTensors, and classes of
sharded tensors that somebody vouches for: an :data:`Opener` says what their items follow from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter, eq
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor

from nostall import _torch
from nostall._model.values import PlannedSave, Share

Serializer = Callable[[Any], bytes]
Opener = Callable[[Any], tuple[Any, Sequence[torch.Tensor]]]
"""For a leaf with tensors: what its items follow from, apart from those, and the tensors in order
of its items."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _open_dtensor(leaf: DTensor) -> tuple[Any, Sequence[torch.Tensor]]:
    return (_torch.spec_of(leaf), leaf.requires_grad), (_torch.local_tensor_of(leaf),)


Openers = Mapping[type | str, Opener]
"""By class of leaves, or its name."""
OPENERS: Openers = {DTensor: _open_dtensor} if _torch.KNOWS_DTENSORS else {}


def qualified_name(of: type) -> str:
    """The name of a class, with its module."""
    return f"{of.__module__}.{of.__qualname__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """One mapping or list of a nested state dict."""

    keys: list[Any] | None
    """``None`` for a list."""
    key_kinds: list[tuple[type, str]] | None
    """``None`` if all keys are strings. Other keys may be equal with different names: 1 and True,
    0.0 and -0.0."""
    types: list[type]
    inner: tuple[tuple[int, _Level], ...]
    """Contained mappings and lists, by position."""
    is_leaf: bool
    """A list without tensors is saved as one object."""

    def gather(self, value: Any, leaves: list[Any]) -> bool:
        """Append the leaves of ``value``; false if its structure differs."""
        if self.keys is not None:
            if list(value) != self.keys:
                return False
            if self.key_kinds is not None and _kinds_of(value) != self.key_kinds:
                return False
            members = list(value.values())
        else:
            members = value
        if list(map(type, members)) != self.types:
            return False
        found = leaves if not self.is_leaf else []
        begin = 0
        for position, level in self.inner:
            found += members[begin:position]
            if not level.gather(members[position], found):
                return False
            begin = position + 1
        found += members[begin:]
        if self.is_leaf:
            leaves.append(value)
        return True

    def paths(self, prefix: str = "") -> list[str]:
        """The names of the leaves, in order."""
        if self.is_leaf:
            return [prefix[:-1]]
        names: Sequence[object] = self.keys if self.keys is not None else range(len(self.types))
        inner = dict(self.inner)
        found = []
        for position, name in enumerate(names):
            if position in inner:
                found += inner[position].paths(f"{prefix}{name}.")
            else:
                found.append(f"{prefix}{name}")
        return found


def _kinds_of(keys: Iterable[Any]) -> list[tuple[type, str]]:
    return [(type(key), str(key)) for key in keys]


def _level_of(value: Mapping[str, Any] | list[Any]) -> _Level:
    members = list(value.values()) if isinstance(value, Mapping) else value
    inner = tuple(
        (position, _level_of(member))
        for position, member in enumerate(members)
        if isinstance(member, Mapping | list)
    )
    keys = list(value) if isinstance(value, Mapping) else None
    strange = keys is not None and not all(type(key) is str for key in keys)
    return _Level(
        keys=keys,
        key_kinds=_kinds_of(value) if strange else None,
        types=[type(member) for member in members],
        inner=inner,
        is_leaf=isinstance(value, list)
        and all(level.is_leaf for _, level in inner)
        and not any(isinstance(member, torch.Tensor) for member in members),
    )


_PROPERTIES: tuple[Callable[[torch.Tensor], Any], ...] = (
    type,
    attrgetter("layout"),
    attrgetter("dtype"),
    attrgetter("device"),
    attrgetter("requires_grad"),
    torch.Tensor.is_neg,
)
_EXTENTS: tuple[Callable[[torch.Tensor], tuple[int, ...]], ...] = (
    attrgetter("shape"),
    torch.Tensor.stride,
)
_LOW_ADDRESS = 64 << 30
_BLOCK_COUNT = 256
"""Tensors that are compared together: few enough to stay in the core's cache."""


class _TensorKinds:
    """Recognises a sequence of tensors by all properties but their values; keeps no tensor.

    Compares one property of all tensors after the other, in loops that run in C: 0.6 us per tensor.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._properties = [list(map(look, tensors)) for look in _PROPERTIES]
        self._complex = [at for at, tensor in enumerate(tensors) if tensor.is_complex()]
        seen: dict[tuple[int, ...], tuple[int, ...]] = {}  # most tensors share a size
        self._extents = [
            [seen.setdefault(found, found) for found in map(look, tensors)] for look in _EXTENTS
        ]

    def match(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors have the same properties, in order, and memory.

        False if any of them states its place in a larger tensor.
        """
        try:
            with _torch.without_modes():
                if not (
                    all(
                        list(map(look, tensors)) == known
                        for look, known in zip(_PROPERTIES, self._properties, strict=True)
                    )
                    and not any(tensors[at].is_conj() for at in self._complex)
                    and all(  # equally many; not a list: the garbage collector would visit it
                        all(map(eq, map(look, tensors), known))
                        for look, known in zip(_EXTENTS, self._extents, strict=True)
                    )
                    and not any(hasattr(tensor, "global_shape") for tensor in tensors)
                ):
                    return False
                # Without storage, a tensor's address is near 0.
                addresses = list(map(torch.Tensor.data_ptr, tensors))
                return min(addresses, default=_LOW_ADDRESS) >= _LOW_ADDRESS or all(
                    _torch.missing_data(tensor) is None
                    and _torch.payload_stride(tensor.detach()) is not None
                    for tensor, address in zip(tensors, addresses, strict=True)
                    if address < _LOW_ADDRESS
                )
        except RuntimeError:
            return False  # nested tensors have no sizes, and tensors inside vmap no storage


class KnownStructure:
    """The structure of a state dict, and the leaf of each item of a rank's share."""

    def __init__(
        self,
        root: _Level,
        sharded: list[tuple[int, Opener, Any]],
        leaves: list[Any],
        share: Share,
        leaf_of: list[int],
    ) -> None:
        self._root = root
        self._sharded = sharded
        """Leaves that have tensors: position, opener, and what it has said."""
        self._share = share
        self._leaf_of = leaf_of
        """Position among the opened leaves, per item."""
        self._runs = [item for item, form in enumerate(share.forms) if form is None]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        tensors = list(compress(leaves, self._is_tensor))
        blocks = [slice(at, at + _BLOCK_COUNT) for at in range(0, len(tensors), _BLOCK_COUNT)]
        self._kinds = [(block, _TensorKinds(tensors[block])) for block in blocks]
        # The file form of these also depends on the storage that they are a view of.
        self._look_again = [
            item
            for item, form in enumerate(share.forms)
            if form is not None
            and not (leaves[leaf_of[item]].is_contiguous() and leaves[leaf_of[item]].numel())
        ]

    def find(
        self, state_dict: Mapping[str, Any], serialize: Serializer
    ) -> list[torch.Tensor | bytes] | None:
        """The sources of the share's items in a state dict; ``None`` if its structure differs."""
        leaves: list[Any] = []
        if not self._root.gather(state_dict, leaves):
            return None
        if self._sharded:
            opened: list[Any] = []
            begin = 0
            for position, opener, known in self._sharded:
                said, tensors = opener(leaves[position])
                if said != known:
                    return None
                opened += leaves[begin:position]
                opened += tensors
                begin = position + 1
            leaves = opened + leaves[begin:]
        if len(leaves) != len(self._is_tensor):
            return None
        of_leaves = list(compress(leaves, self._is_tensor))
        if not all(kinds.match(of_leaves[block]) for block, kinds in self._kinds):
            return None
        sources = [leaves[position] for position in self._leaf_of]
        for item in self._look_again:
            form = self._share.forms[item]
            if form is None or _torch.payload_stride(sources[item].detach()) != form.stride:
                return None
        for item in self._runs:
            sources[item] = serialize(sources[item])
        return sources


def learn_structure(
    state_dict: Mapping[str, Any],
    flat: Mapping[str, Any],
    planned: PlannedSave,
    openers: Openers = OPENERS,
) -> KnownStructure | None:
    """The structure of a planned state dict; ``None`` if it cannot be recognised safely.

    ``flat`` is the state dict as the planner has flattened it, ``planned`` this rank's share of it.
    """
    root = _level_of(state_dict)
    leaves: list[Any] = []
    root.gather(state_dict, leaves)
    opened: list[Any] = []
    sharded = []
    places: dict[str, list[int]] = {}  # among the opened leaves, by name, in the order of items
    for position, (name, leaf) in enumerate(zip(root.paths(), leaves, strict=True)):
        if leaf is not flat.get(name):
            continue  # an item of the name is refused below
        opener = openers.get(type(leaf)) or openers.get(qualified_name(type(leaf)))
        parts = [leaf]
        if opener is not None:
            said, tensors = opener(leaf)
            sharded.append((position, opener, said))
            parts = list(tensors)
        places[name] = list(range(len(opened), len(opened) + len(parts)))
        opened += parts
    if len(places) != len(leaves) or not all(map(_is_recognizable, opened)):
        return None
    leaf_of = []
    items = zip(planned.share.plan.items, planned.share.forms, planned.sources, strict=True)
    for item, form, source in items:
        candidates = places.get(item.index.fqn, [])
        if isinstance(source, torch.Tensor):  # of several shards, other ranks may write some
            candidates = [each for each in candidates if _is_same_memory(opened[each], source)]
            if len(candidates) > 1 and source.numel():
                return None  # two shards are one tensor now, and need not be later
        if not candidates or (form is None) != (item.type == WriteItemType.BYTE_IO):
            return None
        position = candidates[0]
        if len(places[item.index.fqn]) > 1:
            places[item.index.fqn].remove(position)
        leaf_of.append(position)
    return KnownStructure(root, sharded, opened, planned.share, leaf_of)


def _is_recognizable(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return True
    return (
        type(leaf) in _PLAIN
        and leaf.layout == torch.strided
        and not leaf.is_nested
        and not leaf.is_neg()  # its memory has other values
        and not _torch.says_its_place(leaf)
    )


def _is_same_memory(leaf: Any, source: torch.Tensor) -> bool:
    """Whether an item's value is this leaf: a planner that is vouched for may save another."""
    return (
        isinstance(leaf, torch.Tensor)
        and source.data_ptr() == leaf.data_ptr()
        and (source.dtype, source.shape, source.stride()) == (leaf.dtype, leaf.shape, leaf.stride())
    )
