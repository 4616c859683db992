"""Planners that store tensors in parts or as another dtype, in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType


class Halving(DefaultSavePlanner):
    """Saves float32 as bfloat16, as a planner of a user's own may."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # DCP's name
        if isinstance(object, torch.Tensor) and object.dtype is torch.float32:
            return object.to(torch.bfloat16)
        return super().transform_object(write_item, object)


class InHalves(DefaultSavePlanner):
    """Stores each matrix in two parts, as two ranks with half of its rows each would."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in _halves(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type is not WriteItemType.SHARD:
            return super().resolve_data(write_item)
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        whole = self.state_dict[write_item.index.fqn]
        return whole.narrow(0, chunk.offsets[0], chunk.sizes[0]).clone()


def _halves(item: WriteItem) -> Iterator[WriteItem]:
    tensor = item.tensor_data
    if tensor is None or len(tensor.size) != 2:
        yield item
        return
    rows, columns = tensor.size
    for first, last in ((0, rows // 2), (rows // 2, rows)):
        chunk = ChunkStorageMetadata(
            offsets=torch.Size([first, 0]), sizes=torch.Size([last - first, columns])
        )
        yield WriteItem(
            index=MetadataIndex(item.index.fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=dataclasses.replace(tensor, chunk=chunk),
        )


def save_in_halves(path: Path, state: dict[str, Any]) -> None:
    """One save by stock's writer."""
    writer = dcp.FileSystemWriter(path, sync_files=False)
    dcp.save(state, storage_writer=writer, planner=InHalves(), no_dist=True)
