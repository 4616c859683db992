"""The settings of one writer, and the target of each save that they lead to."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import SavePlan

from nostall import _torch
from nostall._engine import Engine
from nostall._model.values import ItemShape, Layout
from nostall._plan.layout import FileNaming
from nostall._save.session import SaveTarget, packing_of
from nostall._storage.deadlines import in_time
from nostall._storage.directories import Visit
from nostall._storage.posix import may_be_there
from nostall._storage.streams import StreamTarget
from nostall.options import WriterOptions
from nostall.stats import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """Where and how one writer saves."""

    directory: str
    rank: int
    is_alone: bool
    """Whether this rank's checkpoint has metadata of its own."""
    options: WriterOptions
    stream: StreamTarget | None
    transform_descriptors: tuple[str, ...] | None
    """Tells DCP's reader how to undo stream transforms; ``None`` without any."""

    @property
    def metadata_path(self) -> str:
        """The metadata file of the checkpoint."""
        together, alone = self._metadata_paths()
        return alone if self.is_alone else together

    def _metadata_paths(self) -> tuple[str, str]:
        """For a checkpoint that all ranks save together, and one that this rank saves alone."""
        names = (_torch.METADATA_NAME, f"__{self.rank}{_torch.METADATA_NAME}")
        together, alone = (os.path.join(self.directory, name) for name in names)
        return together, alone

    def may_replace(self, *, timeout_s: float) -> bool:
        """Whether the directory may contain a checkpoint.

        Raises:
            SaveTimeoutError: Storage did not answer within ``timeout_s`` seconds.
        """
        return in_time(
            lambda: any(map(may_be_there, self._metadata_paths())),
            timeout_s=timeout_s,
            doing="looking for an existing checkpoint",
            phase="plan",
            path=self.directory,
            rank=self.rank,
        )

    def lay_out(self, shapes: Sequence[ItemShape], engine: Engine) -> Layout:
        """The layout of these items, with file names of no checkpoint."""
        naming = FileNaming(prefix="", separation_hint=self.options.separation_hint)
        return engine.lay_out(shapes, naming, packing_of(self.options, engine))

    def target(self, plan: SavePlan, timeline: Timeline, engine: Engine) -> SaveTarget:
        """The target of a new save, which is under way from now on."""
        job = uuid.uuid4().hex
        timeout_s = engine.options.save_timeout_s
        prefix = getattr(plan.storage_data, "prefix", None) or f"__{self.rank}_"
        # A reader of the previous checkpoint's metadata must not find new files under its names.
        is_beside = getattr(plan.storage_data, "beside", None) == self.directory
        replaces = is_beside or self.may_replace(timeout_s=timeout_s)
        progress = engine.under_way.begin(job, path=self.directory, rank=self.rank)
        return SaveTarget(
            job=job,
            directory=self.directory,
            naming=FileNaming(
                prefix=prefix,
                suffix=f"-{job[:8]}" if replaces else "",
                separation_hint=self.options.separation_hint,
            ),
            options=self.options,
            stream=self.stream,
            visit=Visit(self.directory, progress.created),
            transform_descriptors=self.transform_descriptors,
            timeline=timeline,
            progress=progress,
            timeout_s=timeout_s,
            faults=engine.faults,
        )
