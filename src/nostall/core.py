"""Requests, callers and the queue: schedule saves in a training loop and finalise them in order.

A request is a function for the background, and functions that run in the trainer when it is done on
all ranks. nostall's own save functions go to the torch-free writer process; any other callable runs
in a spawned Python process.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import Self

from nostall._engine import default_engine
from nostall._model.jobs import Failure
from nostall._model.keywords import also_named
from nostall._model.lifecycle import State
from nostall._queue.at_exit import (
    FAILURE_STATUS,
    end_process,
    finish_after_error,
    finish_at_exit,
    prepare_for_exit,
)
from nostall._queue.callers import (
    AsyncCaller,
    Call,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    asked_priority,
)
from nostall._queue.preemption import STATUS as PREEMPTED_STATUS
from nostall._queue.preemption import preemption
from nostall._queue.requests import AsyncRequest
from nostall._ranks.agreement import (
    PATIENCE_S,
    Scheduled,
    View,
    agree,
    most_unfinished,
    share_failure,
)
from nostall._ranks.failures import raise_everywhere
from nostall._ranks.group import Coordination, SingleProcess, coordination_for
from nostall._ranks.reports import is_done
from nostall.errors import OptionError, RankLostError, SaveAbortedError, SaveTimeoutError
from nostall.options import EngineOptions, is_possible_wait

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

_live_queues: weakref.WeakSet[AsyncCallsQueue] = weakref.WeakSet()
_unfinished: dict[AsyncCallsQueue, None] = {}
"""Queues with requests that are not finalised; a strong reference, so that a dropped queue does not
lose saves. Ordered by their first request, which is the same order on all ranks; finalising needs
it."""


_scheduled = Scheduled()


class ActiveCall(NamedTuple):
    """A scheduled request that is not finalised, in the form that frameworks unpack."""

    idx: int
    async_caller: AsyncCaller
    async_request: AsyncRequest


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
        _require_possible(cpu_priority, io_priority, sigterm_timeout)
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
        self._next_index = 0
        self._first_index = 0
        """Index of the first request since the queue was created or aborted, counted from the last
        time when indices started again; may differ by rank."""
        _live_queues.add(self)

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
        engine = default_engine()
        engine.set_priority(asked_priority(cpu_priority), io_priority)
        engine.warmup(0, timeout_s=sigterm_timeout)

    @classmethod
    def get_instances(cls) -> list[AsyncCallsQueue]:
        """The queues of this process."""
        return list(_live_queues)

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
            index = self._next_index
            self._is_in_use = True
            with self._counting():
                call = self._caller.begin(request.freeze()._replace(call_idx=index))
                self._next_index += 1
                self._calls.append(call)
                _unfinished[self] = None
            return index

    def _counting(self) -> AbstractContextManager[None]:
        """Announce the request that the block schedules to other ranks."""
        if not self.is_distributed:
            return nullcontext()
        prepare_for_exit()
        return _scheduled.one_more(coordination_for(self._process_group))

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalise, in order, the requests that are done on all ranks, and return their indices.

        Collective unless ``no_dist``: one small reduction per request that is checked.

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

    def _finalize(self, *, blocking: bool, no_dist: bool) -> list[int]:
        finalized = []
        coordination = coordination_for(self._process_group)
        while calls := self._calls:  # an abort by another thread replaces the deque
            call = calls[0]
            if blocking or self._is_overdue(call):
                self._await(
                    call, longest_s=default_engine().options.save_timeout_s if blocking else 0.0
                )
            self._require_scheduled(call)  # before a collective: an aborted rank joins none
            agreed = self._look_at(call, coordination, no_dist=no_dist)
            if agreed.hurry and not blocking:
                blocking = True
                continue
            if agreed.alive:
                break
            self._take(call)
            if self._finalize_one(call, agreed, coordination, no_dist=no_dist):
                finalized.append(call.request.call_idx)
        return finalized

    def _finalize_one(
        self, call: Call, agreed: View, coordination: Coordination, *, no_dist: bool
    ) -> bool:
        """Finalise a request; false if it failed and ``on_error`` is ``"warn"``."""
        try:
            if agreed.failed:
                self._raise_failure(call, coordination, no_dist=no_dist)
            self._run_finalize_fns(call, coordination, no_dist=no_dist)
        except (RankLostError, SaveTimeoutError):  # the ranks cannot continue together
            raise
        except (Exception, CheckpointException) as error:  # on every rank
            if self._on_error == "raise":
                raise
            self.failures += 1
            _log.warning("request %d has failed: %s", call.request.call_idx, error)
            return False
        return True

    def _run_finalize_fns(self, call: Call, coordination: Coordination, *, no_dist: bool) -> None:
        call.life.to(State.WRITTEN)
        error: BaseException | None = None
        try:
            try:
                call.request.execute_finalize_fns(validate_matching_call_idx=False)
            except (Exception, CheckpointException, SystemExit) as raised:  # of user's functions
                error = raised
            share_failure(
                error,
                SingleProcess() if no_dist else coordination,
                timeout_s=default_engine().options.save_timeout_s + PATIENCE_S,
            )
        except BaseException:  # passed on; after an interrupt this rank joins no collective
            call.life.to(State.FAILED)
            raise
        call.life.to(State.FINALIZED)

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
            _unfinished.pop(self, None)
        if not is_ours:
            raise _aborted_by_another_thread(call)

    def _require_scheduled(self, *calls: Call) -> None:
        """Check that requests are still in the queue.

        Raises:
            SaveAbortedError: Another thread has aborted them.
        """
        for call in calls:
            if call not in self._calls:
                raise _aborted_by_another_thread(call)

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
        if timeout is not None:
            _require_seconds(timeout)
        if timeout is not None and (calls := list(self._calls)):
            coordination = coordination_for(self._process_group)
            unfinished = len(wait([call.outcome for call in calls], timeout).not_done)
            self._require_scheduled(*calls)
            most = most_unfinished(unfinished, coordination, _scheduled, timeout_s=timeout)
            if most:
                raise SaveTimeoutError(
                    f"{unfinished} of {len(calls)} requests are not done on this rank after"
                    f" {timeout:g} s, and up to {most} on others{_how_far(calls)}",
                    rank=coordination.rank,
                    phase="write",
                    hint=hint,
                )
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
        finalised. The queue can be used again. Indices start at 0 again, except after an abort, so
        that no index of an aborted request is used twice.

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
        try:
            if not abort:
                self._wait(timeout, hint="all scheduled requests were aborted")
        finally:
            calls, self._calls = self._calls, deque()
            _unfinished.pop(self, None)
            self._is_in_use = False
            if abort or calls:
                self._first_index = self._next_index
            self._caller.close(abort=abort or bool(calls))

    def _abandon_after_fork(self) -> None:
        """In a forked child: forget the scheduled requests, which belong to the parent."""
        self._calls.clear()
        _unfinished.pop(self, None)
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
                    self._finish_after(error)
            finally:
                self.close(abort=True)
        except Exception as second:  # noted only: the error of the block is raised
            _add_note(error, f"closing the queue also failed: {second}")

    def _finish_after(self, error: BaseException) -> None:
        """Commit the requests that can be committed, so that an exception costs no checkpoint."""
        before = self.pending
        coordination = coordination_for(self._process_group)
        lost = finish_after_error(
            self,
            timeout_s=min(default_engine().options.exit_timeout_s, preemption.left_s),
            is_to_wait=not isinstance(error, SaveTimeoutError),  # a wait that has already failed
            all_leave=lambda timeout_s: _scheduled.all_leave(coordination, timeout_s),
        )
        if lost:
            _add_note(error, f"of {before} requests that were pending some are lost: {lost}")

    def _is_overdue(self, first: Call) -> bool:
        """Whether the first request has been first for longer than a save may take.

        A loop that only polls never waits for it.
        """
        since_s = max(first.begun_s, self._moved_s)
        return time.monotonic() - since_s > default_engine().options.save_timeout_s

    def _await(self, call: Call, *, longest_s: float) -> None:
        if is_done(call.outcome, longest_s):
            return
        timeout_s = default_engine().options.save_timeout_s
        late = Failure(
            kind="SaveTimeoutError",
            message=f"request {call.request.call_idx} was not done within {timeout_s:g} s"
            f"{_how_far([call])}",
            phase="write",
        )
        # Before the abort settles it: the error has to name the deadline.
        call.settle(late)
        if call.native is not None:
            call.native.abort()

    def _look_at(self, call: Call, coordination: Coordination, *, no_dist: bool) -> View:
        """The state of a request over all ranks, or with ``no_dist`` on this one."""
        alive = not call.outcome.done()
        mine = View(
            alive=alive,
            failed=not alive and call.failure() is not None,
            hurry=preemption.asked,
            index=call.request.call_idx - self._first_index,
            last=self._next_index - self._first_index - 1,
        )
        if no_dist:
            return mine
        timeout_s = default_engine().options.save_timeout_s
        return agree(mine, coordination, _scheduled, timeout_s=timeout_s)

    def _raise_failure(self, call: Call, coordination: Coordination, *, no_dist: bool) -> None:
        if not call.life.over:
            call.life.to(State.FAILED)
        if no_dist and call.native is not None:
            # Other ranks finalise, too; there all ranks learn of this rank's failure.
            call.request.execute_finalize_fns(validate_matching_call_idx=False)
        if call.native is not None:
            call.native.discard()
        raise_everywhere(call.failure(), coordination, only_here=no_dist)


def _aborted_by_another_thread(call: Call) -> SaveAbortedError:
    return SaveAbortedError(
        f"request {call.request.call_idx} was aborted by another thread while this one waited for"
        " it",
        rank=coordination_for(None).rank,
        phase="write",
        hint="it was not committed; the queue can be used again",
    )


def _add_note(error: BaseException, note: str) -> None:
    _log.error("after an exception: %s", note)
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(note)


def _how_far(calls: Iterable[Call]) -> str:
    """Progress of the saves of these requests, for a message."""
    found = [call.native.progress.status() for call in calls if call.native is not None]
    return "".join(f"; {status}" for status in found if status is not None)


def _require_seconds(timeout: float) -> None:
    if not is_possible_wait(timeout):
        raise OptionError(
            f"timeout={timeout!r} is not possible", hint="use seconds, or None for no limit"
        )


def _require_possible(cpu_priority: int, io_priority: int | None, sigterm_timeout: float) -> None:
    """Refuse values that would otherwise fail when a process is started."""
    EngineOptions(cpu_priority=cpu_priority, io_priority=io_priority)
    if not sigterm_timeout > 0:
        raise OptionError(
            f"sigterm_timeout={sigterm_timeout} is not possible", hint="use seconds > 0"
        )


def drain_on_sigterm(grace_s: float = 30.0) -> None:
    """On SIGTERM, the signal of pre-emption, finish the scheduled saves, then end the process.

    If any rank gets the signal, all ranks finish the pending requests together at the next poll;
    ranks without a signal then continue. Without a poll, the requests are finished when the
    interpreter ends, which begins after half of the grace period. The process ends by the previous
    handler or, without one, by ``SystemExit(143)`` in the main thread. Call it once, in the main
    thread.

    Args:
        grace_s: Seconds after which the process ends with status 143, and unfinished saves are
            lost. Counted from the first moment when the main thread can run Python code, which it
            cannot in a collective.

    Raises:
        OptionError: This is not the main thread; or ``grace_s`` is not a number of seconds.
    """
    preemption.install(
        grace_s,
        is_anything_pending=lambda: bool(_unfinished),
        abandon=lambda: default_engine().abort("the grace period after SIGTERM is over"),
    )


def abort_all() -> None:
    """Abort every live queue: scheduled requests are never finalised; the queues can be used again.

    May be called from any thread. A thread that waits for an aborted request gets a
    :class:`~nostall.errors.SaveAbortedError`.
    """
    for live in list(_live_queues):
        live.close(abort=True)


def abort_nvrx_checkpoint() -> None:
    """:func:`abort_all`, under the name that frameworks use."""
    abort_all()


def _status_of_a_loss() -> int:
    # The failure of an aborted save may come before the exception that SIGTERM raises.
    is_preempted = preemption.is_ending or preemption.is_too_late
    return PREEMPTED_STATUS if is_preempted else FAILURE_STATUS


def _at_exit() -> None:
    if _unfinished:
        finish_at_exit(
            list(_unfinished),
            timeout_s=min(default_engine().options.exit_timeout_s, preemption.left_s),
            status=_status_of_a_loss,
        )
    if preemption.is_too_late:  # as above
        end_process(PREEMPTED_STATUS)


def _after_fork_in_child() -> None:
    _scheduled.forget_after_fork()
    preemption.forget_after_fork()
    for live in list(_live_queues):
        live._abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
