"""Commit: publish the metadata of a save whose files are all durable. The last thing that happens to a save.

Order: temporary metadata, a large part of which may have been written before, fsync (of the name of a new directory, too),
``os.replace``, fsync of the directory. A crash before the replacement leaves what was there, a crash after it leaves the new
checkpoint. Files of the checkpoint that was replaced are removed only when the replacement is durable.
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
        replaced_files: Names below ``directory`` that nothing refers to once this is published, and asked for only then.
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
    try:
        at("commit")
        if file is None:
            file = UnfinishedFile(temporary)
        with _durable_name(directory) if sync else nullcontext():
            file.append(rest)
            if sync:
                file.sync()
        identity = file.finish()
        at("publish")
        _publish(final, temporary, identity, metadata)
    except NotDurableError:
        raise
    except BaseException as error:
        if file is not None:
            file.remove()
        else:  # which storage may have made, and said that it has not
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
    removed: tuple[str, ...] = ()
    try:
        removed = tuple(replaced_files)
        remove(os.path.join(directory, name) for name in removed)
    except Exception:  # the checkpoint is there, and must not be taken for lost
        _log.exception("files of the replaced checkpoint stay path=%s", directory)
    return CommittedCheckpoint(
        path=directory, metadata_nbytes=sum(map(len, metadata)), removed=removed
    )


def _publish(
    final: str, temporary: str, identity: tuple[int, int], metadata: Sequence[bytes]
) -> None:
    """Give the temporary file its name, and make sure that it has it.

    Raises:
        OSError: Storage has refused; the metadata is not published.
        NotDurableError: It cannot be told whether it is, or another process has put its own in place of it. What the metadata
            may refer to must not be removed.
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
    except Exception as error:
        raise _unknown(final, "the metadata", error) from error
    raise NotDurableError(
        "what was published is not what was written",
        phase="commit",
        path=final,
        hint="another process may save to the same directory",
    )


def give_name(final: str, temporary: str, *, what: str, is_there: Callable[[], bool]) -> None:
    """Rename a file, whatever storage answers.

    An error that storage may answer with after it has done what it was asked for says nothing. What a look then shows may
    be old, but a second rename is asked of storage itself: it does what was not done, or finds nothing to rename.

    Args:
        final: The name that it gets, in place of what has that name.
        temporary: The name that it has.
        what: What is published by it, for the error.
        is_there: Whether it has the name already, as far as can be seen.

    Raises:
        OSError: Storage has refused; the file does not have the name.
        NotDurableError: It cannot be told whether it has.
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
"""Between attempts to rename."""
_REFUSALS = {
    getattr(errno, name)
    for name in (
        *("EACCES", "EPERM", "EROFS", "EXDEV", "ENOSPC", "EDQUOT", "EINVAL", "EISDIR", "ENOTDIR"),
        *("ENOTEMPTY", "EEXIST", "ENAMETOOLONG", "ELOOP", "EMLINK", "ENOSYS", "ENOTSUP"),
    )
}
"""Why storage does not rename. After any other answer it may have done so, or do it yet."""


def _is_there(
    path: str, identity: tuple[int, int], content: Sequence[bytes], *, raises: bool = False
) -> bool:
    """Whether the metadata that was written has its name, as far as can be seen."""
    try:
        # A file system that renames by copying gives the file another number.
        return identity_of(path) == identity or read_metadata_file(path) == b"".join(content)
    except Exception:
        if raises:
            raise
        return False


def _unknown(path: str, what: str, *errors: Exception) -> NotDurableError:
    return NotDurableError(
        f"it cannot be told whether {what} was published: "
        + ", and then ".join(dict.fromkeys(map(_reason, errors))),
        errno=errors[0].errno if isinstance(errors[0], OSError) else None,
        phase="commit",
        path=path,
        hint="look at the directory when storage answers again; another process may save to it, too",
    )


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

    thread = start_apart("nostall-commit", sync)
    try:
        yield
    finally:
        if thread is not None:
            thread.join()
    if failures:
        raise failures[0]
