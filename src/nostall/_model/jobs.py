"""What the trainer asks of the writer process, and what comes back: values that both of them know.

Nothing here imports torch. Values that only the trainer knows are in ``nostall._model.values``: the writer process is ready the
sooner, the less it imports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Where the bytes of a container that depend on its payload lie, relative to the container's first byte.

    torch stores, beside each record's CRC-32, a ``.data/serialization_id`` record: 20 digits that depend on the
    record names only and 20 digits of a running hash over all CRCs. See ``nostall._plan.container``.
    """

    payload_crc_at: tuple[int, int]
    """The CRC field in the payload's data descriptor and the one in its central directory entry."""
    hash_before: int
    """The running hash over the records that precede the payload."""
    crcs_after: tuple[int, ...]
    """CRCs of the records between the payload and the identifier record."""
    id_at: int
    """The identifier record's 40 digits."""
    id_names: bytes
    """Its first 20 digits."""
    id_crc_at: tuple[int, int]
    """The CRC fields of the identifier record itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealTable:
    """How to seal the slots of one file: few templates, and one of them for each slot."""

    templates: tuple[tuple[int, int, Seal | None], ...]
    """Payload offset relative to the blob, payload length, seal."""
    blob_offsets: tuple[int, ...]
    template_of_slot: tuple[int, ...]


PAGE_NBYTES = 4096
"""Alignment of file images in memory and of O_DIRECT writes: the page size of Linux on x86-64 and most arm64."""


def page_aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank could not do its part, as plain data that crosses processes and ranks."""

    kind: str
    """Name of the class in ``nostall.errors`` that the user will see."""
    message: str
    phase: str
    path: str | None = None
    errno: int | None = None
    exit_code: int | None = None
    hint: str | None = None
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteWork:
    """What the writer's threads did for one file, in seconds summed over them."""

    checksum_s: float = 0.0
    """Checksumming and sealing, with waiting for each other; where there is no snapshot, with copying."""
    write_s: float = 0.0
    fsync_s: float = 0.0
    spans: tuple[tuple[str, int, float, float], ...] = ()
    """Phase, thread, begin and end (``time.monotonic``) of the first pieces of work; not all of a very large file's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReceipt:
    """Proof that one shard file is complete on storage."""

    name: str
    """Path below the checkpoint directory; also DCP's storage key."""
    planned_name: str
    """The name in the job: another one, if something had that."""
    nbytes: int
    packed_crc32: bytes
    """Four bytes per slot, see :attr:`crc32`: tens of thousands of numbers that are seldom asked for."""
    crc32_of_file: int | None
    """That of all bytes; ``None`` if checksums are off or a user's stream has the last word on what is in the file."""
    extents: tuple[tuple[int, int], ...] | None
    """Offset and length per slot where a user's stream decided them; ``None`` if they are the layout's."""
    started_s: float
    """Clock reading (``time.monotonic``) when its first byte was handed to the system."""
    finished_s: float
    fsynced: bool
    work: WriteWork = WriteWork()  # frozen
    failed_attempts: tuple[str, ...] = ()
    """Why it had to be written anew, once per attempt."""

    @property
    def crc32(self) -> tuple[int, ...]:
        """One per slot, in layout order; 0 for a slot that has no checksum of its own."""
        return tuple(memoryview(self.packed_crc32).cast("I"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWritten:
    """All files of a rank are complete and, unless switched off, durable."""

    rank: int
    receipts: tuple[FileReceipt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """A rank could not do its part; the files that it had made for it are removed."""

    rank: int
    failure: Failure


RankReport: TypeAlias = RankWritten | RankFailed


MOST_IO_THREADS = 1024
"""Of one writer process; more are a mistake."""


NO_BLOCK = 0
"""In place of a block's identifier: the image is made while it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileImage:
    """One file to write: its name, and the memory that already holds all but the sealed bytes."""

    name: str
    """A similar one is taken if something has it."""
    nbytes: int
    block: int
    """Identifier of the arena block that holds the image."""
    block_offset: int
    seals: SealTable


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
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
    """Whether to checksum files as a whole, beside the payloads that are sealed."""
    retries: int = 0
    """How often to write a file anew that the storage fails for a reason that may pass."""
    stream: bytes | None = None
    """Pickle of the user's own ``open_file`` and stream extensions, if files are to be written through them."""
    sys_path: tuple[str, ...] = ()
    """Where the user's callables can be imported from; empty without ``stream``."""
    faults: tuple[dict[str, Any], ...] = ()
    """Faults to inject, see ``nostall.testing``."""
