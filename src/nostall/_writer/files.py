"""Write the files of a job to storage and report the result.

The same code runs in the writer process and, for synchronous saves, in the trainer. ``streams`` has
the files that go through the user's callables; all others are sealed and written in chunks, with a
few threads.

Chunks of a file are taken in order by whichever thread is free. For each chunk a thread

1. computes the CRC-32 of the payloads and payload parts in it, and seals the containers whose
   payload is entirely in it,
2. seals the other containers whose payload ends in it, once all earlier chunks are sealed: they
   have the earlier parts of that payload, and a container's end may reach into later chunks,
3. writes it.

Where files go through the page cache, two threads do all of this and write the chunks of a file one
after the other: the system lets only one thread at a time write into such a file, and further
threads would wait, in any order and with cold buffers. The same for an object store, whose client
takes parts in order and sends several at a time.

A thread waits only for earlier chunks of its file, which other threads have begun and which wait
only for still earlier ones: there is no cycle, and a single thread never waits. As many threads
checksum at a time as there are processors; a thread that checksums waits for nothing, so each gets
its turn. Checksumming one chunk thus overlaps with writing others.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from nostall._model.jobs import (
    Failure,
    FileImage,
    FileReceipt,
    RankFailed,
    RankReport,
    RankWritten,
    WriteJob,
    WriteWork,
    page_aligned,
)
from nostall._model.threads import work_together
from nostall._storage.directories import remove_unnamed
from nostall._storage.locations import is_address, storage_at, take_storage_options
from nostall._storage.port import Files, Upload, is_transient, require_file
from nostall._writer.seals import Cancelled, GivenUp, Image, Payloads, Position, Window
from nostall._writer.streams import StreamFiles, StreamTarget


def perform(
    job: WriteJob,
    images: Mapping[str, Image],
    streams: Sequence[StreamTarget] = (),
    *,
    cancelled: threading.Event,
    on_progress: Callable[[int], None],
    on_created: Callable[[str], None],
) -> RankReport:
    """Write all files of a job; never raises an ordinary exception.

    Returns a receipt for every file, or the first failure, after which files that the job has made
    are removed, except any that a checkpoint may have. ``images`` are by file name; ``streams`` are
    the user's callables, a copy for each thread, if files are written through them. Another thread
    sets ``cancelled`` to stop the job between two chunks. ``on_progress`` (bytes written so far)
    and ``on_created`` (path of a new file) are called in any thread.
    """
    at = Position(job, cancelled, on_progress, on_created)
    try:
        at.wrote(0)
        at.faults.at("start")
        take_storage_options(job.directory, job.storage_options)
        storage = storage_at(job.directory, sync=job.sync_files, direct=job.direct)
        storage.make_place()
        if streams:
            receipts = StreamFiles(job, images, at, streams).write()
        else:
            receipts = write_images(job, storage, images, at)
            for receipt in receipts:  # the directory may have been removed meanwhile
                at.move("write", storage.where(receipt.name))
                require_file(storage, receipt.name, receipt.nbytes)
        if job.sync_files:
            at.move("fsync", job.directory)
            storage.flush()
        report = RankWritten(rank=job.rank, receipts=receipts)
        at.faults.at("report")
        at.raise_if_cancelled()  # the caller no longer waits for the report
    except BaseException as error:  # every failure is reported to the trainer
        remove_unnamed(sorted(at.created))
        if not isinstance(error, Exception):  # an interrupt
            raise
        failure = describe(error, job, phase=at.phase, path=at.path)
        return RankFailed(rank=job.rank, failure=failure)
    return report


def describe(error: BaseException, job: WriteJob, *, phase: str, path: str) -> Failure:
    """The failure of a rank whose write raised an error; without a traceback if storage is full."""
    if isinstance(error, Cancelled):
        return Failure(kind="SaveAbortedError", message=str(error), phase=phase, path=path)
    code = error.errno if isinstance(error, OSError) and isinstance(error.errno, int) else None
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    hint = None
    is_full = code in (errno.ENOSPC, errno.EDQUOT)
    if is_full:
        needed = sum(image.nbytes for image in job.files)
        hint = _free_space(path, needed)
    elif code in (errno.EACCES, errno.EPERM, errno.EROFS):
        if is_address(path):
            # SeaweedFS answers so for a bucket that does not exist.
            hint = (
                "credentials are missing, have expired, or do not allow it;"
                " or the bucket does not exist: check the address"
            )
        else:
            hint = f"user {os.geteuid()} may not write there; change that or save elsewhere"
    elif code in (errno.ENOENT, errno.ENOTDIR):
        if is_address(path):
            hint = "check the address and its bucket, and that nothing else removes what is there"
        else:
            hint = "each part of the path must be a directory, and stay there during the save"
    return Failure(
        kind="WriteError",
        message=f"{type(error).__name__}: {reason}",
        phase=phase,
        path=path,
        errno=code,
        hint=hint,
        traceback="" if is_full else "".join(traceback.format_exception(error)),
    )


def _free_space(path: str, needed_nbytes: int) -> str | None:
    try:
        room = os.statvfs(path if os.path.isdir(path) else os.path.dirname(path))
    except OSError:
        return None
    return (
        f"this rank's files take {needed_nbytes} bytes; {room.f_bavail * room.f_frsize} bytes and"
        f" {room.f_favail} inodes are free there; make room or save elsewhere"
    )


# --- images, in chunks ----------------------------------------------------------------------------

_BACKOFF_S = 0.1
_BACKOFF_FACTOR = 4
_THREADS_IN_ORDER = 2
"""For files that are written in order: one thread writes, the other prepares the next chunk."""
_SPANS_KEPT = 2000
"""Per file: two for each of the first 1,000 chunks. Totals include all chunks."""


def write_images(
    job: WriteJob, storage: Files, images: Mapping[str, Image], at: Position
) -> tuple[FileReceipt, ...]:
    """Write all files of a job, each up to ``job.retries`` times anew after a transient error.

    Raises ``Cancelled``, or the first error that is permanent or out of retries.
    """
    # With more threads than processors all would finish late, and the device waits meanwhile.
    checksums = threading.Semaphore(len(os.sched_getaffinity(0)))
    done: dict[str, FileReceipt] = {}
    failed_attempts: dict[str, list[str]] = {image.name: [] for image in job.files}
    attempt = 0
    while True:
        tasks = [
            _FileTask(job, storage, image, images[image.name], at, checksums)
            for image in job.files
            if image.name not in done
        ]
        try:
            chunks = _Chunks(tasks, at)
            threads = min(job.io_threads, chunks.count)
            work_together(chunks.write, threads, give_up=chunks.give_up)
        finally:
            for task in tasks:
                task.close()
        done |= {
            task.name: task.receipt(failed_attempts[task.name]) for task in tasks if task.is_done
        }
        failures = {task: task.failure for task in tasks if task.failure is not None}
        if not failures:
            return tuple(done[image.name] for image in job.files)
        for task, failure in failures.items():
            if attempt == job.retries or not is_transient(failure):
                at.move(task.failed_in, task.path)
                raise failure
            failed_attempts[task.name].append(f"{type(failure).__name__}: {failure}")
            # The file was removed: a failed fsync may have dropped data, so it is written anew.
            at.wrote(-task.written_nbytes)
        at.cancelled.wait(_BACKOFF_S * _BACKOFF_FACTOR**attempt)
        at.raise_if_cancelled()
        attempt += 1


class _Chunks:
    """The chunks of a job's files; each thread takes one after the other."""

    def __init__(self, tasks: Sequence[_FileTask], at: Position) -> None:
        self._tasks = tasks
        self._at = at
        self._left = deque((task, n) for task in tasks for n in range(task.chunk_count))
        self.count = len(self._left)
        self._hopeless = threading.Event()
        self._lock = threading.Lock()

    def write(self, thread: int) -> None:
        """Write chunks until none is left, or until a permanent error has failed all files."""
        while not self._hopeless.is_set():
            # The first threads have begun with the first file, or given it up.
            if thread >= _THREADS_IN_ORDER and self._tasks[0].is_in_order():
                return
            try:
                task, chunk = self._left.popleft()
            except IndexError:
                return
            phase = "open"
            try:
                self._at.raise_if_cancelled()
                window = task.seal(chunk, thread)
                phase = "write"
                is_last = task.write(chunk, window, thread)
                del window  # its memory, before the next chunk takes more
                if is_last:
                    phase = task.last_phase
                    task.finish(thread)
            except GivenUp:
                continue
            except Exception as error:  # reported by the caller, once
                self._fail(task, phase, error)

    def give_up(self) -> None:
        """Fail all files that are not done."""
        self._hopeless.set()
        for task in self._tasks:
            task.give_up()

    def _fail(self, failed: _FileTask, phase: str, error: Exception) -> None:
        with self._lock:
            if self._hopeless.is_set() or failed.failure is not None:
                return
            failed.failure, failed.failed_in = error, phase
            if not is_transient(error):
                self._hopeless.set()
        for task in self._tasks if self._hopeless.is_set() else [failed]:
            task.give_up()


class _FileTask:
    """One file being written, shared by the threads that work on its chunks."""

    def __init__(
        self,
        job: WriteJob,
        storage: Files,
        image: FileImage,
        content: Image,
        at: Position,
        checksums: threading.Semaphore,
    ) -> None:
        self.name = image.name
        self.path = storage.where(image.name)
        self._job = job
        self._storage = storage
        self._image = image
        self._content = content
        self._at = at
        self._checksums = checksums
        self._file: Upload | None = None
        self._lock = threading.Lock()
        size = page_aligned(max(1, job.chunk_nbytes))
        self._bounds = (*range(0, image.nbytes, size), image.nbytes) if image.nbytes else (0, 0)
        self.chunk_count = len(self._bounds) - 1
        self._sealed = [threading.Event() for _ in range(self.chunk_count)]
        self._written = [threading.Event() for _ in range(self.chunk_count)]
        self._opened = threading.Event()
        self.written_nbytes = 0
        self._given_up = False
        self.is_done = False
        """Whether the file is complete and, if requested, durable."""
        self.failure: Exception | None = None
        self.failed_in = ""
        """The phase in which it failed."""
        syncs = job.sync_files and not is_address(job.directory)
        self.last_phase = "fsync" if syncs else "write"
        self._payloads = Payloads(image.seals, self._bounds)
        self._started_s = 0.0
        self._finished_s = 0.0
        self._spans: list[tuple[str, int, float, float]] = []

    def seal(self, chunk: int, thread: int) -> Window:
        """Checksum and seal a chunk, which can then be written."""
        begin, end = self._bounds[chunk], self._bounds[chunk + 1]
        self._open()
        started_s = time.monotonic()
        with self._checksums:
            window = self._content.window(begin, end, thread=thread)
            self._payloads.sum_parts(window, chunk)
        if chunk:
            self._wait(self._sealed[chunk - 1])  # and all before it
        self._payloads.seal_ending_in(window, chunk)
        self._content.hand_over(window, end)
        self._sealed[chunk].set()
        if self._job.checksum_files:
            with self._checksums:
                self._payloads.sum_chunk(window, chunk)
        self._note("checksum", thread, started_s)
        return window

    def write(self, chunk: int, window: Window, thread: int) -> bool:
        """Write a sealed chunk; whether it was the last one of the file to be written."""
        begin, end = self._bounds[chunk], self._bounds[chunk + 1]
        started_s = time.monotonic()
        if chunk and self.is_in_order():
            self._wait(self._written[chunk - 1])  # and all before it
        self._at.faults.at("chunk", self.path)
        assert self._file is not None  # opened before it was sealed
        self._file.write(window.memory, begin, end, origin=window.origin)
        self._written[chunk].set()
        self._note("write", thread, started_s)
        self._at.wrote(end - begin)
        with self._lock:
            self.written_nbytes += end - begin
            return self.written_nbytes == self._image.nbytes

    def finish(self, thread: int) -> None:
        """Complete the file, all of which is written."""
        assert self._file is not None  # it was written to
        started_s = time.monotonic()
        self._at.faults.at("fsync", self.path)
        self._file.finish()
        self._finished_s = self._note("fsync", thread, started_s)
        self.is_done = True

    def is_in_order(self) -> bool:
        """Whether chunks are written in order; waits until the file is open or given up."""
        self._opened.wait()
        return self._file is not None and not self._file.any_order

    def _note(self, phase: str, thread: int, started_s: float) -> float:
        """Record a span that ends now; returns the time."""
        now_s = time.monotonic()
        self._spans.append((phase, thread, started_s, now_s))
        return now_s

    def give_up(self) -> None:
        """Wake every thread that waits for a chunk of this file."""
        self._given_up = True
        for event in (*self._sealed, *self._written, self._opened):
            event.set()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def receipt(self, failed_attempts: Sequence[str]) -> FileReceipt:
        assert self._file is not None
        totals = {"checksum": 0.0, "write": 0.0, "fsync": 0.0}
        for phase, _, begin_s, end_s in self._spans:
            totals[phase] += end_s - begin_s
        return FileReceipt(
            name=self._file.name,
            planned_name=self.name,
            nbytes=self._image.nbytes,
            crc32_of_file=self._payloads.crc32_of_file if self._job.checksum_files else None,
            extents=None,
            started_s=self._started_s,
            finished_s=self._finished_s,
            fsynced=self._job.sync_files,
            work=WriteWork(
                checksum_s=totals["checksum"],
                write_s=totals["write"],
                fsync_s=totals["fsync"],
                spans=tuple(self._spans[:_SPANS_KEPT]),
            ),
            failed_attempts=tuple(failed_attempts),
        )

    def _open(self) -> None:
        with self._lock:
            if self._file is not None:
                return
            if self._given_up:
                raise GivenUp
            self._started_s = time.monotonic()
            self._at.faults.at("open", self.path)
            self._file = self._storage.put(self.name, self._image.nbytes, on_created=self._created)
            self._opened.set()

    def _created(self, name: str) -> None:
        self.path = self._storage.where(name)
        self._at.create(self.path)

    def _wait(self, event: threading.Event) -> None:
        # No deadline: the event is set by a thread of this process that only computes before, or
        # writes what has to be written first; and give_up() sets all events.
        event.wait()
        if self._given_up:
            raise GivenUp
