"""The items of an index as the mappings of a ``Metadata``, whose values are made when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from nostall import _torch
from nostall._commit.index.columns import ItemIndex
from nostall._commit.index.items import Items

Entry = TensorStorageMetadata | BytesStorageMetadata


def on_demand(index: ItemIndex, *, path: str) -> Metadata:
    """Metadata with the items of an index, and nothing else; for reading only.

    Raises:
        UnknownMetadataError: It has a dtype or another value that this torch does not know.
    """
    items = Items(index, path=path)
    entries: Mapping[str, Entry] = _Entries(items)
    return Metadata(entries, storage_data=_Places(items))  # type: ignore[arg-type]  # only read


class _Entries(Mapping[str, Entry]):
    """Kinds, sizes and chunks of items by name."""

    def __init__(self, items: Items) -> None:
        self._items = items
        self._rows = items.index.rows
        self._made: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self._items.entry(self._rows[name])
        return made

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
        self._by_begin: dict[str, dict[torch.Size | None, int]] = {}

    def __getitem__(self, index: MetadataIndex) -> _torch.StorageInfo:
        name = index.fqn
        numbers = self._by_begin.get(name)
        if numbers is None:
            numbers = self._by_begin[name] = self._items.places_by_begin(self._rows[name])
        return self._items.info(numbers[index.offset])

    def __iter__(self) -> Iterator[MetadataIndex]:
        for name, row in self._rows.items():
            for number, begin in enumerate(self._items.places_by_begin(row)):
                yield MetadataIndex(name, begin, None if begin is None else number)

    def __len__(self) -> int:
        return sum(len(self._items.places_by_begin(row)) for row in self._rows.values())
