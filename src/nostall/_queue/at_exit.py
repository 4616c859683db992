"""What becomes of saves that are not finalised when the interpreter ends.

They are completed, with the other ranks if there are any, for a limited time. If one is lost all the same, the process says
which and ends with exit status 1, or that of SIGTERM if it ends because of that: a job scheduler must not take a run for a
success whose last checkpoint is not there.
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
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Protocol

from nostall import _torch

_log = logging.getLogger("nostall")

FAILURE_STATUS = 1
LEAVING_S = 5.0
"""How much later than this one another rank may leave with an exception, to finish together what is scheduled."""


class Unfinished(Protocol):
    """A queue with requests that are not finalised."""

    @property
    def pending(self) -> int:
        """How many."""

    @property
    def is_distributed(self) -> bool:
        """Whether finalising them takes other ranks, too."""

    def wait(self, timeout: float | None = None) -> object:
        """Finalise all of them, or raise."""

    def maybe_finalize_async_calls(self, *, blocking: bool) -> object:
        """Finalise those that all ranks are done with."""

    def close(self, *, abort: bool) -> None:
        """Give them up, with ``abort``."""


class _Standby:
    """A thread that is there before it is needed: an interpreter that is ending starts none (from Python 3.12 on)."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], str], Future[str]]] = SimpleQueue()
        self._pid = 0

    def prepare(self) -> None:
        """Start it, if that was not done in this process."""
        if self._pid != os.getpid():
            self._work = SimpleQueue()
            threading.Thread(target=self._serve, name="nostall-exit", daemon=True).start()
            self._pid = os.getpid()

    def run(self, work: Callable[[], str], deadline: float) -> str:
        """What ``work`` returns, or why that is not known."""
        if self._pid != os.getpid():
            return "there is no thread to wait for other ranks with"
        said: Future[str] = Future()
        devices = _torch.current_accelerators()

        def on_the_callers_device() -> str:
            with _torch.on_devices(devices):
                return work()

        self._work.put((on_the_callers_device, said))
        try:
            return said.result(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, FutureTimeoutError):
            return "other ranks did not take part in time"
        except KeyboardInterrupt:
            return "waiting for it was interrupted"

    def _serve(self) -> None:
        while True:
            work, said = self._work.get()
            try:
                why = work()
            except Exception as error:  # of the process group's store, which may be gone
                why = f"{type(error).__name__}: {error}"
            said.set_result(why)


_standby = _Standby()


class _Losses:
    """Saves that fail while the interpreter waits for its threads: nobody asks about them any more."""

    def __init__(self) -> None:
        self.is_waiting = False
        self.any = False

    def begin(self) -> None:
        """The main thread has come to its end."""
        self.is_waiting = True


_losses = _Losses()


@contextmanager
def loss_is_told(path: str) -> Iterator[None]:
    """Let the log tell what fails inside on a thread in the background, where it is a future's that nobody may ask.

    If the interpreter is ending already, nobody can, and the exit status tells it, too.
    """
    try:
        yield
    except Exception as error:
        if threading.current_thread() is not threading.main_thread():
            _log.error("a save has failed path=%s: %s", path, error)
            _losses.any |= _losses.is_waiting
        raise


def _tell_losses() -> None:
    if _losses.any:
        end_process(FAILURE_STATUS)


atexit.register(_tell_losses)
# There is no public way to hear of the end before an executor's threads are waited for, as that of dcp.async_save. The
# last one to register is called first, hence the import of the module that does.
with suppress(RuntimeError):  # imported when the interpreter is ending already
    concurrent.futures.thread.threading._register_atexit(_losses.begin)  # type: ignore[attr-defined]  # private


def prepare_for_exit() -> None:
    """Make ready for finalising with other ranks at exit; to be called when something is scheduled that will need it."""
    _standby.prepare()


def finish_at_exit(
    queues: Iterable[Unfinished],
    *,
    timeout_s: float,
    status: Callable[[], int] = lambda: FAILURE_STATUS,
) -> None:
    """Finalise what is pending; does not return, but ends the process with what ``status`` says then, if something is lost."""
    unfinished = [queue for queue in queues if queue.pending]
    if not unfinished:
        return
    _log.warning(
        "the interpreter ends with %d requests that are not finalised; completing them within %g s;"
        " close() the queue to do so before",
        sum(queue.pending for queue in unfinished),
        timeout_s,
    )
    deadline = time.monotonic() + timeout_s
    done = [_finish(each, deadline) for each in unfinished]
    if not all(done):
        end_process(status())


def finish_after_error(
    unfinished: Unfinished,
    *,
    timeout_s: float,
    is_to_wait: bool,
    all_leave: Callable[[float], str],
) -> str:
    """Finalise what is pending although the caller leaves with an exception.

    Args:
        unfinished: The queue.
        timeout_s: Longest time for it.
        is_to_wait: Whether to wait for what is not written yet.
        all_leave: Why other ranks cannot be expected to do the same; empty if all of them do so within that many seconds.

    Returns:
        Why something is still pending, or has failed; empty if everything is committed.
    """
    _log.warning(
        "an exception leaves %d requests that are not finalised; completing them within %g s",
        unfinished.pending,
        timeout_s,
    )
    if unfinished.is_distributed:
        why = _standby.run(lambda: all_leave(LEAVING_S), time.monotonic() + 2 * LEAVING_S)
        if why:
            return why
    return _complete(unfinished, time.monotonic() + timeout_s, is_to_wait=is_to_wait)


def _finish(unfinished: Unfinished, deadline: float) -> bool:
    """Whether all that was pending is committed; what is not is given up."""
    before = unfinished.pending
    if unfinished.is_distributed and getattr(sys, "last_value", None) is not None:
        why = "this rank ends with an exception, so others do not take part"
    else:
        why = _complete(unfinished, deadline, is_to_wait=True)
    if not why:
        return True
    _log.error("of %d requests that were pending at exit some are lost: %s", before, why)
    try:
        unfinished.close(abort=True)
    except Exception:
        _log.exception("giving them up failed, too")
    return False


def _complete(unfinished: Unfinished, deadline: float, *, is_to_wait: bool) -> str:
    """Why not everything was finalised; empty if it was."""

    def finalize() -> object:  # what others do that poll
        return unfinished.maybe_finalize_async_calls(blocking=is_to_wait)

    if unfinished.is_distributed:
        # Others may have ended already, and a collective cannot be interrupted.
        return _standby.run(lambda: _repeat(finalize, unfinished), deadline)
    if not is_to_wait:
        return _repeat(finalize, unfinished)
    why = _repeat(lambda: unfinished.wait(max(0.0, deadline - time.monotonic())), unfinished)
    if why:  # what is written is not to be lost with what is not
        _repeat(lambda: unfinished.maybe_finalize_async_calls(blocking=False), unfinished)
    return why


def _repeat(finalize: Callable[[], object], unfinished: Unfinished) -> str:
    """Finalise until nothing is pending, or it does not help; why not everything was finalised, empty if it was."""
    why = ""
    while before := unfinished.pending:
        try:
            finalize()
        except KeyboardInterrupt:
            return why or "waiting for it was interrupted"
        except BaseException as error:  # DCP's is no Exception
            why = why or f"{type(error).__name__}: {error}"
        if unfinished.pending == before:
            # It was not about one request, after which others may be in order.
            return why or "it is not written yet"
    return why


def end_process(status: int) -> None:
    """End with this exit status, which a handler that runs at exit has no other way to set."""
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # what Python would run next
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue  # closed, or not there
    os._exit(status)
