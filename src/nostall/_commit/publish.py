"""Commit: publish the metadata of a save whose files are all durable. The last step of a save.

Order: write the temporary metadata (most of it may be written ahead), fsync it and the name of a
new directory, ``os.replace``, fsync of the directory. A crash before the replacement leaves the
previous checkpoint, a crash after it leaves the new one. Files of the replaced checkpoint are
removed only when the replacement is durable.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from nostall._model.values import CommittedCheckpoint
from nostall._storage.deadlines import start_apart
from nostall._storage.posix import (
    UnfinishedFile,
    identity_of,
    may_be_there,
    remove_empty_files,
    remove_files,
    replace_file,
    sync_directory,
    sync_name,
)
from nostall._storage.reading import read_metadata_file
from nostall.errors import NotDurableError, WriteError

_log = logging.getLogger("nostall")


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """Metadata of which a part is already written."""

    file: UnfinishedFile
    """A temporary file in the checkpoint directory."""
    pieces: int
    """Number of the metadata's pieces in the file."""


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
    """Publish a checkpoint.

    Args:
        directory: The checkpoint directory; all files that ``metadata`` names are complete in it.
        metadata: Content of the metadata file, in pieces.
        metadata_name: ``.metadata``, or a rank's own name for saves without coordination.
        replaced_files: Names below ``directory`` that are unreferenced after publishing; iterated
            only then.
        sync: Whether to fsync.
        begun: The part that is already written; its file is published or removed here.
        remove: Removes the replaced files, given their paths.
        at: Called before the metadata is written (``"commit"``) and before it is published
            (``"publish"``); may raise an error of storage.

    Raises:
        NotDurableError: The checkpoint exists, or may exist, but may not survive a power failure.
        WriteError: Any other failure; the previous checkpoint is unchanged.
    """
    final = os.path.join(directory, metadata_name)
    _write_and_publish(final, metadata, begun, sync=sync, at=at)
    if sync:
        make_name_durable(final, what="the new checkpoint")
    removed: tuple[str, ...] = ()
    try:
        removed = tuple(replaced_files)
        remove(os.path.join(directory, name) for name in removed)
    except Exception:  # the checkpoint exists, so the save has succeeded
        _log.exception("files of the replaced checkpoint were not removed path=%s", directory)
    return CommittedCheckpoint(
        path=directory, metadata_nbytes=sum(map(len, metadata)), removed=removed
    )


def _write_and_publish(
    final: str,
    metadata: Sequence[bytes],
    begun: Begun | None,
    *,
    sync: bool,
    at: Callable[[str], None],
) -> None:
    """Complete the temporary file and rename it; its errors are those of :func:`commit`."""
    temporary, rest, file = f"{final}.tmp", metadata, None
    if begun is not None:
        temporary, rest, file = begun.file.path, metadata[begun.pieces :], begun.file
    try:
        at("commit")
        if file is None:
            file = UnfinishedFile(temporary)
        with _durable_name(os.path.dirname(final)) if sync else nullcontext():
            file.append(rest)
            if sync:
                file.sync()
        identity = file.finish()
        at("publish")
        _publish(final, temporary, identity, metadata)
    except NotDurableError:
        raise
    except BaseException as error:  # whatever ended it, the temporary file goes
        if file is not None:
            file.remove()
        else:  # storage may have created it although it reported an error
            remove_empty_files([temporary])
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


def _publish(
    final: str, temporary: str, identity: tuple[int, int], metadata: Sequence[bytes]
) -> None:
    """Rename the temporary file, and verify the result.

    Raises:
        OSError: Storage refused; the metadata is not published.
        NotDurableError: The outcome is unknown, or another process has replaced the file. The files
            that the metadata may refer to must not be removed.
    """
    give_name(
        final,
        temporary,
        what="the metadata",
        is_there=lambda: _is_there(final, identity, metadata),
    )
    try:
        if _is_there(final, identity, metadata, raises=True):
            return
    except Exception as error:  # a file that cannot be read may be the new one
        raise _unknown(final, "the metadata", error) from error
    raise NotDurableError(
        "the published metadata is not the metadata of this save",
        phase="commit",
        path=final,
        hint="another process may save to the same directory",
    )


def give_name(final: str, temporary: str, *, what: str, is_there: Callable[[], bool]) -> None:
    """Rename a file, also if storage reports an error for a rename that it has done.

    After such an error the outcome is unknown, and a look at the directory may show a cached state.
    A second rename reaches storage itself: it completes the first one, or finds nothing to rename.

    Args:
        final: The new name; an existing file of this name is replaced.
        temporary: The present name.
        what: The published thing, for the error.
        is_there: Whether the file appears to have the new name already.

    Raises:
        OSError: Storage refused; the file does not have the new name.
        NotDurableError: The outcome is unknown.
    """
    doubt: OSError | None = None
    for wait_s in (*_WAITS_S, None):
        try:
            replace_file(final, by=temporary)
        except OSError as error:
            if is_there():
                return
            if doubt is None and error.errno in _REFUSALS:
                raise
            if (
                doubt is None
                and error.errno == errno.ENOENT
                and not may_be_there(os.path.dirname(final))
            ):
                raise
            doubt = doubt or error
            if error.errno in (*_REFUSALS, errno.ENOENT) or wait_s is None:
                raise _unknown(final, what, doubt, error) from doubt
            time.sleep(wait_s)
        else:
            return


_WAITS_S = (0.1, 0.4)
"""Delays between attempts to rename."""
_REFUSALS = {
    getattr(errno, name)
    for name in (
        *("EACCES", "EPERM", "EROFS", "EXDEV", "ENOSPC", "EDQUOT", "EINVAL", "EISDIR", "ENOTDIR"),
        *("ENOTEMPTY", "EEXIST", "ENAMETOOLONG", "ELOOP", "EMLINK", "ENOSYS", "ENOTSUP"),
    )
}
"""Errors after which the rename was not done. After any other error it may have been, or may be."""


def make_name_durable(path: str, *, what: str) -> None:
    """Fsync the directory of a file that has just got its name.

    Args:
        path: The file.
        what: The published thing, for the error.

    Raises:
        NotDurableError: Storage refused; the file has its name.
    """
    try:
        sync_directory(os.path.dirname(path))
    except OSError as error:
        raise NotDurableError(
            f"{what} exists, but its name could not be made durable: {_reason(error)}",
            errno=error.errno,
            phase="commit",
            path=path,
            hint="it may not survive a power failure; save again when storage answers",
        ) from error


def _is_there(
    path: str, identity: tuple[int, int], content: Sequence[bytes], *, raises: bool = False
) -> bool:
    """Whether the written metadata appears under its name."""
    try:
        # A file system that renames by copying changes the inode number.
        return identity_of(path) == identity or read_metadata_file(path) == b"".join(content)
    except Exception:  # of storage or for lack of memory: no answer must end the attempts
        if raises:
            raise
        return False


def _unknown(path: str, what: str, *errors: Exception) -> NotDurableError:
    return NotDurableError(
        f"cannot determine whether {what} was published: "
        + ", and then ".join(dict.fromkeys(map(_reason, errors))),
        errno=errors[0].errno if isinstance(errors[0], OSError) else None,
        phase="commit",
        path=path,
        hint="check the directory when storage answers again; another process may save to it",
    )


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else repr(error)


@contextmanager
def _durable_name(directory: str) -> Iterator[None]:
    """Make the directory's own name durable, concurrently with the block's own fsync.

    Raises:
        OSError: The name could not be made durable.
    """
    failures: list[OSError] = []

    def sync() -> None:
        try:
            sync_name(directory)
        except OSError as error:
            failures.append(error)

    thread = start_apart("nostall-commit", sync)
    try:
        yield
    finally:
        if thread is not None:
            thread.join()
    if failures:
        raise failures[0]
