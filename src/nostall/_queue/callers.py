"""Requests, and callers: the processes that run them.

A request is a function for the background, and functions that follow it in the trainer. nostall's
own saves go to the torch-free writer process, with any caller. Other callables run in a Python
process: a persistent one (:class:`PersistentAsyncCaller`) or one per call
(:class:`TemporalAsyncCaller`).
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from functools import partial
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from nostall._engine import default_engine
from nostall._model.jobs import Failure, RankFailed
from nostall._model.names import counted
from nostall._model.threads import interruptible, is_done, uninterrupted
from nostall._queue.python_worker import Outcome, PythonWorker, serialize_call
from nostall._ranks.failures import error_of, failure_of, raise_everywhere
from nostall._ranks.group import are_same_ranks, coordination_for
from nostall._save.early_commit import EarlyCommit
from nostall._save.split_save import BackgroundSave, SplitSave
from nostall.errors import OptionError, RankMismatchError, SaveTimeoutError

F = TypeVar("F", bound=Callable[..., Any])

_COMMITS: list[Callable[..., Any]] = []
"""Functions marked by :func:`commits`."""
_COMMIT_ARGUMENTS = 3


# --- requests -------------------------------------------------------------------------------------


def commits(function: F) -> F:
    """Mark the finalize function that commits a save, given its writer and two more arguments.

    It raises on all ranks or on none, so that no rank has to ask the others.
    """
    _COMMITS.append(function)
    return function


def committed_by(function: Callable[[], Any]) -> tuple[Any, ...] | None:
    """The arguments of a commit if that is known to be all a finalize function does, or ``None``.

    Known are partials, and closures, such as Megatron's, that Python compiled to use no name and no
    value of their surroundings but the commit and what it is called with.
    """
    used: list[Any]
    if isinstance(function, partial):
        used = [function.func, function.args, *function.keywords]
    elif isinstance(function, FunctionType):
        code = function.__code__
        if code.co_varnames:  # an argument's default value, or a local one, may be anything
            return None
        try:
            used = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # a variable that has no value yet
            return None
        used += [function.__globals__.get(name) for name in code.co_names]
        used += [each for each in code.co_consts if isinstance(each, CodeType)]
    else:
        return None
    arguments = [each for each in used if not any(each is known for known in _COMMITS)]
    if len(arguments) != 1 or len(used) != 2 or not isinstance(arguments[0], tuple | list):
        return None
    if len(arguments[0]) != _COMMIT_ARGUMENTS or not hasattr(arguments[0][0], "_rank_save"):
        return None
    return tuple(arguments[0])


class AsyncRequest(NamedTuple):
    """A function for the background, and functions that follow it in the trainer."""

    async_fn: Callable[..., Any] | None
    """Runs in the background; ``None`` if this rank has nothing to do."""
    async_fn_args: tuple[Any, ...] | list[Any]
    """Its arguments; the result of ``preload_fn`` replaces index 1."""
    finalize_fns: list[Callable[[], Any]]
    """Run in the trainer, in order, once every rank is done; not after a failure that it knows."""
    async_fn_kwargs: dict[str, Any] | None = None
    """Its keyword arguments."""
    preload_fn: Callable[[], Any] | None = None
    """Runs in the trainer when the request is scheduled; its result replaces argument index 1."""
    is_frozen: bool = False
    call_idx: int = 0
    flush_dst: str | None = None
    """NVRx's destination of files that its writer has left on a local disk; must be ``None``."""

    @classmethod
    def of(cls, request: object) -> AsyncRequest:
        """A request of any class, taken by its fields; all but the first three may be missing.

        Raises:
            OptionError: It lacks one of the first three, or has a ``flush_dst``.
        """
        if getattr(request, "flush_dst", None) is not None:
            raise OptionError(
                "a request with flush_dst needs NVRx's own queue, which copies its files there",
                hint="leave staging_dir out; local_staging_dir is nostall's own",
            )
        if isinstance(request, cls):
            return request
        fields = {name: getattr(request, name) for name in cls._fields if hasattr(request, name)}
        missing = [name for name in cls._fields[:3] if name not in fields]
        if missing:
            raise OptionError(
                f"an object of type {type(request).__name__} cannot be scheduled: it has no"
                f" {missing[0]}",
                hint="pass an AsyncRequest, or an object with its fields",
            )
        return cls(**fields)

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Append a finalize function.

        Raises:
            RuntimeError: The request is already scheduled.
        """
        if self.is_frozen:
            raise RuntimeError("cannot add a finalize function to a scheduled request")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Run the whole request in the caller's thread. Collective.

        Raises:
            CheckpointException: It failed on some rank; raised on every rank, and nothing is
                finalised. In a single process, a callable that is not nostall's own raises its own
                exception instead.
        """
        native = self.async_fn if isinstance(self.async_fn, BackgroundSave) else None
        failure: Failure | None = None
        try:
            if self.async_fn is not None:
                self.async_fn(*self.loaded_args(), **(self.async_fn_kwargs or {}))
        except Exception as error:  # the other ranks wait in a collective
            if native is None and coordination_for(None).world_size == 1:
                raise
            failure = failure_of(error, phase="write")
            if native is not None:
                native.fail(error, phase="stage")
        coordination = coordination_for(None)
        if native is not None:
            failure = native.failure() or failure
        if coordination.maximum([int(failure is not None)]) != [0]:
            if native is not None:
                native.discard()
            raise_everywhere(failure, coordination)
        self.execute_finalize_fns(validate_matching_call_idx=False)

    def loaded_args(self) -> list[Any]:
        """The arguments after preloading."""
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            if len(args) < 2:
                raise OptionError(
                    f"a request with a preload_fn has {counted(len(args), 'argument')}",
                    hint="pass at least two async_fn_args: the result replaces index 1",
                )
            with interruptible():
                args[1] = self.preload_fn()
        return args

    def early_commit(
        self, group: dist.ProcessGroup | None, *, after: deque[Call]
    ) -> EarlyCommit | None:
        """The early commit of its save, which is allowed now.

        ``None`` if a finalize function is to run before, a save ``after`` which it comes waits for
        a poll, or other ranks save than those of a group.
        """
        first = committed_by(self.finalize_fns[0]) if self.finalize_fns else None
        waiting = [each.request.finalize_fns for each in after if each.early is None]
        if first is None or any(committed_by(function) for each in waiting for function in each):
            return None
        writer, _, wrapper = first
        split: SplitSave | None = writer._rank_save.split
        if split is None or split.early is None or not are_same_ranks(wrapper.group, group):
            return None
        if self.async_fn is not (split if split.has_to_run else None):
            return None
        split.early.after = next((each.early for each in reversed(after) if each.early), None)
        split.early.is_allowed = True
        if not split.has_to_run:
            split.was_started = True  # no snapshot is scheduled
            split.early.begin()
        return split.early

    def freeze(self) -> AsyncRequest:
        """A copy of the request, closed to further finalize functions."""
        return self._replace(is_frozen=True)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Run the finalize functions and return the call index.

        With ``validate_matching_call_idx`` this is collective: ranks first compare their indices.

        Raises:
            RankMismatchError: Ranks are about to finalise different requests.
        """
        if validate_matching_call_idx:
            highest, lowest = coordination_for(None).maximum([self.call_idx, -self.call_idx])
            if highest != -lowest:
                raise RankMismatchError(
                    f"ranks finalise different requests: this one {self.call_idx}, others {-lowest}"
                    f" to {highest}",
                    phase="commit",
                    hint="schedule and finalise the same requests in the same order on every rank",
                )
        for fn in self.finalize_fns:
            with interruptible():
                fn()
        return self.call_idx


# --- callers --------------------------------------------------------------------------------------


class Call:
    """A scheduled request in progress."""

    def __init__(self, request: AsyncRequest) -> None:
        self.request = request
        function = request.async_fn
        self.native = function if isinstance(function, BackgroundSave) else None
        """The save behind the request, if it is nostall's own."""
        self.begun_s = time.monotonic()
        self.outcome: Future[Outcome] = Future()
        self.late: Failure | None = None
        """The failure that counts once its deadline has passed."""
        self.early: EarlyCommit | None = None
        """The early commit of the save that it finalises, if there is to be one."""
        self.process: PythonWorker | None = None
        """The process of a callable that is not nostall's own."""

    def settle(self, failure: Outcome) -> None:
        # An abort and an answer may coincide; the first one counts.
        with suppress(InvalidStateError):
            self.outcome.set_result(failure and (self.late or failure))

    def discard(self) -> None:
        """Remove this rank's files of a save that will not be committed."""
        if self.native is not None:
            self.native.discard()
        elif self.early is not None:  # it has none, but could commit
            self.early.withdraw()


class AsyncCaller(ABC):
    """Runs requests in the background, and ends them in their order.

    Subclasses choose the process for callables that are not nostall's own.
    """

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        """The requests in progress, oldest first; an abort replaces the deque."""
        self._cpu_priority: int | None = None
        self._io_priority: int | None = None
        self._process: PythonWorker | None = None
        """The Python process that serves later calls, too."""

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Take the snapshot, or begin it with overlapped staging, and start the request.

        Raises:
            StagingError: The request cannot be sent to another process.
        """
        with uninterrupted(patience=2):
            self.begin(AsyncRequest.of(async_req))

    def begin(self, request: AsyncRequest) -> Call:
        """Schedule a request; returns the call."""
        default_engine().set_priority(self._cpu_priority, self._io_priority)
        call = Call(request)
        self._calls.append(call)
        if request.async_fn is None:
            call.settle(None)
            return call
        phase = "stage"
        try:
            args = request.loaded_args()
            if (native := call.native) is not None:
                phase = "start"
                native.start(args[1]).add_done_callback(lambda _: call.settle(native.failure()))
                return call
            phase = "serialise"
            fd = serialize_call(request.async_fn, args, request.async_fn_kwargs or {})
            phase = "start"
            try:
                call.process = self._worker()
            except BaseException:  # passed on; no process owns the descriptor
                os.close(fd)
                raise
            call.process.submit(fd).add_done_callback(lambda done: call.settle(done.result()))
        except BaseException as error:  # of the user's functions, or an interrupt
            # A call that cannot be pickled fails on every rank, so each raises at once.
            if phase == "serialise" or not isinstance(error, Exception):
                # Its caller never gets its index.
                self.take_over(call)
                if call.native is not None:
                    call.native.abort(failure_of(error, phase="start"))
                    call.discard()
                raise
            # Other ranks wait for this one; all of them raise when finalising.
            failure = failure_of(error, phase=phase)
            if call.native is not None:
                call.native.fail(error, phase=phase)
                failure = call.native.failed(error, phase=phase).failure
            call.settle(failure)
        return call

    def is_current_async_call_done(
        self,
        blocking: bool = False,
        no_dist: bool = False,
        finalize_timeout: float | None = None,
    ) -> bool:
        """Whether the oldest request is done, on every rank; collective unless ``no_dist``.

        With ``finalize_timeout`` it is not if ``blocking`` takes longer than so many seconds.

        Raises:
            SaveError: A callable that is not nostall's own failed on this rank. nostall's own saves
                report failures on every rank when they are finalised.
            SaveTimeoutError: With ``blocking``: not done within ``EngineOptions.save_timeout_s``.
        """
        if not self._calls:
            return True
        call = self._calls[0]
        limit_s = default_engine().options.save_timeout_s
        timeout_s = limit_s if finalize_timeout is None else finalize_timeout
        with uninterrupted():
            is_late = blocking and not is_done(call.outcome, timeout_s)
            if is_late and finalize_timeout is None:
                raise SaveTimeoutError(
                    f"request {call.request.call_idx} did not finish within {timeout_s:g} s",
                    rank=coordination_for(None).rank,
                    phase="write",
                    hint="wait again, or give it up with close(abort=True)",
                )
            alive = not is_done(call.outcome)
            if not (not alive if no_dist else self.sync_all_async_calls(alive)):
                return False
            self.take_over(call)
            failure = call.outcome.result()
            if failure is not None and call.native is None:
                raise error_of(RankFailed(rank=coordination_for(None).rank, failure=failure))
        return True

    def sync_all_async_calls(self, is_alive: bool) -> bool:
        """Whether all ranks are done; this rank is not if ``is_alive``. Collective."""
        return coordination_for(None).maximum([int(is_alive)]) == [0]

    def take_over(self, call: Call) -> bool:
        """Remove a finished call from the caller; false if another thread has aborted it.

        A call leaves the deque once, so it is either finalised or aborted, never both.
        """
        try:
            self._calls.remove(call)
        except ValueError:
            return False
        if call.process is not None and call.process is not self._process:
            call.process.end(abort=not call.process.idle)
        return True

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """End the caller's processes, after their work or at once with ``abort``. Idempotent."""

    def _worker(self) -> PythonWorker:
        """The process for callables that are not nostall's own."""
        # Not abstract: a user's subclass that schedules nostall's saves needs no process.
        raise NotImplementedError(f"{type(self).__name__} runs only nostall's own saves")

    def abandon_after_fork(self) -> None:
        """In a forked child: drop calls and processes, which belong to the parent."""
        for process in {self._process, *(call.process for call in self._calls)}:
            if process is not None:
                process.abandon_after_fork()
        self._process = None
        self._calls.clear()

    def abort_calls(self) -> None:
        """Abort all requests; Ctrl-C in the wait for one of them is raised when all are aborted."""
        with uninterrupted(), ExitStack() as every:
            calls, self._calls = self._calls, deque()  # later calls are kept
            for _ in range(len(calls)):
                every.callback(self._abort_next, calls)

    def _abort_next(self, calls: deque[Call]) -> None:
        try:
            call = calls.popleft()
        except IndexError:  # another thread has taken the last one
            return
        native = call.native
        try:
            if native is not None and not is_done(call.outcome):
                native.abort()
        finally:
            aborted = "the request was aborted"
            call.settle(Failure(kind="SaveAbortedError", message=aborted, phase="write"))
            call.discard()
            if call.process is not None and call.process is not self._process:
                call.process.end(abort=not call.process.idle)


def asked_priority(cpu_priority: int) -> int | None:
    """The requested niceness; ``None`` for 10, the default in the established signature."""
    return None if cpu_priority == 10 else cpu_priority


class PersistentAsyncCaller(AsyncCaller):
    """Runs callables that are not nostall's own in one Python process, started on first use.

    Args:
        is_daemon: Accepted for compatibility; workers never outlive the trainer.
        cpu_priority: Niceness of background processes, 0 to 19; at its default, that of
            ``EngineOptions``.
        io_priority: Their I/O scheduling class (Linux ``ionice``); ``None`` for that of
            ``EngineOptions``.
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
        self._cpu_priority = asked_priority(cpu_priority)
        self._io_priority = io_priority
        self._sigterm_timeout_s = sigterm_timeout

    def close(self, abort: bool = False) -> None:
        """End the worker process, if there is one."""
        if abort:
            self.abort_calls()
        process, self._process = self._process, None
        if process is not None:
            process.end(abort=abort)

    def _worker(self) -> PythonWorker:
        if self._process is None or not self._process.alive:
            self._process = self._new_worker()
        return self._process

    def _new_worker(self) -> PythonWorker:
        options = default_engine().options
        return PythonWorker(
            cpu_priority=options.cpu_priority,
            io_priority=options.io_priority,
            sigterm_timeout_s=self._sigterm_timeout_s,
        )


class TemporalAsyncCaller(PersistentAsyncCaller):
    """A new Python process for every call of a callable that is not nostall's own."""

    def close(self, abort: bool = False) -> None:
        """End the processes of all calls."""
        calls = list(self._calls)
        super().close(abort)
        for call in calls:
            if call.process is not None:
                call.process.end(abort=abort)

    def _worker(self) -> PythonWorker:
        return self._new_worker()


class ActiveCall(NamedTuple):
    """A scheduled request that is not finalised, in the form that frameworks unpack."""

    idx: int
    async_caller: AsyncCaller
    async_request: AsyncRequest
