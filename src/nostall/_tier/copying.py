"""Copy one file of a checkpoint from a local tier to its destination.

It is written as those of a save are: in parts, by several threads, with a checksum. So a part that
the local disk has damaged is noticed.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from nostall._model.jobs import (
    NO_BLOCK,
    Failure,
    FileImage,
    RankFailed,
    SealTable,
    WriteJob,
    page_aligned,
)
from nostall._model.values import WrittenFile
from nostall._storage.places import storage_at
from nostall._storage.port import Source
from nostall._storage.posix_storage import PosixStorage
from nostall._writer.files import perform
from nostall._writer.images import Window

_NO_SEALS = SealTable(templates=(), blob_offsets=(), template_of_slot=())
_HINT = "save again; the last checkpoint at the destination is untouched"


class Refused(Exception):
    """The destination has not taken a file; it may later."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Unpromotable(Exception):
    """The local checkpoint is damaged, so it will never be promoted."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.failure = Failure(
            kind="DamagedCheckpointError", message=message, phase="promote", path=path, hint=_HINT
        )


class Replaced(Exception):
    """A later save has replaced the local checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """From where to where, and how."""

    directory: str
    destination: str
    io_threads: int
    chunk_nbytes: int
    retries: int


def copy_file(file: WrittenFile, how: Copying, on_progress: Callable[[int], None]) -> None:
    """Write one file at the destination; nothing of it is left there after a failure.

    Raises:
        Replaced: The local file is gone.
        Unpromotable: It is damaged.
        Refused: The destination has not taken it.
    """
    local, storage = PosixStorage(how.directory), storage_at(how.destination)
    chunk_nbytes = page_aligned(max(how.chunk_nbytes, storage.least_part(file.nbytes)))
    try:
        source = local.open(file.name)
    except FileNotFoundError:
        raise Replaced(f"a local file is gone: {file.name}") from None
    with closing(source):
        image = _LocalFile(source)
        report = perform(
            WriteJob(
                job=how.directory,
                rank=0,
                directory=how.destination,
                files=(
                    FileImage(
                        name=file.name,
                        nbytes=file.nbytes,
                        block=NO_BLOCK,
                        block_offset=0,
                        seals=_NO_SEALS,
                    ),
                ),
                sync_files=True,
                io_threads=how.io_threads,
                chunk_nbytes=chunk_nbytes,
                direct=True,
                retries=how.retries,
            ),
            {file.name: image},
            on_progress=on_progress,
        )
    if image.why_unreadable:
        raise Unpromotable(
            f"a local file cannot be read: {image.why_unreadable}", local.where(file.name)
        )
    if isinstance(report, RankFailed):
        raise Refused(report.failure)
    (receipt,) = report.receipts
    if receipt.name != file.name:
        storage.remove([receipt.name])
        raise Refused(
            Failure(
                kind="WriteError",
                message="the name of a file is taken",
                phase="promote",
                path=storage.where(file.name),
                hint="something else writes to the destination",
            )
        )
    if file.crc32 is not None and receipt.crc32_of_file != file.crc32:
        storage.remove([file.name])
        raise Unpromotable(
            "a local file has another checksum than was committed", local.where(file.name)
        )


class _LocalFile:
    """The image of a file of the local disk: each chunk has memory of its own, until it is sent."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.why_unreadable = ""
        """Why the local disk has not given all bytes; empty if it has."""

    def window(self, begin: int, end: int, *, thread: int) -> Window:
        """Read a chunk."""
        del thread
        memory = memoryview(mmap.mmap(-1, max(page_aligned(end - begin), mmap.PAGESIZE)))
        try:
            nbytes = self._source.read_into(begin, memory[: end - begin])
        except OSError as error:
            self.why_unreadable = str(error)
            raise
        if nbytes < end - begin:
            self.why_unreadable = f"it has {begin + nbytes} bytes"
            raise OSError(self.why_unreadable)
        return Window(memory, begin)

    def hand_over(self, window: Window, end: int) -> None:
        """Does nothing."""
