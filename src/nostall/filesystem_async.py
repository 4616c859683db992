"""``FileSystemWriterAsync``: DCP's file system writer, with nostall's copy, write and commit.

Three entry points lead to one pipeline:

* ``dcp.save(..., storage_writer=w)`` calls :meth:`~FileSystemWriterAsync.write_data`, which writes
  in this process;
* ``dcp.async_save(..., storage_writer=w)`` calls :meth:`~FileSystemWriterAsync.stage` first; the
  write then finds the staged tensors in snapshot memory and hands them to the writer process;
* frameworks call :meth:`~FileSystemWriterAsync.prepare_write_data` and
  :meth:`~FileSystemWriterAsync.get_save_function_and_args` and schedule the rest themselves.
"""

from __future__ import annotations

import os
import queue
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from nostall import _torch
from nostall._model.threads import uninterrupted
from nostall._plan.items import require_representable
from nostall._queue.ending import report_loss
from nostall._queue.sigterm import preemption
from nostall._ranks.group import Coordination, coordination_for
from nostall._save.decide import commit_results
from nostall._save.prepared import (
    ReplacingPrefix,
    WriterSettings,
    WrittenItems,
    settings_of,
    write_results,
)
from nostall._save.rank_save import RankSave
from nostall._save.stager import Staging
from nostall._storage.locations import is_address, is_place, local_tier_of, place_of
from nostall.options import StagingMode
from nostall.stats import SaveStats

if TYPE_CHECKING:
    from nostall._tier.promotions import Promotion

__all__ = ["FileSystemWriterAsync", "get_write_results_queue"]


class _NoManager:
    """In the place of the process that serves a queue of ``multiprocessing``."""

    def shutdown(self) -> None:
        """Do nothing: there is no process."""


class _ResultsQueue(queue.SimpleQueue[Any]):
    _manager = _NoManager()


_results_queue: _ResultsQueue | None = None
"""Frameworks look for it; each save of nostall has its own channel instead."""


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
        path: Checkpoint directory, or an address in an object store, such as ``s3://bucket/key``.
        single_file_per_rank: ``False`` makes one file per item.
        sync_files: Fsync files and directory before a rank reports success.
        thread_count: Number of files per rank.
        per_thread_copy_ahead: Accepted for compatibility, without effect.
        cache_staged_state_dict: Accepted for compatibility, without effect.
        overwrite: Whether a committed checkpoint in ``path`` may be replaced.
        _extensions: DCP's stream extensions, such as compression.
        serialization_format: ``TORCH_SAVE``, or ``SAFETENSORS`` for a state dict of dense tensors:
            each rank's files are named ``*.safetensors`` and can be read without DCP.
        staging: ``"blocking"``: the save call returns when the snapshot is taken, and every tensor
            may be changed. ``"overlapped"``: it returns at once. Forward, backward and every
            ``step()`` of a ``torch.optim.Optimizer`` may follow: the step waits for the copy. Small
            tensors (4 MiB of the smallest, 8 MiB of those of up to 32 KiB) may be changed at any
            time. Other code must call :meth:`wait_staged` before it changes a larger tensor, or the
            save fails. A change that torch does not count (``.data``, NumPy, a replayed CUDA graph)
            is not detected.
        separation_hint: Items whose name starts with this go to files of their own, named with it.
        use_msc: Accepted for compatibility, without effect.
        is_multiproc_io: Accepted for compatibility; threads of one process write all files.
        use_cached_data_structure: Accepted for compatibility; structure is always cached.
        use_cpu_shm_for_gpu_tensors: Accepted for compatibility; shared memory is always used.
        staging_dir: Accepted for compatibility, with a warning: files are written to ``path``.
        open_file: A callable with the signature of ``open`` that opens every shard file.
        local_staging_dir: A directory on a local disk, for all checkpoints beside ``path``. The
            checkpoint is committed there, under the same name, and then promoted to ``path`` in the
            background: see :attr:`promotion`. A job that starts again with the same directory
            continues with what was left.
        local_staging_limit: How many committed checkpoints may wait there for their destinations;
            the next save waits, ``EngineOptions.save_timeout_s`` at most.
        local_staging_shared: Whether all ranks see the same ``local_staging_dir``. ``False`` if
            each host has its own: every rank brings its own files to ``path`` then, and the
            coordinator publishes the metadata when all of them are there.
        storage_options: What obstore's ``from_url`` is given for the bucket of ``path``, such as
            ``{"region": "eu-west-1"}``, by this process from now on and by those that it starts.

    The first nine are those of ``torch.distributed.checkpoint.FileSystemWriter``, in its order;
    the others are keyword-only.

    Raises:
        OptionError: Two options exclude each other, or an option has a value that is not possible.
    """

    can_run_decentralized_global_plan = True
    """Each rank may make its final plan alone."""
    flush_dst = None
    """NVRx's destination of files on a local disk, for a request: there are none."""
    _settings_of: partial[WriterSettings]
    """Returns the settings of a writer with these options."""
    _tier: tuple[str, Any, Any] | None
    """``local_staging_dir``, ``local_staging_limit`` and ``local_staging_shared``."""
    _rank_save: RankSave
    """This rank's part of the present save."""
    _is_coordinator = True

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
            staging_dir: str | os.PathLike[str] | None = None,
            open_file: Callable[..., Any] = open,
            local_staging_dir: str | os.PathLike[str] | None = None,
            local_staging_limit: int = 2,
            local_staging_shared: bool = True,
            storage_options: Mapping[str, Any] | None = None,
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
            staging_dir: str | os.PathLike[str] | None = None,
            open_file: Callable[..., Any] = open,
            local_staging_dir: str | os.PathLike[str] | None = None,
            local_staging_limit: int = 2,
            local_staging_shared: bool = True,
            storage_options: Mapping[str, Any] | None = None,
            **kwargs: Any,
        ) -> None:
            """For the arguments see the class."""
            place = place_of(path, storage_options)
            if staging_dir is not None:
                warnings.warn(
                    "staging_dir has no effect: files are written to the checkpoint's path, from"
                    " memory; local_staging_dir commits them on a local disk first",
                    stacklevel=2,
                )
            self._tier = None
            if local_staging_dir is not None:
                root = local_tier_of(local_staging_dir)
                self._tier = root, local_staging_limit, local_staging_shared
            super().__init__(path, *args, **kwargs)
            self._settings_of = partial(
                settings_of,
                staging=staging,
                separation_hint=separation_hint,
                open_file=open_file,
            )
            self._start(place, None)

    def _start(self, place: str, staging: Staging | None) -> None:
        """Begin a save. A wrong combination of options is an error here, not when it runs."""
        self.path = place if is_address(place) else Path(place)
        if self._tier is None:
            self._rank_save = RankSave(self._settings_of(self), staging)
            return
        from nostall._tier.saving import TieredSave, local_directory  # other jobs do not need it

        root, limit, shared = self._tier
        self._settings_of = partial(self._settings_of, directory=local_directory(root, place))
        self._rank_save = TieredSave(self._settings_of(self), staging, limit, shared)

    # --- DCP's storage writer -------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start over for another checkpoint, at ``checkpoint_id`` if given.

        Raises:
            OptionError: A split save of this writer is not finalised yet.
        """
        self._rank_save.require_over()
        place = place_of(self.path if checkpoint_id is None else checkpoint_id)
        super().reset(checkpoint_id)
        self._start(place, self._rank_save.staged_for_next)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set this rank's role; DCP calls this on every rank."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if self.rank is None:
            self.rank = coordination_for(None).rank
        self._is_coordinator = is_coordinator or not self.use_collectives
        self._rank_save.settings = self._settings_of(self)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """On the coordinator: make the directory and check for an existing checkpoint.

        Raises:
            StagingError: Files of safetensors cannot have one of the items.
            CheckpointExistsError: A checkpoint exists, and ``overwrite=False``.
            WriteError: The directory cannot be made.
        """
        settings = self._settings_of(self)
        require_representable(plan, settings.file_format, rank=self.rank or 0)
        if self._is_coordinator:
            with report_loss(str(self.path)):
                self._rank_save.settings = settings
                self._rank_save.make_ready()
        return plan if self.use_collectives else self.prepare_decentralized_global_plan(plan)

    @property
    def _ignores_items(self) -> bool:
        """Whether the global plan may be prepared without its items: not by a user's method."""
        return type(self).prepare_global_plan is FileSystemWriterAsync.prepare_global_plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank a prefix of file names; other hosts learn of an existing checkpoint.

        From the plans, as they may not see it yet; not if names of files are unique.
        """
        plans = super().prepare_global_plan(plans)
        settings = self._rank_save.settings
        if settings.has_unique_names or not settings.may_replace():
            return plans
        return [
            replace(plan, storage_data=ReplacingPrefix(plan.storage_data.prefix, str(self.path)))
            for plan in plans
        ]

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """This rank's final plan when ranks plan alone: its own plan with a file prefix."""
        return replace(local_plan, storage_data=_torch.StoragePrefix(f"__{self.rank or 0}_"))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Snapshot and write this rank's share; on return its files are complete.

        Raises:
            SaveError: The save failed; the subclass says how.
        """
        self._rank_save.settings = self._settings_of(self)
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

    @classmethod
    def cleanup_tensor_caches(cls) -> None:
        """Do nothing: no tensor of a state dict is kept between saves."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a writer can be made for the id, as the client of its store is installed."""
        return is_place(checkpoint_id)

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
        self._rank_save.settings = self._settings_of(self)
        call = _torch.arguments_of_async_save()
        alone = call.get("no_dist", False)
        ranks = Coordination() if alone else coordination_for(call.get("process_group"))
        with uninterrupted():
            return self._rank_save.stage(state_dict, ranks)

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
        self._rank_save.settings = self._settings_of(self)
        self._rank_save.prepare(plan, planner)

    def get_save_function_and_args(self) -> tuple[Any, Any, list[Any]]:
        """``(save_fn, preload_fn, [rank, None, results])`` to schedule.

        ``(None, None, [])`` if this rank has nothing to write, or if nothing is planned.
        """
        split = self._rank_save.split
        if split is None or not split.has_to_run:
            return None, None, []
        return split, split.stage, [split.rank, None, queue.SimpleQueue()]

    def retrieve_write_results(self) -> list[WriteResult] | _torch.WrappedException:
        """This rank's results, or its failure in DCP's wrapped form. Waits for the report."""
        with uninterrupted():
            results = self._rank_save.retrieve(write_results)
        if isinstance(results, tuple):
            return results
        return WrittenItems(results, self._rank_save.written_files)

    @property
    def stats(self) -> SaveStats | None:
        """Timings of this writer's save on this rank; ``None`` before its files are written.

        Complete once the save is finalised.
        """
        return self._rank_save.stats

    @property
    def promotion(self) -> Promotion | None:
        """The copy of this writer's last checkpoint from ``local_staging_dir`` to ``path``.

        ``promotion.done`` and ``promotion.result(timeout)`` tell when it is committed there.
        ``None`` on other ranks than the coordinator, before the local commit, and without
        ``local_staging_dir``.
        """
        return getattr(self._rank_save, "promotion", None)
