"""The items of a checkpoint, their places and values: ``inspect`` and ``diff``. Imports torch.

Metadata is read through the allow-list, tensors as :func:`nostall.load` does, objects as bytes.
"""

from __future__ import annotations

import fnmatch
import math
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
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
from nostall._commit.commit import why_no_checkpoint
from nostall._commit.manifest import Manifest, split
from nostall._commit.metadata import extents_of, load_metadata
from nostall._model.names import METADATA_NAME, counted, some
from nostall._storage.locations import storage_at
from nostall._storage.port import PartStream, open_to_read, read_metadata
from nostall.errors import DamagedCheckpointError, OptionError
from nostall.integrity import why_damaged
from nostall.loading import load

_SIGNS = {"only in A": "-", "only in B": "+", "structure": "!", "values": "~"}
_COMPARED_AT_A_TIME = 1 << 22
"""Elements, so that copies in double precision stay small."""
_OBJECT = "object"


@dataclass(frozen=True, kw_only=True)
class Item:
    """A tensor or an object; ``inspect --json`` prints its fields except ``key``."""

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


# --- commands -------------------------------------------------------------------------------------


def inspect(given: Namespace) -> Answer:
    """Names, dtypes, shapes, sharding, sizes and files of items."""
    path = given.path
    present, _, manifest = open_checkpoint(path)
    items = _chosen(present, given.name)
    if given.sort is not None:
        items.sort(key=lambda item: item.name if given.sort == "name" else -item.nbytes)
    damage, metrics = damage_of(path), metrics_of(path)
    plain = {
        "path": path,
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
    of_all = "" if len(items) == len(present) else f" (of {len(present)})"
    committed = "without a manifest"
    if manifest is not None:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.committed_at_s))
        committed = f"committed {at} by nostall {manifest.version}"
    summary = [
        f"{counted(tensors, 'tensor')}, {counted(len(items) - tensors, 'object')}{of_all}",
        f"{format_size(nbytes)} in {counted(len(files), 'file')}",
        committed,
        *([f"metrics {format_metrics(metrics)}"] if metrics else []),
    ]
    rows = [
        (
            item.name,
            item.dtype,
            item.shape,
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
    (one, *_), (other, *_) = map(open_checkpoint, (given.a, given.b))
    chosen = _chosen({**one, **other}, given.name)
    for path in (given.a, given.b):
        if (damage := damage_of(path, deep=given.values)) is not None:
            raise damage
    plain: list[dict[str, str]] = []
    what: str | None
    done_nbytes, all_nbytes = 0, sum(item.nbytes for item in chosen)
    with progress("comparing") as report:
        for name, nbytes in ((item.name, item.nbytes) for item in chosen):
            done_nbytes += nbytes
            items = [each[name] for each in (one, other) if name in each]
            forms = [item.form for item in items]
            if len(items) < 2:
                where, what = "only in A" if name in one else "only in B", forms[0]
            elif forms[0] != forms[1]:
                where, what = "structure", " -> ".join(forms)
            elif given.values:
                values = map(_value_of, (given.a, given.b), items)
                where, what = "values", _difference(*values)
                report(done_nbytes, all_nbytes)
            else:
                continue
            if what:
                plain.append({"name": name, "where": where, "what": what})
    lines = [f"{_SIGNS[each['where']]} {each['name']}: {each['what']}" for each in plain]
    compared = "names, dtypes, shapes" + (" and values" if given.values else "")
    differ = "1 differs" if len(plain) == 1 else f"{len(plain)} differ"
    rest = "" if given.values else "; values were not compared (--values does)"
    lines.append(f"{counted(len(chosen), 'item')} compared by {compared}: {differ}{rest}")
    return Answer(plain, lines, Status.FAILED if plain else Status.FINE)


def _chosen(items: Mapping[str, Item], patterns: Sequence[str]) -> list[Item]:
    """The items whose names match any shell pattern; all of them without patterns.

    ``OptionError`` if none does: a misspelt name must not look like no difference.
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


def _difference(one: Any, other: Any) -> str | None:
    """How two tensors of one dtype and shape, or two stored objects, differ, if they do at all."""
    if isinstance(one, bytes):
        return None if one == other else "the stored bytes differ"
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


def open_checkpoint(path: str) -> tuple[dict[str, Item], Metadata, Manifest | None]:
    """The items of a committed checkpoint, each with a place in a file of it, by name."""
    files = storage_at(path)
    where = files.where(METADATA_NAME)
    try:
        with open_to_read(files, METADATA_NAME) as stream:
            content = read_metadata(stream, where)
    except (FileNotFoundError, NotADirectoryError):
        raise NotThere(f"{path}: {why_no_checkpoint(path)}") from None
    pickled, manifest = split(content, path=where)
    metadata = load_metadata(pickled, path=where)
    extents_of(metadata, path=where)  # refuses files outside the directory
    items = [_item(key, metadata, where) for key in metadata.state_dict_metadata]
    return {item.name: item for item in items}, metadata, manifest


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


def damage_of(path: str, *, deep: bool = False) -> DamagedCheckpointError | None:
    """The error of a checkpoint whose files have other sizes, or if ``deep`` other bytes.

    What is converted gets new checksums, so damage could not be found later. Sizes are compared
    first: a missing or truncated file is named without reading the others.
    """
    why = why_damaged(path)
    if deep and why is None:
        with progress("verifying") as report:
            why = why_damaged(path, deep=True, progress=report)
    if why is None:
        return None
    hint = f"`nostall verify {path}` lists all damage"
    return DamagedCheckpointError(f"the checkpoint is damaged: {why}", path=path, hint=hint)


def require_covered(item: Item, path: str) -> None:
    """Require that the parts of a tensor are the whole tensor."""
    if sum(math.prod(part["sizes"]) for part in item.parts) < math.prod(item.shape or ()):
        raise DamagedCheckpointError(f"{item.name!r} has missing parts", path=path)


def _value_of(path: str, item: Item) -> Any:
    """A tensor, whatever its parts; or an object as the bytes that are stored."""
    if item.shape is None:
        (part,) = item.parts
        with closing(storage_at(path).open(part["file"])) as source:
            return PartStream(source, part["offset"], part["nbytes"]).read()
    require_covered(item, path)
    try:
        tensor = torch.empty(item.shape, dtype=getattr(torch, item.dtype))
    except RuntimeError as error:  # hostile metadata can have any size
        raise MemoryError(f"no memory for {item.name!r}") from error
    load({item.key: tensor}, path)
    return tensor
