"""``Metadata`` of which a part is read when somebody first asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, SupportsIndex

from torch.distributed.checkpoint.metadata import Metadata

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
