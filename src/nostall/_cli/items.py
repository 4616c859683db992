"""The items of a checkpoint, their places and values: ``inspect`` and ``diff``. Imports torch.

Metadata is read through the allow-list, tensors as :func:`nostall.load` does, objects as bytes.
"""

from __future__ import annotations

import fnmatch
import math
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from nostall._cli.listing import metrics_of
from nostall._cli.output import (
    Answer,
    NotThere,
    Status,
    format_metrics,
    format_size,
    plain_metrics,
    progress,
    table,
)
from nostall._commit.committed import found_instead
from nostall._commit.manifest import Manifest, split
from nostall._commit.metadata import extents_of, load_metadata
from nostall._model.names import METADATA_NAME
from nostall._model.wording import counted, some
from nostall._storage.locations import storage_at
from nostall._storage.port import open_to_read, read_metadata
from nostall.errors import DamagedCheckpointError, OptionError
from nostall.integrity import why_damaged
from nostall.loading import load

_SIGNS = {"only in A": "-", "only in B": "+", "structure": "!", "values": "~"}
_OF_MANAGER = "nostall."
"""How names of a CheckpointManager's own items begin."""
_COMPARED_AT_A_TIME = 1 << 22
"""Elements, so that copies in double precision stay small."""
_OBJECT = "object"


@dataclass(frozen=True, kw_only=True)
class Item:
    """A tensor or an object; its fields are those of ``inspect --json``, except ``key``."""

    key: Any
    """The name in the metadata, usually a text."""
    name: str
    dtype: str
    """Without ``torch.``; or ``object``."""
    shape: list[int] | None
    """``None`` for an object."""
    nbytes: int
    """In files."""
    parts: list[dict[str, Any]]
    """For each stored part its ``offsets`` and ``sizes`` in the tensor, and its place: ``file``,
    ``offset`` and ``nbytes``."""

    @property
    def form(self) -> str:
        """Dtype and shape, as in ``float32 [3, 4]``."""
        return self.dtype if self.shape is None else f"{self.dtype} {self.shape}"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint."""

    path: str
    metadata: Metadata
    manifest: Manifest | None
    items: Mapping[str, Item]
    """By name, in the order of the metadata."""


# --- commands -------------------------------------------------------------------------------------


def inspect(given: Namespace) -> Answer:
    """Names, dtypes, shapes, sharding, sizes and files of items."""
    checkpoint = open_checkpoint(given.path)
    items = _chosen(checkpoint.items, given.name)
    if given.sort is not None:
        items.sort(key=lambda item: item.name if given.sort == "name" else -item.nbytes)
    damage = None
    try:
        require_undamaged(checkpoint.path, deep=False)
    except DamagedCheckpointError as error:
        damage = error
    manifest, metrics = checkpoint.manifest, metrics_of(checkpoint.path)
    plain = {
        "path": checkpoint.path,
        "committed_at_s": None if manifest is None else manifest.committed_at_s,
        "nostall": None if manifest is None else manifest.version,
        "metrics": plain_metrics(metrics),
        "damage": None if damage is None else damage.message,
        "items": [
            {name: value for name, value in asdict(item).items() if name != "key"} for item in items
        ],
    }
    files = {part["file"] for item in items for part in item.parts}
    tensors, nbytes = sum(item.shape is not None for item in items), sum(i.nbytes for i in items)
    of_all = "" if len(items) == len(checkpoint.items) else f" (of {len(checkpoint.items)})"
    summary = [
        f"{counted(tensors, 'tensor')}, {counted(len(items) - tensors, 'object')}{of_all}",
        f"{format_size(nbytes)} in {counted(len(files), 'file')}",
        "without a manifest",
    ]
    if manifest is not None:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.committed_at_s))
        summary[-1] = f"committed {at} by nostall {manifest.version}"
    if metrics:
        summary.append(f"metrics {format_metrics(metrics)}")
    rows = [
        (
            item.name,
            item.dtype,
            "" if item.shape is None else str(item.shape),
            _sharding(item.parts),
            format_size(item.nbytes),
            some(sorted({part["file"] for part in item.parts}), 1),
        )
        for item in items
    ]
    lines = table("name dtype shape sharding >size files", rows)
    return Answer(plain, [*lines, "; ".join(summary)], error=damage)


def _sharding(parts: Sequence[Mapping[str, Any]]) -> str:
    """Parts along each dimension, as in ``4x1``; empty if there is one part."""
    grid = [len(set(offsets)) for offsets in zip(*(part["offsets"] for part in parts), strict=True)]
    if len(parts) < 2:
        return ""
    return "x".join(map(str, grid)) if math.prod(grid) == len(parts) else f"{len(parts)} parts"


def diff(given: Namespace) -> Answer:
    """Differences of two checkpoints in structure and values: a line for each item that differs."""
    one, other = open_checkpoint(given.a), open_checkpoint(given.b)
    names = [item.name for item in _chosen({**one.items, **other.items}, given.name)]
    for checkpoint in (one, other):
        require_undamaged(checkpoint.path, deep=given.values)
    found = {}
    for name in names:
        forms = [each.items[name].form for each in (one, other) if name in each.items]
        if len(forms) < 2:
            found[name] = ("only in A" if name in one.items else "only in B", forms[0])
        elif forms[0] != forms[1]:
            found[name] = ("structure", " -> ".join(forms))
    if given.values:
        for name, what in _values(one, other, [name for name in names if name not in found]):
            found[name] = ("values", what)
    plain = [
        {"name": name, "where": found[name][0], "what": found[name][1]}
        for name in names
        if name in found
    ]
    lines = [f"{_SIGNS[each['where']]} {each['name']}: {each['what']}" for each in plain]
    compared = "names, dtypes, shapes" + (" and values" if given.values else "")
    differ = "1 differs" if len(found) == 1 else f"{len(found)} differ"
    rest = "" if given.values else "; values were not compared (--values does)"
    lines.append(f"{counted(len(names), 'item')} compared by {compared}: {differ}{rest}")
    return Answer(plain, lines, Status.FAILED if found else Status.FINE)


def _chosen(items: Mapping[str, Item], patterns: Sequence[str]) -> list[Item]:
    """The items whose names match any shell pattern; all of them without patterns.

    Raises:
        OptionError: None does: a misspelt name must not look like no difference.
    """
    matching = [
        name
        for name in items
        if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if items and not matching:
        raise OptionError(
            f"no item matches --name {', '.join(patterns)}", hint=f"there are: {some([*items], 3)}"
        )
    return [items[name] for name in matching]


def _values(one: Checkpoint, other: Checkpoint, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names of items whose values differ, and how they do."""
    ends = list(accumulate(one.items[name].nbytes for name in names))
    with progress("comparing") as report:
        for name, done in zip(names, ends, strict=True):
            left, right = (_value_of(each.path, each.items[name]) for each in (one, other))
            what = None
            if one.items[name].shape is not None:
                what = difference(left, right)
            elif left != right:
                what = "the stored objects have other bytes"
            if what is not None and name.startswith(_OF_MANAGER):
                what = (
                    "what a CheckpointManager has recorded differs: times and metrics of the step,"
                    " or generators and extra of a rank"
                )
            if what is not None:
                yield name, what
            report(done, ends[-1])


def difference(one: torch.Tensor, other: torch.Tensor) -> str | None:
    """How two tensors of the same dtype and shape differ; ``None`` if all bits are equal."""
    different, largest = 0, 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    pieces = (each.reshape(-1).split(_COMPARED_AT_A_TIME) for each in (one, other))
    for left, right in zip(*pieces, strict=True):
        shape = len(left), left.element_size()
        rows = (each.view(torch.uint8).reshape(shape) for each in (left, right))
        unequal = torch.ne(*rows).any(dim=1)
        if not unequal.any():
            continue
        different += int(unequal.sum())
        try:
            distance = float((left[unequal].to(wide) - right[unequal].to(wide)).abs().max())
        except RuntimeError:  # a dtype that only stores bits
            distance = math.inf
        largest = max(largest, distance) if math.isfinite(distance) else math.inf
    if not different:
        return None
    by = f", at most by {largest:.6g}" if math.isfinite(largest) else ""
    return f"{different} of {one.numel()} elements differ{by}"


# --- opening and reading --------------------------------------------------------------------------


def open_checkpoint(path: str) -> Checkpoint:
    """The description of a committed checkpoint: its items, each with a place in a file of it."""
    files = storage_at(path)
    where = files.where(METADATA_NAME)
    try:
        with open_to_read(files, METADATA_NAME) as stream:
            content = read_metadata(stream, where)
    except (FileNotFoundError, NotADirectoryError) as error:
        why = f"no checkpoint was committed here{found_instead(path)}"
        raise NotThere(f"{path}: {why}") from error
    pickled, manifest = split(content, path=where)
    metadata = load_metadata(pickled, path=where)
    extents_of(metadata, path=where)  # refuses files outside the directory
    items = [_item(key, metadata, where) for key in metadata.state_dict_metadata]
    by_name = {item.name: item for item in items}
    return Checkpoint(path=path, metadata=metadata, manifest=manifest, items=by_name)


def _item(key: Any, metadata: Metadata, path: str) -> Item:
    entry = metadata.state_dict_metadata[key]
    dtype, shape = _OBJECT, None
    chunks = [(MetadataIndex(key), torch.Size())]
    if isinstance(entry, TensorStorageMetadata):
        dtype, shape = str(getattr(entry.properties, "dtype", None)), list(entry.size)
        chunks = [(MetadataIndex(key, chunk.offsets), chunk.sizes) for chunk in entry.chunks]
        if not dtype.startswith("torch."):
            raise DamagedCheckpointError(f"the tensor {key!r:.80} has no dtype", path=path)
    parts = []
    for index, sizes in chunks:
        place = metadata.storage_data.get(index)
        if place is None:
            raise DamagedCheckpointError(f"{key!r:.80} has no place in a file", path=path)
        in_file = {"file": place.relative_path, "offset": place.offset, "nbytes": place.length}
        parts.append({"offsets": [*(index.offset or ())], "sizes": [*sizes], **in_file})
    return Item(
        key=key,
        name=str(key),
        dtype=dtype.removeprefix("torch."),
        shape=shape,
        nbytes=sum(part["nbytes"] for part in parts),
        parts=parts,
    )


def require_undamaged(path: str, *, deep: bool) -> None:
    """Require files of the right sizes, and if ``deep`` that every byte is as it was written.

    What is converted gets new checksums, so damage could not be found later.
    """
    why = why_damaged(path)
    if deep and why is None:
        with progress("verifying") as report:
            why = why_damaged(path, deep=True, progress=report)
    if why is not None:
        hint = f"`nostall verify {path}` lists all damage"
        raise DamagedCheckpointError(f"the checkpoint is damaged: {why}", path=path, hint=hint)


def require_covered(item: Item, path: str) -> None:
    """Require that the parts of a tensor are the whole tensor."""
    if sum(math.prod(part["sizes"]) for part in item.parts) < math.prod(item.shape or ()):
        raise DamagedCheckpointError(f"{item.name!r} has missing parts", path=path)


def _value_of(path: str, item: Item) -> Any:
    """A tensor, whatever its parts; or an object as the bytes that are stored."""
    if item.shape is None:
        (part,) = item.parts
        content = bytearray(part["nbytes"])
        with closing(storage_at(path).open(part["file"])) as source:
            source.read_into(part["offset"], memoryview(content))
        return content
    require_covered(item, path)
    try:
        tensor = torch.empty(item.shape, dtype=getattr(torch, item.dtype))
    except RuntimeError as error:  # hostile metadata can have any size
        raise MemoryError(f"no memory for {item.name!r}") from error
    load({item.key: tensor}, path)
    return tensor
