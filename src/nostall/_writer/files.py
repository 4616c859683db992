"""Write the files of a job to storage and report the result.

The same code runs in the writer process and, for synchronous saves, in the trainer.
"""

from __future__ import annotations

import errno
import os
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence

from nostall._model.jobs import (
    Failure,
    Faults,
    RankFailed,
    RankReport,
    RankWritten,
    WriteJob,
)
from nostall._storage.directories import remove_unnamed
from nostall._storage.locations import is_address, storage_at, take_storage_options
from nostall._storage.port import require_file
from nostall._writer.chunks import write_images
from nostall._writer.shared import Cancelled, Image, Position
from nostall._writer.streams import StreamFiles, StreamTarget


def perform(
    job: WriteJob,
    images: Mapping[str, Image],
    streams: Sequence[StreamTarget] = (),
    cancelled: threading.Event | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
    on_created: Callable[[str], None] = lambda _: None,
) -> RankReport:
    """Write all files of a job; never raises an ordinary exception.

    Returns a receipt for every file, or the first failure, after which files that the job has made
    are removed, except any that a checkpoint may have. ``images`` are by file name; ``streams`` are
    the user's callables, a copy for each thread, if files are written through them. Another thread
    sets ``cancelled`` to stop the job between two chunks. ``on_progress`` (bytes written so far)
    and ``on_created`` (path of a new file) are called in any thread.
    """
    at = Position(
        job.directory,
        cancelled=cancelled or threading.Event(),
        on_progress=on_progress,
        on_created=on_created,
    )
    try:
        at.wrote(0)
        faults = Faults(job.faults)
        faults.at("start")
        take_storage_options(job.directory, job.storage_options)
        storage = storage_at(job.directory, sync=job.sync_files, direct=job.direct)
        storage.make_place()
        if streams:
            receipts = StreamFiles(job, images, faults, at, streams).write()
        else:
            receipts = write_images(job, storage, images, faults, at)
            for receipt in receipts:  # the directory may have been removed meanwhile
                at.move("write", storage.where(receipt.name))
                require_file(storage, receipt.name, receipt.nbytes)
        if job.sync_files:
            at.move("fsync", job.directory)
            storage.flush()
        report = RankWritten(rank=job.rank, receipts=receipts)
        faults.at("report")
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
