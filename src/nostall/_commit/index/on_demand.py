"""The items of an index as the dictionaries of a ``Metadata``, of which values are made on demand.

A load needs the items of its own state, which are few of a large checkpoint's: of a million, whose
index is read in 0.4 s, all objects take 3 s and 1 GB.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, KeysView
from threading import RLock
from typing import Any, SupportsIndex, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from typing_extensions import Self

from nostall import _torch
from nostall._commit.index.columns import ItemIndex
from nostall._commit.index.items import Items
from nostall._model.collection import no_collection

Entry = TensorStorageMetadata | BytesStorageMetadata
K = TypeVar("K")
V = TypeVar("V")


def on_demand(index: ItemIndex, *, path: str) -> Metadata:
    """Metadata with the items of an index, and nothing else; the caller may change it.

    Raises:
        UnknownMetadataError: It has a dtype or another value that this torch does not know.
    """
    items = Items(index, path=path)
    return Metadata(Entries(items), storage_data=Places(items))


class OnDemand(dict[K, V]):
    """A dictionary that makes a value when it is looked up, and all on any other use.

    Python calls ``__missing__`` for a key that the dictionary itself does not have yet. Several
    threads may read it.
    """

    def __init__(self, items: Items) -> None:
        super().__init__()
        self._items: Items | None = items
        """``None`` as soon as everything was made."""
        self._completing = RLock()

    @abstractmethod
    def _made(self, items: Items, key: K) -> V:
        """The value of a key; a :class:`KeyError` if there is none."""

    @abstractmethod
    def _all(self, items: Items) -> Iterator[tuple[K, V]]:
        """All keys and values, in their order."""

    def __missing__(self, key: K) -> V:
        items = self._items
        if items is not None:
            return dict.setdefault(self, key, self._made(items, key))
        if dict.__contains__(self, key):  # another thread has just made everything
            return dict.__getitem__(self, key)
        raise KeyError(key)

    def get(self, key: K, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __contains__(self, key: object) -> bool:
        return self.get(key, self) is not self  # type: ignore[arg-type]  # any key may be asked for

    def _whole(self) -> Self:
        """This dictionary, with everything in it; what was looked up before is the same object."""
        with self._completing:
            if self._items is not None:
                with no_collection():
                    whole = dict(self._all(self._items))
                    whole.update(list(dict.items(self)))
                    dict.clear(self)
                    dict.update(self, whole)
                self._items = None
        return self

    def copy(self) -> dict[K, V]:
        return dict(dict.items(self._whole()))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return dict, (self.copy(),)


def _on_everything(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def called(self: OnDemand[Any, Any], *arguments: Any, **named: Any) -> Any:
        # dict looks into another one of these without asking it.
        whole = [each._whole() if isinstance(each, OnDemand) else each for each in arguments]
        return method(self._whole(), *whole, **named)

    return called


for _name in (
    *("__delitem__", "__eq__", "__ior__", "__iter__", "__len__", "__ne__", "__or__", "__repr__"),
    *("__reversed__", "__ror__", "__setitem__", "clear", "items", "keys", "pop"),
    *("popitem", "setdefault", "update", "values"),
):
    setattr(OnDemand, _name, _on_everything(_name))


class Entries(OnDemand[str, Entry]):
    """Kinds, sizes and chunks of items by name. Names are there without being made."""

    def _made(self, items: Items, key: str) -> Entry:
        return items.entry(items.index.rows[key])

    def _all(self, items: Items) -> Iterator[tuple[str, Entry]]:
        for row, name in enumerate(items.index.names):
            yield name, items.entry(row)

    def __contains__(self, name: object) -> bool:
        items = self._items
        return name in (items.index.rows if items is not None else dict.keys(self))

    def __iter__(self) -> Iterator[str]:
        items = self._items
        return iter(items.index.rows) if items is not None else dict.__iter__(self)

    def __len__(self) -> int:
        items = self._items
        return len(items.index.names) if items is not None else dict.__len__(self)

    def keys(self) -> Any:
        """The names, as a view of this dictionary."""
        return KeysView(self)


class Places(OnDemand[MetadataIndex, _torch.StorageInfo]):
    """Places of chunks and objects."""

    def __init__(self, items: Items) -> None:
        super().__init__(items)
        self._by_begin: dict[int, dict[torch.Size | None, int]] = {}

    def _made(self, items: Items, key: MetadataIndex) -> _torch.StorageInfo:
        if type(key) is not MetadataIndex:
            raise KeyError(key)
        row = items.index.rows[key.fqn]
        place = items.only_place(row, key.offset)
        if place is None:
            numbers = self._by_begin.get(row)
            if numbers is None:
                numbers = self._by_begin[row] = items.places_by_begin(row)
            place = numbers[key.offset]
        return items.info(place)

    def _all(self, items: Items) -> Iterator[tuple[MetadataIndex, _torch.StorageInfo]]:
        for row, name in enumerate(items.index.names):
            for number, (begin, place) in enumerate(items.places_by_begin(row).items()):
                key = object.__new__(MetadataIndex)
                if begin is None:
                    key.__dict__.update(fqn=name, index=None)
                else:
                    key.__dict__.update(fqn=name, index=number, offset=begin)
                yield key, items.info(place)
