"""The content of one ``.metadata`` file, read as far as a load needs it.

That is its index; its pickle if there is no index, or if the index says too little. Items of an
index, and attributes of the pickle, are made when somebody first asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import fields
from typing import Any, SupportsIndex, TypeVar

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
from nostall._commit.metadata_pickle import HINT
from nostall._model import checksum
from nostall._model.threads import gc_paused
from nostall._storage.port import PartStream, Source, as_stream, read_metadata
from nostall.errors import DamagedCheckpointError, UntrustedMetadataError

T = TypeVar("T")


class Pickled:
    """The description of a checkpoint without an index."""

    def __init__(self, metadata: Metadata, *, path: str) -> None:
        self.shared = metadata
        """For reading only."""
        self._path = path

    def private(self, source: Source, *, load_id: str) -> Metadata:  # noqa: ARG002  # as Indexed's
        """A copy that the caller may change, except for the ranks' plans.

        ``UntrustedMetadataError`` if a part of it has a type other than the declared one.
        """
        metadata = self.shared
        twin = _twin(metadata)
        try:
            with gc_paused():
                twin.state_dict_metadata = {
                    fqn: _private_tensor(entry)
                    if isinstance(entry, TensorStorageMetadata)
                    else entry
                    for fqn, entry in metadata.state_dict_metadata.items()
                }
                twin.storage_data = {
                    index: _twin(info) for index, info in metadata.storage_data.items()
                }
                vars(twin).update(_private_rest(metadata, load_id))
        except Exception as error:  # incomplete or deeply nested objects can raise anything
            raise _cannot_be_copied(error, self._path) from error
        return twin


class _Unread:
    """In place of a pickle that has not been read yet."""


class Indexed:
    """The description of a checkpoint with an index."""

    def __init__(self, index: ItemIndex, manifest: Manifest, *, path: str) -> None:
        self._index = index
        self._manifest = manifest
        self._path = path
        # One attribute: threads share this object. At worst, two of them unpickle the same bytes.
        self._pickle: _Unread | bytes | Metadata = _Unread()
        self.shared = on_demand(index, path=path)
        """For reading only; it has nothing but items."""

    def private(self, source: Source, *, load_id: str) -> Metadata:
        """Metadata that the caller may change, except for the ranks' plans.

        What only the pickle has is unpickled when it is needed, from bytes that are read now.
        ``UnknownMetadataError`` if an item has a value that this torch does not know; ``ReadError``
        if the pickle is too long.
        """
        if isinstance(self._pickle, _Unread):
            stream = PartStream(source, 0, self._manifest.metadata_nbytes)
            self._pickle = read_metadata(stream, self._path)
        with gc_paused():
            entries, places = entries_and_places(self._index, path=self._path)
        return lazy_metadata(self._rest(load_id), state_dict_metadata=entries, storage_data=places)

    def _rest(self, load_id: str) -> Callable[[], dict[str, Any]]:
        def rest() -> dict[str, Any]:
            metadata = self._unpickled()
            try:
                return _private_rest(metadata, load_id)
            except Exception as error:  # as above
                raise _cannot_be_copied(error, self._path) from error

        return rest

    def _unpickled(self) -> Metadata:
        pickled = self._pickle
        if isinstance(pickled, Metadata):
            return pickled
        assert isinstance(pickled, bytes)  # private() has read it before this can be called
        if checksum.crc32(pickled) != self._manifest.metadata_crc32:
            raise DamagedCheckpointError(
                "the metadata does not match the checksum in its manifest",
                phase="read",
                path=self._path,
                hint=DAMAGED_HINT,
            )
        metadata = load_metadata(pickled, path=self._path)
        metadata.state_dict_metadata, metadata.storage_data = {}, {}
        self._pickle = metadata
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
    metadata = load_metadata(read_metadata(as_stream(source), path), path=path)
    extents_of(metadata, path=path)  # refuses files outside the directory
    return Pickled(metadata, path=path)


def _private_rest(metadata: Metadata, load_id: str) -> dict[str, Any]:
    """All attributes but the items."""
    rest = dict(vars(metadata))
    del rest["state_dict_metadata"], rest["storage_data"]
    storage_meta = copy(metadata.storage_meta) or StorageMeta()
    storage_meta.load_id = load_id
    planner_data = _private_mappings(metadata.planner_data)
    return {**rest, "storage_meta": storage_meta, "planner_data": planner_data}


def _cannot_be_copied(error: Exception, path: str) -> UntrustedMetadataError:
    return UntrustedMetadataError(
        f"the metadata cannot be copied: {type(error).__name__}: {error!s:.200}",
        phase="read",
        path=path,
        hint=HINT,
    )


def _private_tensor(tensor: TensorStorageMetadata) -> TensorStorageMetadata:
    twin = _twin(tensor)
    twin.properties = _twin(tensor.properties)
    twin.chunks = [_twin(chunk) for chunk in tensor.chunks]
    return twin


def _private_mappings(planner_data: Any) -> Any:
    if type(planner_data) is dict and all(map(_is_path, planner_data.values())):
        return dict(planner_data)  # the form of stock's planners; takes 1 % of the time of deepcopy
    return deepcopy(planner_data)


def _is_path(value: Any) -> bool:
    return type(value) is tuple and all(type(key) is str or type(key) is int for key in value)


def _twin(instance: T) -> T:
    """A shallow copy of a plain dataclass instance, in a tenth of the time of ``copy``."""
    twin = object.__new__(type(instance))
    vars(twin).update(vars(instance))
    return twin


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
