"""Seal file images and write them to the user's streams, one file after the other."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from nostall._model.jobs import FileReceipt, WriteJob, WriteWork
from nostall._storage.posix import create_new
from nostall._storage.streams import StreamTarget, write_stream
from nostall._writer.faults import Faults
from nostall._writer.images import Image
from nostall._writer.position import Position
from nostall._writer.seals import ChunkPlanner, Payloads


def write_streams(
    job: WriteJob,
    images: Mapping[str, Image],
    faults: Faults,
    at: Position,
    target: StreamTarget,
    chunk_planner: ChunkPlanner,
) -> tuple[FileReceipt, ...]:
    """Write all files of a job front to back; each image must be entirely in memory.

    Raises:
        Cancelled: The job was cancelled.
        Exception: An error of the user's callables.
    """
    receipts = []
    for image in job.files:
        at.raise_if_cancelled()
        path = os.path.join(job.directory, image.name)
        at.move("write", path)
        faults.at("open", path)
        # The user's callable may replace an existing file, so the file must be one of this save.
        path, fd = create_new(path)
        try:
            at.create(path)
        finally:
            os.close(fd)
        at.move("write", path)
        window = images[image.name].window(0, image.nbytes, thread=0)
        payloads = Payloads(chunk_planner(image.seals, [0, image.nbytes]))
        payloads.sum_parts(window, 0)
        payloads.seal_ending_in(window, 0)
        started_s = time.monotonic()
        starts = image.seals.blob_offsets
        blobs = [
            (start, stop - start)
            for start, stop in zip(starts, (*starts[1:], image.nbytes), strict=True)
        ]
        extents = write_stream(
            target,
            path,
            window.memory,
            blobs,
            chunk_nbytes=job.chunk_nbytes,
            sync=job.sync_files,
            before_each=at.raise_if_cancelled,
        )
        at.wrote(image.nbytes)
        receipts.append(
            FileReceipt(
                name=os.path.relpath(path, job.directory),
                planned_name=image.name,
                nbytes=sum(length for _, length in extents),
                crc32_of_file=None,
                extents=extents if target.transforms else None,
                started_s=started_s,
                finished_s=time.monotonic(),
                fsynced=job.sync_files,
                work=WriteWork(write_s=time.monotonic() - started_s),
            )
        )
    return tuple(receipts)
