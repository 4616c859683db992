"""Plans and results of ranks that save a sharded state: real objects of torch."""

from __future__ import annotations

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
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch

_ROWS, _COLUMNS = 4, 64
"""Of each shard. Exchanges do not depend on them."""
_NBYTES = 4 * _ROWS * _COLUMNS + 512
"""Of an item with its container."""


class ShardedState:
    """A state of which each rank has a shard of every tensor.

    Args:
        ranks: How many ranks there are.
        items: Tensors, and so shards of each rank.
    """

    def __init__(self, ranks: int, items: int) -> None:
        self.ranks = ranks
        self.items = items
        self._names = [f"model.layers.{number}.weight" for number in range(items)]
        self._mappings = {name: ("model", name.removeprefix("model.")) for name in self._names}

    def plan(self, rank: int) -> SavePlan:
        """A rank's local plan."""
        return SavePlan(
            [self._item(name, rank) for name in self._names], planner_data=self._mappings
        )

    def _item(self, name: str, rank: int) -> WriteItem:
        # Objects of its own, as stock's planner makes them: pickle shares the same object only.
        chunk = ChunkStorageMetadata(
            offsets=torch.Size([_ROWS * rank, 0]), sizes=torch.Size([_ROWS, _COLUMNS])
        )
        return WriteItem(
            index=MetadataIndex(name, torch.Size([_ROWS * rank, 0])),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk,
                properties=TensorProperties(dtype=torch.float32),
                size=torch.Size([_ROWS * self.ranks, _COLUMNS]),
            ),
        )

    @property
    def nbytes(self) -> int:
        """The length of a rank's file."""
        return self.items * _NBYTES

    def file(self, rank: int) -> str:
        """The name of a rank's file."""
        return f"__{rank}_{0}.distcp"

    def results(self, rank: int) -> list[WriteResult]:
        """A rank's write results."""
        return [
            WriteResult(
                index=MetadataIndex(name, torch.Size([_ROWS * rank, 0]), rank),
                size_in_bytes=_NBYTES,
                storage_data=_torch.StorageInfo(self.file(rank), number * _NBYTES, _NBYTES),
            )
            for number, name in enumerate(self._names)
        ]
