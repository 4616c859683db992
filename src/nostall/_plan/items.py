"""Plan: turn DCP's save plan into this rank's items, each with its source and its container.

Values from the planner are classified once:

* *bytes*: an object that the planner has serialised; its bytes are fixed from here on;
* *tensor*: a plain strided tensor, on any device; only its container is made here, the snapshot
  copies it;
* *run*: a tensor whose file form is more than one payload (sparse, conjugated, quantised, a
  subclass, a sub-byte dtype). ``torch.save`` serialises it to memory here.

Files of safetensors have tensors only, in row-major order; everything else is an error.
"""

from __future__ import annotations

import io
import math
import os
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.utils.serialization import config

from nostall import _torch
from nostall._model.names import FileFormat, some
from nostall._model.values import Container, ItemShape, PlannedSave, Share, TensorEntry, TensorForm
from nostall._plan.formats import entry_of, with_seal
from nostall.errors import StagingError

_NAMED = 3
"""How many items an error names."""


def require_representable(plan: SavePlan, file_format: FileFormat, *, rank: int) -> None:
    """Raise ``StagingError`` if a local plan has items that files of this format cannot have."""
    if file_format is FileFormat.TORCH_SAVE:
        return
    strange = []
    for item in plan.items:
        kind: object = "an object"
        if item.tensor_data is not None:
            properties = item.tensor_data.properties
            is_strided = properties.layout is torch.strided
            kind = properties.dtype if is_strided else properties.layout
            if is_strided and _entry(item) is not None:
                continue
        strange.append(f"{item.index.fqn!r:.80} ({kind})")
    if strange:
        raise StagingError(
            f"a safetensors file cannot hold {some(strange, _NAMED)}",
            rank=rank,
            phase="plan",
            hint="it holds only dense tensors of the dtypes in docs/format.md; save the others to"
            " another checkpoint, with SerializationFormat.TORCH_SAVE",
        )


def plan_rank(
    plan: SavePlan, planner: SavePlanner, *, rank: int, file_format: FileFormat, path: str | None
) -> PlannedSave:
    """Resolve every item of a rank's final plan; ``path``, the checkpoint, is for errors.

    ``StagingError`` if a tensor has no data (meta device), the planner could not produce an item,
    or files of this format cannot have it.
    """
    # Read once: torch takes 25 us to return them, most of the cost of an item.
    settings = bool(torch.serialization.get_crc32_options()), int(config.save.storage_alignment)
    items: list[_Item] = []
    for item in plan.items:
        try:
            value: Any = planner.resolve_data(item)
            if file_format is FileFormat.SAFETENSORS:
                items.append(_plan_bare(item, value))
            elif item.type == WriteItemType.BYTE_IO:
                items.append(_run(item, value.getvalue(), weight=0))
            else:
                items.append(_plan_tensor(item, _torch.plain(value), settings))
        except Exception as error:  # planners and tensor subclasses can raise anything
            raise StagingError(
                f"item {item.index.fqn!r} cannot be staged: {type(error).__name__}: {error}",
                rank=rank,
                phase="plan",
                path=path,
                hint="change the item or leave it out of the state dict",
                cause=error,
            ) from None
    share = Share(
        rank=rank,
        plan=plan,
        shapes=tuple(shape for shape, _, _ in items),
        forms=tuple(form for _, form, _ in items),
    )
    return PlannedSave(share=share, sources=[source for _, _, source in items])


_Item = tuple[ItemShape, TensorForm | None, torch.Tensor | bytes]
_Settings = tuple[bool, int]
"""The settings of torch that change a container: checksums, payload alignment."""


def _plan_tensor(item: WriteItem, tensor: torch.Tensor, settings: _Settings) -> _Item:
    if missing := _torch.missing_data(tensor):
        raise ValueError(missing)
    if not all(type(length) is int for length in tensor.shape):
        raise ValueError("a tensor dimension has no fixed length, as in a jagged nested tensor")
    chunk = tensor.shape if item.tensor_data is None else item.tensor_data.chunk.sizes
    weight = math.prod(chunk) * tensor.itemsize
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


def _plan_bare(item: WriteItem, value: Any) -> _Item:
    """An item of a file of safetensors: row-major values, which the file's header describes."""
    tensor = _torch.plain_values(_torch.plain(value)) if isinstance(value, torch.Tensor) else None
    if tensor is None:
        raise ValueError(f"a safetensors file cannot hold this {type(value).__name__}")
    if missing := _torch.missing_data(tensor):
        raise ValueError(missing)
    entry, size = _entry(item), tuple(tensor.shape)
    planned = item.tensor_data
    if entry is None or planned is None:
        raise ValueError(f"a safetensors file cannot hold {tensor.dtype} under this name")
    if (planned.properties.dtype, tuple(planned.chunk.sizes)) != (tensor.dtype, size):
        raise ValueError(f"it is {tensor.dtype} {list(size)}, not what the planner has planned")
    container = Container(
        prefix=b"", payload_nbytes=tensor.nbytes, suffix=b"", seal=None, entry=entry
    )
    shape = ItemShape(
        fqn=item.index.fqn, container=container, nbytes=tensor.nbytes, weight=tensor.nbytes
    )
    stride = tuple(torch.empty(size, device="meta").stride())
    if tensor.is_contiguous():
        stride = tuple(tensor.stride())  # also of dimensions of length 1
    return shape, TensorForm(dtype=tensor.dtype, size=size, stride=stride), tensor


def _entry(item: WriteItem) -> TensorEntry | None:
    planned = item.tensor_data
    if planned is None:
        return None
    dtype = str(planned.properties.dtype).removeprefix("torch.")
    return entry_of(item.index.fqn, dtype, planned.chunk.sizes, planned.chunk.offsets)


@lru_cache(maxsize=65536)
def _container(
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    settings: _Settings,  # part of the cache key: they change what torch writes
) -> Container:
    return with_seal(container_skeleton(dtype, size, stride), checksums=settings[0])


def _run(item: WriteItem, content: bytes, *, weight: int) -> _Item:
    shape = ItemShape(fqn=item.index.fqn, container=None, nbytes=len(content), weight=weight)
    return shape, None, content


# --- the file form of a tensor, without the payload -----------------------------------------------


class _Skeleton(io.BytesIO):
    """Receives a container without its payload, over which ``torch.save`` seeks."""

    payload_at = payload_nbytes = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR or self.payload_nbytes:
            raise io.UnsupportedOperation("only one relative seek, over the payload, is expected")
        if offset:
            self.payload_at, self.payload_nbytes = self.tell(), offset
        return self.tell()

    def tell(self) -> int:
        return super().tell() + self.payload_nbytes


def container_skeleton(
    dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]
) -> Container:
    """The container of a plain CPU tensor with its own exact storage, by ``torch.save``."""
    # Never touched (unless torch is set to be deterministic): it takes no memory, however large.
    stand_in = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    skeleton = _Skeleton()
    with torch.serialization.skip_data():
        torch.save(stand_in, skeleton)
    content, at = skeleton.getvalue(), skeleton.payload_at
    return Container(
        prefix=content[:at], payload_nbytes=skeleton.payload_nbytes, suffix=content[at:], seal=None
    )
