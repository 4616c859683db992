"""The nested state dict of items that DCP has stored flat. No I/O, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nostall.errors import DamagedCheckpointError

_MOST_LEVELS = 100


class _Node(dict[Any, Any]):
    """A dict made here; an item that is a dict is a leaf."""


def nested(flat: Mapping[Any, Any], paths: Any, where: str) -> dict[Any, Any]:
    """Items in the dicts and lists that they were in.

    Args:
        flat: The items, by name.
        paths: For each name the keys that lead to it: texts in dicts, numbers in lists; whatever
            metadata has there. Items without such a path stay at the top.
        where: Path of the checkpoint, for errors.

    Raises:
        DamagedCheckpointError: An item would be inside another one.
    """
    root = _Node()
    for name, value in flat.items():
        *outer, last = _path_of(name, paths)
        node = root
        for key in outer:
            node = node.setdefault(key, _Node())
            if type(node) is not _Node:
                raise DamagedCheckpointError(f"{name!r:.80} is inside another item", path=where)
        if last in node:
            raise DamagedCheckpointError(f"{name!r:.80} has the place of another item", path=where)
        node[last] = value
    return {key: _plain(value) for key, value in root.items()}


def _path_of(name: Any, paths: Any) -> tuple[Any, ...]:
    path = paths.get(name) if isinstance(paths, Mapping) else None
    if type(path) is tuple and 0 < len(path) <= _MOST_LEVELS and set(map(type, path)) <= {str, int}:
        return path
    return (name,)


def _plain(value: Any) -> Any:
    if type(value) is not _Node:
        return value
    if all(type(key) is int for key in value) and sorted(value) == list(range(len(value))):
        return [_plain(value[position]) for position in range(len(value))]
    return {key: _plain(each) for key, each in value.items()}
