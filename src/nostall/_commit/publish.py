"""Commit: publish the metadata of a save whose files are all durable. The last step of a save.

Only when the publication is durable, the files of the replaced checkpoint can be removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from nostall._storage.port import Conflict, Storage, reason, version_of
from nostall.errors import NotDurableError, WriteError

_log = logging.getLogger("nostall")


def commit(
    storage: Storage,
    metadata: Sequence[bytes],
    *,
    metadata_name: str,
    replaced_files: Iterable[str],
    at: Callable[[str], None] = lambda _: None,
) -> tuple[str, ...]:
    """Publish a checkpoint.

    Args:
        storage: The checkpoint's files; all that ``metadata`` names are complete.
        metadata: Content of the metadata file, in pieces.
        metadata_name: ``.metadata``, or a rank's own name for saves without coordination.
        replaced_files: Names that are unreferenced after publishing; iterated only then.
        at: Called before the metadata is written (``"commit"``) and before it is published
            (``"publish"``); may raise an error of storage.

    Returns:
        The replaced files, for the caller to remove; none if they cannot be determined.

    Raises:
        NotDurableError: The checkpoint exists, or may exist, but may not survive a power failure.
        WriteError: Any other failure; the previous checkpoint is unchanged.
    """
    try:
        at("commit")
        storage.publish(
            metadata_name,
            metadata,
            # Of two saves at once, the second one must see the first.
            expected=version_of(storage.stat, metadata_name)
            if storage.publishes_conditionally
            else None,
            before=lambda: at("publish"),
        )
    except NotDurableError:
        raise
    except Exception as error:
        raise WriteError(
            f"the metadata could not be published: {reason(error)}",
            errno=error.errno if isinstance(error, OSError) else None,
            phase="commit",
            path=storage.where(metadata_name),
            hint="the other save's checkpoint stays; let one job save to a directory"
            if isinstance(error, Conflict)
            else "the previous checkpoint, if there was one, is untouched",
        ) from error
    try:
        return tuple(replaced_files)
    except Exception:  # the checkpoint exists, so the save has succeeded
        where = storage.where()
        _log.exception("files of the replaced checkpoint cannot be determined: path=%s", where)
        return ()
