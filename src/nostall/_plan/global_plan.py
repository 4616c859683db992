"""The global plan of stock's planner, made from columns.

As ``DefaultSavePlanner.create_global_plan`` makes it, item for item: which rank writes what several
have, the chunks of each tensor in the order of ranks, and their numbers as hints. Nothing is made
per item but a chunk of the metadata; a rank gets positions and hints instead of a plan. Whatever is
unusual, or wrong, is left to stock's planner and its messages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
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
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from nostall import _torch
from nostall._commit.local_plans import SHARD, CompactPlan, PlanColumns
from nostall.errors import RankMismatchError

_Size = tuple[int, ...]
_Chunk = tuple[_Size, _Size]
"""Offsets and sizes."""


class Share(NamedTuple):
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
) -> tuple[list[Share], Metadata] | None:
    """All ranks' shares, and the metadata; ``None`` if stock's planner has to look at the plans.

    Args:
        plans: The local plans of all ranks.
        to_lowest_rank: Whether the lowest rank writes what several have; otherwise the one with the
            fewest bytes.
    """
    written = _written(plans, to_lowest_rank=to_lowest_rank)
    made = None if written is None else _metadata(plans, written)
    if made is None:
        return None
    shares, metadata = made
    mappings: dict[str, Any] = {}
    for before, plan in zip([None, *reversed(plans)], reversed(plans), strict=False):
        if before is None or plan.planner_data is not before.planner_data:
            mappings.update(plan.planner_data)
    return shares, replace(metadata, planner_data=mappings)


def require_one_shape(plans: Sequence[CompactPlan]) -> None:
    """Refuse tensors of one name whose shapes differ between ranks: only one would be saved.

    Plans of an unusual form are not looked at.

    Raises:
        RankMismatchError: There are some.
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


# --- who writes what several ranks have ---------------------------------------------------------


def _written(
    plans: Sequence[PlanColumns], *, to_lowest_rank: bool
) -> list[list[int] | None] | None:
    """For each rank, the positions of the items that it writes; ``None`` for all of its own."""
    keys = [plan.keys for plan in plans]
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
    """What each item adds to the load of a rank: the bytes of the whole tensor; 1 for an object."""
    lengths = [_element_nbytes(each) for each in plan.properties]
    for offsets, shape, position in zip(plan.offsets, plan.shapes, plan.properties_of, strict=True):
        yield 1 if offsets is None else math.prod(shape) * lengths[position] or 1


def _element_nbytes(properties: TensorProperties) -> int:
    scalar: Any = TensorWriteData(None, properties, torch.Size())  # type: ignore[arg-type]  # unused
    return (
        WriteItem(MetadataIndex(""), WriteItemType.TENSOR, None, scalar).tensor_storage_size() or 0
    )


# --- the metadata -------------------------------------------------------------------------------


def _metadata(
    plans: Sequence[PlanColumns], written: Sequence[list[int] | None]
) -> tuple[list[Share], Metadata] | None:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    tensors: dict[str, tuple[TensorStorageMetadata, list[_Chunk]]] = {}
    known: dict[_Size, torch.Size] = {}

    def size(plain: _Size) -> torch.Size:
        found = known.get(plain)
        return known.setdefault(plain, torch.Size(plain)) if found is None else found

    shares = []
    for plan, positions in zip(plans, written, strict=True):
        hints: list[int | None] = []
        rows = plan.rows
        if positions is not None:
            rows = [rows[each] for each in positions]
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
        shares.append(Share(positions, hints))
    for entry, chunks in tensors.values():
        entry.chunks += [ChunkStorageMetadata(size(at), size(of)) for at, of in chunks]
    return (shares, Metadata(entries)) if _are_valid(len(plans), tensors) else None


def _are_valid(
    ranks: int, tensors: Mapping[str, tuple[TensorStorageMetadata, Sequence[_Chunk]]]
) -> bool:
    """Whether the chunks of every tensor lie in it, do not overlap and, of several ranks, fill it.

    Tensors whose parts do not simply lie side by side are left to stock's check.
    """
    unusual: dict[str, Any] = {
        name: entry
        for name, (entry, chunks) in tensors.items()
        if not _lie_side_by_side(tuple(entry.size), chunks)
    }
    return not unusual or _torch.is_valid_plan(ranks, Metadata(unusual))


def _lie_side_by_side(shape: _Size, chunks: Sequence[_Chunk]) -> bool:
    """Whether a tensor is cut into its chunks along one dimension."""
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
