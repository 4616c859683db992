"""Every value that crosses a boundary between two stages of the trainer; those that the writer process knows too are in ``_model.jobs``.

Made by one stage and only read by the next ones. Nothing here imports torch. ``Container`` describes one item's bytes,
``Slot`` and ``FileLayout`` where they lie in a file, ``Commit`` and ``Abort`` what becomes of what the ranks have written.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from nostall._model.jobs import Seal, SealTable, page_aligned

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.planner import SavePlan


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
    left: tuple[str, ...] = ()
    """Names of files that earlier saves of this rank have made there; nobody has told it whether they are a checkpoint's."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCheckpoint:
    """A checkpoint whose metadata is published and durable."""

    path: str
    metadata_nbytes: int
    removed: tuple[str, ...]
    """Files of the checkpoint that it replaced, deleted after the swap."""
