"""Commit: publish the metadata of a save whose files are all durable. The last step of a save.

Only when the publication is durable, the files of the replaced checkpoint can be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nostall._storage.port import Conflict, Draft, Published, Storage, Version, reason
from nostall.errors import NotDurableError, WriteError


def commit(
    storage: Storage,
    metadata: Sequence[bytes],
    *,
    metadata_name: str,
    expected: Version | None = None,
    draft: Draft | None = None,
    at: Callable[[str], None] = lambda _: None,
) -> Published | None:
    """Publish a checkpoint.

    Args:
        storage: The checkpoint's files; all that ``metadata`` names are complete.
        metadata: Content of the metadata file, in pieces.
        metadata_name: ``.metadata``, or a rank's own name for saves without coordination.
        expected: The version that is replaced; ``None`` for any.
        draft: Holds the first pieces of the metadata; published or removed here.
        at: Called before the metadata is written (``"commit"``) and before it is published
            (``"publish"``); may raise an error of storage.

    Returns:
        As :meth:`~nostall._storage.port.Storage.publish`.

    Raises:
        NotDurableError: The checkpoint exists, or may exist, but may not survive a power failure.
        WriteError: Any other failure; the previous checkpoint is unchanged.
    """
    try:
        at("commit")
        return storage.publish(
            metadata_name,
            metadata,
            draft=draft,
            expected=expected,
            before=lambda: at("publish"),
        )
    except NotDurableError:
        raise
    except BaseException as error:  # an interrupt, too, leaves no draft
        if draft is not None:
            draft.remove()
        if not isinstance(error, Exception):
            raise
        raise WriteError(
            f"the metadata could not be published: {reason(error)}",
            errno=error.errno if isinstance(error, OSError) else None,
            phase="commit",
            path=storage.where(metadata_name),
            hint="the other save's checkpoint stays; let one job save to a directory"
            if isinstance(error, Conflict)
            else "the previous checkpoint, if there was one, is untouched",
        ) from error
    finally:
        if draft is not None:
            draft.close()
