"""Plan: turn DCP's save plan into this rank's items, each with its source and its container.

Values from the planner are classified once:

* *bytes*: an object that the planner has serialised; its bytes are fixed from here on;
* *tensor*: a plain strided tensor, on any device; only its container is made here, the snapshot
  copies it;
* *run*: a tensor whose file form is more than one payload (sparse, conjugated, quantised, a
  subclass, a sub-byte dtype). ``torch.save`` serialises it to memory here.
"""

from __future__ import annotations

import io
import math
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from nostall import _torch
from nostall._model.values import Container, ItemShape, PlannedSave, Share, TensorForm
from nostall._plan.container import build_container
from nostall._plan.skeleton import container_settings, container_skeleton
from nostall.errors import StagingError


class Resolver(Protocol):
    """The part of ``SavePlanner`` that is used here."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The live tensor, or the serialised object, behind a planned item."""


def plan_rank(plan: SavePlan, resolver: Resolver, *, rank: int) -> PlannedSave:
    """Resolve every item of a rank's final plan.

    Raises:
        StagingError: A tensor has no data (meta device), or the planner could not produce an item.
    """
    settings = container_settings()
    items = [_plan_item(item, resolver, rank, settings) for item in plan.items]
    share = Share(
        rank=rank,
        plan=plan,
        shapes=tuple(shape for shape, _, _ in items),
        forms=tuple(form for _, form, _ in items),
    )
    return PlannedSave(share=share, sources=[source for _, _, source in items])


_Item = tuple[ItemShape, TensorForm | None, torch.Tensor | bytes]
_Settings = tuple[bool, int]
"""Read once per save: torch takes 25 us to return them, most of the cost of an item."""


def _plan_item(item: WriteItem, resolver: Resolver, rank: int, settings: _Settings) -> _Item:
    try:
        value: Any = resolver.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            return _run(item, value.getvalue(), weight=0)
        return _plan_tensor(item, _torch.plain(value), settings)
    except Exception as error:  # planners and tensor subclasses can raise anything
        raise StagingError(
            f"item {item.index.fqn!r} cannot be staged: {type(error).__name__}: {error}",
            rank=rank,
            phase="plan",
            hint="change the item or leave it out of the state dict",
        ) from error


def _plan_tensor(item: WriteItem, tensor: torch.Tensor, settings: _Settings) -> _Item:
    if missing := _torch.missing_data(tensor):
        raise ValueError(missing)
    weight = _chunk_nbytes(item, tensor)
    stride = _torch.payload_stride(tensor)
    if stride is None:
        buffer = io.BytesIO()
        torch.save(_torch.as_stock_writes(tensor), buffer)
        return _run(item, buffer.getvalue(), weight=weight or 1)
    size = tuple(tensor.shape)
    container = _container(tensor.dtype, size, stride, settings)
    shape = ItemShape(
        fqn=item.index.fqn, container=container, nbytes=container.nbytes, weight=weight
    )
    return shape, TensorForm(dtype=tensor.dtype, size=size, stride=stride), tensor


@lru_cache(maxsize=65536)
def _container(
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    _settings: _Settings,  # part of the cache key: they change what torch writes
) -> Container:
    skeleton = container_skeleton(dtype, size, stride)
    return build_container(
        prefix=skeleton.prefix,
        payload_nbytes=skeleton.payload_nbytes,
        suffix=skeleton.suffix,
        checksums=skeleton.checksums,
    )


def _run(item: WriteItem, content: bytes, *, weight: int) -> _Item:
    shape = ItemShape(fqn=item.index.fqn, container=None, nbytes=len(content), weight=weight)
    return shape, None, content


def _chunk_nbytes(item: WriteItem, tensor: torch.Tensor) -> int:
    if item.tensor_data is None:
        return tensor.nbytes
    return math.prod(item.tensor_data.chunk.sizes) * tensor.itemsize
