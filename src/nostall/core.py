"""Requests, callers and the queue: scheduling saves from a training loop and finalising them in order.

A request is a function to run in the background and functions to run in the trainer once it is done on all ranks.
nostall's own save functions go to the torch-free writer process; any other callable runs in a spawned Python process.
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

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import Self

from nostall._engine import default_engine
from nostall._model.jobs import Failure
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
"""Queues with requests that are not finalised: kept, so that letting go of one does not lose its saves. In the order in which
they got their first one, which is the same on all ranks, as finalising them has to be."""


_scheduled = Scheduled()


class AsyncCallsQueue:
    """Schedules requests and finalises them in order, each once all ranks are done with it.

    As a context manager it finalises what is pending when the block ends; also when it ends with an exception, which goes on, but
    for ``EngineOptions.exit_timeout_s`` at most, and where other ranks take part only if all of them leave with one within five
    seconds. What cannot be finalised then is given up, and a note of the exception says why.

    Args:
        persistent: Keep one Python process for callables that are not nostall's own, instead of one per call.
        is_daemon: Accepted for compatibility; workers never outlive the trainer.
        cpu_priority: Niceness of background processes, 0 to 19; left at its default, what ``EngineOptions`` says.
        io_priority: Their I/O scheduling class (Linux ``ionice``); ``None`` for what ``EngineOptions`` says.
        sigterm_timeout: Seconds between SIGTERM and SIGKILL when a process is ended.
        cpu_shm_mode: Accepted for compatibility; snapshots are always in shared host memory.
        process_group: The ranks that schedule together; the default group if ``None``.
        on_error: ``"raise"``, or ``"warn"`` to log a request that has failed on some rank, count it in :attr:`failures`, and
            go on with the next one: for jobs that would rather miss a checkpoint than end. What is raised before a request is
            scheduled, by planning with other ranks, is raised in any case.
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
        on_error: str = "raise",
    ) -> None:
        if on_error not in ("raise", "warn"):
            raise OptionError(
                f"on_error={on_error!r} is not possible", hint='use "raise" or "warn"'
            )
        _require_possible(cpu_priority, io_priority, sigterm_timeout)
        kind = PersistentAsyncCaller if persistent else TemporalAsyncCaller
        self._caller = kind(is_daemon, cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode)
        self._process_group = process_group
        self._on_error = on_error
        self.failures = 0
        """How many requests have failed with ``on_error="warn"``."""
        self._calls: deque[Call] = deque()
        self._moved_s = 0.0
        """When the queue's first request last became another one."""
        self._next_index = 0
        self._first_index = 0
        """That of the first request since the queue was made or aborted; ranks may be aborted at different requests."""
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
        """Start this rank's writer process before the first save; see :func:`nostall.warmup` to reserve memory, too."""
        engine = default_engine()
        engine.set_priority(asked_priority(cpu_priority), io_priority)
        engine.warmup(0, timeout_s=sigterm_timeout)

    def schedule_async_request(self, request: AsyncRequest) -> int:
        """Take the snapshot and start the request; returns its index when the trainer may change its tensors.

        A failure to take the snapshot is raised on every rank when the request is finalised.

        Raises:
            StagingError: A callable that is not nostall's own cannot be sent to another process.
            OptionError: ``request`` is not an ``AsyncRequest``.
        """
        if not isinstance(request, AsyncRequest):
            raise OptionError(
                f"an object of type {type(request).__name__} cannot be scheduled",
                hint="pass an AsyncRequest",
            )
        with preemption.deferred():
            index = self._next_index
            with self._counting():
                call = self._caller.begin(request.freeze()._replace(call_idx=index))
                self._next_index += 1
                self._calls.append(call)
                _unfinished[self] = None
            return index

    def _counting(self) -> AbstractContextManager[None]:
        """Let other ranks know of the request that is scheduled inside."""
        if not self.is_distributed:
            return nullcontext()
        prepare_for_exit()
        return _scheduled.one_more(coordination_for(self._process_group))

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalise, in order, the requests that are done on all ranks, and return their indices.

        Collective unless ``no_dist``: one small reduction per unfinished request that is looked at.

        Args:
            blocking: Wait until all scheduled requests are done.
            no_dist: Look at this rank only. Finalize functions that are collective still need all ranks.

        Raises:
            CheckpointException: A request failed on some rank; raised on every rank. Its finalize functions are not run,
                and later requests stay scheduled.
            RankMismatchError: Ranks have scheduled different numbers of requests.
            RankLostError: Another rank has ended.
            SaveTimeoutError: Other ranks have not polled for a minute longer than a save may take.
            SaveAbortedError: Another thread has aborted the queue meanwhile; raised on this rank, whatever ``on_error`` says.
                What was scheduled after that stays scheduled.
        """
        with preemption.deferred():
            return self._finalize(blocking=blocking, no_dist=no_dist)

    def _finalize(self, *, blocking: bool, no_dist: bool) -> list[int]:
        finalized = []
        coordination = coordination_for(self._process_group)
        while calls := self._calls:  # an abort by another thread puts another deque in its place
            call = calls[0]
            if blocking or self._is_overdue(call):
                self._await(
                    call, longest_s=default_engine().options.save_timeout_s if blocking else 0.0
                )
            self._require_scheduled(call)  # before ranks talk: who aborts talks to nobody
            agreed = self._look_at(call, coordination, no_dist=no_dist)
            if agreed.hurry and not blocking:
                blocking = True
                continue
            if agreed.alive:
                break
            self._take(call)
            try:
                if agreed.failed:
                    self._raise_failure(call, coordination, no_dist=no_dist)
                self._run_finalize_fns(call, coordination, no_dist=no_dist)
            except (RankLostError, SaveTimeoutError):  # there is no going on together
                raise
            except (Exception, CheckpointException) as error:  # on every rank
                if self._on_error == "raise":
                    raise
                self.failures += 1
                _log.warning("request %d has failed: %s", call.request.call_idx, error)
                continue
            finalized.append(call.request.call_idx)
        return finalized

    def _run_finalize_fns(self, call: Call, coordination: Coordination, *, no_dist: bool) -> None:
        call.life.to(State.WRITTEN)
        error: BaseException | None = None
        try:
            call.request.execute_finalize_fns(validate_matching_call_idx=False)
        except (Exception, CheckpointException, SystemExit) as raised:  # DCP's is no Exception
            error = raised
        except BaseException:  # an interrupt, after which this rank talks to nobody
            call.life.to(State.FAILED)
            raise
        try:
            share_failure(
                error,
                SingleProcess() if no_dist else coordination,
                timeout_s=default_engine().options.save_timeout_s + PATIENCE_S,
            )
        except BaseException:
            call.life.to(State.FAILED)
            raise
        call.life.to(State.FINALIZED)

    def _take(self, call: Call) -> None:
        """Take the first request from the queue, to finalise it.

        Raises:
            SaveAbortedError: Another thread has aborted it.
        """
        is_ours = self._caller.take_over(call)
        self._moved_s = time.monotonic()
        with suppress(ValueError):  # aborted meanwhile, or too late for that
            self._calls.remove(call)
        if not self._calls:
            _unfinished.pop(self, None)
        if not is_ours:
            raise _aborted_by_another_thread(call)

    def _require_scheduled(self, *calls: Call) -> None:
        """Make sure that requests are still in the queue.

        Raises:
            SaveAbortedError: Another thread has aborted them.
        """
        for call in calls:
            if call not in self._calls:
                raise _aborted_by_another_thread(call)

    def poll(self) -> list[int]:
        """Finalise what is done on all ranks, without waiting. Collective."""
        return self.maybe_finalize_async_calls(blocking=False)

    def wait(self, timeout: float | None = None) -> list[int]:
        """Wait until everything scheduled is done, and finalise it. Collective.

        Args:
            timeout: Seconds to wait at most for what is scheduled to be written. Ranks that come to this call later are waited
                for in addition, for ``EngineOptions.save_timeout_s`` and a minute.

        Raises:
            SaveTimeoutError: Some rank's part was not done within ``timeout`` seconds; raised on every rank, and nothing is
                finalised.
            CheckpointException: A request failed on some rank.
            SaveAbortedError: Another thread has aborted the queue meanwhile.
        """
        return self._wait(timeout, hint="wait again, or close(abort=True)")

    def _wait(self, timeout: float | None, *, hint: str) -> list[int]:
        """As :meth:`wait`; ``hint`` is what to do about what is not done in time."""
        if timeout is not None:
            _require_seconds(timeout)
        if timeout is not None and (calls := list(self._calls)):
            coordination = coordination_for(self._process_group)
            unfinished = len(wait([call.outcome for call in calls], timeout).not_done)
            self._require_scheduled(*calls)
            most = most_unfinished(unfinished, coordination, _scheduled, timeout_s=timeout)
            if most:
                raise SaveTimeoutError(
                    f"{unfinished} of {len(calls)} requests are not done on this rank after {timeout:g} s,"
                    f" and up to {most} on others{_how_far(calls)}",
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
        """Finalise everything that is scheduled, or give it up with ``abort``; then end worker processes. Idempotent.

        Without ``abort`` this is collective while requests are pending. An aborted request is never finalised. The queue
        can be used again.

        Args:
            abort: Wait for nothing.
            timeout: Seconds to wait at most, after which everything is given up, as with :meth:`wait`; ``None`` for
                ``save_timeout_s`` for each request.

        Raises:
            SaveTimeoutError: Some rank's part was not done within ``timeout`` seconds.
            CheckpointException: A request has failed on some rank; what was scheduled after it is given up.
        """
        try:
            if not abort:
                self._wait(timeout, hint="what was scheduled has been given up")
        finally:
            calls, self._calls = self._calls, deque()
            _unfinished.pop(self, None)
            if abort or calls:
                self._first_index = self._next_index
            self._caller.close(abort=abort or bool(calls))

    def abandon_after_fork(self) -> None:
        """In a forked child: forget what is scheduled; it is the parent's to finalise or to abort."""
        self._calls.clear()
        _unfinished.pop(self, None)
        self._caller.abandon_after_fork()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or (isinstance(error, SystemExit) and preemption.is_ending):
            self.close()
            return
        try:
            try:
                if self._calls:
                    self._finish_after(error)
            finally:
                self.close(abort=True)
        except Exception as second:  # the error in the body is the one that matters
            _add_note(error, f"closing the queue failed, too: {second}")

    def _finish_after(self, error: BaseException) -> None:
        """Commit what can be, although the block ended with an exception: that is not to cost a checkpoint."""
        before = self.pending
        coordination = coordination_for(self._process_group)
        lost = finish_after_error(
            self,
            timeout_s=min(default_engine().options.exit_timeout_s, preemption.left_s),
            is_to_wait=not isinstance(error, SaveTimeoutError),  # which is that of a wait in vain
            all_leave=lambda timeout_s: _scheduled.all_leave(coordination, timeout_s),
        )
        if lost:
            _add_note(error, f"of {before} requests that were pending some are lost: {lost}")

    def _is_overdue(self, first: Call) -> bool:
        """Whether the first request has been the first for longer than a save may take; nobody may ever wait for it."""
        since_s = max(first.begun_s, self._moved_s)
        return time.monotonic() - since_s > default_engine().options.save_timeout_s

    def _await(self, call: Call, *, longest_s: float) -> None:
        if is_done(call.outcome, longest_s):
            return
        timeout_s = default_engine().options.save_timeout_s
        late = Failure(
            kind="SaveTimeoutError",
            message=f"request {call.request.call_idx} was not done within {timeout_s:g} s{_how_far([call])}",
            phase="write",
        )
        # Before the abort settles it: the deadline is what the user has to hear of.
        call.settle(late)
        if call.native is not None:
            call.native.abort()

    def _look_at(self, call: Call, coordination: Coordination, *, no_dist: bool) -> View:
        """What holds of a request on any rank, or with ``no_dist`` on this one."""
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
            # The other ranks are going to finalise; they learn of this rank's failure there, and so does this one.
            call.request.execute_finalize_fns(validate_matching_call_idx=False)
        if call.native is not None:
            call.native.discard()
        raise_everywhere(call.failure(), coordination, only_here=no_dist)


def _aborted_by_another_thread(call: Call) -> SaveAbortedError:
    return SaveAbortedError(
        f"request {call.request.call_idx} was aborted by another thread while this one was waiting for it",
        rank=coordination_for(None).rank,
        phase="write",
        hint="nothing of it was committed; the queue can be used again",
    )


def _add_note(error: BaseException, note: str) -> None:
    _log.error("after an exception: %s", note)
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(note)


def _how_far(calls: Iterable[Call]) -> str:
    """What is known of the saves of these requests, for a message."""
    found = [call.native.progress.status() for call in calls if call.native is not None]
    return "".join(f"; {status}" for status in found if status is not None)


def _require_seconds(timeout: float) -> None:
    if not is_possible_wait(timeout):
        raise OptionError(
            f"timeout={timeout!r} is not possible", hint="use seconds, or None for no limit"
        )


def _require_possible(cpu_priority: int, io_priority: int | None, sigterm_timeout: float) -> None:
    """Refuse what could only fail once a process is started."""
    EngineOptions(cpu_priority=cpu_priority, io_priority=io_priority)
    if not sigterm_timeout > 0:
        raise OptionError(
            f"sigterm_timeout={sigterm_timeout} is not possible", hint="use seconds > 0"
        )


def drain_on_sigterm(grace_s: float = 30.0) -> None:
    """Let SIGTERM, with which schedulers announce pre-emption, finish the saves that are scheduled, and then end the process.

    What is pending is finished at the next poll, by all ranks together, whichever of them got the signal; ranks that got none
    go on then. Without a poll it is finished when the interpreter ends, which begins after half of the grace period. The process ends by
    the handler that was there before or, if there was none, by ``SystemExit(143)`` in the main thread. Call it once, in the
    main thread.

    Args:
        grace_s: Seconds after which the process ends, with status 143, and unfinished saves are lost; counted from when the
            main thread can run Python code, so not while it stands in a collective.

    Raises:
        OptionError: This is not the main thread; or ``grace_s`` is no number of seconds.
    """
    preemption.install(
        grace_s,
        is_anything_pending=lambda: bool(_unfinished),
        abandon=lambda: default_engine().abort("the grace period after SIGTERM is over"),
    )


def abort_all() -> None:
    """Abort every live queue: what is scheduled is given up and never finalised; each queue can be used again.

    From any thread. One that waits for what is given up gets a :class:`~nostall.errors.SaveAbortedError`.
    """
    for live in list(_live_queues):
        live.close(abort=True)


def abort_nvrx_checkpoint() -> None:
    """The name under which frameworks look for :func:`abort_all`."""
    abort_all()


def _status_of_a_loss() -> int:
    # The failure of what was given up may have come before the exception that SIGTERM raises.
    is_preempted = preemption.is_ending or preemption.is_too_late
    return PREEMPTED_STATUS if is_preempted else FAILURE_STATUS


def _at_exit() -> None:
    if _unfinished:
        finish_at_exit(
            list(_unfinished),
            timeout_s=min(default_engine().options.exit_timeout_s, preemption.left_s),
            status=_status_of_a_loss,
        )
    if preemption.is_too_late:  # the failure of what was given up may have come first
        end_process(PREEMPTED_STATUS)


def _after_fork_in_child() -> None:
    _scheduled.forget_after_fork()
    preemption.forget_after_fork()
    for live in list(_live_queues):
        live.abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
