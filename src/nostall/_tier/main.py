"""The process that promotes checkpoints: receive jobs from the socket, and answer each.

It ends with the trainer, as the writer process does; what it has not promoted is still staged then.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
import traceback
from dataclasses import asdict
from typing import Any

from nostall._model.checksum import use_fastest_from
from nostall._model.jobs import Failure
from nostall._tier.promoting import PromotionJob, Refused, Unpromotable, promote
from nostall._writer.framing import Message, send
from nostall._writer.parent import make_importable, messages_from_parent
from nostall.errors import NostallError

_PROGRESS_EVERY_S = 0.25
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 60.0


def main(socket_fd: int, parent_pid: int, checksums_from: str) -> None:
    """Serve one trainer until it closes the socket or ends; arguments as of the writer process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    promoter = _Promoter(socket.socket(fileno=socket_fd))
    threading.Thread(target=promoter.serve, name="nostall-promotions", daemon=True).start()
    promoter.send({"type": "ready", "pid": os.getpid()})
    if checksums_from:
        use_fastest_from(checksums_from)
    for message, _ in messages_from_parent(promoter.socket, parent_pid):
        promoter.jobs.put(message)


class _Promoter:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.jobs: queue.SimpleQueue[Message] = queue.SimpleQueue()
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
        """Promote forever, one checkpoint at a time, in order."""
        while True:
            message = self.jobs.get()
            failure = self._promoted(message["job"], message)
            plain = None if failure is None else asdict(failure)
            self.send({"type": "promoted", "job": message["job"], "failure": plain})

    def _promoted(self, name: str, message: Message) -> Failure | None:
        """Promote, however long the destination refuses; the failure if it can never succeed."""

        def on_progress(nbytes: int, total_nbytes: int) -> None:
            now_s = time.monotonic()
            if now_s >= self._next_s:
                self._next_s = now_s + _PROGRESS_EVERY_S
                self.send({"type": "progress", "job": name, "nbytes": nbytes, "of": total_nbytes})

        delay_s = _FIRST_DELAY_S
        while True:
            try:
                make_importable(message["sys_path"])
                promote(_job(message), on_progress)
            except Unpromotable as error:
                return error.failure
            except Exception as error:  # whatever the client of a store raises; it may pass
                self.send({"type": "progress", "job": name, "trouble": _described(error)})
                time.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            else:
                return None


def _job(message: dict[str, Any]) -> PromotionJob:
    return PromotionJob(
        directory=message["directory"],
        destination=message["destination"],
        io_threads=message["io_threads"],
        chunk_nbytes=message["chunk_nbytes"],
        retries=message["retries"],
    )


def _described(error: Exception) -> str:
    if isinstance(error, Refused):
        return f"{error.failure.message} ({error.failure.path})"
    if isinstance(error, BlockingIOError):
        return "another process is promoting it"
    if isinstance(error, NostallError | OSError):
        return str(error)
    return "".join(traceback.format_exception(error))
