"""One rank's part of a save: the composer of the stages. Read this first.

::

    plan -> PlannedSave -> lay_out -> Layout             prepare() here
         -> begin_snapshot -> Snapshot                   stage() in stage
         -> write -> RankReport                          write_here() and write_in_background()
                                                         in write; for synchronous saves,
                                                         write_now() in write_directly does both
         -> results                                      write_results() in written

Facades call these functions and nothing below them. The caller chooses where to write: in a writer
process, or in this one while it waits. The code that writes is the same.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._commit.collect import require_one_result_each
from nostall._engine import Engine
from nostall._model.collection import no_collection
from nostall._model.values import ItemShape, Layout, PlannedSave, Share
from nostall._plan.items import Resolver, plan_rank
from nostall._plan.layout import FileNaming, Packing, renamed
from nostall._plan.structure import OPENERS, KnownStructure, Openers
from nostall._plan.structure import learn as learn_structure
from nostall._save.settings import SaveTarget, WriterSettings
from nostall._save.written import expected_results

_log = logging.getLogger("nostall")


@dataclass
class Beside(_torch.StoragePrefix):
    """DCP's prefix of a rank's file names, from a coordinator that found a checkpoint."""

    beside: str
    """The directory of that checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSave:
    """A rank's share with its layout, before any data is copied."""

    planned: PlannedSave
    layout: Layout
    target: SaveTarget
    known: KnownSave | None = None
    """The known save with the same results, apart from file names; ``None`` if there is none."""

    @property
    def rank(self) -> int:
        """The rank of the share."""
        return self.planned.share.rank

    @property
    def plan(self) -> SavePlan:
        """The rank's final plan."""
        return self.planned.share.plan

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the rank's files, in layout order."""
        return tuple(file.name for file in self.layout.files)


@no_collection()
def prepare(
    plan: SavePlan, resolver: Resolver, *, target: SaveTarget, engine: Engine
) -> PreparedSave:
    """Resolve a final plan and lay it out.

    Raises:
        StagingError: An item could not be resolved.
    """
    settings = target.settings
    planned = plan_rank(
        plan,
        resolver,
        rank=settings.rank,
        file_format=settings.options.file_format,
        path=settings.directory,
    )
    with target.timeline.measure("layout"):
        packing = settings.packing(engine)
        layout = engine.lay_out(planned.share.shapes, target.naming, packing)
    target.progress.expect(layout.nbytes)
    return PreparedSave(planned=planned, layout=layout, target=target)


@dataclass(frozen=True, kw_only=True)
class KnownSave:
    """The part of a prepared save that the next save with an equal plan can reuse."""

    structure: KnownStructure | None
    """Recognises the structure without a planner; ``None`` if only the planner can."""
    share: Share
    layout: Layout
    naming: FileNaming
    packing: Packing
    token: str
    """Identifies these results among all known to ranks."""

    def fits(self, settings: WriterSettings) -> bool:
        """Whether a writer with these settings can use it, whose containers have its format."""
        return self.naming.file_format is settings.options.file_format

    @cached_property
    def runs(self) -> list[int]:
        """Items that are bytes."""
        return [item for item, form in enumerate(self.share.forms) if form is None]

    @cached_property
    def results(self) -> tuple[WriteResult, ...]:
        """DCP's results of a save with this layout."""
        return tuple(expected_results(self.share, self.layout))


def known(prepared: PreparedSave, structure: KnownStructure | None, engine: Engine) -> KnownSave:
    """The part of a prepared save that the next one with an equal plan can reuse."""
    items = prepared.plan.items
    require_one_result_each(
        (item.index for item in items),
        (items[slot.item].index for file in prepared.layout.files for slot in file.slots),
        rank=prepared.rank,
    )
    return KnownSave(
        structure=structure,
        share=prepared.planned.share,
        layout=prepared.layout,
        naming=prepared.target.naming,
        packing=prepared.target.settings.packing(engine),
        token=uuid.uuid4().hex,
    )


@no_collection()
def learn(
    prepared: PreparedSave,
    state_dict: dict[str, Any],
    flat: dict[str, Any] | None,
    engine: Engine,
    openers: Openers = OPENERS,
) -> KnownSave | None:
    """The reusable part of a prepared save, before staging; ``None`` if nothing is safe.

    Args:
        prepared: The save.
        state_dict: The planned state dict.
        flat: The same, flattened by a planner whose plan follows from the structure; else ``None``.
        engine: The engine of the save.
        openers: By class of leaves that have tensors.
    """
    try:
        structure = None
        if flat is not None:
            structure = learn_structure(state_dict, flat, prepared.planned, openers)
        return known(prepared, structure, engine)
    except Exception:  # this save is not affected; the next one is planned
        _log.debug("the structure was not learned", exc_info=True)
        return None


def prepare_known(
    known: KnownSave, sources: list[torch.Tensor | bytes], *, target: SaveTarget, engine: Engine
) -> PreparedSave:
    """As :func:`prepare`, for a structure that was saved before."""
    share, layout, packing = known.share, known.layout, target.settings.packing(engine)
    shapes = _with_lengths(share, sources, known.runs)
    groups, now = known.naming, target.naming
    same = groups.separation_hint == now.separation_hint
    if shapes is not share.shapes or packing != known.packing or not same:
        share = replace(share, shapes=shapes)
        with target.timeline.measure("layout"):
            layout = engine.lay_out(shapes, target.naming, packing)
    elif target.naming != known.naming:
        layout = renamed(layout, target.naming)
    planned = PlannedSave(share=share, sources=sources)
    target.progress.expect(layout.nbytes)
    return as_known(PreparedSave(planned=planned, layout=layout, target=target), known)


def as_known(prepared: PreparedSave, known: KnownSave | None) -> PreparedSave:
    """The prepared save, with the known one if their results are equal apart from file names.

    Results follow from the final plan and the layout.
    """
    is_same = known is not None and (
        prepared.plan is known.share.plan and prepared.layout.key == known.layout.key
    )
    if not is_same or prepared.target.settings.transform_descriptors is not None:
        return prepared
    return replace(prepared, known=known)


def _with_lengths(
    share: Share, sources: Sequence[torch.Tensor | bytes], runs: Sequence[int]
) -> tuple[ItemShape, ...]:
    """The share's shapes with the current lengths of its objects."""
    lengths = {item: len(cast("bytes", sources[item])) for item in runs}
    changed = {
        item: replace(share.shapes[item], nbytes=nbytes)
        for item, nbytes in lengths.items()
        if nbytes != share.shapes[item].nbytes
    }
    if not changed:
        return share.shapes
    return tuple(changed.get(item, shape) for item, shape in enumerate(share.shapes))
