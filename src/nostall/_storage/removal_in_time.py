"""Removal of files for the trainer, which waits a few seconds at most."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from nostall._storage.deadlines import in_time
from nostall._storage.unused_files import remove_unnamed
from nostall.errors import SaveTimeoutError

_log = logging.getLogger("nostall")

REMOVAL_TIMEOUT_S = 2.0
"""For files of a failed save; after that the removal goes on in the background."""
_NAMED = 8


def remove_in_time(
    paths: Sequence[str],
    *,
    remove: Callable[[Sequence[str]], object] = remove_unnamed,
    timeout_s: float = REMOVAL_TIMEOUT_S,
) -> None:
    """Remove files, by default those that no metadata names; waits ``timeout_s`` seconds at most.

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
