"""Snapshot: copy every live tensor once, straight to its place in the image of the file it will be in.

The bytes around the payloads are the same for every save of a layout; they are laid down when a block first serves
that layout and stay in it. In steady state a snapshot is nothing but the copies. Tensors that a stager has already
put at their place (see ``restage``) are recognised by address and not copied again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nostall import _torch
from nostall._arena import Block, Lease, address_of
from nostall._values import Layout, PlannedItem, PlannedSave, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A rank's share, private to the save: nothing the trainer does can change it, and no tensor is held by it."""

    rank: int
    layout: Layout
    lease: Lease


def take_snapshot(planned: PlannedSave, layout: Layout, lease: Lease) -> Snapshot:
    """Fill the lease's block with the images of all files of ``layout``."""
    block = lease.block
    targets = _primed_views(planned.items, layout, block)
    sources = []
    for file in layout.files:
        for slot in file.slots:
            source = planned.items[slot.item].source
            if isinstance(source, torch.Tensor):
                if slot.payload_nbytes:
                    sources.append(source)
            else:
                at = file.image_offset + slot.offset
                block.memory[at : at + slot.length] = source
    _torch.copy_all(targets, sources)
    return Snapshot(rank=planned.rank, layout=layout, lease=lease)


def adopt_staged(planned: PlannedSave, layout: Layout, lease: Lease) -> Snapshot | None:
    """The snapshot that a staged state dict already is, or ``None`` if a tensor is not at its place."""
    if layout.image_nbytes > lease.block.nbytes:
        return None  # an object has grown since the places were remembered
    base = address_of(lease.block)
    for file in layout.files:
        for slot in file.slots:
            source = planned.items[slot.item].source
            if (
                isinstance(source, torch.Tensor)
                and slot.payload_nbytes
                and source.data_ptr() != base + file.image_offset + slot.payload_offset
            ):
                return None
    _lay_down_containers(layout, lease.block)
    lease.block.primed = None  # its views belong to tensors that the caller may still hold
    for file in layout.files:
        for slot in file.slots:
            source = planned.items[slot.item].source
            if isinstance(source, bytes):
                at = file.image_offset + slot.offset
                lease.block.memory[at : at + slot.length] = source
    return Snapshot(rank=planned.rank, layout=layout, lease=lease)


def _primed_views(items: Sequence[PlannedItem], layout: Layout, block: Block) -> list[torch.Tensor]:
    """Where the payloads go, in layout order; the views live in the block until another layout uses it."""
    key = (layout.key, tuple((item.stride, _dtype(item)) for item in items))
    if block.primed is not None and block.primed[0] == key:
        views: list[torch.Tensor] = block.primed[1]
        return views
    _lay_down_containers(layout, block)
    views = [
        view
        for file in layout.files
        for slot in file.slots
        if (view := _payload_view(items[slot.item], slot, file.image_offset, block)) is not None
    ]
    block.primed = (key, views)
    return views


def _dtype(item: PlannedItem) -> torch.dtype | None:
    return item.source.dtype if isinstance(item.source, torch.Tensor) else None


def _payload_view(
    item: PlannedItem, slot: Slot, image_offset: int, block: Block
) -> torch.Tensor | None:
    source = item.source
    if not isinstance(source, torch.Tensor) or not slot.payload_nbytes:
        return None
    return _torch.view_of(
        block.memory, image_offset + slot.payload_offset, source.dtype, source.shape, item.stride
    )


def _lay_down_containers(layout: Layout, block: Block) -> None:
    memory = block.memory
    for file in layout.files:
        for slot in file.slots:
            container = layout.shapes[slot.item].container
            if container is None:
                continue
            at = file.image_offset + slot.offset
            memory[at : at + len(container.prefix)] = container.prefix
            at += len(container.prefix) + container.payload_nbytes
            memory[at : at + len(container.suffix)] = container.suffix
