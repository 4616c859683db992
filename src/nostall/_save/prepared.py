"""A save before any data is copied: settings, target, items with their layout.

::

    plan -> PlannedSave -> lay_out -> Layout             prepare() here
         -> begin_snapshot -> Snapshot                   stage() in stage_and_write
         -> write -> RankReport                          write_here() and write_in_background()
                                                         in stage_and_write; for synchronous
                                                         saves, write_directly() in write_directly
         -> results                                      write_results() in written

The caller chooses where to write: in a writer process, or in this one while it waits. The code that
writes is the same.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast, get_args

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._commit.commit import require_one_result_each
from nostall._engine import Engine
from nostall._model.names import FileFormat
from nostall._model.progress import Progress
from nostall._model.threads import gc_paused
from nostall._model.values import Layout, PlannedSave, Share
from nostall._plan.items import Resolver, plan_rank
from nostall._plan.layout import FileNaming, Packing, with_naming
from nostall._plan.structure import OPENERS, KnownStructure, Openers, learn_structure
from nostall._save.written import expected_results
from nostall._storage.deadlines import may_hold
from nostall._storage.directories import Visit
from nostall._storage.locations import is_address, storage_at
from nostall._writer.streams import StreamTarget
from nostall.errors import OptionError
from nostall.options import StagingMode, require, require_integer, require_switch
from nostall.stats import Timeline

_log = logging.getLogger("nostall")

_FORMATS = {
    SerializationFormat.TORCH_SAVE: FileFormat.TORCH_SAVE,
    SerializationFormat.SAFETENSORS: FileFormat.SAFETENSORS,
}


# --- settings of a writer, and the target of a save -----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """Where and how one writer saves."""

    directory: str
    """The checkpoint is committed in it."""
    rank: int
    is_alone: bool
    """Whether this rank's checkpoint has metadata of its own."""
    thread_count: int
    file_per_item: bool
    sync_files: bool
    overwrite: bool
    separation_hint: str | None
    staging: StagingMode
    file_format: FileFormat
    stream: StreamTarget | None
    transform_descriptors: tuple[str, ...] | None
    """Tells DCP's reader how to undo stream transforms; ``None`` without any."""
    final_path: str
    """Where the checkpoint is to be in the end; the same for all ranks."""
    metadata_name: str
    other_metadata_name: str
    """Name of the other kind of metadata: this rank's own if all save together, or the reverse."""
    is_elsewhere: bool
    """Whether the directory, which other hosts may not see, is not where it belongs."""
    has_unique_names: bool
    """Whether file names are unique, so that an existing checkpoint does not matter to them."""

    def __post_init__(self) -> None:
        # Values are kept in Python's own types.
        thread_count = require_integer("thread_count", self.thread_count, at_least=1)
        object.__setattr__(self, "thread_count", thread_count)
        for name in ("sync_files", "overwrite"):
            object.__setattr__(self, name, require_switch(name, getattr(self, name)))
        modes = get_args(StagingMode)
        require(self.staging in modes, f"staging={self.staging!r}", " or ".join(modes))
        hint: object = self.separation_hint
        if hint is not None:
            require(
                self.thread_count >= 2,
                f"separation_hint={hint!r} with thread_count={self.thread_count}",
                "thread_count >= 2: each group gets half of the files",
            )
            require(
                isinstance(hint, str) and hint and os.sep not in hint and not hint.startswith("."),
                f"separation_hint={hint!r}",
                "a prefix without a path separator or a leading dot",
            )

    def may_replace(self, engine: Engine) -> bool:
        """Whether the directory may contain a checkpoint; ``SaveTimeoutError`` if storage hangs."""
        return may_hold(
            self.directory,
            [self.metadata_name, self.other_metadata_name],
            rank=self.rank,
            timeout_s=engine.options.save_timeout_s,
        )

    def naming(self, prefix: str = "", suffix: str = "") -> FileNaming:
        """The names of a rank's files."""
        return FileNaming(
            prefix=prefix,
            suffix=suffix,
            separation_hint=self.separation_hint,
            file_format=self.file_format,
        )

    def packing(self, engine: Engine) -> Packing:
        """The number and size of a rank's files."""
        return Packing(
            file_count=self.thread_count,
            file_per_item=self.file_per_item,
            max_file_nbytes=engine.options.max_wave_nbytes,
        )

    def chunk_nbytes(self, layout: Layout, engine: Engine) -> int:
        """Bytes per write, of any file of a layout."""
        longest = max((file.nbytes for file in layout.files), default=0)
        return max(engine.options.chunk_nbytes, storage_at(self.directory).least_part(longest))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTarget:
    """Where and how one rank's files of one save are written."""

    job: str
    settings: WriterSettings
    naming: FileNaming
    visit: Visit
    """Shows other saves of this process that this one is in progress in the directory."""
    timeline: Timeline
    progress: Progress
    timeout_s: float
    """Longest time for storage to answer."""
    faults: bytes
    """Faults that a test injects into this save."""


def settings_of(
    writer: FileSystemWriter,
    *,
    staging: StagingMode,
    separation_hint: str | None,
    open_file: Callable[..., Any],
    directory: str | None = None,
) -> WriterSettings:
    """The settings of a writer, by its attributes at this moment, as subclasses may change them.

    The other arguments are options that stock's writer does not have; with a ``directory``, the
    checkpoint is committed in it instead of the writer's path. ``OptionError`` if two options
    exclude each other, or an option has an impossible value.
    """
    if not callable(open_file):
        raise OptionError(
            f"open_file={open_file!r} is not callable",
            hint="use a callable with the signature of open",
        )
    wanted = getattr(writer, "serialization_format", SerializationFormat.TORCH_SAVE)
    if not isinstance(wanted, SerializationFormat) or wanted not in _FORMATS:
        raise OptionError(
            f"invalid serialization_format={wanted!r}",
            hint="use a member of torch.distributed.checkpoint.filesystem.SerializationFormat",
        )
    file_format = _FORMATS[wanted]
    transforms = tuple(writer.transforms.extensions)
    has_stream = open_file is not open or transforms
    if has_stream and is_address(writer.path):
        raise OptionError(
            "open_file and stream extensions need a file system",
            path=str(writer.path),
            hint="leave them out, or save to a directory",
        )
    if has_stream and directory is not None:
        raise OptionError(
            "open_file and stream extensions do not support local_staging_dir",
            path=str(writer.path),
            hint="leave one of them out",
        )
    if has_stream and file_format is FileFormat.SAFETENSORS:
        raise OptionError(
            "open_file and stream extensions need SerializationFormat.TORCH_SAVE",
            path=str(writer.path),
            hint="leave them out: a file of safetensors is written as a whole",
        )
    rank, together = writer.rank or 0, _torch.METADATA_NAME
    alone = f"__{rank}{together}"
    return WriterSettings(
        directory=directory or str(writer.path),
        final_path=str(writer.path),
        is_elsewhere=directory is not None,
        has_unique_names=directory is not None or is_address(writer.path),
        rank=rank,
        is_alone=not writer.use_collectives,
        metadata_name=together if writer.use_collectives else alone,
        other_metadata_name=alone if writer.use_collectives else together,
        thread_count=writer.thread_count,
        file_per_item=not require_switch("single_file_per_rank", writer.single_file_per_rank),
        sync_files=writer.sync_files,
        overwrite=writer.overwrite,
        separation_hint=separation_hint,
        staging=staging,
        file_format=file_format,
        stream=StreamTarget(open_file=open_file, transforms=transforms) if has_stream else None,
        transform_descriptors=tuple(each.get_descriptor() for each in reversed(transforms)) or None,
    )


@dataclass
class ReplacingPrefix(_torch.StoragePrefix):
    """DCP's prefix of a rank's file names, from a coordinator that found a checkpoint."""

    replaced_directory: str
    """The directory of that checkpoint."""


# --- items with their layout ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSave:
    """A rank's share with its layout, before any data is copied."""

    planned: PlannedSave
    layout: Layout
    target: SaveTarget
    known: KnownSave | None = None
    """The known save with the same results, apart from file names; ``None`` if there is none."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the rank's files, in layout order."""
        return tuple(file.name for file in self.layout.files)


@gc_paused()
def prepare(
    plan: SavePlan, resolver: Resolver, *, target: SaveTarget, engine: Engine
) -> PreparedSave:
    """Resolve a final plan and lay it out; ``StagingError`` if an item could not be resolved."""
    settings = target.settings
    planned = plan_rank(
        plan,
        resolver,
        rank=settings.rank,
        file_format=settings.file_format,
        path=settings.directory,
    )
    with target.timeline.measure("layout"):
        packing = settings.packing(engine)
        layout = engine.lay_out(planned.share.shapes, target.naming, packing)
    target.progress.nbytes = layout.nbytes
    return PreparedSave(planned=planned, layout=layout, target=target)


# --- structures that are known from earlier saves -------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KnownSave:
    """The part of a prepared save that the next save with an equal plan can reuse.

    Only a writer whose containers have its format can use it.
    """

    structure: KnownStructure | None
    """Recognises the structure without a planner; ``None`` if only the planner can."""
    share: Share
    layout: Layout
    naming: FileNaming
    packing: Packing
    token: str
    """Identifies these results among all known to ranks."""

    @cached_property
    def runs(self) -> list[int]:
        """Items that are bytes."""
        return [item for item, form in enumerate(self.share.forms) if form is None]

    @cached_property
    def results(self) -> tuple[WriteResult, ...]:
        """DCP's results of a save with this layout."""
        return tuple(expected_results(self.share, self.layout))


@gc_paused()
def learn(
    prepared: PreparedSave,
    state_dict: dict[str, Any],
    flat: dict[str, Any] | None,
    engine: Engine,
    openers: Openers = OPENERS,
) -> KnownSave | None:
    """The reusable part of a prepared save, before staging; ``None`` if nothing is safe.

    ``flat`` is the state dict, flattened by a planner whose plan follows from the structure; else
    ``None``.
    """
    try:
        structure = None
        if flat is not None:
            structure = learn_structure(state_dict, flat, prepared.planned, openers)
        items = prepared.planned.share.plan.items
        require_one_result_each(
            (item.index for item in items),
            (items[slot.item].index for file in prepared.layout.files for slot in file.slots),
            rank=prepared.target.settings.rank,
        )
        return KnownSave(
            structure=structure,
            share=prepared.planned.share,
            layout=prepared.layout,
            naming=prepared.target.naming,
            packing=prepared.target.settings.packing(engine),
            token=uuid.uuid4().hex,
        )
    except Exception:  # this save is not affected; the next one is planned
        _log.debug("the structure was not learned", exc_info=True)
        return None


def prepare_known(
    known: KnownSave, sources: list[torch.Tensor | bytes], *, target: SaveTarget, engine: Engine
) -> PreparedSave:
    """Prepare a save of a structure that was saved before, without its planner."""
    share, layout, packing = known.share, known.layout, target.settings.packing(engine)
    lengths = {item: len(cast("bytes", sources[item])) for item in known.runs}
    changed = {
        item: replace(share.shapes[item], nbytes=nbytes)
        for item, nbytes in lengths.items()
        if nbytes != share.shapes[item].nbytes
    }
    same = known.naming.separation_hint == target.naming.separation_hint
    if changed:
        shapes = tuple(changed.get(item, shape) for item, shape in enumerate(share.shapes))
        share = replace(share, shapes=shapes)
    if changed or packing != known.packing or not same:
        with target.timeline.measure("layout"):
            layout = engine.lay_out(share.shapes, target.naming, packing)
    elif target.naming != known.naming:
        layout = with_naming(layout, target.naming)
    planned = PlannedSave(share=share, sources=sources)
    target.progress.nbytes = layout.nbytes
    return as_known(PreparedSave(planned=planned, layout=layout, target=target), known)


def as_known(prepared: PreparedSave, known: KnownSave | None) -> PreparedSave:
    """The prepared save, with the known one if their results, which follow from final plan and
    layout, are equal apart from file names.
    """
    is_same = known is not None and (
        prepared.planned.share.plan is known.share.plan and prepared.layout.key == known.layout.key
    )
    if not is_same or prepared.target.settings.transform_descriptors is not None:
        return prepared
    return replace(prepared, known=known)
