"""The saves of a manager that are under way: a queue, and the handle of each of its requests."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from nostall._manager.handles import SaveHandle
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

_log = logging.getLogger("nostall")


class FailingPlanner(DefaultSavePlanner):
    """Raises an error of this rank where all ranks learn of it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def set_up_planner(self, *_args: Any, **_kwargs: Any) -> None:
        raise self._error


class PendingSaves:
    """Saves that are scheduled and neither committed nor failed.

    Args:
        process_group: The ranks that save together.
        on_commit: Called on every rank when all checkpoints of a step are committed.
        on_error: Whether the error of a failed save is raised, or logged.

    Raises:
        OptionError: ``on_error`` is neither.
    """

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
        self._requests: deque[SaveHandle] = deque()
        """The save of each request, in order; a step in parts has several requests."""
        self._on_commit = on_commit
        self._on_error = on_error
        self._own: frozenset[int] = frozenset()
        """Steps that were committed."""
        self.activity = Activity()
        """Replaced, never changed: another thread reads it."""

    def start(
        self,
        handle: SaveHandle,
        writers: Sequence[FileSystemWriterAsync],
        items: Sequence[dict[str, Any]],
        planner: Callable[[], DefaultSavePlanner],
        caches: Sequence[CheckpointMetadataCache],
    ) -> None:
        """Plan and start the checkpoints of a step. Collective.

        Ctrl-C interrupts it at the end, when the save is under way.

        Args:
            handle: That of the step; it fails if a checkpoint cannot be started.
            writers: One per checkpoint.
            items: The state dict of each checkpoint.
            planner: Makes the planner of a checkpoint.
            caches: What is known about earlier saves of each checkpoint.

        Raises:
            CheckpointException: A rank could not plan; raised on every rank.
        """
        with uninterrupted():
            try:
                for writer, part, cache in zip(writers, items, caches, strict=True):
                    self._schedule(handle, writer, part, planner(), cache)
            except BaseException as error:  # passed on
                if self._requests.count(handle) < len(writers):
                    handle.fail(error)
                raise

    def _schedule(
        self,
        handle: SaveHandle,
        writer: FileSystemWriterAsync,
        state_dict: dict[str, Any],
        planner: DefaultSavePlanner,
        cache: CheckpointMetadataCache,
    ) -> None:
        planned = save_state_dict_async_plan(
            state_dict,
            writer,
            self._group,
            planner=planner,
            enable_cache=True,
            metadata_cache=cache,
        )
        save_fn, preload_fn, arguments = writer.get_save_function_and_args()
        finalize: list[Callable[[], Any]] = [
            partial(save_state_dict_async_finalize, *planned),
            partial(self._note_committed, handle),
        ]
        self._requests.append(handle)
        self._note_activity(self.activity.last)
        try:
            self._queue.schedule_async_request(
                AsyncRequest(save_fn, arguments, finalize, preload_fn=preload_fn)
            )
        except BaseException:  # passed on
            if len(self._requests) > self._queue.pending:
                self._requests.pop()  # the queue does not have it
                self._note_activity(self.activity.last)
            raise

    def poll(self) -> None:
        """Commit what all ranks have written. Collective.

        Raises:
            CheckpointException: A save failed on some rank; raised on every rank.
        """
        with self.reported(), self._settled():
            self._queue.poll()

    def wait(self, timeout: float | None) -> None:
        """Wait until nothing is scheduled. Collective.

        Raises:
            CheckpointException: A save failed on some rank: the first error, after all saves.
            SaveTimeoutError: Some rank was not done within ``timeout`` seconds.
        """
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

    def finish_after(self, kind: Any, error: BaseException, trace: Any) -> None:
        """Commit what can be committed after an exception, as the queue does; abort the rest."""
        with self._settled():
            self._queue.__exit__(kind, error, trace)

    def close(self) -> None:
        """Abort what is still scheduled, and end the queue's processes. Idempotent."""
        with self._settled():
            self._queue._give_up()

    def _note_committed(self, handle: SaveHandle) -> None:
        self._requests.remove(handle)
        is_whole = handle.commit_part()
        if is_whole:
            self._own |= {handle.step}
        self._note_activity(handle.step if is_whole else self.activity.last)
        if is_whole:
            self._on_commit()

    def _note_activity(self, last: int | None) -> None:
        in_flight = frozenset(handle.step for handle in self._requests)
        self.activity = Activity(in_flight=in_flight, last=last, own=self._own)

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """After the block, fail the saves whose requests the queue no longer has."""
        try:
            yield
        except BaseException as error:
            self._fail_lost(error)
            raise
        self._fail_lost(SaveAbortedError("the save was aborted", phase="write"))

    def _fail_lost(self, error: BaseException) -> None:
        while len(self._requests) > self._queue.pending:
            self._requests.popleft().fail(error)
        self._note_activity(self.activity.last)
