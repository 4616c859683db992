"""The writer process: receive jobs from the socket, write them, answer.

The main thread reads the socket, so that the end of the trainer is noticed at once (see
``messages``). The process then exits, whatever its other threads are doing; an unfinished file is
not part of any checkpoint. A second thread writes the jobs one after the other. SIGINT and SIGTERM
are ignored: a signal to the whole process group must not lose a save, and the trainer decides when
the writer ends.
"""

from __future__ import annotations

import mmap
import os
import pickle
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from nostall._model.checksum import use_fastest_from
from nostall._model.jobs import RankFailed, RankReport, WriteJob, page_aligned
from nostall._writer.files import describe, perform
from nostall._writer.messages import (
    Answer,
    Cancel,
    Created,
    MapBlock,
    Message,
    UnmapBlock,
    Wrote,
    ignore_signals,
    make_importable,
    messages_from_parent,
    say_ready,
    send,
)
from nostall._writer.seals import Cancelled, WholeImage
from nostall.errors import ProtocolError

_PROGRESS_EVERY_S = 0.25
"""Interval of progress messages; the trainer's receiving thread takes turns with training."""


def main(socket_fd: int, parent_pid: int, checksums_from: str) -> None:
    """Serve one trainer until it closes the socket or ends.

    ``checksums_from`` is the path for ``_model.checksum.use_fastest_from``, or ``""``.
    """
    ignore_signals(signal.SIGTERM)
    sock = socket.socket(fileno=socket_fd)
    writer = _Writer(sock)
    threading.Thread(target=writer.write_jobs, name="nostall-jobs", daemon=True).start()
    say_ready(sock, parent_pid)
    if checksums_from:  # after "ready", which the trainer waits for
        use_fastest_from(checksums_from)
    for message, descriptors in messages_from_parent(sock, parent_pid):
        writer.take(message, descriptors)
    os._exit(0)


class _Writer:
    """The memory blocks and waiting jobs of this process."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._blocks: dict[int, mmap.mmap] = {}
        self._jobs: queue.SimpleQueue[tuple[WriteJob, threading.Event]] = queue.SimpleQueue()
        self._waiting: dict[str, WriteJob] = {}
        """Jobs that have not begun; the thread that removes a job answers it."""
        self._cancelled: dict[str, threading.Event] = {}
        self._send_lock = threading.Lock()

    def take(self, message: Message, descriptors: list[int]) -> None:
        """Handle one message; on the main thread only. ``ProtocolError`` if no trainer sends it."""
        try:
            match message:
                case MapBlock():
                    self._blocks[message.block] = mmap.mmap(descriptors[0], message.nbytes)
                case UnmapBlock():
                    # The mapping ends with the last image that refers to it.
                    self._blocks.pop(message.block, None)
                case WriteJob():
                    cancelled = self._cancelled[message.job] = threading.Event()
                    self._waiting[message.job] = message
                    self._jobs.put((message, cancelled))
                case Cancel():  # at once if the job has not begun, else between two chunks
                    job = self._waiting.pop(message.job, None)
                    running = self._cancelled.get(message.job)
                    if job is not None:
                        self._answer(message.job, _failed(job, Cancelled()))
                    elif running is not None:
                        running.set()
                case _:
                    raise ProtocolError(f"an unexpected message: {message!r:.200}")
        finally:
            for fd in descriptors:
                with suppress(OSError):
                    os.close(fd)

    def write_jobs(self) -> None:
        """Write jobs forever, one at a time, in order."""
        while True:
            job, cancelled = self._jobs.get()
            if self._waiting.pop(job.job, None) is None:
                continue  # cancelled before it began, and answered
            try:
                make_importable(job.sys_path)
                report = perform(
                    job,
                    self._images(job),
                    # The user's callables, for each thread its own.
                    [pickle.loads(job.stream) for _ in job.files[: job.io_threads] if job.stream],
                    cancelled=cancelled,
                    on_progress=self._progress_sender(job.job),
                    on_created=partial(self._send_created, job.job),
                )
            except BaseException as error:  # an answer is sent in any case
                report = _failed(job, error)
            self._answer(job.job, report)

    def _progress_sender(self, name: str) -> Callable[[int], None]:
        """A function that sends progress of a job at intervals; nothing depends on it."""
        next_s = 0.0

        def send_progress(nbytes: int) -> None:
            nonlocal next_s
            now_s = time.monotonic()
            if now_s >= next_s:
                next_s = now_s + _PROGRESS_EVERY_S
                self._send(Wrote(name, nbytes))

        return send_progress

    def _send_created(self, name: str, path: str) -> None:
        self._send(Created(name, path))

    def _answer(self, name: str, report: RankReport) -> None:
        self._cancelled.pop(name, None)
        self._send(Answer(name, report))

    def _send(self, message: Message) -> None:
        # An error means that the trainer has ended: then the main thread ends this process.
        with suppress(OSError), self._send_lock:
            send(self._sock, message)

    def _images(self, job: WriteJob) -> dict[str, WholeImage]:
        images = {}
        for image in job.files:
            block = self._blocks.get(image.block)
            end = image.block_offset + page_aligned(image.nbytes)
            if block is None or end > len(block):
                raise ProtocolError(f"the image of {image.name} lies outside of the memory sent")
            images[image.name] = WholeImage(memoryview(block)[image.block_offset : end])
        return images


def _failed(job: WriteJob, error: BaseException) -> RankFailed:
    failure = describe(error, job, phase="write", path=job.directory)
    return RankFailed(rank=job.rank, failure=failure)
