"""Publishing on a POSIX file system: write a temporary file, rename it, and settle all doubts.

Order: write the temporary file, fsync it and the name of a new
directory, ``os.replace``, fsync of the directory. A crash before the replacement leaves the
previous content, a crash after it leaves the new one.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence

from nostall._model.names import METADATA_SUFFIX
from nostall._storage.port import Conflict, Version, may_have, reason, version_of
from nostall._storage.posix import (
    close_all,
    identity_of,
    remove_draft,
    replace_file,
    sync_directory,
    sync_name,
    write_draft,
)
from nostall._storage.posix_files import PosixFiles
from nostall._storage.reading import open_to_read, read_metadata
from nostall.errors import NotDurableError


class PosixStorage(PosixFiles):
    """A checkpoint directory; a :class:`~nostall._storage.port.Storage`.

    ``publish`` compares with ``expected`` just before the rename. Between processes this is not
    atomic: POSIX has no conditional rename.
    """

    publishes_conditionally = False

    def publish(
        self,
        name: str,
        content: Sequence[bytes],
        *,
        expected: Version | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        final = self.where(name)
        # Another process that saves to this directory must not publish this file. A crash leaves
        # it, and nobody looks for random names but a commit, for those of metadata.
        unique = f".{os.urandom(4).hex()}" if name.endswith(METADATA_SUFFIX) else ""
        draft = f"{self.where(unique + name)}.tmp"
        fd = write_draft(draft, content, sync=self._sync)
        try:
            if self._sync:
                sync_name(self._directory)
            before()
            if expected is not None and version_of(self.stat, name) != expected:
                raise Conflict(final)
            _rename(final, draft, identity_of(fd), content)
        except NotDurableError:
            raise
        except BaseException:  # passed on; nothing is published
            remove_draft(draft, fd)
            raise
        finally:
            close_all([fd])
        if self._sync:
            make_name_durable(final, what="the new checkpoint")


def _rename(
    final: str, temporary: str, identity: tuple[int, int], content: Sequence[bytes]
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
        is_there=lambda: _is_there(final, identity, content),
    )
    try:
        if _is_there(final, identity, content, raises=True):
            return
    except Exception as error:  # the rename was done
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
            if doubt is None and (
                error.errno in _REFUSALS
                or (
                    error.errno == errno.ENOENT
                    and not may_have(PosixFiles(os.path.dirname(final)), "")
                )
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
        NotDurableError: That failed, for whatever reason; the file has its name.
    """
    try:
        sync_directory(os.path.dirname(path))
    except Exception as error:  # no memory, say: the caller must not remove what it has published
        raise NotDurableError(
            f"{what} exists, but its name could not be made durable: {reason(error)}",
            errno=error.errno if isinstance(error, OSError) else None,
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
        if identity_of(path) == identity:
            return True
        with open_to_read(PosixFiles(os.path.dirname(path)), os.path.basename(path)) as stream:
            return read_metadata(stream, path) == b"".join(content)
    except Exception:  # of storage, or no memory: not an answer
        if raises:
            raise
        return False


def _unknown(path: str, what: str, *errors: Exception) -> NotDurableError:
    return NotDurableError(
        f"cannot determine whether {what} was published: "
        + ", and then ".join(dict.fromkeys(map(reason, errors))),
        errno=errors[0].errno if isinstance(errors[0], OSError) else None,
        phase="commit",
        path=path,
        hint="check the directory when storage answers again; another process may save to it",
    )
