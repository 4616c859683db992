"""Requests, callers and the queue: scheduling saves from a training loop and finalising them in order.

A request is a function to run in the background and functions to run in the trainer once it is done on all ranks.
nostall's own save functions go to the torch-free writer process; any other callable runs in a spawned Python process.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist
from typing_extensions import Self

from nostall import _torch
from nostall._background import BackgroundSave
from nostall._coordination import Coordination, coordination_for
from nostall._failures import exception_for, sendable
from nostall._lifecycle import Lifecycle, State
from nostall._python_worker import Outcome, PythonWorker, serialize_call
from nostall._runtime import default_engine
from nostall._save import error_of, failure_of
from nostall._values import Failure, RankFailed, RankReport
from nostall.errors import OptionError, SaveTimeoutError


class AsyncRequest(NamedTuple):
    """Something to do in the background, and what follows it in the trainer."""

    async_fn: Callable[..., Any] | None
    """Runs in the background; ``None`` if this rank has nothing to do."""
    async_fn_args: tuple[Any, ...] | list[Any]
    finalize_fns: list[Callable[[], Any]]
    """Run in the trainer, in order, once every rank is done; never after a failure."""
    async_fn_kwargs: dict[str, Any] | None = None
    preload_fn: Callable[[], Any] | None = None
    """Runs in the trainer when the request is scheduled; its result takes the place of argument index 1."""
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Append a finalize function.

        Raises:
            RuntimeError: The request is scheduled already.
        """
        if self.is_frozen:
            raise RuntimeError(
                "a request that is scheduled already takes no more finalize functions"
            )
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Do everything here and now, with the code that would have run in the background."""
        if self.async_fn is not None:
            self.async_fn(*self.loaded_args(), **(self.async_fn_kwargs or {}))
        for finalize in self.finalize_fns:
            finalize()

    def loaded_args(self) -> list[Any]:
        """The arguments after preloading."""
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            loaded = self.preload_fn()
            if len(args) < 2:
                raise OptionError(
                    f"a request with a preload_fn has {len(args)} arguments",
                    hint="give async_fn_args at least two: the result replaces index 1",
                )
            args[1] = loaded
        return args

    def freeze(self) -> AsyncRequest:
        """The same request, closed to further finalize functions."""
        return self._replace(is_frozen=True)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Run the finalize functions and return the call index.

        With ``validate_matching_call_idx`` this is collective: ranks first compare their indices.

        Raises:
            RuntimeError: Ranks are about to finalise different requests.
        """
        if validate_matching_call_idx:
            highest, lowest = coordination_for(None).maximum([self.call_idx, -self.call_idx])
            if highest != -lowest:
                raise RuntimeError(
                    f"ranks finalise different requests: this one {self.call_idx}, others {-lowest} to {highest}"
                )
        for finalize in self.finalize_fns:
            finalize()
        return self.call_idx


class _Call:
    """A scheduled request on its way."""

    def __init__(self, request: AsyncRequest) -> None:
        self.request = request
        self.life = Lifecycle()
        self.outcome: Future[Outcome] = Future()

    @property
    def native(self) -> BackgroundSave | None:
        """The save behind the request, if it is nostall's own."""
        return self.request.async_fn if isinstance(self.request.async_fn, BackgroundSave) else None

    def settle(self, failure: Outcome) -> None:
        with suppress(
            InvalidStateError
        ):  # aborting and an answer may coincide; the first one stands
            self.outcome.set_result(failure)

    def failure(self) -> Failure | None:
        """Why it failed; only once it is done."""
        return self.outcome.result(0)


def _failure_in(report: RankReport) -> Outcome:
    return report.failure if isinstance(report, RankFailed) else None


class AsyncCaller(ABC):
    """Runs requests in the background, one after the other.

    Subclasses say which process runs callables that are not nostall's own.
    """

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque()

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Take the snapshot and start the request; returns when the trainer may change its tensors.

        Raises:
            StagingError: The request cannot be sent to another process.
        """
        self.begin(async_req)

    def begin(self, request: AsyncRequest) -> _Call:
        """As :meth:`schedule_async_call`; returns the call."""
        call = _Call(request)
        self._calls.append(call)
        call.life.to(State.STAGING)
        if request.async_fn is None:
            call.settle(None)
            call.life.to(State.STAGED)
            call.life.to(State.WRITING)
            return call
        try:
            args = request.loaded_args()
        except (
            Exception
        ) as error:  # the other ranks wait for this one; all of them raise when finalising
            if call.native is not None:
                call.native.fail(error, phase="stage")
            call.life.to(State.FAILED)
            call.settle(failure_of(error, phase="stage"))
            return call
        call.life.to(State.STAGED)
        if call.native is not None:
            report = call.native.start(args[1])
            report.add_done_callback(lambda done: call.settle(_failure_in(done.result())))
        else:
            try:
                fd = serialize_call(request.async_fn, args, request.async_fn_kwargs or {})
            except BaseException:
                self._calls.remove(call)
                raise
            self._worker().submit(fd).add_done_callback(lambda done: call.settle(done.result()))
        call.life.to(State.WRITING)
        return call

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the oldest request is done, on every rank unless ``no_dist``. Collective unless ``no_dist``."""
        if not self._calls:
            return True
        call = self._calls[0]
        while True:
            if blocking:
                call.outcome.result(default_engine().options.save_timeout_s)
            alive = not call.outcome.done()
            done = not alive if no_dist else not self.sync_all_async_calls(alive)
            if done:
                self._calls.popleft()
                self._call_is_done()
            if done or not blocking:
                return done

    def sync_all_async_calls(self, is_alive: bool) -> bool:
        """Whether the request is unfinished on any rank. Collective."""
        return coordination_for(None).maximum([int(is_alive)]) == [1]

    def take_over(self, call: _Call) -> None:
        """Forget a call that the queue has finalised, failed or aborted."""
        if call in self._calls:
            self._calls.remove(call)
            self._call_is_done()

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """End the processes of this caller: when they are done, or now with ``abort``. Idempotent."""

    @abstractmethod
    def _worker(self) -> PythonWorker:
        """The process for callables that are not nostall's own."""

    def _call_is_done(self) -> None:  # noqa: B027  # a hook; most callers keep what served the call
        """A call left; subclasses may end what served it."""

    def _abort_calls(self) -> None:
        for call in list(self._calls):
            if call.native is not None and not call.outcome.done():
                call.native.abort()
            call.settle(
                Failure(kind="SaveAbortedError", message="the request was aborted", phase="write")
            )
        self._calls.clear()


class PersistentAsyncCaller(AsyncCaller):
    """One Python process, started when first needed and used again, for callables that are not nostall's own.

    Args:
        is_daemon: Accepted for compatibility; workers never outlive the trainer.
        cpu_priority: Niceness of background processes, 0 to 19.
        io_priority: Their I/O scheduling class (Linux ``ionice``).
        sigterm_timeout: Seconds between SIGTERM and SIGKILL when a process is ended.
        cpu_shm_mode: Accepted for compatibility; snapshots are always in shared host memory.
    """

    def __init__(
        self,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        super().__init__()
        self._cpu_priority = cpu_priority
        self._io_priority = io_priority
        self._sigterm_timeout_s = sigterm_timeout
        self._process: PythonWorker | None = None

    def begin(self, request: AsyncRequest) -> _Call:
        """As the base class, with this caller's priorities."""
        default_engine().set_priority(self._cpu_priority, self._io_priority)
        return super().begin(request)

    def close(self, abort: bool = False) -> None:
        """End the worker process, if there is one."""
        if abort:
            self._abort_calls()
        process, self._process = self._process, None
        if process is not None:
            process.end(abort=abort)

    def _worker(self) -> PythonWorker:
        if self._process is None or not self._process.alive:
            self._process = PythonWorker(
                cpu_priority=self._cpu_priority,
                io_priority=self._io_priority,
                sigterm_timeout_s=self._sigterm_timeout_s,
            )
        return self._process


class TemporalAsyncCaller(PersistentAsyncCaller):
    """A new Python process for every call of a callable that is not nostall's own."""

    def _call_is_done(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end(abort=False)


_live_queues: weakref.WeakSet[AsyncCallsQueue] = weakref.WeakSet()


class AsyncCallsQueue:
    """Schedules requests and finalises them in order, each once all ranks are done with it.

    Args:
        persistent: Keep one Python process for callables that are not nostall's own, instead of one per call.
        is_daemon: Accepted for compatibility; workers never outlive the trainer.
        cpu_priority: Niceness of background processes, 0 to 19.
        io_priority: Their I/O scheduling class (Linux ``ionice``).
        sigterm_timeout: Seconds between SIGTERM and SIGKILL when a process is ended.
        cpu_shm_mode: Accepted for compatibility; snapshots are always in shared host memory.
        process_group: The ranks that schedule together; the default group if ``None``.
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
    ) -> None:
        kind = PersistentAsyncCaller if persistent else TemporalAsyncCaller
        self._caller = kind(is_daemon, cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode)
        self._process_group = process_group
        self._calls: deque[_Call] = deque()
        self._next_index = 0
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
        engine.set_priority(cpu_priority, io_priority)
        engine.warmup(0, timeout_s=sigterm_timeout)

    def schedule_async_request(self, request: AsyncRequest) -> int:
        """Take the snapshot and start the request; returns its index when the trainer may change its tensors.

        A failure to take the snapshot is raised on every rank when the request is finalised.

        Raises:
            StagingError: A callable that is not nostall's own cannot be sent to another process.
        """
        index = self._next_index
        call = self._caller.begin(request.freeze()._replace(call_idx=index))
        self._next_index += 1
        self._calls.append(call)
        return index

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
            RuntimeError: Ranks have scheduled different numbers of requests.
        """
        finalized = []
        coordination = coordination_for(self._process_group)
        while self._calls:
            call = self._calls[0]
            if blocking:
                self._await(call)
            alive, failed = self._agree(call, coordination, no_dist=no_dist)
            if alive:
                break
            self._calls.popleft()
            self._caller.take_over(call)
            if failed:
                self._raise_failure(call, coordination, no_dist=no_dist)
            call.life.to(State.WRITTEN)
            try:
                call.request.execute_finalize_fns(validate_matching_call_idx=False)
            except BaseException:
                call.life.to(State.FAILED)
                raise
            call.life.to(State.FINALIZED)
            finalized.append(call.request.call_idx)
        return finalized

    def poll(self) -> list[int]:
        """Finalise what is done on all ranks, without waiting. Collective."""
        return self.maybe_finalize_async_calls(blocking=False)

    def wait(self, timeout: float | None = None) -> list[int]:
        """Wait until everything scheduled is done, and finalise it. Collective.

        Raises:
            SaveTimeoutError: This rank's part was not done within ``timeout`` seconds; nothing is finalised.
            CheckpointException: A request failed on some rank.
        """
        if timeout is not None:
            pending = wait([call.outcome for call in self._calls], timeout).not_done
            if pending:
                raise SaveTimeoutError(
                    f"{len(pending)} of {len(self._calls)} requests are not done after {timeout:g} s",
                    rank=coordination_for(self._process_group).rank,
                    phase="write",
                    hint="wait again, or close(abort=True)",
                )
        return self.maybe_finalize_async_calls(blocking=True)

    @property
    def pending(self) -> int:
        """Number of requests that are scheduled and not finalised."""
        return len(self._calls)

    def get_num_unfinalized_calls(self) -> int:
        """Number of requests that are scheduled and not finalised."""
        return self.pending

    def close(self, abort: bool = False) -> None:
        """Finalise everything that is scheduled, or give it up with ``abort``; then end worker processes. Idempotent.

        Without ``abort`` this is collective while requests are pending. An aborted request is never finalised. The queue
        can be used again.
        """
        try:
            if not abort:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            calls, self._calls = self._calls, deque()
            self._caller.close(abort=abort or bool(calls))
            for call in calls:
                if not call.life.over:
                    call.life.to(State.ABORTED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(abort=True)
        except Exception as second:  # the error in the body is the one that matters
            if hasattr(error, "add_note"):
                error.add_note(f"closing the queue failed, too: {second}")

    def _await(self, call: _Call) -> None:
        timeout_s = default_engine().options.save_timeout_s
        try:
            call.outcome.result(timeout_s)
        except TimeoutError:
            late = Failure(
                kind="SaveTimeoutError",
                message=f"request {call.request.call_idx} was not done within {timeout_s:g} s",
                phase="write",
            )
            if call.native is not None:
                call.native.abort()
            call.settle(late)

    def _agree(
        self, call: _Call, coordination: Coordination, *, no_dist: bool
    ) -> tuple[bool, bool]:
        """Whether the call is unfinished anywhere, and whether it failed anywhere."""
        alive = not call.outcome.done()
        failed = not alive and call.failure() is not None
        if no_dist:
            return alive, failed
        index = call.request.call_idx
        any_alive, any_failed, highest, lowest = coordination.maximum(
            [int(alive), int(failed), index, -index]
        )
        if highest != -lowest:
            raise RuntimeError(
                f"ranks look at different requests: rank {coordination.rank} at {index}, others at"
                f" {-lowest} to {highest}; every rank has to schedule and poll the same number of times"
            )
        return bool(any_alive), bool(any_failed)

    def _raise_failure(self, call: _Call, coordination: Coordination, *, no_dist: bool) -> None:
        if not call.life.over:
            call.life.to(State.FAILED)
        failure = call.failure()
        mine = (
            None
            if failure is None
            else sendable(
                _torch.wrap_exception(error_of(RankFailed(rank=coordination.rank, failure=failure)))
            )
        )
        if no_dist and call.native is not None:
            # The other ranks are going to finalise; they learn of this rank's failure there, and so does this one.
            call.request.execute_finalize_fns(validate_matching_call_idx=False)
        if call.native is not None:
            call.native.discard()
        everyone = [mine] if no_dist else coordination.all_gather(mine)
        ranks = [coordination.rank] if no_dist else range(coordination.world_size)
        failures = {
            rank: wrapped
            for rank, wrapped in zip(ranks, everyone, strict=True)
            if wrapped is not None
        }
        raise exception_for(failures, step="write", on_coordinator=coordination.is_coordinator)


def abort_all() -> None:
    """Abort every live queue: what is scheduled is given up and never finalised; each queue can be used again."""
    for live in list(_live_queues):
        live.close(abort=True)


def abort_nvrx_checkpoint() -> None:
    """The name under which frameworks look for :func:`abort_all`."""
    abort_all()
