"""``Metadata`` whose items are those of an index; the rest is unpickled on first use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, SupportsIndex

from torch.distributed.checkpoint.metadata import Metadata

from nostall._commit.indexing import Entries, Places

_REST = "nostall.rest"
"""Not a name that code could have for an attribute."""
_ITEMS = ("state_dict_metadata", "storage_data")


class IndexedMetadata(Metadata):
    """Metadata without what only its pickle has; it becomes a plain ``Metadata`` on first use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_completed(self), name)

    def __eq__(self, other: object) -> bool:
        return _completed(self) == other

    __hash__ = None  # type: ignore[assignment]  # as of dataclasses that can be compared

    def __repr__(self) -> str:
        return repr(_completed(self))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return _completed(self).__reduce_ex__(protocol)


class _FromPickle:
    """An attribute that an instance does not have yet, in place of its default in the class."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: IndexedMetadata | None, owner: type) -> Any:
        if instance is None:
            return getattr(Metadata, self._name)
        return getattr(_completed(instance), self._name)


for _field in fields(Metadata):
    if _field.name not in _ITEMS:
        setattr(IndexedMetadata, _field.name, _FromPickle(_field.name))


def indexed_metadata(
    entries: Entries, places: Places, rest: Callable[[], dict[str, Any]]
) -> IndexedMetadata:
    """Metadata with these items.

    Args:
        entries: Its ``state_dict_metadata``.
        places: Its ``storage_data``.
        rest: Makes its other attributes, by name; called on first use. What the caller has set
            meanwhile stays.
    """
    metadata = object.__new__(IndexedMetadata)
    vars(metadata).update({"state_dict_metadata": entries, "storage_data": places, _REST: rest})
    return metadata


def _completed(metadata: Metadata) -> Metadata:
    rest = vars(metadata).get(_REST)
    if rest is not None:  # otherwise another thread was faster
        for name, value in rest().items():
            vars(metadata).setdefault(name, value)
        vars(metadata).pop(_REST, None)
    metadata.__class__ = Metadata
    return metadata
