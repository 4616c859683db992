"""``FileSystemWriterAsync``: DCP's file system writer, with nostall's copy, write and commit.

Three entry points, one pipeline (``nostall._save.session``):

* ``dcp.save(..., storage_writer=w)`` calls :meth:`~FileSystemWriterAsync.write_data`, which writes
  in this process;
* ``dcp.async_save(..., storage_writer=w)`` calls :meth:`~FileSystemWriterAsync.stage` first; the
  write then finds the staged tensors in snapshot memory and hands them to the writer process;
* frameworks call :meth:`~FileSystemWriterAsync.prepare_write_data` and
  :meth:`~FileSystemWriterAsync.get_save_function_and_args` and schedule the rest themselves.
"""

from __future__ import annotations

import dataclasses
import os
import queue
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from nostall import _torch
from nostall._engine import default_engine
from nostall._queue.at_exit import report_loss
from nostall._queue.preemption import preemption
from nostall._save.coordinator import commit_results
from nostall._save.rank_save import RankSave, Staging
from nostall._save.session import Beside
from nostall._save.settings import WriterSettings
from nostall._save.stager import stage_for_later
from nostall._storage.destination import absolute, make_ready, require_file_system, require_possible
from nostall._storage.streams import StreamTarget
from nostall.errors import OptionError
from nostall.options import StagingMode, WriterOptions, require_switch
from nostall.stats import SaveStats, Timeline

__all__ = ["FileSystemWriterAsync", "get_write_results_queue"]

_PROCESSES_FOR_MULTIPROC_IO = 2
_MSC_PREFIX = "msc://"


class _NoManager:
    """In the place of the process that serves a queue of ``multiprocessing``."""

    def shutdown(self) -> None:
        """Do nothing: there is no process."""


class _ResultsQueue(queue.SimpleQueue[Any]):
    _manager = _NoManager()


_results_queue: _ResultsQueue | None = None
"""Frameworks look for it; each save of nostall has its own channel instead."""


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _rank_among_peers() -> int | None:
    """This rank; ``None`` if it is the only one."""
    has_group = dist.is_available() and dist.is_initialized()
    return dist.get_rank() if has_group and dist.get_world_size() > 1 else None


def get_write_results_queue(mp_mode: str = "spawn") -> queue.SimpleQueue[Any]:
    """The process-wide queue that frameworks look for; ``mp_mode`` has no effect.

    Frameworks end its ``_manager`` before they start again; the queue can be used afterwards.
    """
    global _results_queue
    if _results_queue is None:
        _results_queue = _ResultsQueue()
    return _results_queue


class FileSystemWriterAsync(FileSystemWriter):
    """A drop-in ``FileSystemWriter`` whose saves do not stall training and commit atomically.

    Make a new one for every checkpoint. It is cheap: memory and processes belong to the engine.

    Args:
        path: Checkpoint directory.
        single_file_per_rank: ``False`` makes one file per item.
        sync_files: Fsync files and directory before a rank reports success.
        thread_count: Number of files per rank.
        per_thread_copy_ahead: Accepted for compatibility, without effect.
        cache_staged_state_dict: Accepted for compatibility, without effect.
        overwrite: Whether a committed checkpoint in ``path`` may be replaced.
        _extensions: DCP's stream extensions, such as compression.
        serialization_format: ``TORCH_SAVE``; others are not supported yet.
        staging: ``"blocking"``: the save call returns when the snapshot is taken, and every tensor
            may be changed. ``"overlapped"``: it returns at once. Forward, backward and every
            ``step()`` of a ``torch.optim.Optimizer`` may follow: the step waits for the copy. Small
            tensors (4 MiB of the smallest, 8 MiB of those of up to 32 KiB) may be changed at any
            time. Other code must call :meth:`wait_staged` before it changes a larger tensor, or the
            save fails. A change that torch does not count (``.data``, NumPy, a replayed CUDA graph)
            is not detected.
        separation_hint: Items whose name starts with this go to files of their own, named with it.
        use_msc: Accepted for compatibility, without effect; ``msc://`` paths are not supported yet.
        is_multiproc_io: Spread the files over two writer processes.
        use_cached_data_structure: Accepted for compatibility; structure is always cached, values
            never.
        use_cpu_shm_for_gpu_tensors: Accepted for compatibility; snapshots are always in shared host
            memory.
        open_file: A callable with the signature of ``open`` that opens every shard file.

    The first nine are those of ``torch.distributed.checkpoint.FileSystemWriter``, in its order;
    the others are keyword-only.

    Raises:
        OptionError: Two options exclude each other, or an option is not supported yet.
    """

    if TYPE_CHECKING:
        # Stock's arguments by name, behind the signature that frameworks inspect.
        def __init__(
            self,
            path: str | os.PathLike[str],
            single_file_per_rank: bool = True,
            sync_files: bool = True,
            thread_count: int = 1,
            per_thread_copy_ahead: int = 10_000_000,
            cache_staged_state_dict: bool = False,
            overwrite: bool = True,
            _extensions: Sequence[_torch.StreamTransformExtension] | None = None,
            serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
            *,
            staging: StagingMode = "blocking",
            separation_hint: str | None = None,
            use_msc: bool = False,
            is_multiproc_io: bool = False,
            use_cached_data_structure: bool = False,
            use_cpu_shm_for_gpu_tensors: bool = False,
            open_file: Callable[..., Any] = open,
        ) -> None: ...

    else:

        def __init__(
            self,
            path: str | os.PathLike[str],
            *args: Any,
            staging: StagingMode = "blocking",
            separation_hint: str | None = None,
            use_msc: bool = False,
            is_multiproc_io: bool = False,
            use_cached_data_structure: bool = False,
            use_cpu_shm_for_gpu_tensors: bool = False,
            open_file: Callable[..., Any] = open,
            **kwargs: Any,
        ) -> None:
            require_possible(path)
            super().__init__(path, *args, **kwargs)
            self._begin(path, staging, separation_hint, is_multiproc_io, open_file)

    def _begin(
        self,
        path: str | os.PathLike[str],
        staging: StagingMode,
        separation_hint: str | None,
        is_multiproc_io: bool,
        open_file: Callable[..., Any],
    ) -> None:
        """Check all options, and begin the first save."""
        if not callable(open_file):
            raise OptionError(
                f"open_file={open_file!r} is not callable",
                hint="use a callable with the signature of open",
            )
        require_file_system(path)
        self.path = absolute(self.path)
        form = getattr(self, "serialization_format", SerializationFormat.TORCH_SAVE)
        if form is not SerializationFormat.TORCH_SAVE:
            raise OptionError(
                f"serialization_format={form!r} is not supported yet",
                hint="leave it at SerializationFormat.TORCH_SAVE",
            )
        spread = require_switch("is_multiproc_io", is_multiproc_io)
        self._processes = _PROCESSES_FOR_MULTIPROC_IO if spread else 1
        self._separation_hint = separation_hint
        self._staging_mode = staging
        transforms = tuple(self.transforms.extensions)
        own_stream = open_file is not open or bool(transforms)
        self._stream = (
            StreamTarget(open_file=open_file, transforms=transforms) if own_stream else None
        )
        self._is_coordinator = True
        self._staging: Staging | None = None
        """Belongs to the present save, and to the one that the next :meth:`reset` begins:
        ``dcp.async_save`` resets the writer between staging and writing."""
        # A wrong combination of options is an error here, not when the first save runs.
        self._rank_save = RankSave(self._settings())
        """This rank's part of the present save."""

    # --- DCP's storage writer -------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start over for another checkpoint, at ``checkpoint_id`` if given.

        Raises:
            OptionError: A split save of this writer is not finalised yet.
        """
        self._rank_save.require_over()
        super().reset(checkpoint_id)
        require_file_system(checkpoint_id)
        self.path = absolute(self.path)
        staging, self._staging = self._staging, None
        self._rank_save = RankSave(self._settings(), staging)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set this rank's role; DCP calls this on every rank."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if self.rank is None:
            self.rank = _rank()
        self._is_coordinator = is_coordinator or not self.use_collectives
        self._rank_save.settings = self._settings()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """On the coordinator: make the directory and check for an existing checkpoint.

        Raises:
            CheckpointExistsError: A checkpoint exists, and ``overwrite=False``.
            WriteError: The directory cannot be made.
        """
        if self._is_coordinator:
            with report_loss(str(self.path)):
                make_ready(
                    str(self.path),
                    self._rank_save.settings.metadata_path,
                    overwrite=self.overwrite,
                    rank=self.rank,
                    timeout_s=default_engine().options.save_timeout_s,
                )
        if not self.use_collectives:
            prefix = _torch.StoragePrefix(f"__{self.rank}_")
            plan = dataclasses.replace(plan, storage_data=prefix)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As stock; if a checkpoint exists, the plans say so, as other hosts may not see it yet."""
        plans = super().prepare_global_plan(plans)
        timeout_s = default_engine().options.save_timeout_s
        if not self._rank_save.settings.may_replace(timeout_s=timeout_s):
            return plans
        return [
            dataclasses.replace(plan, storage_data=Beside(plan.storage_data.prefix, str(self.path)))
            for plan in plans
        ]

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """This rank's final plan when ranks plan alone: its own plan with a file prefix."""
        prefix = _torch.StoragePrefix(f"__{self.rank or 0}_")
        return dataclasses.replace(local_plan, storage_data=prefix)

    @property
    def can_run_decentralized_global_plan(self) -> bool:
        """Whether each rank may make its final plan alone: always."""
        return True

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Snapshot and write this rank's share; on return its files are complete.

        Raises:
            SaveError: The save failed; the subclass says how.
        """
        self._staging = None
        self._rank_save.settings = self._settings()
        with preemption.deferred(then_end=False), report_loss(str(self.path)):
            results = self._rank_save.write_now(plan, planner)
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the metadata of a checkpoint whose files are all complete. Coordinator only.

        The metadata object that stock ``dcp.save`` passes is completed, as by stock. An object that
        already belongs to a checkpoint (loaded or cached) is not changed; a copy is published. If
        certainly nothing was published, the files of all ranks are removed.

        Raises:
            IncompleteSaveError: No rank wrote an item of the metadata; nothing is published.
            RankMismatchError: A rank wrote to another directory; nothing is published.
            WriteError: The metadata could not be published.
        """
        with preemption.deferred(then_end=False), report_loss(str(self.path)):
            commit_results(self._rank_save, metadata, results, self.storage_meta)

    def storage_meta(self) -> StorageMeta | None:
        """What DCP stores beside the items: the path and the identifier of this save."""
        return super().storage_meta()

    @classmethod
    def cleanup_tensor_caches(cls) -> None:
        """Do nothing: no tensor of a state dict is kept between saves."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this writer accepts the id; true for ``msc://`` ids, too."""
        if str(checkpoint_id).startswith(_MSC_PREFIX):
            return True
        return bool(super().validate_checkpoint_id(checkpoint_id))

    # --- DCP's stager ---------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Copy a state dict into snapshot memory; the copy is valid until it is saved.

        Returns:
            The copy; with overlapped staging a future of it, which ``dcp.async_save`` turns into
            ``AsyncSaveResponse.staging_completion``. If several ranks save together, a rank that
            cannot copy returns an object that fails the save on every rank, with one of the errors
            below.

        Raises:
            SaveTimeoutError: Earlier saves still hold all snapshot memory.
            ReservationError: There is not enough host memory.
        """
        self._staging = None
        timeline = Timeline()
        staged = stage_for_later(
            state_dict, default_engine(), timeline, self._settings(), rank=_rank_among_peers()
        )
        self._staging = self._rank_save.staging = Staging(fence=staged.fence, timeline=timeline)
        return staged.copied

    def __getstate__(self) -> dict[str, Any]:
        """The state without the save, which belongs to this process."""
        return {**self.__dict__, "_staging": None, "_rank_save": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin a save in the process that has received the writer."""
        self.__dict__.update(state)
        self._rank_save = RankSave(self._settings())

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when tensors may be changed; at once without overlapped staging.

        A failed snapshot raises no error here; finalising raises it, on every rank.

        Raises:
            SaveTimeoutError: The copy is not complete after ``timeout`` seconds.
        """
        self._rank_save.wait_staged(timeout)

    def synchronize_staging(self) -> None:
        """The name under which DCP looks for :meth:`wait_staged`."""
        self.wait_staged()

    def close(self) -> None:
        """Nothing to close: memory and processes belong to the engine."""

    # --- split saves ----------------------------------------------------------------------------

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Resolve and lay out this rank's final plan.

        Objects are serialised now; ``preload_fn`` copies the tensors.

        Raises:
            StagingError: An item could not be resolved.
        """
        self._rank_save.settings = self._settings()
        self._rank_save.prepare(plan, planner)

    def get_save_function_and_args(self) -> tuple[Any, Any, list[Any]]:
        """``(save_fn, preload_fn, [rank, None, results])`` to schedule.

        ``(None, None, [])`` if this rank has nothing to write, or if nothing is planned.
        """
        split = self._rank_save.to_schedule
        if split is None:
            return None, None, []
        return split, split.stage, [split.rank, None, queue.SimpleQueue()]

    def retrieve_write_results(self) -> list[WriteResult] | _torch.WrappedException:
        """This rank's results, or its failure in DCP's wrapped form. Waits for the report."""
        return self._rank_save.retrieve_results()

    @property
    def stats(self) -> SaveStats | None:
        """Timings of this writer's save on this rank; ``None`` before its files are written.

        Complete once the save is finalised.
        """
        return self._rank_save.stats

    # --------------------------------------------------------------------------------------------

    def _settings(self) -> WriterSettings:
        extensions = reversed(self.transforms.extensions)
        return WriterSettings(
            directory=str(self.path),
            rank=self.rank or 0,
            is_alone=not self.use_collectives,
            options=WriterOptions(
                thread_count=self.thread_count,
                file_per_item=not require_switch("single_file_per_rank", self.single_file_per_rank),
                sync_files=self.sync_files,
                overwrite=self.overwrite,
                separation_hint=self._separation_hint,
                processes=self._processes,
                staging=self._staging_mode,
            ),
            stream=self._stream,
            transform_descriptors=tuple(each.get_descriptor() for each in extensions) or None,
        )
