"""Commit: publish the metadata of a save whose files are all durable. The last step of a save.

Files of the replaced checkpoint are removed only when the publication is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from nostall._model.values import CommittedCheckpoint
from nostall._storage.port import Draft, Storage
from nostall.errors import NotDurableError, WriteError

_log = logging.getLogger("nostall")


def commit(
    storage: Storage,
    metadata: Sequence[bytes],
    *,
    metadata_name: str,
    replaced_files: Iterable[str],
    draft: Draft | None = None,
    remove: Callable[[Iterable[str]], object] | None = None,
    at: Callable[[str], None] = lambda _: None,
) -> CommittedCheckpoint:
    """Publish a checkpoint.

    Args:
        storage: The checkpoint's files; all that ``metadata`` names are complete.
        metadata: Content of the metadata file, in pieces.
        metadata_name: ``.metadata``, or a rank's own name for saves without coordination.
        replaced_files: Names that are unreferenced after publishing; iterated only then.
        draft: Holds the first pieces of the metadata; published or removed here.
        remove: Removes the replaced files; by default ``storage.remove``.
        at: Called before the metadata is written (``"commit"``) and before it is published
            (``"publish"``); may raise an error of storage.

    Raises:
        NotDurableError: The checkpoint exists, or may exist, but may not survive a power failure.
        WriteError: Any other failure; the previous checkpoint is unchanged.
    """
    try:
        at("commit")
        storage.publish(metadata_name, metadata, draft=draft, before=lambda: at("publish"))
    except NotDurableError:
        raise
    except BaseException as error:
        if draft is not None:
            draft.remove()
        if not isinstance(error, Exception):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        raise WriteError(
            f"the metadata could not be published: {reason}",
            errno=error.errno if isinstance(error, OSError) else None,
            phase="commit",
            path=storage.where(metadata_name),
            hint="the previous checkpoint, if there was one, is untouched",
        ) from error
    finally:
        if draft is not None:
            draft.close()
    where = storage.where("")
    removed: tuple[str, ...] = ()
    try:
        removed = tuple(replaced_files)
        (remove or storage.remove)(removed)
    except Exception:  # the checkpoint exists, so the save has succeeded
        _log.exception("files of the replaced checkpoint were not removed path=%s", where)
    return CommittedCheckpoint(path=where, metadata_nbytes=sum(map(len, metadata)), removed=removed)
