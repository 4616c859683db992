"""Seal file images and write them through the user's callables: ``open_file`` and transforms.

Each file is written front to back, by one thread. A transform (compression, encryption) changes
lengths, so the items' offsets are known only after writing and are returned in the receipt.

Several files are written at a time, as what a stream does (compress, encrypt, send) is often slower
than storage. Each thread has a copy of its own of the user's callables, so that no instance is
called by two threads.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from nostall._model.jobs import FileImage, FileReceipt, WriteJob, WriteWork
from nostall._model.threads import work_together
from nostall._storage.posix import create_new
from nostall._writer.seals import GivenUp, Image, Payloads, Position


class StreamTarget(NamedTuple):
    """The user's callables for one save."""

    open_file: Callable[..., Any]
    transforms: Sequence[Any] = ()
    """DCP's ``StreamTransformExtension``, of which ``transform_to`` is used."""


class _Output(io.RawIOBase):
    """Counts what a transform writes, as not every stream can tell its position.

    Flushes instead of closing: a transform closes its output, which holds many items.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.nbytes = 0

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        nbytes = memoryview(piece).nbytes
        self._raw.write(piece)
        self.nbytes += nbytes
        return nbytes

    def close(self) -> None:
        if not self.closed:
            self._raw.flush()
        super().close()


class StreamFiles:
    """The files of a job; each thread takes one after the other, with one of ``targets`` to itself.

    Each image must be entirely in memory.
    """

    def __init__(
        self,
        job: WriteJob,
        images: Mapping[str, Image],
        at: Position,
        targets: Sequence[StreamTarget],
    ) -> None:
        self._job = job
        self._images = images
        self._at = at
        self._targets = targets
        self._left = deque(job.files)
        self._done: dict[str, FileReceipt] = {}
        self._failures: list[tuple[str, Exception]] = []
        """The path and the error of each file that failed; the first is raised."""
        self._given_up = threading.Event()
        """Lets each thread stop at the next piece of its file."""

    def write(self) -> tuple[FileReceipt, ...]:
        """Write them all; raises the first error of the user's callables, or ``Cancelled``."""
        work_together(self._write_some, len(self._targets), give_up=self._given_up.set)
        if self._failures:
            path, failure = self._failures[0]
            self._at.move("write", path)
            raise failure
        return tuple(self._done[image.name] for image in self._job.files)

    def _write_some(self, thread: int) -> None:
        """Write files until none is left, or one has failed."""
        while not self._given_up.is_set():
            try:
                image = self._left.popleft()
            except IndexError:
                return
            self._write_one(image, self._targets[thread])

    def _write_one(self, image: FileImage, target: StreamTarget) -> None:
        path = os.path.join(self._job.directory, image.name)
        try:
            self._require_wanted()
            self._at.faults.at("open", path)
            # The user's callable may replace an existing file, so it must be one of this save.
            path, fd = create_new(path)
            try:
                self._at.create(path)
            finally:
                os.close(fd)
            self._done[image.name] = self._written(image, path, target)
        except GivenUp:
            return
        except Exception as error:  # of any kind; raised by write()
            failure = error
        except SystemExit as error:  # it would end this thread only
            failure = RuntimeError(f"open_file or an extension called sys.exit: {error!r}")
        else:
            return
        self._failures.append((path, failure))
        self._given_up.set()

    def _require_wanted(self) -> None:
        self._at.raise_if_cancelled()
        if self._given_up.is_set():
            raise GivenUp

    def _written(self, image: FileImage, path: str, target: StreamTarget) -> FileReceipt:
        window = self._images[image.name].window(0, image.nbytes, thread=0)
        Payloads(image.seals, (0, image.nbytes)).sum_parts(window, 0)  # all are in one chunk
        started_s = time.monotonic()
        starts = image.seals.blob_offsets
        extents = []
        at = 0
        with target.open_file(path, "wb") as stream:
            for begin, end in zip(starts, (*starts[1:], image.nbytes), strict=True):
                nbytes = self._write_blob(target, stream, window.memory[begin:end])
                extents.append((at, nbytes))
                at += nbytes
            if self._job.sync_files:
                stream.flush()
                # Without a descriptor, the stream's close has to make the file durable.
                with suppress(AttributeError, io.UnsupportedOperation):
                    os.fsync(stream.fileno())
        self._at.wrote(image.nbytes)
        finished_s = time.monotonic()
        return FileReceipt(
            name=os.path.relpath(path, self._job.directory),
            planned_name=image.name,
            nbytes=at,
            crc32_of_file=None,
            extents=tuple(extents) if target.transforms else None,
            started_s=started_s,
            finished_s=finished_s,
            fsynced=self._job.sync_files,
            work=WriteWork(write_s=finished_s - started_s),
        )

    def _write_blob(self, target: StreamTarget, stream: Any, blob: memoryview) -> int:
        """Write one item through the user's transforms; returns its length in the file."""
        output = _Output(stream) if target.transforms else None
        sink: Any = stream if output is None else output
        for transform in target.transforms:
            sink = transform.transform_to(sink)
        for begin in range(0, len(blob), self._job.chunk_nbytes):
            self._require_wanted()
            sink.write(blob[begin : begin + self._job.chunk_nbytes])
        if output is None:
            return len(blob)
        sink.close()
        return output.nbytes
