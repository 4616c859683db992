"""Callers: the processes that run requests.

nostall's own saves go to the torch-free writer process, with any caller. Other callables run in a
Python process: a persistent one (:class:`PersistentAsyncCaller`) or one per call
(:class:`TemporalAsyncCaller`).
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from nostall._engine import default_engine
from nostall._model.jobs import Failure, RankFailed
from nostall._model.threads import is_done, uninterrupted
from nostall._queue.python_worker import Outcome, PythonWorker, serialize_call
from nostall._queue.requests import AsyncRequest
from nostall._ranks.failures import error_of, failure_of
from nostall._ranks.group import coordination_for
from nostall._save.early_commit import EarlyCommit
from nostall._save.split_save import BackgroundSave
from nostall.errors import OptionError, SaveTimeoutError
from nostall.options import EngineOptions

_log = logging.getLogger("nostall")


class Call:
    """A scheduled request in progress."""

    def __init__(self, request: AsyncRequest) -> None:
        self.request = request
        self.begun_s = time.monotonic()
        self.outcome: Future[Outcome] = Future()
        self.late: Failure | None = None
        """What it fails with, if it fails, once its deadline has passed."""
        self.early: EarlyCommit | None = None
        """The early commit of the save that it finalises, if there is to be one."""
        self.process: PythonWorker | None = None
        """The process of a callable that is not nostall's own."""

    @property
    def native(self) -> BackgroundSave | None:
        """The save behind the request, if it is nostall's own."""
        return self.request.async_fn if isinstance(self.request.async_fn, BackgroundSave) else None

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

    def failure(self) -> Failure | None:
        """Its failure, if any; call it only when the request is done."""
        return self.outcome.result()


class AsyncCaller(ABC):
    """Runs requests in the background, one after the other.

    Subclasses choose the process for callables that are not nostall's own.
    """

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        """The requests in progress, oldest first; an abort replaces the deque."""

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Take the snapshot and start the request; returns when the trainer may change its tensors.

        Raises:
            StagingError: The request cannot be sent to another process.
        """
        with uninterrupted(patience=2):
            self.begin(AsyncRequest.of(async_req))

    def begin(self, request: AsyncRequest) -> Call:
        """As :meth:`schedule_async_call`; returns the call."""
        call = Call(request)
        self._calls.append(call)
        if request.async_fn is None:
            call.settle(None)
            return call
        phase = "stage"
        try:
            args = request.loaded_args()
            fd = None
            if call.native is None:
                phase = "serialise"
                fd = serialize_call(request.async_fn, args, request.async_fn_kwargs or {})
            phase = "start"
            self._start(call, args, fd)
        except BaseException as error:  # of the user's functions, or an interrupt
            # A call that cannot be pickled fails on every rank, so each raises at once.
            if phase == "serialise" or not isinstance(error, Exception):
                self._forget(call, error)
                raise
            # Other ranks wait for this one; all of them raise when finalising.
            self._fail(call, error, phase=phase)
        return call

    def _forget(self, call: Call, interrupt: BaseException) -> None:
        """Discard a request whose scheduling was interrupted: its caller never gets its index."""
        self.take_over(call)
        if call.native is not None:
            call.native.abort(failure_of(interrupt, phase="start"))
            call.discard()

    def _start(self, call: Call, args: list[Any], call_fd: int | None) -> None:
        if (native := call.native) is not None:
            native.start(args[1]).add_done_callback(lambda _: call.settle(native.failure()))
            return
        assert call_fd is not None  # serialised above
        try:
            call.process = self._worker()
        except BaseException:  # passed on; no process owns the descriptor
            os.close(call_fd)
            raise
        call.process.submit(call_fd).add_done_callback(lambda done: call.settle(done.result()))

    def _fail(self, call: Call, error: Exception, *, phase: str) -> None:
        failure = failure_of(error, phase=phase)
        if call.native is not None:
            call.native.fail(error, phase=phase)
            failure = call.native.failed(error, phase=phase).failure
        call.settle(failure)

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the oldest request is done, on every rank; collective unless ``no_dist``.

        Raises:
            SaveError: A callable that is not nostall's own failed on this rank. nostall's own saves
                report failures on every rank when they are finalised.
            SaveTimeoutError: With ``blocking``: not done within ``EngineOptions.save_timeout_s``.
        """
        if not self._calls:
            return True
        call = self._calls[0]
        timeout_s = default_engine().options.save_timeout_s
        with uninterrupted():
            if blocking and not is_done(call.outcome, timeout_s):
                raise SaveTimeoutError(
                    f"request {call.request.call_idx} was not done within {timeout_s:g} s",
                    rank=coordination_for(None).rank,
                    phase="write",
                    hint="wait again, or give it up with close(abort=True)",
                )
            alive = not is_done(call.outcome)
            if not (not alive if no_dist else self.sync_all_async_calls(alive)):
                return False
            self.take_over(call)
            failure = call.failure()
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
        self._call_is_done(call)
        return True

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """End the caller's processes, after their work or at once with ``abort``. Idempotent."""

    def _worker(self) -> PythonWorker:
        """The process for callables that are not nostall's own."""
        # Not abstract: a user's subclass that schedules nostall's saves needs no process.
        raise NotImplementedError(f"{type(self).__name__} runs only nostall's own saves")

    def _call_is_done(self, call: Call) -> None:  # noqa: B027  # a hook
        """Called when a call leaves; subclasses may end its process."""

    def abandon_after_fork(self) -> None:
        """In a forked child: drop calls and processes, which belong to the parent."""
        for process in {call.process for call in self._calls if call.process is not None}:
            process.abandon_after_fork()
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
            if native is None:
                self._call_is_done(call)


_LEGACY_CPU_PRIORITY = 10


def asked_priority(cpu_priority: int) -> int | None:
    """The requested niceness; ``None`` for the default in the established signature."""
    return None if cpu_priority == _LEGACY_CPU_PRIORITY else cpu_priority


def require_possible(cpu_priority: int, io_priority: int | None, sigterm_timeout: float) -> None:
    """Refuse values that would otherwise fail when a process is started.

    Raises:
        OptionError: A priority is out of range, or the timeout is not a positive number of seconds.
    """
    EngineOptions(cpu_priority=cpu_priority, io_priority=io_priority)
    if not sigterm_timeout > 0:
        raise OptionError(
            f"sigterm_timeout={sigterm_timeout} is not possible", hint="use seconds > 0"
        )


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
        self._process: PythonWorker | None = None

    def begin(self, request: AsyncRequest) -> Call:
        """As the base class, with this caller's priorities."""
        default_engine().set_priority(self._cpu_priority, self._io_priority)
        return super().begin(request)

    def close(self, abort: bool = False) -> None:
        """End the worker process, if there is one."""
        if abort:
            self.abort_calls()
        process, self._process = self._process, None
        if process is not None:
            process.end(abort=abort)

    def abandon_after_fork(self) -> None:
        """In a forked child: drop calls and processes, which belong to the parent."""
        process, self._process = self._process, None
        super().abandon_after_fork()
        if process is not None:
            process.abandon_after_fork()

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

    def _call_is_done(self, call: Call) -> None:
        if call.process is not None:
            call.process.end(abort=not call.process.idle)


class ActiveCall(NamedTuple):
    """A scheduled request that is not finalised, in the form that frameworks unpack."""

    idx: int
    async_caller: AsyncCaller
    async_request: AsyncRequest
