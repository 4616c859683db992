"""Commit: publish the metadata of a save whose files are all durable. The last thing that happens to a save.

Order: temporary metadata, fsync (of the name of a new directory, too), ``os.replace``, fsync of the directory. A crash before the replacement leaves what
was there, a crash after it leaves the new checkpoint. Files of the checkpoint that was replaced are removed only when
the replacement is durable.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from nostall._storage.posix import remove_files, replace_file, sync_directory, write_file
from nostall._values import CommittedCheckpoint
from nostall.errors import WriteError


def commit(
    directory: str,
    metadata: bytes,
    *,
    metadata_name: str,
    replaced_files: Iterable[str],
    sync: bool,
) -> CommittedCheckpoint:
    """Make a checkpoint exist.

    Args:
        directory: The checkpoint directory; every file that ``metadata`` names is complete in it.
        metadata: The metadata as it is to stand in its file.
        metadata_name: ``.metadata``, or a rank's own name for saves without coordination.
        replaced_files: Names below ``directory`` that only the checkpoint being replaced refers to.
        sync: Whether to wait until the device has it.

    Raises:
        WriteError: Storage refused; what was committed before still is.
    """
    final = os.path.join(directory, metadata_name)
    temporary = f"{final}.tmp"
    published = False
    try:
        if sync:
            _write_durably(directory, temporary, metadata)
        else:
            write_file(temporary, metadata, sync=False)
        replace_file(final, by=temporary)
        published = True
        if sync:
            sync_directory(directory)
    except OSError as error:
        if not published:
            remove_files([temporary])
        raise WriteError(
            f"the metadata could not be {'made durable' if published else 'published'}:"
            f" {error.strerror or error}",
            errno=error.errno,
            phase="commit",
            path=final,
            hint="the new checkpoint is there, but may not survive a power failure"
            if published
            else "the previous checkpoint, if there was one, is untouched",
        ) from error
    removed = tuple(replaced_files)
    remove_files(os.path.join(directory, name) for name in removed)
    return CommittedCheckpoint(path=directory, metadata_nbytes=len(metadata), removed=removed)


def _write_durably(directory: str, path: str, content: bytes) -> None:
    """Write a file, and see to it that the directory's own name is durable; both wait for the same device."""
    parent = os.path.dirname(os.path.realpath(directory))
    failures: list[OSError] = []

    def sync_name() -> None:
        try:
            sync_directory(parent)
        except PermissionError:
            return  # who may not read it has not made the directory either
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=sync_name, name="nostall-commit")
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending, or the system has no thread to give
        sync_name()
        write_file(path, content, sync=True)
    else:
        try:
            write_file(path, content, sync=True)
        finally:
            thread.join()
    if failures:
        raise failures[0]
