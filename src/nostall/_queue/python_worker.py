"""A Python process for requests that are not nostall's own saves: it calls importable functions.

It starts with the first such request, and imports torch. Arguments are serialised with
``torch.save`` into anonymous memory on the caller's thread, so that later changes by the trainer do
not affect them, and sent as one descriptor. The process does not run the user's main script again,
so the script needs no ``__main__`` guard; objects defined in it are refused when the request is
scheduled.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import FunctionType
from typing import Any

from nostall._memory.arena import memory_descriptor
from nostall._model.jobs import Failure
from nostall._model.threads import is_done
from nostall._writer.messages import (
    Answer,
    Call,
    ignore_signals,
    messages_from_parent,
    say_ready,
    send,
)
from nostall._writer.trainer_side import ENCODING, ChildProcess, import_paths
from nostall.errors import StagingError

_DRAIN_TIMEOUT_S = 1800.0
"""Longest wait for calls when the process ends; the default of ``EngineOptions.save_timeout_s``."""

Outcome = Failure | None
"""``None`` if the function returned."""

_ENTRY = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); {}"
    "from nostall._queue.python_worker import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)

_preparations: list[str] = []


def prepare_new_workers(statement: str) -> None:
    """Let each process that starts from now on run a Python statement first. Idempotent."""
    if statement not in _preparations:
        _preparations.append(statement)


class _Travelling:
    """Replaces the pickle module in ``torch.save``; refuses objects defined in the main script."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, FunctionType | type) and value.__module__ == "__main__":
                raise pickle.PicklingError(f"{value.__qualname__} is defined in the main script")
            return NotImplemented


def serialize_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> int:
    """Put a call into anonymous memory and return its descriptor, which the caller closes.

    ``StagingError`` if a part of the call cannot be pickled, which the message names, or the system
    gives no such memory.
    """
    import torch

    try:
        fd = memory_descriptor("nostall-call")
    except OSError as error:
        raise StagingError(
            f"the request cannot be sent to another process: memfd_create: {error.strerror}",
            phase="stage",
            hint="this system, or the container's profile, must allow memfd_create",
        ) from error
    try:
        with open(fd, "wb", closefd=False) as stream:
            torch.save((function, tuple(args), dict(kwargs)), stream, pickle_module=_Travelling)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        os.close(fd)
        raise StagingError(
            f"the request cannot be sent to another process: {error}",
            phase="stage",
            hint="use a function defined at the top level of an importable module, and plain"
            " arguments; finalize functions may be closures",
        ) from error
    except BaseException:  # of the user's pickling code, or an interrupt
        os.close(fd)
        raise
    return fd


class PythonWorker(ChildProcess[Outcome]):
    """One process, one call at a time, in order."""

    kind = "worker process"

    def __init__(
        self, *, cpu_priority: int | None, io_priority: int | None, sigterm_timeout_s: float
    ) -> None:
        self._sigterm_timeout_s = sigterm_timeout_s
        self._calls = 0
        entry = _ENTRY.format("".join(f"{each}; " for each in _preparations))
        super().__init__(
            [*ENCODING, "-c", entry, json.dumps(import_paths())],
            cpu_priority=cpu_priority,
            io_priority=io_priority,
        )

    def submit(self, call_fd: int) -> Future[Outcome]:
        """Send a serialised call; takes its descriptor. The future always completes."""
        self._calls += 1
        job = str(self._calls)
        try:
            return self._ask(job, lambda failure: failure, [(Call(job), (call_fd,))])
        finally:
            os.close(call_fd)

    def end(self, *, abort: bool) -> None:
        """End the process: after its calls or a timeout, or at once with ``abort``. Idempotent."""
        with self._lock:
            unfinished = [waiting.future for waiting in self._waiting.values()]
        deadline_s = time.monotonic() + _DRAIN_TIMEOUT_S
        if abort or not all(is_done(each, deadline_s - time.monotonic()) for each in unfinished):
            self.terminate("the request was aborted", kill_after_s=self._sigterm_timeout_s)
        else:
            self.close(kill_after_s=self._sigterm_timeout_s)


def serve(socket_fd: int, parent_pid: int) -> None:
    """Main function of the process: its main thread calls, another one watches the parent."""
    ignore_signals()  # but SIGTERM, by which the trainer ends this process
    sock = socket.socket(fileno=socket_fd)
    calls: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sock, parent_pid, calls), daemon=True).start()
    say_ready(sock, parent_pid, "nostall-worker")
    while True:
        job, fd = calls.get()
        failure: Failure | None = None
        try:
            _call(fd)
        except Exception as error:  # the process survives failed requests
            failure = Failure(
                kind="SaveError",
                message=f"{type(error).__name__}: {error}",
                phase="write",
                errno=error.errno if isinstance(error, OSError) else None,
                traceback=traceback.format_exc(),
            )
        send(sock, Answer(job, failure))


def _listen(
    sock: socket.socket, parent_pid: int, calls: queue.SimpleQueue[tuple[str, int]]
) -> None:
    try:
        for call, (fd,) in messages_from_parent(sock, parent_pid):
            assert isinstance(call, Call)
            calls.put((call.job, fd))
    finally:
        os._exit(0)  # whatever the other thread is doing


def _call(fd: int) -> None:
    import torch

    with open(fd, "rb") as stream:
        stream.seek(0)
        # Trusted input: the trainer wrote it, and only this descriptor refers to it.
        function, args, kwargs = torch.load(stream, map_location="cpu", weights_only=False)
    function(*args, **kwargs)
