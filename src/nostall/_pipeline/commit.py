"""Commit: publish the metadata of a save whose files are all durable. The last thing that happens to a save.

Order: temporary metadata, a large part of which may have been written before, fsync (of the name of a new directory, too),
``os.replace``, fsync of the directory. A crash before the replacement leaves what was there, a crash after it leaves the new
checkpoint. Files of the checkpoint that was replaced are removed only when the replacement is durable.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from nostall._storage.posix import (
    UnfinishedFile,
    close_all,
    identity_of,
    remove_files,
    replace_file,
    sync_directory,
    sync_name,
)
from nostall._storage.reading import read_metadata_file
from nostall._values import CommittedCheckpoint
from nostall.errors import NotDurableError, WriteError

_log = logging.getLogger("nostall")


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """Metadata of which a part has been written already."""

    file: UnfinishedFile
    """A temporary file in the checkpoint directory."""
    pieces: int
    """How many of the metadata's pieces are in it."""


def commit(
    directory: str,
    metadata: Sequence[bytes],
    *,
    metadata_name: str,
    replaced_files: Iterable[str],
    sync: bool,
    begun: Begun | None = None,
    remove: Callable[[Iterable[str]], object] = remove_files,
    at: Callable[[str], None] = lambda _: None,
) -> CommittedCheckpoint:
    """Make a checkpoint exist.

    Args:
        directory: The checkpoint directory; every file that ``metadata`` names is complete in it.
        metadata: The metadata as it is to stand in its file, in pieces.
        metadata_name: ``.metadata``, or a rank's own name for saves without coordination.
        replaced_files: Names below ``directory`` that only the checkpoint being replaced refers to.
        sync: Whether to wait until the device has it.
        begun: What has been written of it; the file is published or removed here.
        remove: Removes those files, given by their paths.
        at: Told before the metadata is written (``"commit"``) and before it is published (``"publish"``); may raise what
            storage could.

    Raises:
        NotDurableError: The checkpoint is there, or may be, but may not survive a power failure.
        WriteError: Anything else went wrong; what was committed before still is.
    """
    final = os.path.join(directory, metadata_name)
    temporary, rest, file = f"{final}.tmp", metadata, None
    if begun is not None:
        temporary, rest, file = begun.file.path, metadata[begun.pieces :], begun.file
    opened: list[int] = []
    try:
        at("commit")
        if file is None:
            file = UnfinishedFile(temporary)
        with _durable_name(directory) if sync else nullcontext():
            file.append(rest)
            if sync:
                file.sync()
        opened.append(file.finish())
        identity = identity_of(opened[0])
        at("publish")
        try:
            replace_file(final, by=temporary)
        except OSError as error:
            # Network file systems may answer so to a request that they have heard twice, and done once.
            if not _is_published(final, identity, metadata, refusal=error):
                raise
        else:
            _is_published(final, identity, metadata)
    except NotDurableError:
        raise
    except BaseException as error:
        remove_files([temporary])
        if not isinstance(error, Exception):
            raise
        raise WriteError(
            f"the metadata could not be published: {_reason(error)}",
            errno=error.errno if isinstance(error, OSError) else None,
            phase="commit",
            path=final,
            hint="the previous checkpoint, if there was one, is untouched",
        ) from error
    finally:
        if file is not None:
            file.close()
        close_all(opened)
    try:
        if sync:
            sync_directory(directory)
    except OSError as error:
        raise NotDurableError(
            f"the metadata could not be made durable: {_reason(error)}",
            errno=error.errno,
            phase="commit",
            path=final,
            hint="the new checkpoint is there, but may not survive a power failure",
        ) from error
    removed = tuple(replaced_files)
    try:
        remove(os.path.join(directory, name) for name in removed)
    except Exception:  # the checkpoint is there, and must not be taken for lost
        _log.exception("files of the replaced checkpoint stay path=%s", directory)
    return CommittedCheckpoint(
        path=directory, metadata_nbytes=sum(map(len, metadata)), removed=removed
    )


def _is_published(
    path: str,
    identity: tuple[int, int],
    content: Sequence[bytes],
    *,
    refusal: OSError | None = None,
) -> bool:
    """Whether the metadata that was written has its name now; false only after a refusal, if it has not.

    Raises:
        NotDurableError: That cannot be told, or another process has put its own in place of it. What the metadata may refer
            to must not be removed.
    """
    cause: Exception | None = refusal
    try:
        if identity_of(path) == identity:
            return True
        if refusal is not None and not os.path.isfile(path):
            return False
        # A file system that renames by copying gives the file another number.
        if read_metadata_file(path) == b"".join(content):
            return True
        if refusal is not None:
            return False
        reason = "what was published is not what was written"
    except Exception as error:
        if refusal is not None and isinstance(error, FileNotFoundError):
            return False
        before = f"{_reason(refusal)}, and then " if refusal is not None else ""
        reason = f"it cannot be told whether the metadata was published: {before}{_reason(error)}"
        cause = cause or error
    raise NotDurableError(
        reason,
        errno=cause.errno if isinstance(cause, OSError) else None,
        phase="commit",
        path=path,
        hint="look at the directory when storage answers again; another process may save to it, too",
    ) from cause


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else repr(error)


@contextmanager
def _durable_name(directory: str) -> Iterator[None]:
    """Make the directory's own name durable meanwhile: what is done inside waits for the same device.

    Raises:
        OSError: It could not be made durable.
    """
    failures: list[OSError] = []

    def sync() -> None:
        try:
            sync_name(directory)
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=sync, name="nostall-commit", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending, or the system has no thread to give
        sync()
        yield
    else:
        try:
            yield
        finally:
            thread.join()
    if failures:
        raise failures[0]
