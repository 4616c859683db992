"""The content of one ``.metadata`` file, read as far as a load needs it.

That is its index; its pickle if there is no index, or if the index says too little. Items of an
index, and attributes of the pickle, are made when somebody first asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cached_property, partial
from typing import Any, SupportsIndex

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from nostall import _torch
from nostall._commit.index import ItemIndex
from nostall._commit.indexing import Items, entries_and_places, read_index
from nostall._commit.manifest import DAMAGED_HINT, Manifest
from nostall._commit.metadata import extents_of, load_metadata
from nostall._model import checksum
from nostall._model.threads import gc_paused
from nostall._storage.port import PartStream, Source, as_stream, read_metadata
from nostall.errors import DamagedCheckpointError


class Pickled:
    """The description of a checkpoint without an index; each caller gets what was unpickled for it.

    ``metadata`` is the first of these, which nobody has yet.
    """

    def __init__(self, metadata: Metadata, content: bytes, *, path: str) -> None:
        self._content = content
        self._path = path
        self._unused = [metadata]

    @cached_property
    def shared(self) -> Metadata:
        """For reading only."""
        return self._unpickled()

    def private(self, source: Source, *, load_id: str) -> Metadata:  # noqa: ARG002  # as Indexed's
        """Metadata that the caller may change."""
        return _for_load(self._unpickled(), load_id)

    def _unpickled(self) -> Metadata:
        with suppress(IndexError):  # threads share this object
            return self._unused.pop()
        return load_metadata(self._content, path=self._path)


class Indexed:
    """The description of a checkpoint with an index."""

    def __init__(self, index: ItemIndex, manifest: Manifest, *, path: str) -> None:
        self._index = index
        self._manifest = manifest
        self._path = path
        self._content: bytes | None = None
        """The pickle, once it is read."""
        self.shared = on_demand(index, path=path)
        """For reading only; it has nothing but items."""

    def private(self, source: Source, *, load_id: str) -> Metadata:
        """Metadata that the caller may change.

        What only the pickle has is unpickled when it is needed, from bytes that are read now.
        ``UnknownMetadataError`` if an item has a value that this torch does not know; ``ReadError``
        if the pickle is too long.
        """
        content = self._content
        if content is None:
            stream = PartStream(source, 0, self._manifest.metadata_nbytes)
            self._content = content = read_metadata(stream, self._path)
        with gc_paused():
            entries, places = entries_and_places(self._index, path=self._path)
        rest = partial(self._rest, content, load_id)
        return lazy_metadata(rest, state_dict_metadata=entries, storage_data=places)

    def _rest(self, content: bytes, load_id: str) -> dict[str, Any]:
        """All attributes but the items."""
        if checksum.crc32(content) != self._manifest.metadata_crc32:
            raise DamagedCheckpointError(
                "the metadata does not match the checksum in its manifest",
                phase="read",
                path=self._path,
                hint=DAMAGED_HINT,
            )
        rest = vars(_for_load(load_metadata(content, path=self._path), load_id))
        for items in ("state_dict_metadata", "storage_data"):
            rest.pop(items, None)
        return rest


def _for_load(metadata: Metadata, load_id: str) -> Metadata:
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    metadata.storage_meta.load_id = load_id
    return metadata


Description = Pickled | Indexed


def describe(source: Source, path: str) -> Description:
    """The description in a metadata file; as little of it is read as possible.

    ``DamagedCheckpointError`` if the index or the manifest is damaged; ``UntrustedMetadataError``
    if what was read is damaged, or names files that it should not; ``ReadError`` if the file is too
    long.
    """
    found = read_index(as_stream(source), path=path)
    if found is not None:
        index, manifest = found
        return Indexed(index, manifest, path=path)
    content = read_metadata(as_stream(source), path)
    metadata = load_metadata(content, path=path)
    extents_of(metadata, path=path)  # refuses files outside the directory
    return Pickled(metadata, content, path=path)


# --- the items of an index, as mappings whose values are made when asked for ----------------------

Entry = TensorStorageMetadata | BytesStorageMetadata


def on_demand(index: ItemIndex, *, path: str) -> Metadata:
    """Metadata with the items of an index, and nothing else; for reading only.

    ``UnknownMetadataError`` if it has a dtype or another value that this torch does not know.
    """
    items = Items(index, path=path)
    entries: Mapping[str, Entry] = _Entries(items)
    return Metadata(entries, storage_data=_Places(items))  # type: ignore[arg-type]  # only read


class _Entries(Mapping[str, Entry]):
    """Kinds, sizes and chunks of items by name."""

    def __init__(self, items: Items) -> None:
        self._items = items
        self._rows = items.index.rows
        self._made: dict[tuple[int, ...], Entry] = {}
        """Entries by what they are made from: many items of a checkpoint are alike."""

    def __getitem__(self, name: str) -> Entry:
        row = self._rows[name]
        key = self._items.key(row)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._items.entry(row)
        return made

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key, or the default; no exception is made on the way."""
        return self[name] if name in self._rows else default

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class _Places(Mapping[MetadataIndex, _torch.StorageInfo]):
    """Places of chunks and objects."""

    def __init__(self, items: Items) -> None:
        self._items = items
        self._rows = items.index.rows
        self._by_begin: dict[int, dict[torch.Size | None, int]] = {}

    def __getitem__(self, index: MetadataIndex) -> _torch.StorageInfo:
        row = self._rows[index.fqn]
        place = self._items.only_place(row, index.offset)
        if place is None:
            numbers = self._by_begin.get(row)
            if numbers is None:
                numbers = self._by_begin[row] = self._items.places_by_begin(row)
            place = numbers[index.offset]
        return self._items.info(place)

    def __iter__(self) -> Iterator[MetadataIndex]:
        for name, row in self._rows.items():
            for number, begin in enumerate(self._items.places_by_begin(row)):
                yield MetadataIndex(name, begin, None if begin is None else number)

    def __len__(self) -> int:
        return sum(len(self._items.places_by_begin(row)) for row in self._rows.values())


# --- metadata of which a part is read when somebody first asks for it -----------------------------

_REST = "nostall.rest"
"""Not a name that code could have for an attribute."""


class LazyMetadata(Metadata):
    """Metadata that lacks attributes until one of them is asked for; see :func:`lazy_metadata`.

    It calls itself plain metadata, as proxies do: so it is compared, copied, pickled and shown.
    """

    __class__ = property(lambda _: Metadata)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_plain(self), name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return _plain(self).__reduce_ex__(protocol)


class _Missing:
    """An attribute that an instance does not have yet, in place of its default in the class."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: LazyMetadata | None, owner: type) -> Any:
        return getattr(Metadata if instance is None else _plain(instance), self._name)


for _field in fields(Metadata):
    setattr(LazyMetadata, _field.name, _Missing(_field.name))


def lazy_metadata(rest: Callable[[], dict[str, Any]], **known: Any) -> LazyMetadata:
    """Metadata with ``known`` attributes; ``rest`` returns the others when one is asked for.

    What the caller has set meanwhile stays.
    """
    metadata: LazyMetadata = object.__new__(LazyMetadata)
    vars(metadata).update(known, **{_REST: rest})
    return metadata


def _plain(metadata: LazyMetadata) -> Metadata:
    """Plain metadata with the same attributes, all of which the other has now, too."""
    found = vars(metadata)
    rest = found.get(_REST)
    if rest is not None:  # otherwise another thread was faster
        for name, value in rest().items():
            found.setdefault(name, value)
        found.pop(_REST, None)
    plain = object.__new__(Metadata)
    vars(plain).update(found)
    return plain
