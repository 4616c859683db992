"""Every value that crosses a boundary between two stages.

Made by one stage and only read by the next ones. Nothing here imports torch: the writer process uses this file too.
``Container`` describes one item's bytes, ``Slot`` and ``FileLayout`` where they lie in a file, ``WriteJob`` what the
writer process is asked to do, and ``RankReport`` what came of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.planner import SavePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Where the bytes of a container that depend on its payload lie, relative to the container's first byte.

    torch stores, beside each record's CRC-32, a ``.data/serialization_id`` record: 20 digits that depend on the
    record names only and 20 digits of a running hash over all CRCs. See ``nostall._pipeline.container``.
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
class Container:
    """The bytes ``torch.save`` puts around one tensor's payload."""

    prefix: bytes
    payload_nbytes: int
    suffix: bytes
    seal: Seal | None
    """``None`` if no byte depends on the payload (an empty tensor, or checksums switched off)."""

    @property
    def nbytes(self) -> int:
        """Length of the whole blob, as recorded in DCP's metadata."""
        return len(self.prefix) + self.payload_nbytes + len(self.suffix)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemShape:
    """All that laying out needs to know of an item; equal shapes lay out equally."""

    fqn: str
    container: Container | None
    """``None`` for an item that is a run of bytes already (an object, or a tensor of a rare kind)."""
    nbytes: int
    weight: int
    """Bytes counted when items are packed into files; 0 for a bytes item, as in stock DCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """How a tensor lies in its payload."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements; those of the live tensor may be others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank writes of a checkpoint: structure, no values, so that it can be kept from save to save."""

    rank: int
    plan: SavePlan
    shapes: tuple[ItemShape, ...]
    """One per item of the plan."""
    forms: tuple[TensorForm | None, ...]
    """One per item of the plan; ``None`` for an item that is a run of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSave:
    """One rank's share of a checkpoint with its values, resolved but not yet copied."""

    share: Share
    sources: Sequence[torch.Tensor | bytes]
    """One per item of the plan: the live tensor, laid out in memory as its payload will be or not; or the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one item in its file."""

    item: int
    """Position in the plan's items."""
    offset: int
    length: int
    payload_offset: int
    """Offset of the raw payload in the file; equals ``offset`` for a bytes item."""
    payload_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealTable:
    """How to seal the slots of one file: few templates, and one of them for each slot."""

    templates: tuple[tuple[int, int, Seal | None], ...]
    """Payload offset relative to the blob, payload length, seal."""
    blob_offsets: tuple[int, ...]
    template_of_slot: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """One shard file: its name below the checkpoint directory and what lies where in it."""

    name: str
    group: str
    """What the name begins with; empty without a separation hint."""
    nbytes: int
    slots: tuple[Slot, ...]
    image_offset: int
    """Where this file's image begins in the snapshot's memory; a multiple of the page size."""
    seals: SealTable
    """How the writer seals the slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All files of one rank's share of a checkpoint."""

    key: Hashable
    """Equal for layouts that put the same containers at the same places, whatever the files are called."""
    shapes: tuple[ItemShape, ...]
    files: tuple[FileLayout, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.nbytes for file in self.files)

    @property
    def image_nbytes(self) -> int:
        """Memory that all file images together need."""
        if not self.files:
            return 0
        last = self.files[-1]
        return last.image_offset + page_aligned(last.nbytes)


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
    """A rank could not do its part; its partial files are removed."""

    rank: int
    failure: Failure


RankReport: TypeAlias = RankWritten | RankFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """What a manifest says of one shard file."""

    name: str
    """Path below the checkpoint directory."""
    nbytes: int
    crc32: int | None
    """``None`` if it was not computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """What one rank has written for a save, and where."""

    directory: str
    """The checkpoint directory, as this rank was told."""
    files: tuple[WrittenFile, ...] | None
    """``None`` if a user's stream had the last word on what is in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Every rank wrote all it had planned."""

    results: list[list[Any]]
    """DCP's write results of each rank, in rank order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """At least one rank did not."""

    failures: dict[int, Any]
    """Why, for each of them, in the form in which DCP sends exceptions."""


Verdict: TypeAlias = Commit | Abort


MOST_IO_THREADS = 1024
"""Of one writer process; more are a mistake."""

NO_BLOCK = 0
"""In place of a block's identifier: the image is made while it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileImage:
    """One file to write: its name, and the memory that already holds all but the sealed bytes."""

    name: str
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCheckpoint:
    """A checkpoint whose metadata is published and durable."""

    path: str
    metadata_nbytes: int
    removed: tuple[str, ...]
    """Files of the checkpoint that it replaced, deleted after the swap."""
