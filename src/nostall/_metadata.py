"""Metadata as bytes: DCP's own objects in DCP's own format, read through an allow-list.

``.metadata`` is a pickle, so reading one runs whatever it says. What nostall reads itself, it reads with
:class:`_MetadataUnpickler`, which resolves exactly the classes that DCP metadata consists of. Stock readers have no
such limit.

Frameworks keep every rank's local plan with the metadata (``Metadata.all_local_plans``) to validate the plan cache of a
resumed run. It is an attribute that the dataclass does not declare, so anything that rebuilds the dataclass drops it;
the same object therefore also stands in the planner data under :data:`_PLANS_KEY`, which costs nothing in a pickle.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._names import is_shard_name
from nostall.errors import UntrustedMetadataError

_PLANS_KEY = "nostall.all_local_plans"

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset", "complex", "range", "slice", "bytearray"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and name in _DTYPE_NAMES:
            return super().find_class(module, name)
        raise UntrustedMetadataError(
            f"the metadata names {module}.{name}, which DCP metadata does not consist of",
            phase="read",
            hint="if you trust whoever wrote it, read it with torch's own FileSystemReader",
        )


def _dtype_names() -> frozenset[str]:
    import torch

    return frozenset(name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype))


_DTYPE_NAMES = _dtype_names()


_shared_lock = threading.Lock()


@contextmanager
def _nothing_shared_changes() -> Iterator[None]:
    """Undo what a pickle has done to the classes, enum members and functions that it may name, and refuse it.

    It can set attributes of whatever it has on its stack, and a class is the same object for the whole process.

    Raises:
        UntrustedMetadataError: It has done so.
    """
    with _shared_lock:
        before = [(each, dict(vars(each))) for each in _shared_objects()]
        try:
            yield
        finally:
            changed = [each for each, attributes in before if _restore(each, attributes)]
            if changed:
                raise UntrustedMetadataError(
                    f"the metadata changes {changed[0]!r}, which is no part of it", phase="read"
                )


def _restore(shared: Any, attributes: Mapping[str, Any]) -> bool:
    """Give an object its attributes back; whether it did not have them."""
    now = dict(vars(shared))
    if now.keys() == attributes.keys() and all(now[name] is attributes[name] for name in now):
        return False
    if not isinstance(shared, type):
        vars(shared).clear()
        vars(shared).update(attributes)
        return True
    for name in now.keys() - attributes.keys():
        type.__delattr__(shared, name)
    for name, value in attributes.items():
        if now.get(name, _MISSING) is not value:
            type.__setattr__(shared, name, value)
    return True


_MISSING = object()


@lru_cache(maxsize=1)
def _shared_objects() -> tuple[Any, ...]:
    """What the allow-list names, as far as it can be changed."""
    found: list[Any] = []
    for module, names in _ALLOWED.items():
        if module == "builtins" or module not in sys.modules:
            continue  # Python's own types cannot be changed
        for name in sorted(names):
            named = getattr(sys.modules[module], name, None)
            if named is None or not hasattr(named, "__dict__"):
                continue
            found.append(named)
            if isinstance(named, type) and issubclass(named, Enum):
                found += list(named)
    return tuple(found)


def load_metadata(content: bytes, *, path: str) -> Metadata:
    """The metadata in a ``.metadata`` file.

    Raises:
        UntrustedMetadataError: It holds something that DCP metadata does not consist of, or is no pickle of metadata.
    """
    try:
        with _nothing_shared_changes():
            # Which reads no further than the pickle.
            metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except UntrustedMetadataError as error:
        error.path = path
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise UntrustedMetadataError(
            f"the metadata cannot be read: {type(error).__name__}: {error}", phase="read", path=path
        ) from error
    if not isinstance(metadata, Metadata):
        raise UntrustedMetadataError(
            f"the file holds a {type(metadata).__name__}, not DCP metadata", phase="read", path=path
        )
    return _with_plans_restored(metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Metadata of a finished save, pickled but for what belongs to one checkpoint; as good for the next equal save."""

    pickled: bytes
    storage_data: Mapping[MetadataIndex, Any]
    files: frozenset[str]
    """Names of the shard files."""

    def content(self, storage_meta: StorageMeta | None) -> bytes:
        """The content of a ``.metadata`` file.

        A pickle is a program for a stack machine. This one makes the metadata object, sets all attributes but
        ``storage_meta``, and then sets that one. Protocol 3, because later ones cut the program into frames of stated
        length.
        """
        rest = pickle.dumps({"storage_meta": storage_meta}, protocol=_PROTOCOL)
        return b"".join((self.pickled[:-1], rest[_PROTO_NBYTES:-1], pickle.BUILD, pickle.STOP))


_PROTOCOL = 3
_PROTO_NBYTES = 2
_MOST_NBYTES = 1 << 62
"""What no file system can hold; a sum of two is still a file offset."""


def publication_of(finished: Metadata) -> Publication:
    """What to publish for the metadata of a finished save."""
    plans = getattr(finished, "all_local_plans", None)
    twin = copy(finished)
    if plans is not None and isinstance(finished.planner_data, Mapping):
        twin.planner_data = {**finished.planner_data, _PLANS_KEY: plans}
    vars(twin).pop("storage_meta", None)
    return Publication(
        pickled=pickle.dumps(twin, protocol=_PROTOCOL),
        storage_data=finished.storage_data,
        files=frozenset(info.relative_path for info in finished.storage_data.values()),
    )


def local_plans_in(metadata: Metadata | None) -> list[SavePlan] | None:
    """All ranks' plans that a loaded checkpoint was saved with, if it has them; from whichever reader it comes."""
    plans = getattr(metadata, "all_local_plans", None)
    if plans is None and metadata is not None and isinstance(metadata.planner_data, Mapping):
        plans = metadata.planner_data.get(_PLANS_KEY)
    return plans


def complete_metadata(metadata: Metadata, results: list[list[WriteResult]]) -> Metadata:
    """The metadata of a finished save, but for ``storage_meta``; the argument is not changed."""
    finished = copy(metadata)
    finished.version = _torch.DCP_VERSION
    finished.storage_data = {
        result.index: result.storage_data for per_rank in results for result in per_rank
    }
    return finished


def planned_indices(metadata: Metadata) -> list[MetadataIndex]:
    """Every item that a reader of this metadata may ask storage for."""
    indices = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            indices += [MetadataIndex(fqn, chunk.offsets) for chunk in entry.chunks]
        elif isinstance(entry, BytesStorageMetadata):
            indices.append(MetadataIndex(fqn))
    return indices


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Where one item of a checkpoint is."""

    file: str
    offset: int
    length: int
    item: str
    is_transformed: bool
    """Whether a stream transform has compressed or otherwise changed it."""

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.offset + self.length


def extents_of(metadata: Metadata, *, path: str) -> list[Extent]:
    """Where the items of a checkpoint are, in the order of files and of offsets in them.

    Raises:
        UntrustedMetadataError: Somewhere outside the checkpoint directory, nowhere, or two of them in one place.
    """
    storage_data = metadata.storage_data
    if not isinstance(storage_data, Mapping):
        raise _refused("it does not say where its items are", path)
    extents = sorted(_extent(index, info, path) for index, info in storage_data.items())
    for one, other in itertools.pairwise(extents):
        if one.file == other.file and one.end > other.offset:
            raise _refused(f"items {one.item!r} and {other.item!r} overlap in {one.file}", path)
    return extents


def _extent(index: Any, info: Any, path: str) -> Extent:
    item = getattr(index, "fqn", None)
    name, offset, length = (
        getattr(info, attribute, None) for attribute in ("relative_path", "offset", "length")
    )
    if not isinstance(item, str) or not isinstance(name, str) or not is_shard_name(name):
        raise _refused(f"item {item!r} is said to be in {name!r}", path)
    for value in (offset, length):
        if not isinstance(value, int) or not 0 <= value <= _MOST_NBYTES:
            raise _refused(f"item {item!r} is said to be at {offset!r} with {length!r} bytes", path)
    assert isinstance(offset, int)
    assert isinstance(length, int)
    transforms = getattr(info, "transform_descriptors", None)
    return Extent(os.path.normpath(name), offset, length, item, bool(transforms))


def _refused(why: str, path: str) -> UntrustedMetadataError:
    return UntrustedMetadataError(f"the metadata cannot be true: {why}", phase="read", path=path)


def referenced_files(path: str) -> set[str]:
    """Names of the shard files that a committed checkpoint consists of; empty if its metadata cannot be trusted."""
    try:
        with open(path, "rb") as stream:
            metadata = load_metadata(stream.read(), path=path)
    except (OSError, UntrustedMetadataError):
        return set()
    storage_data = metadata.storage_data
    infos = storage_data.values() if isinstance(storage_data, Mapping) else ()
    names = [getattr(info, "relative_path", None) for info in infos]
    return {
        os.path.normpath(name) for name in names if isinstance(name, str) and is_shard_name(name)
    }


def _with_plans_restored(metadata: Metadata) -> Metadata:
    if isinstance(metadata.planner_data, dict) and _PLANS_KEY in metadata.planner_data:
        plans = metadata.planner_data.pop(_PLANS_KEY)
        if getattr(metadata, "all_local_plans", None) is None:
            metadata.all_local_plans = plans  # type: ignore[attr-defined]  # frameworks keep plans there
    return metadata
