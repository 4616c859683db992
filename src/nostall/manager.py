"""A manager of the checkpoints of one training job: when to save, what to keep, where to resume.

One job saves below one directory at a time; any number of processes may read. All methods that say
"Collective" are called on every rank of the group, in the same order; rank 0 decides for all, and
its errors reach all.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import Self

from nostall._engine import default_engine
from nostall._manager.contents import PerRank, Restoration, Restored, capture, require_state
from nostall._manager.policies import (
    Better,
    KeepBest,
    KeepEvery,
    KeepLatest,
    Policy,
    StepRecord,
    better_of,
    policies_of,
)
from nostall._manager.retention import Retention
from nostall._manager.steps import FailingPlanner, RootLock, SaveHandle, StepDirectories, step_of
from nostall._model.threads import uninterrupted
from nostall._queue.ending import together
from nostall._ranks.failures import sendable
from nostall._ranks.group import Coordination, coordination_for, require_members, require_numpy
from nostall._storage.locations import place_of, require_directory, require_possible
from nostall._torch import wrap_exception
from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.errors import NostallError, OptionError, SaveAbortedError, SaveTimeoutError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import require_integer, require_on_error
from nostall.prefetching import stop_prefetching
from nostall.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

__all__ = [
    "CheckpointManager",
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "PerRank",
    "Policy",
    "Restored",
    "SaveHandle",
    "StepRecord",
]

_log = logging.getLogger("nostall")
_REMOVAL_S = 30.0
_MANY = 10_000
"""Plain values in a state: planning 100,000 of them takes seconds of the training thread."""

T = TypeVar("T")


class CheckpointManager:
    """Saves, lists, restores and removes the steps of a training job.

    As a context manager it commits pending saves when the block ends; after an exception as
    :class:`~nostall.core.AsyncCallsQueue` does.

    Methods that look at storage raise ``ReadError`` if it refuses to answer, and
    ``SaveTimeoutError`` if it does not within ``EngineOptions.save_timeout_s``. Collective ones
    raise a ``CheckpointException`` on every rank if an earlier save has failed on some rank, unless
    ``on_error`` is ``"warn"``; its step has no checkpoint then, or still the one that it had.

    Args:
        root: Directory of the steps' directories, ``step-000000100`` and so on; or an address in an
            object store, where nothing keeps a second job from saving.
        keep: A policy, or several: a step stays if any of them keeps it. All steps stay without.
        save_every: Steps, or a time, between two saves, for :meth:`should_save`.
        metrics: Which value of a metric is better, ``"min"`` or ``"max"``, for :meth:`best_step`;
            in addition to those of ``KeepBest`` policies.
        process_group: The ranks that save together; the default group if ``None``.
        writer: Makes the writer of a directory, such as
            ``partial(FileSystemWriterAsync, thread_count=4)``.
        alone: Whether this process is a job of its own, with its own root, although a launcher has
            set ``RANK`` and ``WORLD_SIZE``. Without effect once a process group is initialised;
            a group of one rank as ``process_group`` says the same then.
        on_error: ``"raise"``; or ``"warn"``, by which the error of a failed save is a warning in
            the log. A handle's :meth:`SaveHandle.result` raises it in both cases.
        on_commit: Called on rank 0 with the directory and the number of each step that this manager
            has committed (in ``local_staging_dir`` first, if there is one), by the method that
            learns of it. It must not communicate with other ranks; an exception is logged.
        storage_options: As of :class:`nostall.FileSystemWriterAsync`, for all of the manager.

    Raises:
        OptionError: An argument is not possible; or ``root`` is a step, or is, or is below, a
            regular file.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: Policy | Iterable[Policy] | None = None,
        save_every: int | timedelta | None = None,
        metrics: Mapping[str, Better] | None = None,
        process_group: dist.ProcessGroup | None = None,
        writer: Callable[[str], FileSystemWriterAsync] = FileSystemWriterAsync,
        alone: bool = False,
        on_error: Literal["raise", "warn"] = "raise",
        on_commit: Callable[[str, int], object] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        require_members(process_group, 0)
        if not callable(writer):
            raise OptionError(
                f"writer={writer!r:.200} cannot be called",
                hint="pass what makes the writer of a directory, such as"
                " partial(FileSystemWriterAsync, thread_count=4)",
            )
        if not (on_commit is None or callable(on_commit)):
            raise OptionError(
                f"on_commit={on_commit!r:.200} cannot be called",
                hint="pass a function of the directory and the step",
            )
        require_on_error(on_error)
        policies = policies_of(keep)
        self._save_every = _interval_of(save_every)
        self._better = better_of(policies, metrics or {})
        require_possible(root)
        self._steps = StepDirectories(place_of(os.path.expanduser(root), storage_options))
        self._steps.look(self._require_root_of_steps)
        self._lock = RootLock(self._steps.root)
        self._group = process_group
        self._is_alone = alone
        self._is_closed = False
        self._make_writer = writer
        self._on_error = on_error
        self._on_commit = on_commit
        self._queue = AsyncCallsQueue(process_group=process_group, on_error="raise")
        self._cache = CheckpointMetadataCache()
        self._handles: deque[SaveHandle] = deque()
        """The save of each request, in order."""
        self._retention = Retention(self._steps, policies, self._handles)
        self._highest: int | None = None
        """The highest step that has a directory, as all ranks know; ``None`` before the lock."""
        self._has_warned = False
        """Whether the log says that a state has many plain values."""
        self._saved_at_s = time.monotonic()
        """When the last save began, or the manager was made; for a time as ``save_every``."""

    def _require_root_of_steps(self) -> None:
        require_directory(self._steps.root)
        parent, name = os.path.split(self._steps.root)
        step = step_of(name)
        if step is not None and StepDirectories(parent).committed_at_s(step) is not None:
            raise OptionError(
                "the root is a step itself, as its name and its checkpoint say",
                path=self._steps.root,
                hint="pass the directory that holds the steps, and the step to restore()",
            )

    # --- saving -------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether to save this step. If not, commits the saves that are done, as :meth:`poll` does.

        Collective: call it after every step. With a time as ``save_every``, rank 0's clock decides.

        Raises:
            OptionError: The manager has no ``save_every``, or cannot save, as in :meth:`save`.
        """
        coordination = self._ranks(to_save=True)
        if self._save_every is None:
            raise OptionError("save_every was not given", hint="pass it, or decide in the loop")
        self._take_root(coordination)
        if isinstance(self._save_every, int):
            is_due = step > 0 and step % self._save_every == 0
        else:
            is_time = time.monotonic() - self._saved_at_s >= self._save_every.total_seconds()
            is_due = coordination.maximum([int(is_time and coordination.is_coordinator)]) == [1]
        if not is_due:  # an error here would keep the caller from this save, which polls itself
            self.poll()
        return is_due

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        extra: object = None,
    ) -> SaveHandle:
        """Save a step in the background. Collective.

        When it returns, everything may be changed, tensors as ``staging`` of the writer says. A
        step that is committed already is replaced at one instant.

        Args:
            step: The number of finished steps, for example; 0 or more.
            state: By name: objects with ``state_dict`` and ``load_state_dict``, tensors (also
                distributed ones), plain values, nested dictionaries and lists of these.
            metrics: Numbers by which steps are compared; those of rank 0 count.
            extra: Anything that can be pickled; each rank has its own.

        Raises:
            CheckpointException: A rank could not plan this save; with several ranks also if a
                state or metrics are not possible. Or an earlier save failed; this one has begun.
            OptionError: Another argument is not possible, or one of these in a single process; the
                manager is closed; a process group, or NumPy for it, is missing; or another process
                of this machine saves below the root.
        """
        coordination = self._ranks(to_save=True)
        step = require_integer("step", step, at_least=0)
        if coordination.world_size == 1:  # several ranks learn of an error when they plan
            _validated(state, metrics or {})
        failed: CheckpointException | None = None
        try:
            self.poll()
        except CheckpointException as error:  # of an earlier save, which costs this one nothing
            failed = error
        highest = self._take_root(coordination)
        # Other ranks may write as soon as they enter a save. So one of a step that may have a
        # directory waits until rank 0 removes nothing; the others need no communication.
        if step <= highest:
            agreed(coordination, self._retention.wait)
        self._highest = max(highest, step)
        path = self._steps.path(step)
        writer = self._make_writer(path)
        items: dict[str, Any] = {}
        planner: FailingPlanner | None = None
        try:
            numbers = _validated(state, metrics or {})
            items, plain = capture(state, step, numbers, extra, coordination.rank)
            if coordination.is_coordinator and plain.total() > _MANY and not self._has_warned:
                self._has_warned = True
                ((key, most),) = plain.most_common(1)
                _log.warning(
                    "the state has %d plain values, %d of them in %r. Each is saved as an item of"
                    " its own, which is slow. Pass them as extra, which restore() returns as"
                    " restored.extra; or put them into one list of plain values, or one"
                    " tensor",
                    *(plain.total(), most, key),
                )
        except Exception as error:  # also of users' objects
            planner = FailingPlanner(error)
        handle = SaveHandle(step, writer, path, self._wait)
        with self._reported(), uninterrupted(patience=2):  # Ctrl-C has to wait until it is planned
            self._handles.append(handle)
            try:
                planned = save_state_dict_async_plan(
                    items,
                    writer,
                    self._group,
                    planner=planner,
                    enable_cache=True,
                    metadata_cache=self._cache,
                )
                save_fn, preload_fn, arguments = writer.get_save_function_and_args()
                finalize_fns: list[Callable[[], Any]] = [
                    partial(save_state_dict_async_finalize, *planned),
                    partial(self._note_committed, handle),
                ]
                request = AsyncRequest(save_fn, arguments, finalize_fns, preload_fn=preload_fn)
                self._queue.schedule_async_request(request)
            except BaseException as error:  # passed on
                if len(self._handles) > self._queue.pending:  # the queue does not have it
                    self._handles.pop()._outcome = error
                raise
        self._saved_at_s = time.monotonic()
        if failed is not None:
            raise failed
        return handle

    def _note_committed(self, handle: SaveHandle) -> None:
        with uninterrupted(patience=2):
            # First, as the thread that removes steps may remove what is in neither.
            self._retention.own.append(handle.step)
            self._handles.remove(handle)
            handle._outcome = "committed"
            if not coordination_for(self._group).is_coordinator:
                return
            self._retention.begin()
        if self._on_commit is not None:
            promotion = handle._writer.promotion
            path = handle.path if promotion is None else promotion.local_path
            try:
                self._on_commit(path, handle.step)
            except Exception:  # the step is committed, and other ranks know of no error
                _log.exception("on_commit has failed, and the step is committed: path=%s", path)

    def _take_root(self, coordination: Coordination) -> int:
        """Lock the root, once, and remove what a crash has left; the highest step. Collective.

        Nobody should train until the first save to learn that another job has the root.
        """
        if self._highest is None:
            self._highest = agreed(coordination, self._begin)
        return self._highest

    def _begin(self) -> int:
        self._steps.look(self._lock.take)
        self._retention.begin(self._steps.remove_unfinished)
        self._retention.wait()
        return max(self._steps.look(self._steps.listed), default=-1)

    def discard_after(self, step: int) -> None:
        """Remove all steps above a committed one: after ``restore(state, step)``, those of the
        abandoned run, which a restart would resume from. Waits for pending saves. Collective.

        Raises:
            OptionError: ``step`` is not committed, or the manager cannot save, as in :meth:`save`.
            WriteError: Storage refused, or another process of this machine reads one of the steps.
        """
        coordination = self._ranks(to_save=True)
        step = require_integer("step", step, at_least=0)
        self._wait(None)
        self._take_root(coordination)
        agreed(coordination, self._retention.wait)
        agreed(coordination, partial(self._steps.look, partial(self._steps.remove_after, step)))

    # --- waiting ------------------------------------------------------------------------------

    def poll(self) -> None:
        """Commit the saves that all ranks have written, without waiting. Collective."""
        with self._reported(), self._settled():
            self._queue.poll()

    def all_committed(self) -> bool:
        """Whether no save is in progress any more, after a :meth:`poll`; the same on all ranks.

        A failed save raises its error here, or is logged with ``on_error="warn"``. Collective.
        """
        self.poll()
        return not self._handles

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all saves are committed or have failed. Collective.

        Then it waits up to 30 s until rank 0 has removed what policies do not keep: after it, all
        ranks see the same steps.

        Args:
            timeout: Longest wait for this rank's files, in seconds; ``None`` for
                ``EngineOptions.save_timeout_s``.

        Raises:
            CheckpointException: The first error of a save, after all are done; others are logged.
            SaveTimeoutError: Some rank was not done within ``timeout`` seconds; saves go on.
        """
        self._wait(timeout)
        if self._highest is not None and not self._is_closed:
            agreed(coordination_for(self._group), self._await_removal)

    def _wait(self, timeout: float | None) -> None:
        """Wait until nothing is scheduled; raise the first error after that, and log the others."""
        first: CheckpointException | None = None
        while before := self._queue.pending:
            try:
                with self._reported(), self._settled():
                    self._queue.wait(timeout)
            except CheckpointException as error:
                if self._queue.pending == before:
                    raise
                if first is None:
                    first = error
                else:
                    _log.error("another save has failed, too: %s", error)
        if first is not None:
            raise first

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """A block that raises the error of a failed save, or logs it, as the caller has chosen."""
        try:
            yield
        except CheckpointException as error:
            if self._on_error == "raise":
                raise
            _log.warning("a save has failed; training goes on: %s", error)

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """After the block, fail the saves whose requests the queue no longer has."""
        failure: BaseException = SaveAbortedError("the save was aborted", phase="write")
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            while len(self._handles) > self._queue.pending:
                self._handles.popleft()._outcome = failure

    def _await_removal(self) -> None:
        try:
            self._retention.wait(_REMOVAL_S)
        except SaveTimeoutError as error:
            _log.warning("%s", error)

    def close(self) -> None:
        """Wait for all saves, and up to 30 s for the removal of steps. Idempotent. Collective.

        The lock of the root is released, and snapshot memory that no save uses. The manager can
        still look at steps and restore them, but saves no more.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self.wait()
            else:  # commits what can be committed
                with self._settled():
                    self._queue.__exit__(kind, error, trace)
        finally:
            self._is_closed = True
            with self._settled():
                self._queue.close(abort=True)
            default_engine().arena.trim()
            self._await_removal()
            try:
                self._steps.look(self._lock.release)
            except NostallError as failure:  # the lock ends with the process; saves are committed
                _log.warning("the lock of the root was not released: %s", failure)

    # --- looking ------------------------------------------------------------------------------

    def path(self, step: int) -> str:
        """The directory of a step, whether it exists or not."""
        return self._steps.path(step)

    def all_steps(self) -> list[int]:
        """The committed steps in ascending order, as this rank sees them now."""
        return list(self._steps.look(self._steps.committed))

    def latest_step(self) -> int | None:
        """The highest committed step, as this rank sees it now; ``None`` without any."""
        return max(self.all_steps(), default=None)

    def best_step(self, metric: str | None = None) -> int | None:
        """The committed step with the best value of a metric; ``None`` if no step has it.

        Args:
            metric: Its name; may be left out if the manager knows of one only.

        Raises:
            OptionError: It is not known which value of this metric is better.
        """
        if metric is None and len(self._better) == 1:
            (metric,) = self._better
        if metric is None or metric not in self._better:
            raise OptionError(
                f"this manager was not told whether a high or a low metric={metric!r} is better"
                f"{f'; it knows {sorted(self._better)}' if self._better else ''}",
                path=self._steps.root,
                hint=f'pass metrics={{"{metric or "loss"}": "min"}}, or "max", to the manager',
            )
        records = self._steps.look(partial(self._retention.records, with_files=True))
        return next(iter(KeepBest(1, metric, self._better[metric]).keeps(records)), None)

    # --- restoring ----------------------------------------------------------------------------

    def restore(
        self,
        state: MutableMapping[str, Any],
        step: int | None = None,
        *,
        rng: bool = True,
        verify: bool = False,
    ) -> Restored | None:
        """Restore a step into a state, after waiting for pending saves. Collective.

        Objects get their state by ``load_state_dict``; tensors are loaded in place; other values
        are replaced in ``state``. Pickles in the checkpoint are executed, and reading its files has
        no deadline, as in ``dcp.load``. No process on the machine of rank 0 removes the step
        meanwhile. If one on another machine does, this is an error.

        Args:
            state: As for :meth:`save`; it may lack keys of the step. The state dict of an optimizer
                in place of the optimizer is refused, as the optimizer would keep its old values.
            step: The step; by default the highest one that can be restored. Higher ones are
                skipped with a warning.
            rng: Whether to set the random number generators of Python, NumPy, torch and the current
                accelerator to what they were on this rank.
            verify: Whether rank 0 first compares every byte of the step with its checksum, as
                :func:`nostall.verify` does, while other ranks wait. Without it, a step counts as
                undamaged if its manifest and metadata are, and its files have their sizes.

        Returns:
            What was restored; ``None`` if there is no committed step to restore by default.

        Raises:
            ReadError: The step is not committed.
            UnknownMetadataError: ``step``, or one of several of which none can be restored, is not
                understood.
            DamagedCheckpointError: ``step`` is damaged, holds another step than its name says, or
                was saved by another program; or steps are committed, and this is true of all.
            CheckpointException: A rank could not read it, or its state does not fit the step.
            OptionError: The state of this rank does not fit the step: names or shapes differ, or an
                object refuses what was saved; then what comes before it in ``state``, and tensors,
                may hold values of the step. Or a process group, or NumPy for it, is missing.
        """
        require_state(state)
        step = None if step is None else require_integer("step", step, at_least=0)
        coordination = self._ranks()
        self._wait(None)
        with ExitStack() as hold:
            choose = partial(self._steps.choose, step, hold, deep=verify)
            about = agreed(coordination, choose)
            if about is None:
                return None
            with together(coordination):
                path = self._steps.path(about.step)
                restoration = Restoration(state, about, path, coordination)
            restoration.load(self._group)
            stop_prefetching()
            self._cache.set_cached_global_metadata(restoration.metadata)
        with together(coordination):
            return restoration.finish(rng=rng)

    def _ranks(self, *, to_save: bool = False) -> Coordination:
        """The ranks of the job, known by now; required not to be closed if it is ``to_save``."""
        if to_save and self._is_closed:
            raise OptionError(
                "the manager is closed",
                path=self._steps.root,
                hint="make a new CheckpointManager: another job may save below this root by now",
            )
        rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
        is_of_several = rank is not None and size.isdecimal() and int(size) > 1
        has_group = dist.is_available() and dist.is_initialized()
        if is_of_several and not (self._is_alone or has_group):
            # Each would take itself for the whole job, and remove the steps of the others.
            raise OptionError(
                f"this is RANK={rank} of WORLD_SIZE={size}, and no process group is initialised",
                path=self._steps.root,
                hint="call torch.distributed.init_process_group() first; or pass alone=True if each"
                " process has a root of its own",
            )
        return coordination_for(self._group)


def agreed(coordination: Coordination, decide: Callable[[], T]) -> T:
    """Return or raise on every rank what ``decide`` does on rank 0. Collective."""
    outcome: tuple[Any, BaseException | None] | None = None
    if coordination.is_coordinator:
        try:
            outcome = decide(), None
        except Exception as error:  # raised on every rank
            outcome = None, sendable(wrap_exception(error))[0]
    result, failure = coordination.broadcast(outcome)
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]  # of type T


def _validated(state: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics as Python numbers, once they, the state, and a later restore are possible."""
    require_numpy()  # before a job trains for what it could not restore
    require_state(state)
    try:
        # By float(), torch would warn of a loss that is part of a graph.
        return {
            str(name): float(value.item() if isinstance(value, torch.Tensor) else value)
            for name, value in dict[str, Any](metrics).items()
        }
    except (ArithmeticError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise OptionError(
            f"invalid metrics={metrics!r:.200}: {error}", hint='use {"loss": 0.5}', cause=error
        ) from None


def _interval_of(save_every: int | timedelta | None) -> int | timedelta | None:
    """Steps or a time between two saves; positive."""
    if save_every is None or (isinstance(save_every, timedelta) and save_every > timedelta(0)):
        return save_every
    try:
        return require_integer("save_every", save_every, at_least=1)
    except OptionError as error:
        error.hint = f"{error.hint}; or a time, such as datetime.timedelta(minutes=10)"
        raise
