r"""The index of a checkpoint's items: what the pickle says of them, as arrays.

It stands between the pickle and the manifest of a ``.metadata`` file, and the manifest has its
length and checksum. All numbers are little endian::

    \n#nostall-index\n                              16 bytes
    u64  format, items, places, shapes, dimensions, bytes of the names
    u64  dimensions[dimensions], offset[places], length[places]
    u32  nchars[items], kind[items], size[items], count[items], ndim[shapes],
         begin[places], extent[places], file[places]
    the names, in UTF-8, one after the other; nchars has their lengths in characters
    the tables: {"files": [name, ...], "properties": [[...], ...]} in JSON, up to the end

Format 1 is for archives of ``torch.save`` and objects, format 2 for tensors in files of
safetensors. A shape is ``ndim`` of the dimensions. ``kind`` is 0 for an object, otherwise one more
than the number of the item's properties in the table; ``size`` is the number of a shape. An item
has ``count`` places: an object one, a tensor one per chunk. ``begin`` and ``extent`` are the
numbers of the shapes that are a chunk's offsets and sizes; ``file`` is the number of a file in the
table.
Imports no torch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from nostall._model.names import AS_SAFETENSORS

MARK = b"\n#nostall-index\n"
TRANSFORMS: Mapping[int, tuple[str, ...] | None] = {1: None, 2: AS_SAFETENSORS}
"""By format, what metadata names as the transforms of all places."""
HEADER = struct.Struct(f"<{len(MARK)}s6Q")


class InvalidIndexError(ValueError):
    """The bytes are not an index."""


class Properties(NamedTuple):
    """What a tensor's dtype is, and what else DCP stores of a tensor, in plain values."""

    dtype: str
    """Without ``torch.``; ``layout``, too."""
    layout: str
    memory_format: int
    requires_grad: bool
    pin_memory: bool
    stride: tuple[int, ...] | None
    """Since torch 2.15."""


@dataclass(frozen=True, kw_only=True)
class ItemIndex:
    """The items of a checkpoint; the columns are those in the description of the module."""

    names: Sequence[str]
    kind: Sequence[int]
    size: Sequence[int]
    count: Sequence[int]
    shapes: Sequence[tuple[int, ...]]
    begin: Sequence[int]
    extent: Sequence[int]
    file: Sequence[int]
    offset: Sequence[int]
    length: Sequence[int]
    properties: Sequence[Properties]
    files: Sequence[str]
    transforms: tuple[str, ...] | None = None
    """One of the values of :data:`TRANSFORMS`."""

    @cached_property
    def rows(self) -> Mapping[str, int]:
        """The number of each item."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @cached_property
    def first_places(self) -> Sequence[int]:
        """The number of the first place of each item, and at the end that of all places."""
        return list(accumulate(self.count, initial=0))
