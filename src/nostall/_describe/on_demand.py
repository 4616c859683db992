"""The items of an index as the mappings of a ``Metadata``, whose values are made when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from nostall import _torch
from nostall._commit.index import ItemIndex
from nostall._commit.indexing import Items

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
