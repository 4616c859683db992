"""Values that cross a boundary between two stages of the trainer.

Values shared with the writer process are in ``_model.jobs``. Each value is made by one stage and
only read by later ones. Nothing here imports torch. ``Container`` describes one item's bytes,
``Slot`` and ``FileLayout`` their place in a file.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nostall._model.jobs import Seal, SealTable, page_aligned

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.planner import SavePlan


MOST_SERIES = (1 << 63) - 1
"""A reduction of ranks carries signed 64-bit integers."""


class SaveId(NamedTuple):
    """Identifies one save; the same on all its ranks. A tuple, to be fast to make and compare."""

    series: int
    """A random number that ranks have agreed on."""
    number: int
    """Counts the saves that all ranks have begun since then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor in the header of a file of safetensors, apart from its place."""

    name: str
    dtype: str
    """In the format's words, such as ``F32``."""
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where it begins in the tensor that it is a part of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The bytes that ``torch.save`` puts around one tensor's payload; none in safetensors."""

    prefix: bytes
    payload_nbytes: int
    suffix: bytes
    seal: Seal | None
    """``None`` if no byte depends on the payload (an empty tensor, or checksums switched off)."""
    entry: TensorEntry | None = None
    """In place of prefix and suffix if the file has a header."""

    @property
    def nbytes(self) -> int:
        """Length of the blob, as recorded in DCP's metadata."""
        return len(self.prefix) + self.payload_nbytes + len(self.suffix)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemShape:
    """The properties of an item that determine its layout; equal shapes lay out equally."""

    fqn: str
    container: Container | None
    """``None`` for a bytes item (an object, or a tensor of a rare kind)."""
    nbytes: int
    weight: int
    """Bytes counted when items are packed into files; 0 for a bytes item, as in stock DCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """Form of a tensor in its payload."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements; may differ from the live tensor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a checkpoint: structure without values, reusable by later saves."""

    rank: int
    plan: SavePlan
    shapes: tuple[ItemShape, ...]
    """One per item of the plan."""
    forms: tuple[TensorForm | None, ...]
    """One per item of the plan; ``None`` for a bytes item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSave:
    """One rank's share of a checkpoint with its values, resolved but not yet copied."""

    share: Share
    sources: Sequence[torch.Tensor | bytes]
    """One per item of the plan: the live tensor, with any strides, or the bytes."""


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
    """One shard file: its name below the checkpoint directory, and the places of its items."""

    name: str
    group: str
    """Prefix of the name; empty without a separation hint."""
    nbytes: int
    header: bytes
    """Before the first slot; empty unless the file is one of safetensors."""
    slots: tuple[Slot, ...]
    image_offset: int
    """Offset of this file's image in the snapshot's memory; a multiple of the page size."""
    seals: SealTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All files of one rank's share of a checkpoint."""

    key: Hashable
    """Equal for layouts with the same containers at the same places; independent of file names."""
    shapes: tuple[ItemShape, ...]
    files: tuple[FileLayout, ...]

    @property
    def nbytes(self) -> int:
        """Total bytes of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def image_nbytes(self) -> int:
        """Memory for all file images."""
        if not self.files:
            return 0
        last = self.files[-1]
        return last.image_offset + page_aligned(last.nbytes)


class WrittenFile(NamedTuple):
    """Manifest entry of one shard file. A tuple, as the coordinator makes thousands per save."""

    name: str
    """Path below the checkpoint directory."""
    nbytes: int
    crc32: int | None
    """``None`` if it was not computed."""


class RankFiles(NamedTuple):
    """The files that one rank has written for a save, and their directory. See WrittenFile."""

    directory: str
    """The checkpoint directory, as given on this rank."""
    files: tuple[WrittenFile, ...] | None
    """``None`` if a user's stream decided their content."""
    left: tuple[str, ...] = ()
    """Names of files in it from earlier saves of this rank whose outcome it does not know: they may
    belong to a checkpoint."""
    final_path: str | None = None
    """The final directory, if the checkpoint is committed in another one first."""
