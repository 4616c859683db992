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
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from nostall import _torch
from nostall._commit.ahead import WrittenAhead, is_worth_it
from nostall._commit.collect import require_one_directory
from nostall._commit.metadata import Publication
from nostall._engine import Engine, default_engine
from nostall._memory.overlap import SnapshotFence
from nostall._model.jobs import FileReceipt, RankReport, RankWritten
from nostall._model.values import RankFiles
from nostall._plan.layout import FileNaming
from nostall._plan.structure import learn
from nostall._queue.at_exit import loss_is_told
from nostall._queue.preemption import preemption
from nostall._save import finalize, session, write, write_directly
from nostall._save.finalize import (
    FinishedMetadata,
    finish_metadata,
    is_unpublished,
    publication_of_results,
)
from nostall._save.rank_save import RankSave
from nostall._save.stager import stage_for_later, take_over
from nostall._storage.deadlines import in_time
from nostall._storage.destination import absolute, make_ready, require_file_system, require_possible
from nostall._storage.directories import Visit
from nostall._storage.posix import is_same, may_be_there
from nostall._storage.streams import StreamTarget
from nostall.errors import NostallError, OptionError, SaveError, StagingError
from nostall.options import WriterOptions, require_switch
from nostall.stats import SaveStats, Timeline

__all__ = ["FileSystemWriterAsync", "get_write_results_queue"]

_PROCESSES_FOR_MULTIPROC_IO = 2
_MSC_PREFIX = "msc://"

T = TypeVar("T")

_results_queue: queue.SimpleQueue[Any] | None = None
"""Frameworks look for it; each save of nostall has its own channel instead."""


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _rank_among_peers() -> int | None:
    """This rank; ``None`` if it is the only one."""
    has_group = dist.is_available() and dist.is_initialized()
    return dist.get_rank() if has_group and dist.get_world_size() > 1 else None


def get_write_results_queue(mp_mode: str = "spawn") -> queue.SimpleQueue[Any]:
    """The process-wide queue that frameworks look for; ``mp_mode`` has no effect."""
    global _results_queue
    if _results_queue is None:
        _results_queue = queue.SimpleQueue()
    return _results_queue


class FileSystemWriterAsync(FileSystemWriter):
    r"""A drop-in ``FileSystemWriter`` whose saves do not stall training and commit atomically.

    Make a new one for every checkpoint. It is cheap: memory and processes belong to the engine.

    Args:
        path: Checkpoint directory.
        \*args: Those of ``torch.distributed.checkpoint.FileSystemWriter``, in its order.
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
        \*\*kwargs: Those of ``FileSystemWriter`` (``thread_count`` is the number of files per
            rank), and ``open_file``, a callable with the signature of ``open`` that opens every
            shard file.

    Raises:
        OptionError: Two options exclude each other, or an option is not supported yet.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        staging: str = "blocking",
        separation_hint: str | None = None,
        use_msc: bool = False,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
        **kwargs: Any,
    ) -> None:
        open_file = kwargs.pop("open_file", open)
        require_possible(path)
        if not callable(open_file):
            raise OptionError(
                f"open_file is a {type(open_file).__name__}",
                hint="use a callable with the signature of open",
            )
        super().__init__(path, *args, **kwargs)
        require_file_system(path)
        self.path = absolute(self.path)
        if getattr(self, "serialization_format", None) == SerializationFormat.SAFETENSORS:
            raise OptionError(
                "serialization_format=SAFETENSORS is not supported yet",
                hint="leave it at SerializationFormat.TORCH_SAVE",
            )
        self._is_coordinator = True
        self._save: RankSave | None = None
        self._failure: NostallError | None = None
        self._staging = staging
        self._fence: SnapshotFence | None = None
        """Of the last staging; ``dcp.async_save`` resets the writer between staging and writing."""
        self.timeline = Timeline()
        self._staging_timeline = Timeline()
        """Of the last staging, as ``_fence``."""
        self._is_staged = False
        """Whether the last staged copy is written next; if so, :meth:`reset` keeps its fence."""
        self._receipts: tuple[FileReceipt, ...] = ()
        self._slowest_rank: int | None = None
        self._visit: Visit | None = None
        self._separation_hint = separation_hint
        spread = require_switch("is_multiproc_io", is_multiproc_io)
        self._processes = _PROCESSES_FOR_MULTIPROC_IO if spread else 1
        transforms = tuple(self.transforms.extensions)
        own_stream = open_file is not open or bool(transforms)
        self._stream = (
            StreamTarget(open_file=open_file, transforms=transforms) if own_stream else None
        )
        self._options()  # a wrong combination is an error here, not when the first save runs

    # --- DCP's storage writer -------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start over for another checkpoint, at ``checkpoint_id`` if given.

        Raises:
            OptionError: A split save of this writer is not finalised yet.
        """
        self.require_free()
        super().reset(checkpoint_id)
        require_file_system(checkpoint_id)
        self.path = absolute(self.path)
        self._save = None
        self._failure = None
        if not self._is_staged:
            self._fence, self._staging_timeline = None, Timeline()
        self._is_staged = False
        self.timeline = Timeline()
        self._receipts = ()
        self._slowest_rank = None
        self._visit = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set this rank's role; DCP calls this on every rank."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if self.rank is None:
            self.rank = _rank()
        self._is_coordinator = is_coordinator or not self.use_collectives

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """On the coordinator: make the directory and check for an existing checkpoint.

        Raises:
            CheckpointExistsError: A checkpoint exists, and ``overwrite=False``.
            WriteError: The directory cannot be made.
        """
        if self._is_coordinator:
            with loss_is_told(str(self.path)):
                make_ready(
                    str(self.path),
                    self._metadata_path(),
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
        if not self._may_replace():
            return plans
        return [
            dataclasses.replace(
                plan, storage_data=session.Beside(plan.storage_data.prefix, str(self.path))
            )
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
        self._is_staged = False
        with preemption.deferred(then_end=False), loss_is_told(str(self.path)):
            self.timeline.adopt(self._staging_timeline)
            return self._write_share(plan, planner)

    def _write_share(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        fence, self._fence = self._fence, None
        if fence is not None and fence.failure is not None:
            # Also if the planner replaced every tensor, so that none leads back to the staged copy.
            raise StagingError(
                f"the staged copy cannot be used: {fence.failure}",
                rank=self.rank,
                phase="stage",
                path=str(self.path),
            )
        engine = default_engine()
        prepared = self._prepare(plan, planner)
        visit = prepared.target.visit
        try:
            report = self._write(prepared, engine)
            prepared = session.as_written(prepared, report)
            results = session.write_results(prepared, report)
            visit.hand_over()
        except BaseException:
            visit.end(committed=False)
            raise
        finally:
            prepared.target.progress.end()
        self._receipts = report.receipts if isinstance(report, RankWritten) else ()
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result(session.WrittenItems(results, session.written_files(prepared, report)))
        return future

    @staticmethod
    def _write(prepared: session.PreparedSave, engine: Engine) -> RankReport:
        """Write a staged copy in the background; write other tensors directly."""
        staged = take_over(prepared, engine)
        if staged is None:
            return write_directly.write_now(prepared, engine)
        written = write.write_in_background(staged, prepared.target, engine)
        return write.wait_for(written, prepared.target, engine, rank=prepared.rank)

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
        written = [getattr(of_rank, "written", None) for of_rank in results]
        is_published = is_committed = False
        with preemption.deferred(then_end=False), loss_is_told(str(self.path)):
            self._require_files()
            try:
                self.require_written_here(written)
                publication = publication_of_results(metadata, results)
                finished = finish_metadata(publication, written, self.storage_meta())
                is_published = True  # assumed until an error rules it out
                self.publish(publication, metadata, finished)
                is_committed = True
            except Exception as error:
                if not is_published or is_unpublished(error):
                    if self._visit is not None:
                        self._visit.is_removed = True
                    finalize.remove_unpublished(self._metadata_path(), results, written)
                raise
            finally:
                self.end_save(committed=is_committed)

    def _require_files(self) -> None:
        if self._visit is not None and self._visit.is_removed:
            raise SaveError(
                "the files of this save were removed: its commit failed, or a later save to the"
                " directory replaced it",
                rank=self.rank,
                phase="commit",
                path=str(self.path),
                hint="save again, with a new writer",
            )

    def require_written_here(self, written: Sequence[RankFiles | None]) -> None:
        """Refuse to commit files in another directory. Coordinator only.

        Raises:
            RankMismatchError: A rank wrote to another directory than this rank.
        """
        directories = [None if each is None else each.directory for each in written]

        def is_same_in_time(one: str, other: str) -> bool:
            return in_time(
                lambda: is_same(one, other),
                timeout_s=default_engine().options.save_timeout_s,
                doing="comparing the directories that ranks wrote to",
                phase="collect",
                path=one,
                rank=self.rank,
            )

        require_one_directory(directories, str(self.path), rank=self.rank, is_same=is_same_in_time)

    def publish(
        self, publication: Publication, metadata: Metadata, finished: FinishedMetadata
    ) -> None:
        """Publish finished metadata. Coordinator only.

        Args:
            publication: The publication.
            metadata: The object that it was made from.
            finished: The content of the metadata file.

        Raises:
            WriteError: The metadata could not be published.
            SaveTimeoutError: Another save was committing to the same directory all the time.
        """
        fresh = metadata.storage_data is None
        mine = self._receipts[:1] if self._stream is None else ()
        with self.timeline.measure("publish"):
            finalize.publish(
                self._metadata_path(),
                publication,
                finished,
                default_engine(),
                sync=bool(self.sync_files),
                ahead=None if self._save is None else self._save.ahead,
                written_here=next((os.path.join(self.path, each.name) for each in mine), None),
            )
        if fresh:
            metadata.version = _torch.DCP_VERSION
            metadata.storage_data = publication.storage_data
            metadata.storage_meta = finished.storage_meta

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
        timeline = self._staging_timeline = Timeline()
        self._is_staged = True
        staged = stage_for_later(
            state_dict,
            default_engine(),
            timeline,
            overlapped=self._staging == "overlapped",
            rank=_rank_among_peers(),
            path=str(self.path),
        )
        self._fence = staged.fence
        return staged.copied

    def __getstate__(self) -> dict[str, Any]:
        """The state without the objects that belong to this process."""
        return {
            **self.__dict__,
            "_save": None,
            "_visit": None,
            "_fence": None,
        }

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when tensors may be changed; at once without overlapped staging.

        A failed snapshot raises no error here; finalising raises it, on every rank.

        Raises:
            SaveTimeoutError: The copy is not complete after ``timeout`` seconds.
        """
        if self._fence is not None:
            self._fence.wait(timeout)
        if self._save is not None:
            self._save.wait_staged(timeout)

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
        self._save = RankSave(self._prepare(plan, planner))

    def prepare_known(
        self,
        known: session.KnownSave,
        sources: list[torch.Tensor | bytes],
        expected: Publication | None = None,
    ) -> None:
        """As :meth:`prepare_write_data`, for a structure that was saved before.

        Args:
            known: The reusable part of that save.
            sources: One per item of the plan: the live tensor, or the bytes.
            expected: On the coordinator, the publication if file names are those of the last save.
        """
        engine = default_engine()
        target = self._target(known.share.plan, engine)
        with self._over_if_it_fails(target):
            save = RankSave(session.prepare_known(known, sources, target=target, engine=engine))
            if expected is not None:
                save.ahead = self._written_ahead(expected, save.prepared)
        self._save = save

    def _written_ahead(
        self, expected: Publication, prepared: session.PreparedSave
    ) -> WrittenAhead | None:
        """Metadata to write ahead; ``None`` if it is short or this rank's files are unexpected."""
        is_expected = prepared.known is not None and expected.files.issuperset(prepared.files)
        if not (is_expected and is_worth_it(expected)):
            return None
        name = os.path.basename(self._metadata_path())
        return WrittenAhead(str(self.path), name, expected, sync=bool(self.sync_files))

    def learn(self, state_dict: dict[str, Any], flat: dict[str, Any]) -> session.KnownSave | None:
        """The reusable part of the prepared save, before staging; ``None`` if nothing is safe.

        Args:
            state_dict: The planned state dict.
            flat: The same, flattened by the planner.
        """
        if self._save is None:
            return None
        prepared = self._save.prepared
        structure = learn(state_dict, flat, prepared.planned)
        return None if structure is None else session.known(prepared, structure, default_engine())

    def get_save_function_and_args(self) -> tuple[Any, Any, list[Any]]:
        """``(save_fn, preload_fn, [rank, None, results])`` to schedule, or ``(None, None, [])``."""
        if self._save is None or not self._save.prepared.plan.items:
            return None, None, []
        save = self._save
        return save, save.stage, [save.prepared.rank, None, queue.SimpleQueue()]

    def retrieve_write_results(self) -> list[WriteResult] | _torch.WrappedException:
        """This rank's results, or its failure in DCP's wrapped form. Waits for the report."""
        return self._retrieve(
            lambda save: session.WrittenItems(save.results(), save.written_files),
            if_nothing=session.WrittenItems(written=self.written_files),
        )

    def retrieve_failure(self) -> _torch.WrappedException | None:
        """As :meth:`retrieve_write_results`, but the failure only; ``None`` after success."""
        return self._retrieve(RankSave.require_written, if_nothing=None)

    def _retrieve(
        self, ask: Callable[[RankSave], T], *, if_nothing: T
    ) -> T | _torch.WrappedException:
        try:
            if self._failure is not None:
                raise self._failure
            if self._save is None or not self._save.prepared.plan.items:
                return if_nothing
            answer = ask(self._save)
        except Exception as error:  # finalising reports it to every rank
            return _torch.wrap_exception(error)
        self._receipts = self._save.receipts
        return answer

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names of this rank's files below the checkpoint directory, once results are retrieved."""
        return () if self._save is None else self._save.prepared.files

    @property
    def written_files(self) -> RankFiles:
        """The files that this rank wrote, once its results are retrieved."""
        if self._save is None:
            return RankFiles(directory=str(self.path), files=())
        return self._save.written_files

    @property
    def known_results(self) -> str | None:
        """Token of a recognised structure's results, file names aside; else ``None``."""
        if self._save is None or self._save.prepared.known is None:
            return None
        return self._save.prepared.known.token

    def discard(self) -> None:
        """Remove this rank's files of a save that will not be committed."""
        if self._save is not None:
            self._save.discard()

    def require_free(self) -> None:
        """Refuse a second save until the results of the first are collected.

        Raises:
            OptionError: A split save of this writer is not finalised yet.
        """
        if self._save is not None and self._save.pending:
            raise OptionError(
                "this writer's last save is not finalised yet",
                path=str(self.path),
                hint="make a new writer for every checkpoint; writers share memory and processes",
            )

    @property
    def stats(self) -> SaveStats | None:
        """Timings of this writer's save on this rank; ``None`` before its files are written.

        Complete once the save is finalised.
        """
        if not self._receipts:
            return None
        return self.timeline.stats(
            rank=self.rank or 0,
            path=str(self.path),
            receipts=self._receipts,
            slowest_rank=self._slowest_rank,
        )

    @property
    def took_s(self) -> float:
        """Seconds from the start of planning until this rank's files were durable."""
        return self.timeline.took_s(self._receipts)

    def note_slowest(self, rank: int | None) -> None:
        """Note which rank's files were durable last."""
        self._slowest_rank = rank

    def end_save(self, *, committed: bool) -> None:
        """End this writer's split save."""
        if self._save is not None:
            self._save.end(committed=committed)

    def fail_later(self, error: NostallError) -> None:
        """Record that planning failed on this rank; reported when the save is finalised."""
        self._failure = error
        self._save = None

    # --------------------------------------------------------------------------------------------

    def _prepare(self, plan: SavePlan, planner: SavePlanner) -> session.PreparedSave:
        engine = default_engine()
        target = self._target(plan, engine)
        with self._over_if_it_fails(target):
            return session.prepare(plan, planner, rank=self.rank or 0, target=target, engine=engine)

    @staticmethod
    @contextmanager
    def _over_if_it_fails(target: session.SaveTarget) -> Iterator[None]:
        """End the save's progress if it cannot be prepared."""
        try:
            yield
        except BaseException:
            target.progress.end()
            raise

    def _target(self, plan: SavePlan, engine: Engine) -> session.SaveTarget:
        job, directory = uuid.uuid4().hex, str(self.path)
        prefix = getattr(plan.storage_data, "prefix", None) or f"__{self.rank or 0}_"
        # A reader of the previous checkpoint's metadata must not find new files under its names.
        replaces = getattr(plan.storage_data, "beside", None) == directory or self._may_replace()
        progress = engine.under_way.begin(job, path=directory, rank=self.rank or 0)
        self._visit = Visit(directory, progress.created)
        return session.SaveTarget(
            job=job,
            directory=directory,
            naming=FileNaming(
                prefix=prefix,
                suffix=f"-{job[:8]}" if replaces else "",
                separation_hint=self._separation_hint,
            ),
            options=self._options(),
            stream=self._stream,
            visit=self._visit,
            transform_descriptors=self._transform_descriptors(),
            timeline=self.timeline,
            progress=progress,
            timeout_s=engine.options.save_timeout_s,
            faults=engine.faults,
        )

    def _may_replace(self) -> bool:
        """Whether the directory may contain a checkpoint."""
        return in_time(
            lambda: any(map(may_be_there, self._metadata_paths())),
            timeout_s=default_engine().options.save_timeout_s,
            doing="looking for an existing checkpoint",
            phase="plan",
            path=str(self.path),
            rank=self.rank,
        )

    def _options(self) -> WriterOptions:
        return WriterOptions(
            thread_count=self.thread_count,
            file_per_item=not require_switch("single_file_per_rank", self.single_file_per_rank),
            sync_files=self.sync_files,
            overwrite=self.overwrite,
            separation_hint=self._separation_hint,
            processes=self._processes,
            staging=self._staging,
        )

    def _metadata_path(self) -> str:
        together, alone = self._metadata_paths()
        return together if self.use_collectives else alone

    def _metadata_paths(self) -> tuple[str, str]:
        """For a checkpoint that all ranks save together, and one that this rank saves alone."""
        names = (_torch.METADATA_NAME, f"__{self.rank}{_torch.METADATA_NAME}")
        together, alone = (os.path.join(self.path, name) for name in names)
        return together, alone

    def _transform_descriptors(self) -> tuple[str, ...] | None:
        extensions = reversed(self.transforms.extensions)
        return tuple(extension.get_descriptor() for extension in extensions) or None
