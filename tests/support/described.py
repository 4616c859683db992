"""Tensors that say which rows of a larger one they hold, in every way that DCP asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from nostall import _torch

ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
HAS_ATTRIBUTES = _torch._CheckpointableTensor is not None
"""Whether this torch's planner reads them."""
Rows = tuple[tuple[int, int, int], ...]
"""First global row, first local row and count of each part."""


class Described:
    """The methods that DCP asks a tensor for."""

    rows: Rows = ()
    whole: ClassVar[torch.Size] = torch.Size([8, 6])

    def _chunk(self, first: int, count: int) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([count, self.whole[1]]))

    def __create_write_items__(self, name: str, value: torch.Tensor) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size([first, 0]), number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self._chunk(first, count),
                    properties=TensorProperties.create_from_tensor(value),
                    size=self.whole,
                ),
            )
            for number, (first, _, count) in enumerate(self.rows)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(first, count) for first, _, count in self.rows]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert isinstance(self, torch.Tensor)
        (place,) = [place for place in self.rows if index.offset == torch.Size([place[0], 0])]
        return self.as_subclass(torch.Tensor)[place[1] : place[1] + place[2]]


class Part(Described, torch.Tensor):
    """An ordinary subclass."""


class PartParameter(Described, torch.nn.Parameter):
    """A parameter, whose ``detach`` forgets its class."""


class WholeSizePart(Part):
    """Has the size of the larger tensor, which DCP compares when it loads."""

    def size(self, dim: int | None = None) -> Any:
        return self.whole if dim is None else self.whole[dim]


class Distributed(DTensor):
    """A subclass of DTensor that leaves its description to that class."""


def whole() -> torch.Tensor:
    return torch.arange(48.0).view(8, 6)


def filled(rows: Rows, *, padding: int = 0) -> torch.Tensor:
    """Local memory with rows of the larger tensor, and some that are no part of it."""
    local = torch.full((sum(count for _, _, count in rows) + padding, 6), -1.0)
    for first, at, count in rows:
        local[at : at + count] = whole()[first : first + count]
    return local


def part(rows: Rows, kind: type[torch.Tensor] = Part, *, padding: int = 0) -> Any:
    """A tensor of a class that describes itself."""
    local = filled(rows, padding=padding)
    made: Any = kind(local) if kind is PartParameter else local.as_subclass(kind)
    made.rows = rows
    return made


def with_attributes(tensor: torch.Tensor, rows: Rows) -> Any:
    """The tensor, with the attributes that torch's planner reads from 2.14 on."""
    described: Any = tensor
    described.global_shape = (8, 6)
    described.global_offsets = tuple((first, 0) for first, _, _ in rows)
    described.local_offsets = tuple((at, 0) for _, at, _ in rows)
    described.local_sizes = tuple((count, 6) for _, _, count in rows)
    return described


def kinds(rows: Rows) -> dict[str, Callable[[], Any]]:
    """Tensors with these rows, in every way that this torch's planner knows."""
    by_class: dict[str, Callable[[], Any]] = {
        "subclass": lambda: part(rows),
        "subclass, padded": lambda: part(rows, padding=2),
        "subclass, requires grad": lambda: part(rows).requires_grad_(),
        "parameter": lambda: part(rows, PartParameter),
    }
    by_attributes: dict[str, Callable[[], Any]] = {
        "attributes": lambda: with_attributes(filled(rows), rows),
        "attributes, padded": lambda: with_attributes(filled(rows, padding=2), rows),
        "attributes, transposed": lambda: with_attributes(filled(rows).t().contiguous().t(), rows),
        "attributes, parameter": lambda: with_attributes(torch.nn.Parameter(filled(rows)), rows),
        "attributes, subclass": lambda: with_attributes(filled(rows).as_subclass(Plain), rows),
    }
    return by_class | (by_attributes if HAS_ATTRIBUTES else {})


class Plain(torch.Tensor):
    """A subclass without methods of its own."""
