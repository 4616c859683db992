"""The saves of a manager that are under way: a queue, and the handle of each of its requests."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from nostall._manager.retention import Activity
from nostall._model.interrupts import uninterrupted
from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.errors import OptionError, SaveAbortedError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nostall.stats import SaveStats

if TYPE_CHECKING:
    from nostall.tier import Promotion

_log = logging.getLogger("nostall")


class SaveHandle:
    """One save: committed, failed, or under way.

    A save is committed by the manager's methods, on the thread that calls them; so is the state of
    its handle.
    """

    def __init__(
        self, step: int, writer: FileSystemWriterAsync, path: str, wait: Callable[[Any], object]
    ) -> None:
        self.step = step
        self.path = path
        """The directory of the step."""
        self._writer = writer
        self._wait = wait
        self._is_committed = False
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "under way" if not self.done else "failed" if self._error else "committed"
        return f"<SaveHandle step={self.step} {state}>"

    @property
    def done(self) -> bool:
        """Whether the save is committed or has failed; the same on all ranks.

        It changes only in calls of the manager and in :meth:`result`.
        """
        return self._error is not None or self._is_committed

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when tensors may be changed; at once without overlapped staging.

        Raises:
            SaveTimeoutError: The copy is not complete after ``timeout`` seconds.
        """
        self._writer.wait_staged(timeout)

    def result(self, timeout: float | None = None) -> str:
        """Wait until the save is committed; returns the directory of the step.

        Collective until the save is done: call it on every rank. Earlier and later saves of the
        manager are waited for, too.

        Args:
            timeout: As for :meth:`nostall.CheckpointManager.wait`.

        Raises:
            CheckpointException: This save failed on some rank; or, if it was not done before the
                call, another save.
            SaveTimeoutError: Some rank was not done within ``timeout`` seconds.
        """
        if not self.done:
            self._wait(timeout)
        if self._error is not None:
            raise self._error
        return self.path

    @property
    def promotions(self) -> tuple[Promotion, ...]:
        """Promotions of the checkpoint from a local tier to the step's directory, once committed.

        On the coordinator; empty on other ranks, and if the writer has no ``local_staging_dir``.
        """
        return () if self._writer.promotion is None else (self._writer.promotion,)

    @property
    def stats(self) -> SaveStats | None:
        """Timings on this rank.

        ``None`` before its files are written; complete once the save is done.
        """
        return self._writer.stats


class FailingPlanner(DefaultSavePlanner):
    """Raises an error of this rank where all ranks learn of it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def set_up_planner(self, *_args: Any, **_kwargs: Any) -> None:
        raise self._error


class PendingSaves:
    """Saves that are scheduled and neither committed nor failed. All methods are collective."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        on_commit: Callable[[], object],
        on_error: Literal["raise", "warn"],
    ) -> None:
        if on_error not in ("raise", "warn"):
            raise OptionError(
                f"on_error={on_error!r:.200} is not possible", hint='use "raise" or "warn"'
            )
        self._group = process_group
        self._queue = AsyncCallsQueue(process_group=process_group)
        self._cache = CheckpointMetadataCache()
        self._requests: deque[SaveHandle] = deque()
        """The save of each request, in order."""
        self._own: list[int] = []
        """The steps that were committed, in this order."""
        self._on_commit = on_commit
        self._on_error = on_error

    @property
    def activity(self) -> Activity:
        """The saves in progress; callable from any thread."""
        in_flight = frozenset(handle.step for handle in tuple(self._requests))
        return Activity(in_flight, tuple(self._own))

    def start(
        self,
        step: int,
        writer: FileSystemWriterAsync,
        path: str,
        items: dict[str, Any],
        planner: DefaultSavePlanner,
    ) -> SaveHandle:
        """Plan and start the save of a step. Ctrl-C interrupts it when the save is under way."""
        handle = SaveHandle(step, writer, path, self.wait)
        with self.reported(), uninterrupted():
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
                finalize: list[Callable[[], Any]] = [
                    partial(save_state_dict_async_finalize, *planned),
                    partial(self._note_committed, handle),
                ]
                self._requests.append(handle)
                request = AsyncRequest(save_fn, arguments, finalize, preload_fn=preload_fn)
                self._queue.schedule_async_request(request)
            except BaseException as error:  # passed on
                if handle in self._requests and len(self._requests) > self._queue.pending:
                    self._requests.remove(handle)  # the queue does not have it
                if handle not in self._requests:
                    handle._error = error
                raise
        return handle

    def _note_committed(self, handle: SaveHandle) -> None:
        self._own.append(handle.step)  # first, as another thread may remove what is in neither
        self._requests.remove(handle)
        handle._is_committed = True
        self._on_commit()

    def poll(self) -> None:
        """Commit what all ranks have written."""
        with self.reported(), self._settled():
            self._queue.poll()

    def wait(self, timeout: float | None) -> None:
        """Wait until nothing is scheduled; the first error is raised after all saves."""
        first: CheckpointException | None = None
        while before := self._queue.pending:
            try:
                with self.reported(), self._settled():
                    self._queue.wait(timeout)
            except CheckpointException as error:
                if self._queue.pending == before:
                    raise
                first = first or error
        if first is not None:
            raise first

    @contextmanager
    def reported(self) -> Iterator[None]:
        """A block that raises the error of a failed save, or logs it, as the caller has chosen."""
        try:
            yield
        except CheckpointException as error:
            if self._on_error == "raise":
                raise
            _log.warning("a save has failed; training goes on: %s", error)

    def reuse(self, metadata: Any) -> None:
        """Let the next save reuse the plans of a step that was restored."""
        self._cache.set_cached_global_metadata(metadata)

    def finish_after(self, kind: Any, error: BaseException, trace: Any) -> None:
        """Commit what can be committed after an exception, as the queue does; abort the rest."""
        with self._settled():
            self._queue.__exit__(kind, error, trace)

    def close(self) -> None:
        """Abort what is still scheduled, and end the queue's processes. Idempotent."""
        with self._settled():
            self._queue._give_up()

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
            while len(self._requests) > self._queue.pending:
                self._requests.popleft()._error = failure
