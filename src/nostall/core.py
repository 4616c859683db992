"""Requests, callers and the queue: schedule saves in a training loop and finalise them in order.

A request is a function for the background, and functions that run in the trainer when it is done on
all ranks. nostall's own save functions go to the torch-free writer process; any other callable runs
in a spawned Python process.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from typing import Literal

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import Self

from nostall._engine import default_engine
from nostall._model.names import also_named
from nostall._model.threads import is_done, uninterrupted
from nostall._queue.callers import (
    ActiveCall,
    AsyncCaller,
    AsyncRequest,
    Call,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    asked_priority,
)
from nostall._queue.ending import (
    Asking,
    abort_all,
    abort_nvrx_checkpoint,
    aborted_by_another_thread,
    add_note,
    drain_on_sigterm,
    fail_late,
    finalize_call,
    finish_after,
    late,
    live_queues,
    look_at,
    scheduled,
    unfinished_queues,
)
from nostall._queue.sigterm import preemption
from nostall._ranks.agreement import View
from nostall._ranks.group import Coordination, coordination_for
from nostall._save.stager import warmup
from nostall.errors import OptionError, RankLostError, SaveTimeoutError
from nostall.options import EngineOptions, is_possible_wait, require_on_error

__all__ = [
    "ActiveCall",
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "PersistentAsyncCaller",
    "TemporalAsyncCaller",
    "abort_all",
    "abort_nvrx_checkpoint",
    "drain_on_sigterm",
]

_log = logging.getLogger("nostall")


class AsyncCallsQueue:
    """Schedules requests and finalises them in order, each once all ranks are done with it.

    As a context manager it finalises pending requests when the block ends. If the block raises,
    this takes at most ``EngineOptions.exit_timeout_s``, and with other ranks it happens only if all
    of them raise within five seconds. Requests that cannot be finalised are then aborted; a note on
    the exception says why.

    Args:
        persistent: Keep one Python process for callables that are not nostall's own, instead of
            one per call.
        is_daemon: Accepted for compatibility; workers never outlive the trainer.
        cpu_priority: Niceness of background processes, 0 to 19; at its default, that of
            ``EngineOptions``.
        io_priority: Their I/O scheduling class (Linux ``ionice``); ``None`` for that of
            ``EngineOptions``.
        sigterm_timeout: Seconds between SIGTERM and SIGKILL when a process is ended.
        cpu_shm_mode: Accepted for compatibility; snapshots are always in shared host memory.
        process_group: The ranks that schedule together; the default group if ``None``.
        on_error: ``"raise"``; or ``"warn"``, for jobs that would rather miss a checkpoint than end:
            log a request that failed on some rank, on rank 0, count it in :attr:`failures`, and
            continue with the next one. Errors before a request is scheduled, from planning with
            other ranks, are always raised. ``None`` for ``EngineOptions.on_error``.
    """

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
        *,
        process_group: dist.ProcessGroup | None = None,
        on_error: Literal["raise", "warn"] | None = None,
    ) -> None:
        if on_error is not None:
            require_on_error(on_error)
        # Values that would otherwise fail when a process is started.
        EngineOptions(cpu_priority=cpu_priority, io_priority=io_priority)
        if not sigterm_timeout > 0:
            raise OptionError(f"invalid sigterm_timeout={sigterm_timeout}", hint="use seconds > 0")
        kind = PersistentAsyncCaller if persistent else TemporalAsyncCaller
        self._is_persistent, self._is_in_use = persistent, False
        self._caller = kind(is_daemon, cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode)
        self._process_group = process_group
        self._on_error = on_error
        self.failures: int = 0
        """Number of failed requests that were not raised, with ``on_error="warn"``."""
        self._moved_s = 0.0
        """Clock reading when the queue's first request last changed."""
        self._asking = Asking()
        self._next_index = 0
        self._first_index = 0
        """Index of the first request since the queue was created or aborted, counted from the last
        time when indices started again; may differ by rank."""
        live_queues.add(self)

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        """Start this rank's writer process before the first save.

        :func:`nostall.warmup` also reserves memory.
        """
        default_engine().set_priority(asked_priority(cpu_priority), io_priority)
        warmup(timeout=sigterm_timeout)

    @classmethod
    def get_instances(cls) -> list[AsyncCallsQueue]:
        """The queues of this process."""
        return [queue for queue in live_queues if isinstance(queue, cls)]

    @property
    def async_calls(self) -> deque[ActiveCall]:
        """The requests that are scheduled and not finalised."""
        return deque(
            ActiveCall(call.request.call_idx, self._caller, call.request)
            for call in list(self._caller._calls)
        )

    @property
    def persistent_caller(self) -> AsyncCaller | None:
        """The caller, from the first request until :meth:`close`; ``None`` if not persistent."""
        return self._caller if self._is_persistent and self._is_in_use else None

    @also_named(request="async_request")
    def schedule_async_request(self, request: AsyncRequest) -> int:
        """Take the snapshot, start the request and return its index.

        Requests of other classes are taken by their fields, of which the first three are needed.
        The trainer may then change its tensors, with overlapped staging by an optimizer's step. A
        failure to take the snapshot is raised on every rank when the request is finalised.

        Raises:
            StagingError: A callable that is not nostall's own cannot be sent to another process.
            OptionError: ``request`` is not a request.
            SaveAbortedError: Another thread has aborted the queue meanwhile.
        """
        request = AsyncRequest.of(request)
        with preemption.deferred(), uninterrupted(patience=2):
            early = request.early_commit(self._process_group, after=self._caller._calls)
            index = self._next_index
            self._is_in_use = True
            with scheduled.one_more(coordination_for(self._process_group)):
                call = self._caller.begin(request._replace(is_frozen=True, call_idx=index))
                if call not in self._caller._calls:
                    raise aborted_by_another_thread(call)
                call.early = early
                self._next_index += 1
                unfinished_queues[self] = None
            return index

    def maybe_finalize_async_calls(
        self,
        blocking: bool = False,
        no_dist: bool = False,
        finalize_timeout: float | None = None,
    ) -> list[int]:
        """Finalise, in order, the requests that are done on all ranks, and return their indices.

        Collective unless ``no_dist``: one small reduction per request that is checked. Unless
        ``blocking``, its result is used by the next call, so that no rank waits for a later one.

        Args:
            blocking: Wait until all scheduled requests are done.
            no_dist: Check this rank only. Collective finalize functions still need all ranks.
            finalize_timeout: Longest wait for this rank's files, in seconds, if ``blocking``; late
                requests stay scheduled. With ``None`` they fail, after
                ``EngineOptions.save_timeout_s``.

        Raises:
            CheckpointException: A request failed on some rank; raised on every rank. Its finalize
                functions are not run, and later requests stay scheduled.
            RankMismatchError: Ranks have scheduled different numbers of requests.
            RankLostError: Another rank has ended.
            SaveTimeoutError: Other ranks did not poll within ``EngineOptions.save_timeout_s`` and
                a minute.
            SaveAbortedError: Another thread has aborted the queue; raised on this rank, with any
                ``on_error``. Requests scheduled after the abort stay scheduled.
        """
        until_s, keeps_late = (math.inf if blocking else None), False
        if blocking and finalize_timeout is not None:
            if not is_possible_wait(finalize_timeout):
                raise OptionError(
                    f"invalid timeout={finalize_timeout!r}",
                    hint="use seconds, or None for no limit",
                )
            until_s, keeps_late = time.monotonic() + finalize_timeout, True
        return self._finalize(
            until_s=until_s, waits=blocking, no_dist=no_dist, keeps_late=keeps_late
        )

    def _finalize(
        self,
        *,
        until_s: float | None,
        waits: bool = True,
        now: bool = False,
        no_dist: bool = False,
        keeps_late: bool = False,
    ) -> list[int]:
        """Finalise requests; see :meth:`maybe_finalize_async_calls`.

        Args:
            until_s: Clock reading until which files are waited for. ``None`` to wait for none.
            waits: Whether to wait for the answers of other ranks, and for an early commit that has
                begun.
            now: Whether to wait for the answers of other ranks, but not for that commit.
            no_dist: Check this rank only.
            keeps_late: Whether a request that is late stays scheduled. If not, it fails; so does
                one that takes longer than ``save_timeout_s``.
        """
        finalized: list[int] = []
        coordination = coordination_for(self._process_group)
        timeout_s = default_engine().options.save_timeout_s
        if until_s is not None and (keeps_late or until_s < math.inf):
            timeout_s = max(0.0, until_s - time.monotonic())
        with preemption.deferred():
            while calls := self._caller._calls:  # an abort by another thread replaces the deque
                call = calls[0]
                if until_s is not None:
                    left_s = min(timeout_s, max(0.0, until_s - time.monotonic()))
                    if not is_done(call.outcome, left_s) and not keeps_late:
                        fail_late(call, timeout_s)
                else:  # a loop that only polls never waits for a request
                    waited_s = time.monotonic() - max(call.begun_s, self._moved_s)
                    if waited_s > timeout_s and not is_done(call.outcome):
                        fail_late(call, timeout_s)
                # Before a collective: an aborted rank joins none.
                if call not in self._caller._calls:
                    raise aborted_by_another_thread(call)
                mine = look_at(call, self._first_index, self._next_index - 1, waits=waits)
                agreed: View | None = mine._replace(committing=False, committed=0)
                if not no_dist:
                    # All ranks have finalised a request in this call, so none is late.
                    agreed = self._asking.view_of(
                        call,
                        mine,
                        coordination,
                        now=waits or now or bool(finalized),
                        timeout_s=timeout_s,
                    )
                if agreed is None:
                    break
                if agreed.hurry and not waits:  # a process is to end: all requests are waited for
                    until_s, waits = math.inf, True
                    if not agreed.is_done:
                        continue
                if not agreed.is_done:
                    break
                with uninterrupted(patience=2):
                    if self._finalize_one(call, agreed, coordination, no_dist=no_dist):
                        finalized.append(call.request.call_idx)
        return finalized

    def _finalize_one(
        self, call: Call, agreed: View, coordination: Coordination, *, no_dist: bool
    ) -> bool:
        """Take the first request from the queue and finalise it; false if its error is only logged.

        ``SaveAbortedError`` if another thread has aborted it.
        """
        is_ours = self._caller.take_over(call)
        self._moved_s = time.monotonic()
        if not self._caller._calls:
            unfinished_queues.pop(self, None)
        if not is_ours:
            raise aborted_by_another_thread(call)
        try:
            finalize_call(call, coordination, agreed, no_dist=no_dist)
        except (RankLostError, SaveTimeoutError):  # the ranks cannot continue together
            raise
        except (Exception, CheckpointException) as error:  # on every rank
            if (self._on_error or default_engine().options.on_error) == "raise":
                raise
            self.failures += 1
            level = logging.WARNING if coordination.is_coordinator else logging.DEBUG
            _log.log(level, "request %d has failed: %s", call.request.call_idx, error)
            return False
        return True

    def poll(self) -> list[int]:
        """Finalise requests that are done on all ranks, without waiting. Collective."""
        return self.maybe_finalize_async_calls(blocking=False)

    def wait(self, timeout: float | None = None) -> list[int]:
        """Wait until all scheduled requests are done, and finalise them. Collective.

        Args:
            timeout: Longest wait for this rank's files, in seconds; ``None`` for
                ``EngineOptions.save_timeout_s``. If another rank calls this a minute after that, or
                later, the wait fails, and the group is no longer usable.

        Raises:
            SaveTimeoutError: Some rank was not done with a request within ``timeout`` seconds;
                raised on every rank. That request and later ones stay scheduled.
            CheckpointException: A request failed on some rank.
            SaveAbortedError: Another thread has aborted the queue.
        """
        return self._wait(timeout, hint="wait again, or close(abort=True)")

    def _wait(self, timeout: float | None, *, hint: str) -> list[int]:
        """Wait for all requests; ``hint`` is that of the timeout error."""
        finalized = self.maybe_finalize_async_calls(blocking=True, finalize_timeout=timeout)
        if timeout is not None and (calls := list(self._caller._calls)):
            raise late(calls, timeout, hint=hint)
        return finalized

    @property
    def pending(self) -> int:
        """Number of requests that are scheduled and not finalised."""
        return len(self._caller._calls)

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks take part in finalising."""
        return coordination_for(self._process_group).world_size > 1

    def get_num_unfinalized_calls(self) -> int:
        """Number of requests that are scheduled and not finalised."""
        return self.pending

    def close(self, abort: bool = False, *, timeout: float | None = None) -> None:
        """Finalise all scheduled requests, or abort them; then end worker processes. Idempotent.

        Without ``abort`` this is collective while requests are pending. An aborted request is never
        finalised; a save that all ranks have written may be committed nevertheless. The queue can
        be used again. Indices start at 0 again, except after an abort, so that no index of an
        aborted request is used twice.

        Args:
            abort: Abort all requests, without waiting.
            timeout: Longest wait in seconds, as with :meth:`wait`; all requests are then aborted.
                ``None`` for ``save_timeout_s`` for each request.

        Raises:
            SaveTimeoutError: Some rank was not done within ``timeout`` seconds.
            CheckpointException: A request failed on some rank; later requests are aborted.
        """
        self._close(abort=abort, timeout=timeout)
        if not abort:  # the differences, which ranks compare, stay
            self._first_index -= self._next_index
            self._next_index = 0

    def _close(self, *, abort: bool, timeout: float | None = None) -> None:
        with uninterrupted():
            try:
                if not abort:
                    self._wait(timeout, hint="all scheduled requests were aborted")
            finally:
                self._asking.drop()
                unfinished_queues.pop(self, None)
                self._is_in_use = False
                if abort or self._caller._calls:
                    self._first_index = self._next_index
                self._caller.close(abort=abort or bool(self._caller._calls))

    def _abandon_after_fork(self) -> None:
        """In a forked child: forget the scheduled requests, which belong to the parent."""
        self._asking = Asking()  # the parent has asked
        unfinished_queues.pop(self, None)
        self._caller.abandon_after_fork()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or (isinstance(error, SystemExit) and preemption.is_raised):
            self._close(abort=False)
            return
        try:
            try:
                if self._caller._calls:
                    finish_after(self, error, coordination_for(self._process_group))
            finally:
                self._close(abort=True)
        except Exception as second:  # noted only: the error of the block is raised
            add_note(error, f"closing the queue also failed: {second}")
