"""DCP's metadata, read through an allow-list, and where its items are in the files.

``.metadata`` is a pickle, and a pickle can run any code. nostall reads it with
:mod:`nostall._commit.metadata_pickle`, which resolves only the classes of DCP metadata, and then
checks the types of the entries. Stock readers have no such limit.

Frameworks keep every rank's local plan with the metadata (``Metadata.all_local_plans``) to validate
the plan cache of a resumed run. The dataclass does not declare this attribute, so code that
rebuilds the dataclass drops it. A checkpoint therefore has them in the planner data, under
:data:`PLANS_KEY`, as columns (``columns``).
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from types import NoneType
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from nostall._commit.columns import LocalPlans
from nostall._commit.index import ItemIndex
from nostall._commit.indexing import entries_and_places, read_index
from nostall._commit.manifest import DAMAGED_HINT, split
from nostall._commit.metadata_pickle import NAMES, unpickle
from nostall._model.jobs import MOST_NBYTES
from nostall._model.names import counted, is_shard_name
from nostall._storage.port import read_metadata
from nostall.errors import (
    DamagedCheckpointError,
    ReadError,
    UnknownMetadataError,
    UntrustedMetadataError,
)

PLANS_KEY = "nostall.all_local_plans"


def load_metadata(content: bytes, *, path: str) -> Metadata:
    """The metadata in a ``.metadata`` file.

    ``UnknownMetadataError`` if it has parts that DCP metadata does not have;
    ``UntrustedMetadataError`` if it is not a complete pickle of metadata, or is impossible.
    """
    try:
        metadata = unpickle(content)  # ignores the manifest after the pickle
    except UntrustedMetadataError as error:
        error.path = path
        error.hint = error.hint or DAMAGED_HINT
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise UntrustedMetadataError(
            f"the metadata cannot be read: {type(error).__name__}: {error!s:.200}",
            phase="read",
            path=path,
            hint=DAMAGED_HINT,
            cause=error,
        ) from None
    if not isinstance(metadata, Metadata):
        raise _refused(f"the file holds a {type(metadata).__name__}", path)
    _require_entries(metadata, path)
    if isinstance(metadata.planner_data, dict) and PLANS_KEY in metadata.planner_data:
        plans = LocalPlans.of_plain(metadata.planner_data.pop(PLANS_KEY))
        if plans is not None and getattr(metadata, "all_local_plans", None) is None:
            metadata.all_local_plans = plans  # type: ignore[attr-defined]  # see above
    return metadata


def _require_entries(metadata: Metadata, path: str) -> None:
    """Require entries of the declared types, on which all later code relies."""
    entries = vars(metadata).get("state_dict_metadata")
    if type(entries) is not dict:
        raise _refused("state_dict_metadata is not a dict", path)
    if not isinstance(metadata.storage_data, Mapping | NoneType):
        raise _refused("storage_data is not a mapping", path)
    if not isinstance(metadata.storage_meta, StorageMeta | NoneType):
        raise _refused("storage_meta is not a StorageMeta", path)
    for fqn, entry in entries.items():
        if type(fqn) not in NAMES:
            raise _refused(f"the name of an item is a {type(fqn).__name__}", path)
        if type(entry) is TensorStorageMetadata:
            _require_tensor(fqn, vars(entry), path)
        elif type(entry) is not BytesStorageMetadata:
            raise _refused(f"{fqn!r:.80} is neither a tensor nor bytes", path)


def _require_tensor(fqn: Any, tensor: Mapping[str, Any], path: str) -> None:
    size, chunks = tensor.get("size"), tensor.get("chunks")
    if type(size) is not torch.Size or type(chunks) is not list:
        raise _refused(f"the tensor {fqn!r:.80} has no size or no chunks", path)
    if min(size, default=0) < 0 or type(tensor.get("properties")) is not TensorProperties:
        raise _refused(f"the tensor {fqn!r:.80} has a negative size or no properties", path)
    begins = set()
    for chunk in chunks:
        place = vars(chunk) if type(chunk) is ChunkStorageMetadata else {}
        begin, extent = place.get("offsets"), place.get("sizes")
        if type(begin) is not torch.Size or type(extent) is not torch.Size:
            raise _refused(f"a chunk of the tensor {fqn!r:.80} has no offsets or no sizes", path)
        if not len(begin) == len(extent) == len(size):
            raise _refused(f"a chunk of the tensor {fqn!r:.80} differs in dimensions", path)
        for at, length, end in zip(begin, extent, size, strict=True):
            if min(at, length) < 0 or at + length > end:
                raise _refused(f"a chunk of the tensor {fqn!r:.80} lies outside of it", path)
        if not begin or 0 in extent:
            continue  # such chunks do not overlap, and every rank may have one
        if begin in begins:
            raise _refused(f"the tensor {fqn!r:.80} has a duplicate chunk", path)
        begins.add(begin)


def local_plans_in(metadata: Metadata | None) -> Sequence[SavePlan] | None:
    """All ranks' plans of a loaded checkpoint, if it has them; from metadata of any reader."""
    plans = getattr(metadata, "all_local_plans", None)
    if plans is None and metadata is not None and isinstance(metadata.planner_data, Mapping):
        plans = LocalPlans.of_plain(metadata.planner_data.get(PLANS_KEY))
    return plans


def planned_indices(metadata: Metadata) -> list[MetadataIndex]:
    """Every item that a reader of this metadata may request from storage."""
    indices = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            indices += [MetadataIndex(fqn, chunk.offsets) for chunk in entry.chunks]
        elif isinstance(entry, BytesStorageMetadata):
            indices.append(MetadataIndex(fqn))
    return indices


class Extent(NamedTuple):
    """Location of one item of a checkpoint; a tuple, as there may be millions."""

    file: str
    offset: int
    length: int
    item: str
    is_tensor: bool
    """Whether it is a part of a tensor; otherwise a planner has serialised some other object."""
    is_transformed: bool
    """Whether a stream transform has compressed or otherwise changed it."""

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.offset + self.length


def extents_of(metadata: Metadata, *, path: str) -> list[Extent]:
    """Locations of the items of a checkpoint, ordered by file and offset.

    ``UntrustedMetadataError`` if an item in ``storage_data`` has no location, one outside the
    checkpoint directory, or one that overlaps another item's.
    """
    storage_data = metadata.storage_data
    if not isinstance(storage_data, Mapping):
        raise _refused("storage_data is not a mapping", path)
    entries: Mapping[Any, Any] = metadata.state_dict_metadata
    file_of = cache(_file_of)  # a file has many items
    extents = []
    for index, info in storage_data.items():
        if type(index) is not MetadataIndex or type(getattr(index, "fqn", ())) not in NAMES:
            raise _refused("storage_data has a key that is not an item", path)
        name = getattr(info, "relative_path", None)
        item = str(index.fqn)
        file = file_of(name) if isinstance(name, str) else None
        if file is None:
            where = f"the file name {name!r:.200}" if isinstance(name, str) else "no file name"
            raise _refused(f"item {item!r:.80} has {where}", path)
        offset: Any = getattr(info, "offset", None)
        length: Any = getattr(info, "length", None)
        for value in (offset, length):
            if not isinstance(value, int) or not 0 <= value <= MOST_NBYTES:
                # Without the values: the text of an arbitrary object may have any length.
                raise _refused(f"item {item!r:.80} has an impossible offset or length", path)
        is_tensor = isinstance(entries.get(index.fqn), TensorStorageMetadata)
        is_transformed = bool(getattr(info, "transform_descriptors", None))
        extents.append(Extent(file, offset, length, item, is_tensor, is_transformed))
    extents.sort()
    for one, other in itertools.pairwise(extents):
        if one.file == other.file and one.end > other.offset:
            raise _refused(
                f"items {one.item!r:.80} and {other.item!r:.80} overlap in {one.file}", path
            )
    return extents


def _file_of(name: str) -> str | None:
    """The normal form of a shard file's name; ``None`` if it is not one."""
    return os.path.normpath(name) if is_shard_name(name) else None


def _refused(why: str, path: str) -> UntrustedMetadataError:
    what = f"the metadata is invalid: {why}"
    return UntrustedMetadataError(what, phase="read", path=path, hint=DAMAGED_HINT)


def referenced_files(content: bytes, *, path: str) -> set[str]:
    """Names of the shard files of a committed checkpoint; empty if its metadata is not trusted."""
    try:
        metadata = load_metadata(content, path=path)
    except UntrustedMetadataError:
        return set()
    infos = (metadata.storage_data or {}).values()
    names = (getattr(info, "relative_path", None) for info in infos)
    return set(filter(None, {_file_of(name) for name in names if isinstance(name, str)}))


def extents_in(
    stream: BinaryIO, *, path: str, is_confirmed: bool
) -> tuple[Mapping[str, Sequence[Extent]], str | None]:
    """The items in a ``.metadata`` file, by file; and ``None``, or why there are none.

    ``is_confirmed`` says that the manifest has confirmed the bytes. Then metadata that cannot be
    used is such a reason. Otherwise it raises ``UnknownMetadataError`` if it is not understood,
    ``UntrustedMetadataError`` if it is malformed, or ``DamagedCheckpointError`` if it is damaged or
    an item has no location. In both cases, ``UntrustedMetadataError`` if the index is malformed,
    and ``DamagedCheckpointError`` if index and pickle describe different items.
    """
    indexed = read_index(stream, path=path)
    try:
        pickled, _ = split(read_metadata(stream, path), path=path)
        metadata = load_metadata(pickled, path=path)
        extents = _extents(metadata, path)
    except (DamagedCheckpointError, ReadError, UntrustedMetadataError) as error:
        if is_confirmed:
            return {}, error.message
        if isinstance(error, ReadError):
            raise UnknownMetadataError(error.message, phase="read", path=path) from error
        raise
    if indexed is not None:
        _require_agreement(indexed[0], metadata, path)
    return extents, None


def _extents(metadata: Metadata, path: str) -> Mapping[str, list[Extent]]:
    """Locations of the items of a checkpoint, by file."""
    missing = set(planned_indices(metadata)).difference(metadata.storage_data or ())
    if missing:
        named = sorted({str(index.fqn) for index in missing})[:3]
        raise DamagedCheckpointError(
            f"the metadata has no location for {counted(len(missing), 'item')}: {named}",
            phase="verify",
            path=path,
            hint=DAMAGED_HINT,
        )
    by_file: dict[str, list[Extent]] = defaultdict(list)
    for extent in extents_of(metadata, path=path):
        by_file[extent.file].append(extent)
    return by_file


def _require_agreement(index: ItemIndex, metadata: Metadata, path: str) -> None:
    """Require that the index and the pickle describe the same items and places."""
    try:
        said = entries_and_places(index, path=path)
    except UnknownMetadataError:  # but this torch knows all that the pickle has
        said = None
    if said != (metadata.state_dict_metadata, metadata.storage_data):
        raise DamagedCheckpointError(
            "the index and the pickle of the metadata describe different items",
            phase="verify",
            path=path,
            hint=DAMAGED_HINT,
        )
