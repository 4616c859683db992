"""Removal of files that no metadata refers to, by their paths, wherever they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from nostall._storage import posix
from nostall._storage.deadlines import in_time
from nostall._storage.places import is_address, object_storage_at
from nostall.errors import SaveTimeoutError

_log = logging.getLogger("nostall")

REMOVAL_TIMEOUT_S = 2.0
"""For files of a failed save; after that the removal goes on in the background."""
_NAMED = 8


def remove_files(paths: Iterable[str], *, are_finished: bool = False) -> None:
    """Remove files that no metadata will name, by their paths; errors are ignored.

    Args:
        paths: Their paths.
        are_finished: Whether all of them are whole; otherwise uploads of theirs are looked for.
    """
    in_stores: dict[str, list[str]] = {}
    for path in paths:
        if is_address(path):
            place, _, name = path.rpartition("/")
            in_stores.setdefault(place, []).append(name)
        else:
            posix.remove_files([path])
    for place, names in in_stores.items():
        storage = object_storage_at(place)
        if not are_finished:
            storage.discard(names)
            continue
        with suppress(OSError):
            storage.remove(names)


def remove_in_time(
    paths: Sequence[str],
    *,
    remove: Callable[[Sequence[str]], object] = remove_files,
    timeout_s: float = REMOVAL_TIMEOUT_S,
) -> None:
    """Remove files that nothing refers to; waits ``timeout_s`` seconds at most.

    After that the files are logged; removal continues in the background while this process lives.
    """
    if not paths:
        return
    try:
        in_time(
            lambda: remove(paths),
            timeout_s=timeout_s,
            doing="removing files",
            phase="remove",
            path=paths[0],
        )
    except SaveTimeoutError:
        named = ", ".join(paths[:_NAMED]) + (", ..." if len(paths) > _NAMED else "")
        _log.warning(
            "storage has not removed %d files within %g s; they may stay, unused: %s",
            len(paths),
            timeout_s,
            named,
        )
