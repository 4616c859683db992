"""Requests, callers and the queue: schedule saves in a training loop and finalise them in order.

A request is a function for the background, and functions that run in the trainer when it is done on
all ranks. nostall's own save functions go to the torch-free writer process; any other callable runs
in a spawned Python process.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import Self

from nostall._engine import default_engine
from nostall._model.interrupts import is_done, uninterrupted
from nostall._model.keywords import also_named
from nostall._queue.asking import Asking
from nostall._queue.at_exit import add_note
from nostall._queue.callers import (
    ActiveCall,
    AsyncCaller,
    Call,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    asked_priority,
    require_possible,
)
from nostall._queue.finalizing import (
    aborted_by_another_thread,
    await_or_fail,
    finalize,
    look_at,
    require_done,
    require_scheduled,
)
from nostall._queue.live import (
    abort_all,
    abort_nvrx_checkpoint,
    counted,
    drain_on_sigterm,
    finish_after,
    live_queues,
    scheduled,
    unfinished_queues,
)
from nostall._queue.preemption import preemption
from nostall._queue.requests import AsyncRequest
from nostall._ranks.agreement import View
from nostall._ranks.group import Coordination, coordination_for
from nostall._save.warmup import warmup
from nostall.errors import OptionError, RankLostError, SaveTimeoutError
from nostall.options import is_possible_wait

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
            log a request that failed on some rank, count it in :attr:`failures`, and continue with
            the next one. Errors before a request is scheduled, from planning with other ranks, are
            always raised.
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
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        if on_error not in ("raise", "warn"):
            raise OptionError(
                f"on_error={on_error!r} is not possible", hint='use "raise" or "warn"'
            )
        require_possible(cpu_priority, io_priority, sigterm_timeout)
        kind = PersistentAsyncCaller if persistent else TemporalAsyncCaller
        self._is_persistent, self._is_in_use = persistent, False
        self._caller = kind(is_daemon, cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode)
        self._process_group = process_group
        self._on_error = on_error
        self.failures: int = 0
        """Number of failed requests with ``on_error="warn"``."""
        self._calls: deque[Call] = deque()
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
        return [queue for queue in live_queues if isinstance(queue, AsyncCallsQueue)]

    @property
    def async_calls(self) -> deque[ActiveCall]:
        """The requests that are scheduled and not finalised."""
        return deque(
            ActiveCall(call.request.call_idx, self._caller, call.request)
            for call in list(self._calls)
        )

    @property
    def persistent_caller(self) -> AsyncCaller | None:
        """The caller, from the first request until :meth:`close`; ``None`` if not persistent."""
        return self._caller if self._is_persistent and self._is_in_use else None

    @also_named(request="async_request")
    def schedule_async_request(self, request: AsyncRequest) -> int:
        """Take the snapshot, start the request and return its index.

        Requests of other classes are taken by their fields, of which the first three are needed.
        The trainer may then change its tensors. A failure to take the snapshot is raised on every
        rank when the request is finalised.

        Raises:
            StagingError: A callable that is not nostall's own cannot be sent to another process.
            OptionError: ``request`` is not a request.
        """
        request = AsyncRequest.of(request)
        with preemption.deferred():
            early = request.early_commit(self._process_group)
            index = self._next_index
            self._is_in_use = True
            with counted(coordination_for(self._process_group)), uninterrupted():
                call = self._caller.begin(request.freeze()._replace(call_idx=index))
                call.early = early
                self._next_index += 1
                self._calls.append(call)
                unfinished_queues[self] = None
            return index

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalise, in order, the requests that are done on all ranks, and return their indices.

        Collective unless ``no_dist``: one small reduction per request that is checked. Unless
        ``blocking``, its result is used by the next call, so that no rank waits for a later one.

        Args:
            blocking: Wait until all scheduled requests are done.
            no_dist: Check this rank only. Collective finalize functions still need all ranks.

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
        with preemption.deferred():
            return self._finalize(blocking=blocking, no_dist=no_dist)

    def _finalize_done(self) -> list[int]:
        """Finalise what is done on all ranks; waits for their answers, but for no file."""
        with preemption.deferred():
            return self._finalize(blocking=False, no_dist=False, is_last=True)

    def _finalize(self, *, blocking: bool, no_dist: bool, is_last: bool = False) -> list[int]:
        finalized: list[int] = []
        coordination = coordination_for(self._process_group)
        while calls := self._calls:  # an abort by another thread replaces the deque
            call = calls[0]
            timeout_s = default_engine().options.save_timeout_s
            if blocking or self._is_overdue(call, timeout_s):
                await_or_fail(call, longest_s=timeout_s if blocking else 0.0)
            # Before a collective: an aborted rank joins none.
            require_scheduled([call], self._calls)
            waits = blocking or is_last
            mine = look_at(call, self._first_index, self._next_index - 1, waits=waits)
            agreed: View | None = replace(mine, committing=False, committed=0)
            if not no_dist:
                # All ranks have finalised a request in this call, so none is late.
                now = waits or bool(finalized)
                agreed = self._asking.view_of(call, mine, coordination, now=now)
            if agreed is None:
                break
            if not agreed.is_done:
                if agreed.hurry and not waits:
                    blocking = True
                    continue
                break
            # A process is to end: later requests are awaited, too.
            blocking = blocking or (agreed.hurry and not is_last)
            with uninterrupted():
                self._take(call)
                if self._finalize_one(call, agreed, coordination, no_dist=no_dist):
                    finalized.append(call.request.call_idx)
        return finalized

    def _finalize_one(
        self, call: Call, agreed: View, coordination: Coordination, *, no_dist: bool
    ) -> bool:
        """Finalise a request; false if it failed and ``on_error`` is ``"warn"``."""
        try:
            finalize(call, coordination, agreed, no_dist=no_dist)
        except (RankLostError, SaveTimeoutError):  # the ranks cannot continue together
            raise
        except (Exception, CheckpointException) as error:  # on every rank
            if self._on_error == "raise":
                raise
            self.failures += 1
            _log.warning("request %d has failed: %s", call.request.call_idx, error)
            return False
        return True

    def _take(self, call: Call) -> None:
        """Remove the first request from the queue, to finalise it.

        Raises:
            SaveAbortedError: Another thread has aborted it.
        """
        is_ours = self._caller.take_over(call)
        self._moved_s = time.monotonic()
        with suppress(ValueError):  # an abort has removed it
            self._calls.remove(call)
        if not self._calls:
            unfinished_queues.pop(self, None)
        if not is_ours:
            raise aborted_by_another_thread(call)

    def poll(self) -> list[int]:
        """Finalise requests that are done on all ranks, without waiting. Collective."""
        return self.maybe_finalize_async_calls(blocking=False)

    def wait(self, timeout: float | None = None) -> list[int]:
        """Wait until all scheduled requests are done, and finalise them. Collective.

        Args:
            timeout: Longest wait for this rank's files, in seconds. The wait for ranks that call
                this later is additional: ``EngineOptions.save_timeout_s`` and a minute.

        Raises:
            SaveTimeoutError: Some rank was not done within ``timeout`` seconds; raised on every
                rank, and nothing is finalised.
            CheckpointException: A request failed on some rank.
            SaveAbortedError: Another thread has aborted the queue.
        """
        return self._wait(timeout, hint="wait again, or close(abort=True)")

    def _wait(self, timeout: float | None, *, hint: str) -> list[int]:
        """As :meth:`wait`; ``hint`` is that of the timeout error."""
        if timeout is not None and not is_possible_wait(timeout):
            raise OptionError(
                f"timeout={timeout!r} is not possible", hint="use seconds, or None for no limit"
            )
        if timeout is not None and (calls := list(self._calls)):
            coordination = coordination_for(self._process_group)
            deadline_s = time.monotonic() + timeout
            unfinished = sum(
                not is_done(call.outcome, deadline_s - time.monotonic()) for call in calls
            )
            require_scheduled(calls, self._calls)
            require_done(calls, unfinished, coordination, scheduled, timeout_s=timeout, hint=hint)
        return self.maybe_finalize_async_calls(blocking=True)

    @property
    def pending(self) -> int:
        """Number of requests that are scheduled and not finalised."""
        return len(self._calls)

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

    def _give_up(self) -> None:
        """Abort all requests; this process is about to end."""
        self._forget_calls()
        self.close(abort=True)

    def _forget_calls(self) -> bool:
        """Forget the scheduled requests; whether there are any."""
        calls, self._calls = self._calls, deque()
        self._asking.drop()
        unfinished_queues.pop(self, None)
        if calls:
            self._first_index = self._next_index
        return bool(calls)

    def _close(self, *, abort: bool, timeout: float | None = None) -> None:
        try:
            if not abort:
                self._wait(timeout, hint="all scheduled requests were aborted")
        except RankLostError:  # this process is about to end
            self._give_up()
            raise
        finally:
            is_any_left = self._forget_calls()
            self._is_in_use = False
            if abort:
                self._first_index = self._next_index
            self._caller.close(abort=abort or is_any_left)

    def _abandon_after_fork(self) -> None:
        """In a forked child: forget the scheduled requests, which belong to the parent."""
        self._calls.clear()
        self._asking.forget_after_fork()
        unfinished_queues.pop(self, None)
        self._caller.abandon_after_fork()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or (isinstance(error, SystemExit) and preemption.is_ending):
            self._close(abort=False)
            return
        try:
            try:
                if self._calls:
                    finish_after(self, error, coordination_for(self._process_group))
            finally:
                self._give_up()
        except Exception as second:  # noted only: the error of the block is raised
            add_note(error, f"closing the queue also failed: {second}")

    def _is_overdue(self, first: Call, timeout_s: float) -> bool:
        """Whether the first request has been first for longer than ``timeout_s`` seconds.

        A loop that only polls never waits for it.
        """
        return time.monotonic() - max(first.begun_s, self._moved_s) > timeout_s
