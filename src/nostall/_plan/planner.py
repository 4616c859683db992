"""DCP's planners: their errors, their switches, their bytes, and the global plans that they make.

A global plan is made from columns, as ``DefaultSavePlanner.create_global_plan`` makes it, item for
item: which rank writes what several have, the chunks of each tensor in the order of ranks, and
their numbers as hints. Nothing is made per item but a chunk of the metadata; a rank gets positions
and hints instead of a plan. Whatever is unusual, or wrong, is left to stock's planner and its
messages.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from nostall import _torch
from nostall._commit.columns import SHARD, CompactPlan, PlanColumns
from nostall._plan.structure import OPENERS, Opener, Openers, qualified_name
from nostall.errors import NostallError, RankMismatchError, SaveError


@contextmanager
def planner_failures() -> Iterator[None]:
    """Translate DCP's ``CheckpointException`` from a planner into a ``SaveError``.

    Only an ``Exception`` can be sent to other ranks. A ``CheckpointException`` is not one: raised
    elsewhere, it is known to all ranks already.
    """
    try:
        yield
    except _torch.CheckpointException as error:
        raise SaveError(f"the planner raised {error!r}", phase="plan") from error


@dataclass(frozen=True, slots=True)
class Vouched:
    """A planner whose plan follows from its switches and the structure of the state."""

    serialize: Callable[[Any], bytes]
    """Returns the bytes that it writes for a leaf without tensors."""
    openers: Openers


_vouched: dict[type | str, Vouched] = {}


def vouch_for(
    planner: type[DefaultSavePlanner] | str,
    *,
    serialize: Callable[[Any], bytes] | None = None,
    openers: Mapping[type | str, Opener] | None = None,
) -> None:
    """Let saves by a planner of one's own plan once per structure, as those by DCP's planner.

    Call it once per process, before the first save. It is a promise about exactly this class: its
    plan depends on nothing but the attributes of the planner that are ``bool``, ``int`` or ``str``,
    and on names, types, shapes, strides, dtypes and devices in the state dict; and an item's value
    is a tensor of the state dict, or what ``serialize`` returns. All ranks plan the first two saves
    of a structure in a row, and compare them; each plans the third alone; later ones call no method
    of the planner.

    Args:
        planner: The class, or where its module is not to be imported yet its name, as in
            ``package.module.Class``. Subclasses plan every save unless they are vouched for, too.
        serialize: Returns the bytes of a leaf without tensors; ``torch.save``'s by default.
        openers: By class, or its name, of leaves that have tensors, such as a framework's sharded
            tensors: a function which returns what the leaf's items follow from, apart from the
            tensors, in a form that can be compared; and its tensors, in the order of its items.
    """
    _vouched[planner] = Vouched(serialize or serialized, {**OPENERS, **(openers or {})})


def vouched(planner: SavePlanner) -> Vouched | None:
    """The knowledge of a planner that lets it plan once; ``None`` if it plans every save."""
    if is_stocks_own(planner):
        return Vouched(serialized, OPENERS)
    if _torch.caches_plans(planner):
        return None
    return _vouched.get(type(planner)) or _vouched.get(qualified_name(type(planner)))


class PlannerKey(NamedTuple):
    """Identifies what plans of a planner follow from, apart from the state dict: its class, and its
    attributes that are numbers, texts or truth values.
    """

    kind: Hashable
    switches: Hashable


def planner_key(planner: SavePlanner) -> PlannerKey:
    """The planner's class and switches, before it has seen a state dict."""
    switches = {
        name: value
        for name, value in vars(planner).items()
        if isinstance(value, bool | int | str) and name != "is_coordinator"
    }
    return PlannerKey(type(planner), tuple(sorted(switches.items())))


def is_stocks_own(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Whether this is DCP's own planner as usual: its plan depends on the structure only."""
    return (
        type(planner) is DefaultSavePlanner
        and planner.flatten_state_dict
        and planner.flatten_sharded_tensors
        and not _torch.caches_plans(planner)
    )


def serialized(value: Any) -> bytes:
    """An object as serialised by DCP's planner."""
    kind, length = type(value), 0
    if kind is str:
        length = len(value)
    elif kind is int:
        length = value.bit_length()
    if kind in _SCALARS and length <= _LONGEST_KEPT:
        return _serialize_scalar(repr(value), value)
    return _saved(value)


_SCALARS = (bool, int, float, str, type(None))
_LONGEST_KEPT = 256
"""Characters of a string, or bits of an integer; the cache takes a few megabytes at most."""


@lru_cache(maxsize=4096)
def _serialize_scalar(_text: str, value: Any) -> bytes:
    # The key has more than the value, because 1 == 1.0 == True and 0.0 == -0.0.
    return _saved(value)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def as_save_error(error: BaseException, rank: int) -> NostallError:
    """An error of planning as one of ours; ours stay as they are."""
    if isinstance(error, NostallError):
        return error
    return SaveError(f"{type(error).__name__}: {error}", rank=rank, phase="plan")


# --- global plans ---------------------------------------------------------------------------------

_Size = tuple[int, ...]
_Chunk = tuple[_Size, _Size]
"""Offsets and sizes."""


class PlanShare(NamedTuple):
    """A rank's part of a global plan, which it applies to its local plan."""

    kept: list[int] | None
    """Positions of the items that it writes; ``None`` for all."""
    hints: list[int | None]
    """For each of them, the number of its chunk; ``None`` for objects."""
    storage_data: Any = None

    def applied_to(self, local: SavePlan) -> SavePlan:
        """The final plan of the rank with this local plan."""
        items = local.items if self.kept is None else [local.items[each] for each in self.kept]
        hinted = [
            item if hint is None else replace(item, index=replace(item.index, index=hint))
            for item, hint in zip(items, self.hints, strict=True)
        ]
        return replace(local, items=hinted, storage_data=self.storage_data)


def plan_columns(
    plans: Sequence[PlanColumns], *, to_lowest_rank: bool
) -> tuple[list[PlanShare], Metadata] | None:
    """All ranks' shares, and the metadata; ``None`` if stock's planner has to look at the plans.

    An item of several ranks is written by the lowest of them, or, without ``to_lowest_rank``, by
    the one with the fewest bytes.
    """
    written = _written(plans, to_lowest_rank=to_lowest_rank)
    if written is None:
        return None
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    tensors: dict[str, tuple[TensorStorageMetadata, list[_Chunk]]] = {}
    size = cache(torch.Size)
    shares = []
    for plan, positions in zip(plans, written, strict=True):
        hints: list[int | None] = []
        rows = plan.rows if positions is None else map(plan.rows.__getitem__, positions)
        for name, kind, offsets, sizes, shape, position in rows:
            if (kind != SHARD or name not in tensors) and name in entries:
                return None
            if offsets is None:
                entries[name] = BytesStorageMetadata()
                hints.append(None)
                continue
            if name not in tensors:
                entry = TensorStorageMetadata(plan.properties[position], size(shape), [])
                entries[name], tensors[name] = entry, (entry, [])
            _, chunks = tensors[name]
            hints.append(len(chunks))
            chunks.append((offsets, sizes))
        shares.append(PlanShare(positions, hints))
    unusual: dict[str, Any] = {}
    for name, (entry, chunks) in tensors.items():
        entry.chunks += [ChunkStorageMetadata(size(at), size(of)) for at, of in chunks]
        if not _lie_side_by_side(tuple(entry.size), chunks):
            unusual[name] = entry
    if unusual and not _torch.is_valid_plan(len(plans), Metadata(unusual)):
        return None
    mappings: dict[str, Any] = {}
    for before, plan in zip([None, *reversed(plans)], reversed(plans), strict=False):
        if before is None or plan.planner_data is not before.planner_data:
            mappings.update(plan.planner_data)
    return shares, Metadata(entries, planner_data=mappings)


def require_one_shape(plans: Sequence[CompactPlan]) -> None:
    """Refuse tensors of one name whose shapes differ between ranks: only one would be saved.

    ``RankMismatchError`` if there are some. Plans of an unusual form are not looked at.
    """
    found: dict[str, _Size] = {}
    before: PlanColumns | None = None
    for rank, plan in enumerate(plans):
        if not isinstance(plan, PlanColumns):
            continue
        if before is not None and plan.names is before.names and plan.shapes is before.shapes:
            continue  # equal ranks share their columns
        before = plan
        for name, offsets, shape in zip(plan.names, plan.offsets, plan.shapes, strict=True):
            if offsets is not None and found.setdefault(name, shape) != shape:
                named = (isinstance(each, PlanColumns) and name in each.names for each in plans)
                raise RankMismatchError(
                    f"the shape of {name} differs between ranks:"
                    f" {found[name]} on rank {[*named].index(True)} and {shape} on rank {rank}",
                    phase="plan",
                    hint="name it differently on each rank; in the state of a CheckpointManager,"
                    " put an object that has it into PerRank",
                )


def _written(
    plans: Sequence[PlanColumns], *, to_lowest_rank: bool
) -> list[list[int] | None] | None:
    """For each rank, the positions of the items that it writes; ``None`` for all of its own."""
    keys = [list(zip(plan.names, plan.offsets, strict=True)) for plan in plans]
    everything: set[Any] = set()
    for of_rank in keys:
        if len(set(of_rank)) < len(of_rank):
            return None
        everything.update(of_rank)
    if len(everything) == sum(map(len, keys)):
        return [None] * len(plans)
    dropped = _dropped(plans, keys, to_lowest_rank=to_lowest_rank)
    return [
        [position for position, key in enumerate(of_rank) if key not in gone] if gone else None
        for of_rank, gone in zip(keys, dropped, strict=True)
    ]


def _dropped(
    plans: Sequence[PlanColumns], keys: Sequence[Sequence[Any]], *, to_lowest_rank: bool
) -> list[set[Any]]:
    """For each rank, the items that another one writes."""
    holders: defaultdict[Any, list[int]] = defaultdict(list)
    nbytes: dict[Any, int] = {}
    for rank, (plan, of_rank) in enumerate(zip(plans, keys, strict=True)):
        for key in of_rank:
            holders[key].append(rank)
        nbytes.update(zip(of_rank, _nbytes(plan), strict=True))
    dropped: list[set[Any]] = [set() for _ in plans]
    loads = [0] * len(plans)
    for key, ranks in holders.items():
        chosen = ranks[0]
        if len(ranks) > 1:
            if not to_lowest_rank:
                chosen = min(set(ranks), key=loads.__getitem__)  # in a set's order, as stock
            for rank in ranks:
                if rank != chosen:
                    dropped[rank].add(key)
        loads[chosen] += nbytes[key]
    return dropped


def _nbytes(plan: PlanColumns) -> Iterable[int]:
    """The load that each item is for a rank: the bytes of the whole tensor; 1 for an object."""
    lengths = [_element_nbytes(each) for each in plan.properties]
    for offsets, shape, position in zip(plan.offsets, plan.shapes, plan.properties_of, strict=True):
        yield 1 if offsets is None else math.prod(shape) * lengths[position] or 1


def _element_nbytes(properties: TensorProperties) -> int:
    scalar: Any = TensorWriteData(None, properties, torch.Size())  # type: ignore[arg-type]  # unused
    return (
        WriteItem(MetadataIndex(""), WriteItemType.TENSOR, None, scalar).tensor_storage_size() or 0
    )


def _lie_side_by_side(shape: _Size, chunks: Sequence[_Chunk]) -> bool:
    """Whether chunks cut a tensor along one dimension, without overlaps and gaps."""
    cut = next((dim for dim, at in enumerate(max(chunks)[0]) if at), 0)
    origin, begin = (0,) * len(shape), 0
    for offsets, sizes in sorted(chunks):
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return False
        if shape:
            if offsets[cut] != begin or sizes[cut] < 0:
                return False
            begin += sizes[cut]
        if offsets[:cut] + offsets[cut + 1 :] != origin[1:]:
            return False
        if sizes[:cut] + sizes[cut + 1 :] != shape[:cut] + shape[cut + 1 :]:
            return False
    return not shape or begin == shape[cut]
