"""Snapshot: copy every live tensor once, straight to its place in the image of its file.

The bytes around the payloads are the same for every save of a layout. They are written when a block
first serves that layout and stay in it, so later snapshots consist of the copies alone. Tensors
that a stager has already put in their places (see ``staged_state``) are recognised by address and
not copied again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from nostall._memory.arena import Block, Lease, address_of
from nostall._memory.copying import Copies, CopyMethod, Place, Places, views_of
from nostall._model.jobs import RankReport
from nostall._model.values import Layout, PlannedSave, Share, TensorForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A rank's share, private to the save: the trainer cannot change it, and it holds no tensor."""

    layout: Layout
    lease: Lease
    wave: int = 0
    """The index of this part, if the save does not fit into memory as a whole."""
    earlier: tuple[Future[RankReport], ...] = ()
    """Reports on the parts before this one, which are still being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreparedViews:
    """State that a block keeps for the next save of the same layout."""

    layout_key: Hashable
    forms: tuple[TensorForm | None, ...]
    places: Places
    """Where payloads are copied to."""
    items: list[int]
    """The item of each place."""
    runs: list[tuple[int, int]]
    """Items that are bytes, and their offsets."""
    is_laid_down: bool = True
    """Whether the bytes around the payloads are in the block."""


def begin_snapshot(
    planned: PlannedSave,
    layout: Layout,
    lease: Lease,
    *,
    method: CopyMethod,
    after: Mapping[torch.device, Any] | None = None,
) -> tuple[Snapshot, Copies]:
    """Fill the lease's block with the images of all files of ``layout``.

    Args:
        planned: What to copy.
        layout: Where to copy it.
        lease: Memory of at least ``layout.image_nbytes`` bytes.
        method: How to copy large tensors.
        after: Per accelerator, the event that its copies are ordered after; by default its stream.

    Returns:
        The snapshot, which is complete when the copies have been waited for, and the copies. CPU
        tensors are copied already.
    """
    prepared_views = _prepare_views(planned.share, layout, lease.block)
    for item, at in prepared_views.runs:
        content = cast("bytes", planned.sources[item])
        lease.block.memory[at : at + len(content)] = content
    sources = [planned.sources[item] for item in prepared_views.items]
    copies = prepared_views.places.fill(
        cast("list[torch.Tensor]", sources), method=method, after=after
    )
    return Snapshot(layout=layout, lease=lease), copies


def adopt_staged(planned: PlannedSave, layout: Layout, lease: Lease) -> Snapshot | None:
    """The snapshot in a staged state dict's memory, or ``None`` if a tensor is not in its place."""
    if layout.image_nbytes > lease.block.nbytes:
        return None  # an object has grown since the places were recorded
    base = address_of(lease.block)
    for file in layout.files:
        for slot in file.slots:
            source, form = planned.sources[slot.item], planned.share.forms[slot.item]
            if not isinstance(source, torch.Tensor) or form is None or not slot.payload_nbytes:
                continue
            if source.data_ptr() != base + file.image_offset + slot.payload_offset:
                return None
            if tuple(source.stride()) != form.stride:
                return None  # a planner's view with gaps: its elements must be moved together
    lease.block.prepared_views = None  # its views belong to tensors that the caller may still hold
    _lay_down_containers(layout, lease.block)
    for file in layout.files:
        for slot in file.slots:
            source = planned.sources[slot.item]
            if isinstance(source, bytes):
                at = file.image_offset + slot.offset
                lease.block.memory[at : at + slot.length] = source
    return Snapshot(layout=layout, lease=lease)


def write_over(block: Block) -> None:
    """Record that the bytes around payloads are overwritten; views stay valid."""
    if block.prepared_views is not None:
        block.prepared_views = replace(block.prepared_views, is_laid_down=False)


def _prepare_views(share: Share, layout: Layout, block: Block) -> _PreparedViews:
    """Prepare a block for a layout, once: bytes around the payloads, views of their places."""
    prepared_views: _PreparedViews | None = block.prepared_views
    fits = (
        prepared_views
        and prepared_views.layout_key == layout.key
        and prepared_views.forms == share.forms
    )
    if not (prepared_views and fits and prepared_views.is_laid_down):
        write_over(block)  # before writing, as an exception may leave half of it
        _lay_down_containers(layout, block)
    if not (prepared_views and fits):
        block.prepared_views = prepared_views = _views(share, layout, block)
    elif prepared_views.forms is not share.forms or not prepared_views.is_laid_down:
        # Makes the next comparison one of identities.
        block.prepared_views = prepared_views = replace(
            prepared_views, layout_key=layout.key, forms=share.forms, is_laid_down=True
        )
    return prepared_views


def _views(share: Share, layout: Layout, block: Block) -> _PreparedViews:
    places: list[Place] = []
    items, runs = [], []
    for file in layout.files:
        for slot in file.slots:
            form = share.forms[slot.item]
            at = file.image_offset + slot.payload_offset
            if form is None:
                runs.append((slot.item, at))
            elif slot.payload_nbytes:
                places.append((at, form.dtype, form.size, form.stride))
                items.append(slot.item)
    return _PreparedViews(
        layout_key=layout.key,
        forms=share.forms,
        places=Places(views_of(block.memory, places)),
        items=items,
        runs=runs,
    )


def _lay_down_containers(layout: Layout, block: Block) -> None:
    """Write everything but payloads, in one piece between each two, as blobs have no gaps."""
    memory = block.memory
    for file in layout.files:
        at, suffix = file.image_offset, b""
        for slot in file.slots:
            container = layout.shapes[slot.item].container
            prefix = b"" if container is None else container.prefix
            memory[at : at + len(suffix) + len(prefix)] = suffix + prefix
            at = file.image_offset + slot.payload_offset + slot.payload_nbytes
            suffix = b"" if container is None else container.suffix
        memory[at : at + len(suffix)] = suffix
