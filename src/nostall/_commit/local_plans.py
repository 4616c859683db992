"""All ranks' local plans, as columns of plain values.

A plan of stock's planner has five objects per item. As columns it takes a fifth of the bytes, and a
fraction of the time to pickle; what equal ranks have in common is kept once. So ranks send their
plans like this, the coordinator keeps them like this, and a checkpoint has them like this under
:data:`nostall._commit.metadata.PLANS_KEY`. Plans of an unusual form stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, overload

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from nostall.errors import UntrustedMetadataError

SHARD = WriteItemType.SHARD.value
_KINDS = {kind.value: kind for kind in WriteItemType}
_USUAL = TensorWriteData, ChunkStorageMetadata, TensorProperties, *(4 * [torch.Size])
_Size: TypeAlias = "tuple[int, ...]"


class PlanColumns(NamedTuple):
    """A local plan: columns with an entry per item, empty sizes for objects, and common parts."""

    names: list[str]
    kinds: bytes
    """Values of ``WriteItemType``."""
    offsets: list[_Size | None]
    """Where the chunk begins in its tensor; ``None`` for an object."""
    sizes: list[_Size]
    """Lengths of the chunk."""
    shapes: list[_Size]
    """Shapes of the tensors."""
    properties_of: list[int]
    """Positions in the next list; 0 for an object."""
    properties: list[TensorProperties]
    """Without duplicates."""
    planner_data: Any

    @property
    def rows(self) -> list[tuple[str, int, _Size | None, _Size, _Size, int]]:
        """The columns of items, item by item."""
        return list(zip(*self[:6], strict=True))


CompactPlan: TypeAlias = PlanColumns | SavePlan
"""A local plan as columns, if it has the usual form."""


def compact(plan: CompactPlan) -> CompactPlan:
    """The plan as columns, if every item is as stock's planner makes it; else the plan itself.

    Never raises, as other ranks wait for the plan: the coordinator says what is wrong with it.
    """
    if type(plan) is not SavePlan or plan.storage_data is not None or not plan.usable:
        return plan
    try:
        return _columns_of(plan) or plan
    except Exception:  # of any kind: items of a user's may be anything
        return plan


def _columns_of(plan: SavePlan) -> PlanColumns | None:
    """The columns; ``None`` if an item is unusual."""
    columns = PlanColumns([], b"", [], [], [], [], [], plan.planner_data)
    kinds, positions = bytearray(), dict[Any, int]()
    for item in plan.items:
        index, data = item.index, item.tensor_data
        if type(item) is not WriteItem or type(index) is not MetadataIndex:
            return None
        if type(index.fqn) is not str or index.index is not None or item.bytes_io_data is not None:
            return None
        sizes: _Size = ()
        shape: _Size = ()
        offsets, position = None, 0
        if data is None or index.offset is None:
            if (
                data is not None
                or index.offset is not None
                or item.type is not WriteItemType.BYTE_IO
            ):
                return None
        else:
            places = index.offset, data.chunk.offsets, data.chunk.sizes, data.size
            if tuple(map(type, (data, data.chunk, data.properties, *places))) != _USUAL:
                return None
            if data.chunk.offsets != index.offset or item.type is WriteItemType.BYTE_IO:
                return None
            offsets, sizes, shape = map(tuple, (index.offset, data.chunk.sizes, data.size))
            state = data.properties.__getstate__()
            position = positions.setdefault(state, len(columns.properties))
            if position == len(columns.properties):
                columns.properties.append(data.properties)
        kinds.append(item.type.value)
        columns.names.append(index.fqn)
        columns.offsets.append(offsets)
        columns.sizes.append(sizes)
        columns.shapes.append(shape)
        columns.properties_of.append(position)
    return columns._replace(kinds=bytes(kinds))


def in_full(plan: CompactPlan) -> SavePlan:
    """The plan with its items; ``LookupError``, ``TypeError`` or ``ValueError`` if the columns do
    not form a plan.
    """
    if not isinstance(plan, PlanColumns):
        return plan
    items = []
    for name, kind, offsets, sizes, shape, position in plan.rows:
        offset = data = None
        if offsets is not None:
            offset = torch.Size(offsets)
            chunk = ChunkStorageMetadata(offsets=offset, sizes=torch.Size(sizes))
            data = TensorWriteData(chunk, plan.properties[position], torch.Size(shape))
        index = MetadataIndex(name, offset)
        items.append(WriteItem(index=index, type=_KINDS[kind], tensor_data=data))
    return SavePlan(items, planner_data=plan.planner_data)


def sharing(plans: Iterable[CompactPlan]) -> list[CompactPlan]:
    """Equal plans, whose columns are one object if they are equal on two neighbouring ranks."""
    shared: list[CompactPlan] = []
    before: CompactPlan | None = None
    for plan in plans:
        if isinstance(plan, PlanColumns) and isinstance(before, PlanColumns):
            pairs = zip(before, plan, strict=True)
            before = PlanColumns(*(old if _is_equal(old, new) else new for old, new in pairs))
        else:
            before = plan
        shared.append(before)
    return shared


def _is_equal(one: Any, other: Any) -> bool:
    """Equality, also of the order of dictionaries."""
    return bool(one == other) and (type(one) is not dict or [*one] == [*other])


def same_plan(one: CompactPlan, other: CompactPlan) -> bool:
    """Whether two plans have the same items in the same order; storage data may differ."""
    if one is other:
        return True
    if isinstance(one, PlanColumns) and isinstance(other, PlanColumns):
        return one == other
    full, other_full = in_full(one), in_full(other)
    return bool(full.items == other_full.items and full.planner_data == other_full.planner_data)


def matches_loaded(
    loaded: Sequence[SavePlan] | None, *, rank: int, world_size: int, local: SavePlan
) -> bool:
    """Whether this rank's plan equals its plan in a loaded checkpoint.

    Never raises, whatever was loaded: other ranks wait for the answer.
    """
    try:
        if loaded is None or len(loaded) != world_size:
            return False
        mine = loaded.plans[rank] if isinstance(loaded, LocalPlans) else compact(loaded[rank])
        return same_plan(mine, compact(local))
    except Exception:  # of any kind
        return False


class LocalPlans(Sequence[SavePlan]):
    """All ranks' local plans, which have items only while somebody looks at them.

    In a pickle, an ordinary list of plans.
    """

    def __init__(self, plans: Iterable[CompactPlan]) -> None:
        self.plans = list(map(compact, plans))

    @classmethod
    def of(cls, plans: Sequence[SavePlan]) -> LocalPlans:
        """These plans as this class, whatever holds them."""
        return plans if isinstance(plans, LocalPlans) else cls(plans)

    @classmethod
    def of_plain(cls, plans: Any) -> LocalPlans | None:
        """The plans in a checkpoint; ``None`` for another form, of a later nostall, say."""
        if type(plans) is not list or not all(isinstance(each, list | SavePlan) for each in plans):
            return None
        try:
            return cls(PlanColumns(*each) if type(each) is list else each for each in plans)
        except TypeError:
            return None

    @property
    def plain(self) -> list[list[Any] | SavePlan]:
        """For a pickle that readers without nostall can load."""
        return [[*each] if isinstance(each, PlanColumns) else each for each in self.plans]

    def __len__(self) -> int:
        return len(self.plans)

    @overload
    def __getitem__(self, rank: int) -> SavePlan: ...
    @overload
    def __getitem__(self, rank: slice) -> list[SavePlan]: ...
    def __getitem__(self, rank: int | slice) -> SavePlan | list[SavePlan]:
        """The plan of a rank; ``UntrustedMetadataError`` if the checkpoint has no plan there."""
        if isinstance(rank, slice):
            return [self[each] for each in range(len(self))[rank]]
        plan = self.plans[rank]
        try:
            return in_full(plan)
        except (LookupError, TypeError, ValueError):
            what = "the local plans are not plans"
            raise UntrustedMetadataError(what, phase="read") from None

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)
