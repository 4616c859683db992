"""The process that promotes checkpoints: receive jobs from the socket, and answer each.

It ends with the trainer, as the writer process does; what it has not promoted stays in the tier.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from dataclasses import dataclass
from functools import partial

from nostall._model.checksum import use_fastest_from
from nostall._model.jobs import Failure
from nostall._storage.places import take_storage_options
from nostall._tier.copying import Refused, Unpromotable
from nostall._tier.promoting import Existing, NotYet, Promote, Promoting, promote
from nostall._writer.messages import Answer, Message, send
from nostall._writer.parent import (
    ignore_signals,
    make_importable,
    messages_from_parent,
    say_ready,
)
from nostall.errors import NostallError

_PROGRESS_EVERY_S = 0.25
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 20.0


def main(socket_fd: int, parent_pid: int, checksums_from: str) -> None:
    """Serve one trainer until it closes the socket or ends; arguments as of the writer process."""
    ignore_signals(signal.SIGTERM)
    promoter = _Promoter(socket.socket(fileno=socket_fd))
    threading.Thread(target=promoter.serve, name="nostall-promotions", daemon=True).start()
    say_ready(promoter.socket, parent_pid)
    if checksums_from:
        use_fastest_from(checksums_from)
    for message, _ in messages_from_parent(promoter.socket, parent_pid):
        assert isinstance(message, Promote)
        promoter.jobs.put(message)
    os._exit(0)  # whatever the other threads are doing


class _Promoter:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.jobs: queue.SimpleQueue[Promote] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        self._next_s = 0.0

    def send(self, message: Message) -> None:
        """Send a message to the trainer."""
        try:
            with self._send_lock:
                send(self.socket, message)
        except OSError:  # the trainer is gone
            os._exit(0)

    def serve(self) -> None:
        """Promote forever, one checkpoint at a time; what cannot go on now is tried again later."""
        later: list[_Attempt] = []
        while True:
            attempt = self._next(later)
            again_in_s = self._try(attempt)
            if again_in_s is not None:
                attempt.due_s = time.monotonic() + again_in_s
                later.append(attempt)

    def _next(self, later: list[_Attempt]) -> _Attempt:
        """The next new job, or the first of the others that is due again."""
        first = min(later, key=lambda attempt: attempt.due_s, default=None)
        timeout_s = None if first is None else max(0.0, first.due_s - time.monotonic())
        try:
            return _Attempt(self.jobs.get(timeout=timeout_s))
        except queue.Empty:
            assert first is not None
            later.remove(first)
            return first

    def _try(self, attempt: _Attempt) -> float | None:
        """Try to promote; seconds until the next attempt, or ``None`` if the job is answered."""
        name, job, sys_path = attempt.message
        failure: Failure | None = None
        try:
            make_importable(sys_path)
            take_storage_options(job.destination, job.storage_options)
            promote(job, partial(self._send_progress, name))
        except (Existing, Unpromotable) as error:
            failure = error.failure
        except (NotYet, BlockingIOError) as error:
            waits = str(error) if isinstance(error, NotYet) else "another process promotes it"
            self.send(Promoting(name, waits=waits))
            return _FIRST_DELAY_S
        except Exception as error:  # whatever the client of a store raises; it may pass
            self.send(Promoting(name, trouble=_described(error)))
            delay_s, attempt.delay_s = attempt.delay_s, min(2 * attempt.delay_s, _LONGEST_DELAY_S)
            return delay_s
        self.send(Answer(name, failure))
        return None

    def _send_progress(self, name: str, nbytes: int, total_nbytes: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _PROGRESS_EVERY_S
            self.send(Promoting(name, nbytes, total_nbytes))


@dataclass(slots=True, eq=False)
class _Attempt:
    """A job that is not answered, and when it is tried next."""

    message: Promote
    due_s: float = 0.0
    delay_s: float = _FIRST_DELAY_S


def _described(error: Exception) -> str:
    if isinstance(error, Refused):
        return f"{error.failure.message} ({error.failure.path})"
    return str(error) if isinstance(error, NostallError | OSError) else repr(error)
