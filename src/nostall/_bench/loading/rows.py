"""Parts of a checkpoint: one of its tensors, and an eighth of the rows of each, for DCP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nostall._bench.workloads import State

EIGHTHS = 8
_WHICH = 3


class RowsPlanner(DefaultLoadPlanner):
    """Plans to load rows of stored tensors into whole tensors of a flat state dict.

    A sharded tensor of torch would plan the same reads; this needs no process group.
    """

    def __init__(self, rows: Mapping[str, slice]) -> None:
        super().__init__()
        self._rows = rows

    def create_local_plan(self) -> LoadPlan:
        """The reads of these rows."""
        assert self.metadata is not None
        items = []
        for name, rows in self._rows.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            rest = stored.size[1:]
            chunk = ChunkStorageMetadata(
                offsets=torch.Size([rows.start, *(0 for _ in rest)]),
                sizes=torch.Size([rows.stop - rows.start, *rest]),
            )
            items += create_read_items_for_chunk_list(name, stored, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor of that name: offsets are those of the stored one."""
        tensor: Tensor = self.state_dict[index.fqn]
        return tensor


def eighth(tensor: Tensor) -> slice | None:
    """The fourth eighth of its rows, or ``None`` if it has fewer than eight."""
    if tensor.dim() == 0 or tensor.shape[0] < EIGHTHS:
        return None
    count = tensor.shape[0]
    return slice(_WHICH * count // EIGHTHS, (_WHICH + 1) * count // EIGHTHS)


def part_of(state: State, path: Sequence[str]) -> State:
    """A nested state dict with one tensor of this one, all zeros, below the same keys."""
    key, *rest = path
    value: Any = state[key]
    return {key: part_of(value, rest) if rest else torch.zeros_like(value)}


def path_of(state: State, name: str) -> list[str]:
    """The keys that lead to the tensor of a dotted name; keys may have dots themselves."""
    for key, value in state.items():
        if key == name:
            return [key]
        if isinstance(value, dict) and name.startswith(f"{key}."):
            try:
                return [key, *path_of(value, name[len(key) + 1 :])]
            except KeyError:
                continue
    raise KeyError(name)
