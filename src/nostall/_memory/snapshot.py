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
from nostall._memory.copying import Copies, CopyMethod, TargetViews, ViewSpec, views_of
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
    places: TargetViews
    items: list[int]
    """The item of each place."""
    runs: dict[int, int]
    """Offsets of the items that are bytes."""


def begin_snapshot(
    planned: PlannedSave,
    layout: Layout,
    lease: Lease,
    *,
    method: CopyMethod,
    after: Mapping[torch.device, Any] | None = None,
) -> tuple[Snapshot, Copies]:
    """Fill the lease's block with the images of all files of ``layout``.

    The block must have ``layout.image_nbytes`` bytes. CPU tensors are copied when this returns; the
    snapshot is complete when the copies have been waited for. ``after`` has the event that precedes
    the copies from each accelerator; without one, all work of its current stream does.
    """
    share, block = planned.share, lease.block
    prepared: _PreparedViews | None = block.prepared_views
    if prepared is not None and (prepared.layout_key, prepared.forms) == (layout.key, share.forms):
        # With this key and these forms the next comparison is one of identities.
        prepared = replace(prepared, layout_key=layout.key, forms=share.forms)
    else:
        block.prepared_views = None  # before writing, as an exception may leave half of it
        _lay_down_containers(layout, block)
        places, runs = _places(share, layout)
        prepared = _PreparedViews(
            layout_key=layout.key,
            forms=share.forms,
            places=TargetViews(views_of(block.memory, places.values())),
            items=list(places),
            runs=runs,
        )
    block.prepared_views = prepared
    _put_runs(prepared.runs, planned, block)
    sources = [planned.sources[item] for item in prepared.items]
    copies = prepared.places.fill(cast("list[torch.Tensor]", sources), method=method, after=after)
    return Snapshot(layout=layout, lease=lease), copies


def adopt_staged(planned: PlannedSave, layout: Layout, lease: Lease) -> Snapshot | None:
    """The snapshot in a staged state dict's memory, or ``None`` if a tensor is not in its place."""
    if layout.image_nbytes > lease.block.nbytes:
        return None  # an object has grown since the places were recorded
    base = address_of(lease.block)
    places, runs = _places(planned.share, layout)
    for item, (at, _, _, stride) in places.items():
        source = cast("torch.Tensor", planned.sources[item])
        if source.data_ptr() != base + at:
            return None
        if tuple(source.stride()) != stride:
            return None  # a planner's view with gaps: its elements must be moved together
    lease.block.prepared_views = None  # its views belong to tensors that the caller may still hold
    _lay_down_containers(layout, lease.block)
    _put_runs(runs, planned, lease.block)
    return Snapshot(layout=layout, lease=lease)


def _places(share: Share, layout: Layout) -> tuple[dict[int, ViewSpec], dict[int, int]]:
    """By item, the places of payloads in the block, and the offsets of items that are bytes."""
    places: dict[int, ViewSpec] = {}
    runs: dict[int, int] = {}
    for file in layout.files:
        for slot in file.slots:
            form = share.forms[slot.item]
            at = file.image_offset + slot.payload_offset
            if form is None:
                runs[slot.item] = at
            elif slot.payload_nbytes:
                places[slot.item] = (at, form.dtype, form.size, form.stride)
    return places, runs


def _put_runs(runs: Mapping[int, int], planned: PlannedSave, block: Block) -> None:
    for item, at in runs.items():
        content = cast("bytes", planned.sources[item])
        block.memory[at : at + len(content)] = content


def _lay_down_containers(layout: Layout, block: Block) -> None:
    """Write everything but payloads, in one piece between each two, as blobs have no gaps."""
    memory = block.memory
    for file in layout.files:
        at, suffix = file.image_offset, file.header
        for slot in file.slots:
            container = layout.shapes[slot.item].container
            prefix = b"" if container is None else container.prefix
            memory[at : at + len(suffix) + len(prefix)] = suffix + prefix
            at = file.image_offset + slot.payload_offset + slot.payload_nbytes
            suffix = b"" if container is None else container.suffix
        memory[at : at + len(suffix)] = suffix
