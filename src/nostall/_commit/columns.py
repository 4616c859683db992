"""Ranks' local plans and write results, as columns of plain values.

A plan of stock's planner has five objects per item, a result of DCP's fifteen: its item, its place
in a file, their attributes. As columns plans take a fifth of the bytes, and a fraction of the time
to pickle; results take a fifteenth of the memory, and of the time to unpickle. So ranks send them
like this, and the coordinator keeps them like this. Plans and results of an unusual form stay as
they are.

What equal ranks have in common in their plans is kept once, and a checkpoint has all ranks' plans
like this under :data:`nostall._commit.metadata.PLANS_KEY`.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, TypeAlias, overload

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall.errors import UntrustedMetadataError

# --- local plans ----------------------------------------------------------------------------------

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
        is_object = item.type is WriteItemType.BYTE_IO
        if not is_object == (data is None) == (index.offset is None):
            return None
        sizes: _Size = ()
        shape: _Size = ()
        offsets, position = None, 0
        if data is not None:
            places = index.offset, data.chunk.offsets, data.chunk.sizes, data.size
            if tuple(map(type, (data, data.chunk, data.properties, *places))) != _USUAL:
                return None
            if data.chunk.offsets != index.offset:
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
        as_columns = plans.plans if isinstance(plans, LocalPlans) else plans
        self.plans: list[CompactPlan] = list(map(compact, as_columns))

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


# --- write results --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultColumns:
    """Columns with an entry per result, and what results have in common."""

    names: list[str]
    begins: Sequence[torch.Size | None]
    """Offsets of chunks in their tensors, without duplicates; ``None`` for an object."""
    begin_of: array[int]
    """Positions in ``begins``."""
    hints: list[Any]
    """``MetadataIndex.index`` of each."""
    files: Sequence[str]
    """Names, without duplicates."""
    file_of: array[int]
    """Positions in ``files``."""
    offsets: array[int]
    """In the file."""
    lengths: array[int]
    """In the file, in bytes."""
    transforms: tuple[str, ...] | None
    """DCP's names of the stream transforms, which all items have in common."""

    def places(self, memo: dict[Any, Any]) -> Iterator[tuple[MetadataIndex, Any]]:
        """Each item, and its place as an object of DCP's.

        ``memo`` maps names and offsets to themselves; equal ones become one object.
        """
        new, begins = object.__new__, [memo.setdefault(each, each) for each in self.begins]
        for name, begin, hint, file, offset, length in zip(
            map(memo.setdefault, self.names, self.names),
            map(begins.__getitem__, self.begin_of),
            self.hints,
            map(self.files.__getitem__, self.file_of),
            self.offsets,
            self.lengths,
            strict=True,
        ):
            # In half of the time that the constructors take.
            key, place = new(MetadataIndex), new(_torch.StorageInfo)
            vars(key).update(fqn=name, index=hint)
            if begin is not None:
                vars(key)["offset"] = begin
            vars(place).update(relative_path=file, offset=offset, length=length)
            if self.transforms is not None:
                vars(place)["transform_descriptors"] = list(self.transforms)
            yield key, place


RankPlaces: TypeAlias = ResultColumns | Mapping[MetadataIndex, Any]
"""The items of a rank and their places in files, as columns if they have the usual form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A rank's write results, in full."""

    items: RankPlaces
    files: tuple[str, ...]
    token: str | None
    """Identifies results that a later save may refer to."""


class ResultsReference(NamedTuple):
    """A reference to write results that the coordinator received before, under this token."""

    token: str
    files: tuple[str, ...]
    """The present names of the files, in the order of the first report."""


OF_RESULTS = (Results, ResultsReference)  # made once: there are thousands of ranks
RankOutcome: TypeAlias = Results | ResultsReference | _torch.WrappedException
"""A rank's report of its part of a save."""


def token_of(outcome: RankOutcome) -> str | None:
    """The token of these results, if a later save may refer to them."""
    return outcome.token if isinstance(outcome, OF_RESULTS) else None


def columns_of(places: Iterable[tuple[Any, Any]]) -> ResultColumns | None:
    """Items and their places as columns; ``None`` if something would be lost.

    ``KeyError`` if a part is missing; ``OverflowError`` if a number is negative or too large;
    ``TypeError`` if something has no hash, or is no number.
    """
    begins = defaultdict[Any, int](count().__next__)
    files = defaultdict[str, int](count().__next__)
    names, hints, begin_of, file_of, offsets, lengths = [], [], [], [], [], []
    transforms = set[tuple[str, ...] | None]()
    for index, info in places:
        if type(index) is not MetadataIndex or type(info) is not _torch.StorageInfo:
            return None
        # Instances that were unpickled do not have what is None.
        key, place = vars(index), vars(info)
        begin, named = key.get("offset"), place.get("transform_descriptors")
        if begin is not None and type(begin) is not torch.Size:
            return None
        if len(key) != _KEY_PARTS + (begin is not None):
            return None
        if len(place) != _PLACE_PARTS + ("transform_descriptors" in place):
            return None
        transforms.add(None if named is None else tuple(named))
        names.append(key["fqn"])
        begin_of.append(begins[begin])
        hints.append(key.get("index"))
        file_of.append(files[place["relative_path"]])
        offsets.append(place["offset"])
        lengths.append(place["length"])
    numbers = {*map(type, offsets), *map(type, lengths)}
    texts = {*map(type, names), *map(type, files)}
    if not (numbers <= {int} and texts <= {str} and len(transforms) <= 1):
        return None
    return ResultColumns(
        names=names,
        begins=list(begins),
        begin_of=array("I", begin_of),
        hints=hints,
        files=list(files),
        file_of=array("I", file_of),
        offsets=array("Q", offsets),
        lengths=array("Q", lengths),
        transforms=transforms.pop() if transforms else None,
    )


_KEY_PARTS = 2
_PLACE_PARTS = 3
"""Numbers of attributes that instances have, without the optional one; others would be lost."""


def in_columns(results: list[WriteResult]) -> RankPlaces:
    """The items and their places, as columns if nothing is lost."""
    try:
        columns = columns_of((each.index, each.storage_data) for each in results)
    except Exception:  # of any kind: a planner of a user's may make any items
        columns = None
    return columns or {each.index: each.storage_data for each in results}


def renamed_places(places: RankPlaces, names: Mapping[str, str]) -> RankPlaces:
    """Places under the present names of files, given by the earlier ones."""
    if isinstance(places, ResultColumns):
        return replace(places, files=[names[name] for name in places.files])
    return {
        index: replace(info, relative_path=names[info.relative_path])
        for index, info in places.items()
    }


def made(parts: Iterable[RankPlaces], memo: dict[Any, Any]) -> dict[MetadataIndex, Any]:
    """The places of all ranks; columns become new objects (see :meth:`ResultColumns.places`)."""
    places = dict[MetadataIndex, Any]()
    for part in parts:
        places.update(part.places(memo) if isinstance(part, ResultColumns) else part)
    return places


class StorageData(MutableMapping[MetadataIndex, Any]):
    """``Metadata.storage_data`` of all ranks; it has objects from when somebody looks at one."""

    def __init__(self, parts: Sequence[RankPlaces]) -> None:
        self.parts = parts

    @cached_property
    def in_full(self) -> dict[MetadataIndex, Any]:
        """All places as one dictionary, which later changes change."""
        return made(self.parts, {})

    def copy(self) -> dict[MetadataIndex, Any]:
        """A plain dictionary."""
        return dict(self.in_full)

    def __getitem__(self, index: MetadataIndex) -> Any:
        return self.in_full[index]

    def __setitem__(self, index: MetadataIndex, place: Any) -> None:
        self.in_full[index] = place

    def __delitem__(self, index: MetadataIndex) -> None:
        del self.in_full[index]

    def __iter__(self) -> Iterator[MetadataIndex]:
        return iter(self.in_full)

    def __len__(self) -> int:
        return len(self.in_full)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.in_full,)


def parts_of(places: Mapping[MetadataIndex, Any]) -> Sequence[RankPlaces]:
    """The places of ranks as they are now; in one part if somebody may have changed them."""
    if isinstance(places, StorageData) and "in_full" not in vars(places):
        return places.parts
    return [places]
