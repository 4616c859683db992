"""Values that the trainer and the writer process exchange: jobs, receipts and reports.

Nothing here imports torch. Values of the trainer alone are in ``nostall._model.values``: every
import delays the start of the writer process. These are named tuples for the same reason: as
dataclasses, with what that module imports, they took 18 ms more of processor time.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple, TypeAlias


class Seal(NamedTuple):
    """Offsets of the bytes of a container that depend on its payload, from its first byte.

    Beside each record's CRC-32, torch stores a ``.data/serialization_id`` record: 20 digits that
    depend only on the record names, and 20 digits of a running hash over all CRCs. See
    ``nostall._plan.formats``.
    """

    payload_crc_at: tuple[int, int]
    """The CRC fields in the payload's data descriptor and in its central directory entry."""
    hash_before: int
    """The running hash over the records before the payload."""
    crcs_after: tuple[int, ...]
    """CRCs of the records between the payload and the identifier record."""
    id_at: int
    """The identifier record's 40 digits."""
    id_names: bytes
    """Its first 20 digits."""
    id_crc_at: tuple[int, int]
    """The CRC fields of the identifier record itself."""


class SealTable(NamedTuple):
    """How to seal the slots of one file: a few templates, and the template of each slot."""

    templates: tuple[tuple[int, int, Seal | None], ...]
    """Payload offset in the blob, payload length, seal."""
    blob_offsets: tuple[int, ...]
    template_of_slot: tuple[int, ...]


PAGE_NBYTES = 4096
"""Alignment of file images in memory and of O_DIRECT writes.

The page size of Linux on x86-64 and on most arm64 machines.
"""


def page_aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


class Failure(NamedTuple):
    """The failure of a rank, as plain data that crosses processes and ranks."""

    kind: str
    """Name of the class in ``nostall.errors`` that is raised for it."""
    message: str
    phase: str
    path: str | None = None
    errno: int | None = None
    exit_code: int | None = None
    hint: str | None = None
    traceback: str = ""


class WriteWork(NamedTuple):
    """Seconds that the writer's threads spent on one file, summed over the threads."""

    checksum_s: float = 0.0
    """Checksumming and sealing, and the threads' waits for each other; copying too without a
    snapshot."""
    write_s: float = 0.0
    fsync_s: float = 0.0
    spans: tuple[tuple[str, int, float, float], ...] = ()
    """Phase, thread, begin and end (``time.monotonic``) of each section; only the first ones of a
    very large file."""


class FileReceipt(NamedTuple):
    """Proof that one shard file is complete on storage."""

    name: str
    """Path below the checkpoint directory; also DCP's storage key."""
    planned_name: str
    """The name in the job; in a file system ``name`` differs if the planned name was taken."""
    nbytes: int
    crc32_of_file: int | None
    """CRC-32 of all bytes; ``None`` without checksums or if a user's stream decides the content."""
    extents: tuple[tuple[int, int], ...] | None
    """Offset and length per slot if a user's stream decided them; ``None``: as laid out."""
    started_s: float
    """Clock reading (``time.monotonic``) at the first write."""
    finished_s: float
    fsynced: bool
    work: WriteWork = WriteWork()  # immutable
    failed_attempts: tuple[str, ...] = ()
    """The error of each attempt that was retried."""


class RankWritten(NamedTuple):
    """All files of a rank are complete and, with ``sync_files``, durable."""

    rank: int
    receipts: tuple[FileReceipt, ...]


class RankFailed(NamedTuple):
    """A rank's write failed; the files that it created are removed, or will be."""

    rank: int
    failure: Failure


RankReport: TypeAlias = RankWritten | RankFailed


MOST_IO_THREADS = 1024
"""Upper limit for one writer process."""
MOST_NBYTES = 1 << 62
"""Beyond the capacity of any file system or memory; the sum of two is still a file offset."""


NO_BLOCK = 0
"""Block identifier of an image that is built while it is written."""


class FileImage(NamedTuple):
    """One file to write: its name, and the memory that holds all of it but the sealed bytes."""

    name: str
    """If the name is taken in a file system, a similar one is used."""
    nbytes: int
    block: int
    """Identifier of the arena block that holds the image."""
    block_offset: int
    seals: SealTable


class WriteJob(NamedTuple):
    """One rank's files of one save, as plain data."""

    job: str
    rank: int
    directory: str
    files: tuple[FileImage, ...]
    sync_files: bool
    io_threads: int
    chunk_nbytes: int
    direct: bool
    checksum_files: bool = True
    """Whether to checksum whole files, in addition to the sealed payloads."""
    retries: int = 0
    """Retries per file after transient storage errors."""
    stream: bytes | None = None
    """Pickle of the user's ``open_file`` and stream extensions; ``None`` if there are none."""
    sys_path: tuple[str, ...] = ()
    """Import path of the user's callables, of an object store's client, or of faults; empty without
    them."""
    storage_options: str = "{}"
    """The user's options for the client of the directory's bucket, as JSON."""
    faults: bytes = b""
    """Faults that tests have asked for, see :class:`Faults`."""


class Faults:
    """Faults that tests have asked for in one save; without cost if there are none.

    Points are ``start``, ``open``, ``chunk``, ``fsync`` and ``report``, in the trainer ``stage``,
    and in the coordinator ``commit`` and ``publish``. The pickled objects have a method like
    :meth:`at`.
    """

    def __init__(self, pickled: bytes) -> None:
        self._faults: tuple[Any, ...] = pickle.loads(pickled) if pickled else ()

    def at(self, point: str, file: str = "") -> None:
        """Pass a named point of a file; raises what a test has asked for."""
        for fault in self._faults:
            fault.at(point, file)
