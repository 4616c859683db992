"""Saves that are not finalised when the interpreter ends.

They are completed, together with other ranks, within a time limit. If a save is lost, the process
logs it and ends with exit status 1, or with that of SIGTERM after a SIGTERM: a job scheduler must
not count a run as a success if its last checkpoint is missing.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import logging
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Protocol

from nostall._memory import devices
from nostall._model.interrupts import is_done, result_of, start
from nostall._model.wording import counted
from nostall._queue.preemption import STATUS, preemption

_log = logging.getLogger("nostall")

FAILURE_STATUS = 1
LEAVING_S = 5.0
"""Longest time by which another rank may exit with an exception later than this one."""
_LOOK_AGAIN_S = 0.02


class Unfinished(Protocol):
    """A queue with requests that are not finalised."""

    @property
    def pending(self) -> int:
        """Number of these requests."""

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks take part in finalising."""

    def wait(self, timeout: float | None = None) -> object:
        """Finalise all requests, or raise."""

    def maybe_finalize_async_calls(self, *, blocking: bool) -> object:
        """Finalise the requests that are done on all ranks."""

    def _finalize_done(self) -> object:
        """The same, and wait for the other ranks' answers."""

    def _give_up(self) -> None:
        """Abort its requests."""


class _Standby:
    """A thread started in advance: from Python 3.12 on, an ending interpreter starts none."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], str], Future[str]]] = SimpleQueue()
        self._pid = 0

    def prepare(self) -> None:
        """Start the thread, once per process."""
        if self._pid != os.getpid():
            self._work = SimpleQueue()
            start(threading.Thread(target=self._serve, name="nostall-exit", daemon=True))
            self._pid = os.getpid()

    def run(self, work: Callable[[], str], deadline: float) -> str:
        """The result of ``work``, or the reason why it is missing."""
        if self._pid != os.getpid():
            return "no thread is available to wait for other ranks"
        answer: Future[str] = Future()
        try:
            current = devices.current_accelerators()
        except RuntimeError as error:  # the accelerator may be the reason for the exit
            return f"the current accelerator is unknown: {error}"

        def on_the_callers_device() -> str:
            with devices.on_devices(current):
                return work()

        self._work.put((on_the_callers_device, answer))
        try:
            is_in_time = is_done(answer, max(0.0, deadline - time.monotonic()))
        except KeyboardInterrupt:
            return "the wait was interrupted"
        return result_of(answer) if is_in_time else "other ranks did not take part in time"

    def _serve(self) -> None:
        while True:
            work, answer = self._work.get()
            try:
                why = work()
            except Exception as error:  # the process group's store may be gone
                why = f"{type(error).__name__}: {error}"
            answer.set_result(why)


_standby = _Standby()


class _Losses:
    """Saves that fail while the interpreter waits for its threads: no caller sees the error."""

    def __init__(self) -> None:
        self.is_waiting = False
        self.any = False

    def begin(self) -> None:
        """Record that the main thread has ended: SIGTERM interrupts none of the waits to come."""
        self.is_waiting = preemption.is_ending = True


_losses = _Losses()


@contextmanager
def report_loss(path: str) -> Iterator[None]:
    """Log an error of the block on a background thread: its future may never be read.

    If the interpreter is ending, the exit status also reports the error.
    """
    try:
        yield
    except Exception as error:  # raised again
        if threading.current_thread() is not threading.main_thread():
            _log.error("a save has failed: path=%s: %s", path, error)
            _losses.any |= _losses.is_waiting
        raise


def _report_losses() -> None:
    if _losses.any:
        end_with_a_loss()


atexit.register(_report_losses)
# No public hook runs before the interpreter waits for the threads of executors, such as that of
# dcp.async_save. Hooks run in reverse order, so concurrent.futures.thread is imported first.
with suppress(RuntimeError):  # imported while the interpreter is ending
    concurrent.futures.thread.threading._register_atexit(_losses.begin)  # type: ignore[attr-defined]  # private


def prepare_for_exit() -> None:
    """Prepare to finalise with other ranks at exit; call it when such a request is scheduled."""
    _standby.prepare()


def finish_at_exit(queues: Iterable[Unfinished], *, timeout_s: float) -> None:
    """Finalise pending requests; if one is lost, end the process with a status that says so."""
    unfinished = [queue for queue in queues if queue.pending]
    if not unfinished:
        return
    _log.warning(
        "the interpreter ends with %s not finalised; waiting up to %g s; close() the queue, or the"
        " manager, to complete them earlier",
        counted(sum(queue.pending for queue in unfinished), "request"),
        timeout_s,
    )
    deadline = time.monotonic() + timeout_s
    done = [_finish(each, deadline) for each in unfinished]
    if not all(done):
        end_with_a_loss()


def finish_after_error(
    unfinished: Unfinished,
    *,
    timeout_s: float,
    is_to_wait: bool,
    all_leave: Callable[[float], str],
) -> str:
    """Finalise pending requests while the caller exits with an exception.

    Args:
        unfinished: The queue.
        timeout_s: Time limit.
        is_to_wait: Whether to wait for files that are not written yet.
        all_leave: Why other ranks do not take part; empty if all of them exit with an exception
            within the given seconds.

    Returns:
        Why a request is still pending or has failed; empty if all are committed.
    """
    _log.warning(
        "an exception was raised with %s not finalised; waiting up to %g s",
        counted(unfinished.pending, "request"),
        timeout_s,
    )
    if unfinished.is_distributed:
        why = _standby.run(lambda: all_leave(LEAVING_S), time.monotonic() + 2 * LEAVING_S)
        if why:
            return why
    return _complete(unfinished, time.monotonic() + timeout_s, is_to_wait=is_to_wait)


class _Answered(Protocol):
    def is_answered(self) -> bool:
        """Whether it waits for no rank any more."""


def await_answers(questions: Iterable[_Answered], *, timeout_s: float) -> None:
    """Wait until no rank is asked for anything, or end the process as after a loss.

    torch ends a process group, also when the process ends, only when its collectives are over. If
    another rank hangs, that takes as long as the group's deadline.
    """
    if _ends_with_an_exception():  # the other ranks lose this one anyway
        timeout_s = min(timeout_s, LEAVING_S)
    deadline_s = time.monotonic() + timeout_s
    while not all(each.is_answered() for each in questions):
        if time.monotonic() > deadline_s:
            end_with_a_loss()
        time.sleep(_LOOK_AGAIN_S)


def _ends_with_an_exception() -> bool:
    return getattr(sys, "last_value", None) is not None


def add_note(error: BaseException, note: str) -> None:
    """Log a note, and add it to an exception that is about to be raised."""
    _log.error("after an exception: %s", note)
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(note)


def _finish(unfinished: Unfinished, deadline: float) -> bool:
    """Whether all pending requests are committed; the others are given up."""
    before = unfinished.pending
    if unfinished.is_distributed and _ends_with_an_exception():
        why = "this rank ends with an exception, so other ranks do not take part"
    else:
        why = _complete(unfinished, deadline, is_to_wait=True)
    if not why:
        return True
    _log.error("requests were lost at exit, of %d that were pending: %s", before, why)
    try:
        unfinished._give_up()
    except Exception:  # the interpreter ends; the exit status reports the loss
        _log.exception("aborting the lost requests failed")
    return False


def _complete(unfinished: Unfinished, deadline: float, *, is_to_wait: bool) -> str:
    """Why a request was not finalised; empty if all were."""

    def finalize() -> object:  # the same collectives as in a poll of other ranks
        if is_to_wait:
            return unfinished.maybe_finalize_async_calls(blocking=True)
        return unfinished._finalize_done()

    if unfinished.is_distributed:
        # Other ranks may have ended, and a collective cannot be interrupted.
        return _standby.run(lambda: _repeat(finalize, unfinished), deadline)
    if not is_to_wait:
        return _repeat(finalize, unfinished)
    why = _repeat(lambda: unfinished.wait(max(0.0, deadline - time.monotonic())), unfinished)
    if why:  # requests that are written can still be finalised
        _repeat(unfinished._finalize_done, unfinished)
    return why


def _repeat(finalize: Callable[[], object], unfinished: Unfinished) -> str:
    """Finalise while that makes progress; why a request was not finalised, empty if all were."""
    why = ""
    while before := unfinished.pending:
        try:
            finalize()
        except KeyboardInterrupt:
            return why or "the wait was interrupted"
        except BaseException as error:  # CheckpointException is not an Exception
            why = why or f"{type(error).__name__}: {error}"
        if unfinished.pending == before:
            # The error does not concern a single request, so later ones would fail, too.
            return why or "the files are not written yet"
    return why


def end_with_a_loss() -> None:
    """End with status 1, or that of SIGTERM if the signal has arrived."""
    end_process(STATUS if preemption.asked else FAILURE_STATUS)


def end_process(status: int) -> None:
    """End with this exit status; a handler that runs at exit cannot set it in another way."""
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # what Python would run next
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue  # closed or missing
    os._exit(status)
