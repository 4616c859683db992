"""The settings of one writer, and the target of each save that they lead to."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.planner import SavePlan

from nostall import _torch
from nostall._engine import Engine
from nostall._model.names import FileFormat
from nostall._model.progress import Progress
from nostall._model.values import ItemShape, Layout
from nostall._plan.layout import FileNaming, Packing
from nostall._storage.destination import make_ready, may_hold
from nostall._storage.directories import Visit, has_failed_in
from nostall._storage.places import is_address, storage_at
from nostall._writer.streams import StreamTarget
from nostall.errors import OptionError
from nostall.options import StagingMode, WriterOptions, require_switch
from nostall.stats import Timeline

_FORMATS = {
    SerializationFormat.TORCH_SAVE: FileFormat.TORCH_SAVE,
    SerializationFormat.SAFETENSORS: FileFormat.SAFETENSORS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOptions:
    """The options of ``FileSystemWriterAsync`` that stock's writer does not have."""

    staging: StagingMode
    separation_hint: str | None
    open_file: Callable[..., Any]
    directory: str | None = None
    """In which the checkpoint is committed instead of the writer's path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """Where and how one writer saves."""

    directory: str
    """In which the checkpoint is committed."""
    rank: int
    is_alone: bool
    """Whether this rank's checkpoint has metadata of its own."""
    options: WriterOptions
    stream: StreamTarget | None
    transform_descriptors: tuple[str, ...] | None
    """Tells DCP's reader how to undo stream transforms; ``None`` without any."""
    belongs_at: str
    """Where the checkpoint is to be in the end; the same for all ranks."""

    @property
    def metadata_path(self) -> str:
        """The metadata file of the checkpoint."""
        return os.path.join(self.directory, self._metadata_name)

    @property
    def _metadata_name(self) -> str:
        together, alone = self._metadata_names()
        return alone if self.is_alone else together

    def _metadata_names(self) -> tuple[str, str]:
        """For a checkpoint that all ranks save together, and one that this rank saves alone."""
        return _torch.METADATA_NAME, f"__{self.rank}{_torch.METADATA_NAME}"

    def make_ready(self, engine: Engine) -> bool:
        """Make the directory, and check for a checkpoint that must not be replaced.

        Returns:
            Whether the directory may contain a checkpoint.

        Raises:
            CheckpointExistsError: There is one.
            WriteError: The directory cannot be made.
            SaveTimeoutError: Storage did not answer within ``save_timeout_s`` seconds.
        """
        return make_ready(
            self.directory,
            self._metadata_name,
            [name for name in self._metadata_names() if name != self._metadata_name],
            overwrite=self.options.overwrite,
            rank=self.rank,
            timeout_s=engine.options.save_timeout_s,
        )

    @property
    def is_elsewhere(self) -> bool:
        """Whether the directory, which other hosts may not see, is not where it belongs."""
        return self.directory != self.belongs_at

    @property
    def has_unique_names(self) -> bool:
        """Whether file names are unique, so that an existing checkpoint does not matter to them."""
        return self.is_elsewhere or is_address(self.directory)

    def may_replace(self, engine: Engine) -> bool:
        """Whether the directory may contain a checkpoint.

        Raises:
            SaveTimeoutError: Storage did not answer within ``save_timeout_s`` seconds.
        """
        return may_hold(
            self.directory,
            self._metadata_names(),
            rank=self.rank,
            timeout_s=engine.options.save_timeout_s,
        )

    def packing(self, engine: Engine) -> Packing:
        """The number and size of a rank's files."""
        return Packing(
            file_count=self.options.thread_count,
            file_per_item=self.options.file_per_item,
            max_file_nbytes=engine.options.max_wave_nbytes,
        )

    def chunk_nbytes(self, layout: Layout, engine: Engine) -> int:
        """Bytes per write, of any file of a layout."""
        longest = max((file.nbytes for file in layout.files), default=0)
        return max(engine.options.chunk_nbytes, storage_at(self.directory).least_part(longest))

    def lay_out(self, shapes: Sequence[ItemShape], engine: Engine) -> Layout:
        """The layout of these items, with file names of no checkpoint."""
        options = self.options
        naming = _naming(options, prefix="")
        return engine.lay_out(shapes, naming, self.packing(engine))

    def target(
        self, plan: SavePlan, timeline: Timeline, engine: Engine, *, replaces: bool | None
    ) -> SaveTarget:
        """The target of a new save, which is under way from now on.

        Args:
            plan: This rank's final plan.
            timeline: Receives the durations of the stages.
            engine: The engine of the save.
            replaces: Whether the directory may contain a checkpoint; ``None`` to look, unless names
                are unique.

        Raises:
            SaveTimeoutError: Storage did not answer within ``save_timeout_s`` seconds.
        """
        job = uuid.uuid4().hex
        prefix = getattr(plan.storage_data, "prefix", None) or f"__{self.rank}_"
        # A reader of the previous checkpoint's metadata must not find new files under its names.
        is_beside = getattr(plan.storage_data, "beside", None) == self.directory
        if replaces is None and not self.has_unique_names:
            replaces = is_beside or self.may_replace(engine)
        is_suffixed = replaces or self.has_unique_names or has_failed_in(self.directory)
        suffix = self._suffix(job) if is_suffixed else ""
        progress = engine.under_way.begin(job, path=self.directory, rank=self.rank)
        return SaveTarget(
            job=job,
            settings=self,
            naming=_naming(self.options, prefix=prefix, suffix=suffix),
            visit=Visit(self.directory, progress.created),
            timeline=timeline,
            progress=progress,
            timeout_s=engine.options.save_timeout_s,
            faults=engine.faults,
        )

    def _suffix(self, job: str) -> str:
        """What distinguishes the names of a save's files from those of others."""
        # A file system refuses a second file of a name. A store replaces the first one.
        return f"-{job[:8]}-{job[-8:]}" if is_address(self.belongs_at) else f"-{job[:8]}"


def _naming(options: WriterOptions, *, prefix: str, suffix: str = "") -> FileNaming:
    return FileNaming(
        prefix=prefix,
        suffix=suffix,
        separation_hint=options.separation_hint,
        file_format=options.file_format,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTarget:
    """Where and how one rank's files of one save are written."""

    job: str
    settings: WriterSettings
    naming: FileNaming
    visit: Visit
    """Shows other saves of this process that this one is under way in the directory."""
    timeline: Timeline
    """Receives the durations of the stages."""
    progress: Progress
    """Receives the progress of the save."""
    timeout_s: float
    """Longest time for storage to answer."""
    faults: bytes
    """Faults that a test injects into this save."""


def settings_of(writer: FileSystemWriter, own: OwnOptions) -> WriterSettings:
    """The settings of a writer, by its attributes at this moment, as subclasses may change them.

    Raises:
        OptionError: Two options exclude each other, or an option has a value that is not possible.
    """
    if not callable(own.open_file):
        raise OptionError(
            f"open_file={own.open_file!r} is not callable",
            hint="use a callable with the signature of open",
        )
    wanted = getattr(writer, "serialization_format", SerializationFormat.TORCH_SAVE)
    if not isinstance(wanted, SerializationFormat) or wanted not in _FORMATS:
        raise OptionError(
            f"serialization_format={wanted!r} is not possible",
            hint="use a member of torch.distributed.checkpoint.filesystem.SerializationFormat",
        )
    file_format = _FORMATS[wanted]
    transforms = tuple(writer.transforms.extensions)
    has_stream = own.open_file is not open or transforms
    if has_stream and is_address(writer.path):
        raise OptionError(
            "open_file and stream extensions need a file system",
            path=str(writer.path),
            hint="leave them out, or save to a directory",
        )
    if has_stream and own.directory is not None:
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
    return WriterSettings(
        directory=own.directory or str(writer.path),
        belongs_at=str(writer.path),
        rank=writer.rank or 0,
        is_alone=not writer.use_collectives,
        options=WriterOptions(
            thread_count=writer.thread_count,
            file_per_item=not require_switch("single_file_per_rank", writer.single_file_per_rank),
            sync_files=writer.sync_files,
            overwrite=writer.overwrite,
            separation_hint=own.separation_hint,
            staging=own.staging,
            file_format=file_format,
        ),
        stream=StreamTarget(open_file=own.open_file, transforms=transforms) if has_stream else None,
        transform_descriptors=tuple(each.get_descriptor() for each in reversed(transforms)) or None,
    )
