"""A checkpoint in a directory of a POSIX file system: its files, and the commit.

A save changes storage only through this module, and this module only through ``os``, but for
``fallocate``: tests replace ``os`` to record operations, or to lose them as in a crash.

Files are written in large positional chunks, past the page cache if possible. All blocks of a file
are allocated when it is made. ``O_DIRECT`` requires page-aligned memory, offsets and lengths.
Images are page-aligned; the last chunk is written with its padding, and the file is truncated to
its length before fsync. A file system without ``O_DIRECT`` refuses the flag, or the first write
with ``EINVAL``; the page cache is used then, with the same result.

To publish, in this order: write a temporary file, fsync it and the name of a new directory,
``os.replace``, fsync of the directory. A crash before the replacement leaves the previous content,
a crash after it leaves the new one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from nostall._model.jobs import page_aligned
from nostall._model.names import METADATA_SUFFIX
from nostall._storage.port import (
    Conflict,
    Stat,
    Version,
    between,
    may_have,
    open_to_read,
    read_metadata,
    reason,
    unknown_outcome,
    version_of,
)
from nostall.errors import NotDurableError, ReadError

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
"""A new file; existing ones stay. Storage itself is asked: a cache of names can be out of date."""
_READ_ONLY = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_NOTHING_WRITTEN = "the system wrote nothing, without an error"
_NAMES_TRIED = 100
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


class PosixStorage:
    """A checkpoint directory; a :class:`~nostall._storage.port.Storage`.

    ``publish`` compares with ``expected`` just before the rename. Between processes this is not
    atomic: POSIX has no conditional rename. With ``sync`` what is put, removed and published is
    fsynced; with ``direct`` files are put past the page cache.
    """

    publishes_conditionally = False

    def __init__(self, directory: str, *, sync: bool = True, direct: bool = False) -> None:
        self._directory, self._sync, self._direct = directory, sync, direct

    def where(self, name: str = "") -> str:
        return os.path.join(self._directory, name) if name else self._directory

    def make_place(self) -> None:
        make_directory(self._directory)

    def least_part(self, nbytes: int) -> int:
        del nbytes
        return mmap.PAGESIZE

    def put(self, name: str, nbytes: int, *, on_created: Callable[[str], None]) -> NewFile:
        return NewFile(self, name, nbytes, on_created)

    def flush(self) -> None:
        if self._sync:
            with suppress(FileNotFoundError):
                sync_directory(self._directory)

    def open(self, name: str) -> PosixSource:
        return PosixSource(self.where(name))

    def stat(self, name: str) -> Stat:
        path = self.where(name)
        return _stat_of(os.stat(path), path)

    def list(self) -> list[str]:
        return os.listdir(self._directory)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(self.where(name))

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
        # it, and only a commit looks for random names, of metadata.
        unique = f".{os.urandom(4).hex()}" if name.endswith(METADATA_SUFFIX) else ""
        draft = f"{self.where(unique + name)}.tmp"
        fd = write_draft(draft, content, sync=self._sync)

        def is_there() -> bool:
            # A file system that renames by copying changes the inode number.
            if os.path.samestat(os.stat(final), status):
                return True
            with open_to_read(self, name) as stream:
                return read_metadata(stream, final) == b"".join(content)

        try:
            if self._sync:
                sync_name(self._directory)
            before()
            if expected is not None and version_of(self.stat, name) != expected:
                raise Conflict(final)
            status = os.fstat(fd)
            give_name(final, draft, what="the metadata", is_there=is_there)
            try:
                is_ours = is_there()
            except Exception as error:  # the rename was done
                raise unknown_outcome(final, "the metadata", error) from error
            if not is_ours:
                raise NotDurableError(
                    "the published metadata is not the metadata of this save",
                    phase="commit",
                    path=final,
                    hint="another process may save to the same directory",
                )
        except NotDurableError:  # the files that the metadata may refer to must not be removed
            raise
        except BaseException:  # passed on; nothing is published
            remove_draft(draft, fd)
            raise
        finally:
            with suppress(OSError):
                os.close(fd)
        if self._sync:
            make_name_durable(final, what="the new checkpoint")


# --- publish under a name -------------------------------------------------------------------------


def give_name(final: str, temporary: str, *, what: str, is_there: Callable[[], bool]) -> None:
    """Rename a file, also if storage reports an error for a rename that it has done.

    After such an error the outcome is unknown, and a look at the directory may show a cached state.
    A second rename reaches storage itself: it completes the first one, or finds nothing to rename.

    ``is_there`` tells whether the file appears to have the new name already; an error is no answer.
    ``OSError`` if storage refused: the file does not have the new name. ``NotDurableError`` if the
    outcome is unknown.
    """
    doubt: OSError | None = None
    for wait_s in (*_WAITS_S, None):
        try:
            os.replace(temporary, final)
        except OSError as error:
            with suppress(Exception):  # of storage, or no memory
                if is_there():
                    return
            is_refused = error.errno in _REFUSALS
            is_absent = error.errno == errno.ENOENT
            directory = PosixStorage(os.path.dirname(final))
            if doubt is None and (is_refused or (is_absent and not may_have(directory, ""))):
                raise
            doubt = doubt or error
            if is_refused or is_absent or wait_s is None:
                raise unknown_outcome(final, what, doubt, error) from doubt
            time.sleep(wait_s)
        else:
            return


def make_name_durable(path: str, *, what: str) -> None:
    """Fsync the directory of a file that has just got its name; ``what`` is for the error.

    ``NotDurableError`` if that failed, for whatever reason; the file has its name.
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


def write_draft(path: str, content: Sequence[bytes], *, sync: bool) -> int:
    """Make a file that is to be renamed, and fsync it with ``sync``; an existing one is removed.

    Its descriptor cannot be read. Until it is closed no other file of this machine can have the
    same device and inode, even if this one is removed. ``OSError`` also if the system wrote
    nothing, or another process has replaced the file.
    """
    descriptors: list[int] = []
    try:
        try:
            descriptors.append(os.open(path, _NEW, 0o666))
        except FileExistsError:
            # Never overwritten: it may be a link to another file, or have another name.
            os.unlink(path)
            descriptors.append(os.open(path, _NEW, 0o666))
        whole, at = memoryview(b"".join(content)), 0
        while at < len(whole):
            written = os.pwrite(descriptors[0], whole[at:], at)
            if written == 0:
                raise OSError(errno.EIO, _NOTHING_WRITTEN, path)
            at += written
        if sync:
            os.fsync(descriptors[0])
        descriptors.append(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
        if not os.path.samestat(*map(os.fstat, descriptors)):
            raise OSError(errno.ESTALE, "another process has replaced the file", path)
        # Some file systems store it, or report a full disk, only now.
        os.close(descriptors.pop(0))
        return descriptors[0]
    except BaseException:  # passed on; no caller gets a descriptor
        if not descriptors:  # storage may have made it although it reported an error
            remove_empty_files([path])
        else:
            remove_draft(path, descriptors[0])
        for fd in descriptors:
            with suppress(OSError):
                os.close(fd)
        raise


def remove_draft(path: str, fd: int) -> None:
    """Remove the file of a descriptor, unless another process has replaced it with its own."""
    if is_same(fd, path):
        remove_leftover(path)


# --- files that are written and read --------------------------------------------------------------


class NewFile:
    """A new file being written; several threads may write chunks at once.

    If the name is taken, a similar one is used. ``on_created`` is called with it as soon as the
    file exists, still empty.
    """

    def __init__(
        self, storage: PosixStorage, name: str, nbytes: int, on_created: Callable[[str], None]
    ) -> None:
        self._nbytes, self._sync = nbytes, storage._sync
        self._lock = threading.Lock()
        path = storage.where(name)
        make_directory(os.path.dirname(path))
        self._path, self._fd = create_new(path)
        self.name = os.path.relpath(self._path, storage.where())
        self._direct = False
        try:
            on_created(self.name)
            if storage._direct:
                with suppress(OSError):  # not every file system has it
                    self._set_direct(direct=True)
            _preallocate(self._fd, nbytes)
        except BaseException:  # passed on; no caller gets an object to close
            self.close()
            raise

    @property
    def any_order(self) -> bool:
        """Whether writes bypass the page cache, so that several threads can write at a time."""
        return self._direct

    def write(self, memory: memoryview, begin: int, end: int, *, origin: int = 0) -> None:
        """Write a chunk, see :meth:`nostall._storage.port.Upload.write`."""
        length = page_aligned(end) if self._direct else end
        while begin < end:
            direct = self._direct
            try:
                piece = memory[begin - origin : (length if direct else end) - origin]
                written = os.pwrite(self._fd, piece, begin)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._set_direct(direct=False)
                continue
            if written == 0:
                raise OSError(errno.EIO, _NOTHING_WRITTEN, self._path)
            begin += written

    def finish(self) -> None:
        """Truncate the file to its length, fsync it if asked, and close it.

        Some file systems report a full disk or a lost server only at close.
        """
        os.ftruncate(self._fd, self._nbytes)
        if self._sync:
            os.fsync(self._fd)
        fd, self._fd = self._fd, -1
        try:
            os.close(fd)
        except BaseException:  # passed on; close() finds nothing to remove
            remove_leftover(self._path)
            raise

    def close(self) -> None:
        """Remove the file unless it is finished; errors are ignored. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            is_ours = is_same(fd, self._path)  # and not the file of a later save
            with suppress(OSError):
                os.close(fd)
            if is_ours:
                remove_leftover(self._path)

    def _set_direct(self, *, direct: bool) -> None:
        """Bypass the page cache from now on, or not; several threads may call this at once."""
        with self._lock:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            self._direct = direct


def create_new(path: str) -> tuple[str, int]:
    """Open a new file of this path, or of a similar one if it exists; its path and descriptor."""
    root, suffix = os.path.splitext(path)
    for _ in range(_NAMES_TRIED):
        with suppress(FileExistsError):
            return path, os.open(path, _NEW, 0o666)
        path = f"{root}-{os.urandom(4).hex()}{suffix}"
    return path, os.open(path, _NEW, 0o666)


def _preallocate(fd: int, nbytes: int) -> None:
    """Allocate a file's blocks and set its length, where supported; ``OSError`` without space.

    A full disk is reported early. Direct writes beyond the end of a file wait for each other;
    writes inside it do not (ext4, XFS).
    """
    # Not os.posix_fallocate(), which writes zeros where the file system does not support it.
    if nbytes and _fallocate(fd, 0, 0, nbytes):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))


class PosixSource:
    """A regular file, opened for reading.

    ``ReadError`` for anything else: a pipe would block, a device may have no end.
    """

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, _READ_ONLY)
        except FileNotFoundError:
            # With NFS a host that has looked before another one made the file remembers for up to a
            # minute that there is none. A listing asks the server.
            directory, name = os.path.split(path)
            names: list[str] = []
            with suppress(OSError):
                names = os.listdir(directory)
            if name not in names:
                raise
            self._fd = os.open(path, _READ_ONLY)
        try:
            self.stat = _stat_of(os.fstat(self._fd), path)
        except BaseException:  # passed on; no caller gets an object to close
            self.close()
            raise

    def read_into(self, offset: int, *memories: memoryview) -> int:
        total, done = sum(map(len, memories)), 0
        while done < total:
            left = between(memories, done, total) if done else memories
            nbytes = os.preadv(self._fd, left, offset + done)
            if not nbytes:
                break
            done += nbytes
        return done

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _stat_of(status: os.stat_result, path: str) -> Stat:
    if not stat.S_ISREG(status.st_mode):
        raise ReadError("not a regular file", errno=errno.EINVAL, phase="read", path=path)
    version = Version(f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}")
    return Stat(status.st_size, version, status.st_mtime, max(status.st_mtime, status.st_ctime))


# --- directories, and the removal of files --------------------------------------------------------


def make_directory(path: str) -> None:
    """Make a directory if it does not exist.

    Missing parents are made, too, and their names fsynced. The directory's own name is fsynced at
    commit.
    """
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path) from None
    except FileNotFoundError:
        parent = os.path.dirname(os.path.abspath(path))
        if os.path.isdir(parent):  # a file system without directories
            raise
        make_directory(parent)
        sync_directory(os.path.dirname(parent))
        make_directory(path)


def is_same(one: str | int, other: str) -> bool:
    """Whether both lead to the same existing file or directory."""
    try:
        return os.path.samestat(os.stat(one), os.stat(other))
    except OSError:
        return False


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_name(directory: str) -> None:
    """Make a directory's own name durable; where the parent may not be read, it is not new."""
    with suppress(PermissionError):
        sync_directory(os.path.dirname(os.path.realpath(directory)))


class HeldDirectory:
    """A directory that is opened once: what gets its name meanwhile is not touched.

    It has methods of :class:`~nostall._storage.port.Files`. ``NotADirectoryError`` if the path is a
    symbolic link, or a file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def list(self) -> list[str]:
        return os.listdir(self._fd)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                os.unlink(name, dir_fd=self._fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                error.filename = os.path.join(self.path, name)
                raise

    def flush(self) -> None:
        os.fsync(self._fd)

    def remove_place(self) -> None:
        """Remove the directory if it is empty, and make that durable."""
        with suppress(FileNotFoundError):
            os.rmdir(self.path)
        sync_directory(os.path.dirname(self.path))

    def close(self) -> None:
        os.close(self._fd)


def remove_leftover(path: str) -> None:
    """Remove a file that will never be committed.

    Errors are ignored: the failure before is the one to report, and a leftover only takes room.
    """
    with suppress(OSError):
        os.unlink(path)


def remove_empty_files(paths: Iterable[str]) -> None:
    """Remove the files that are empty; errors are ignored."""
    for path in paths:
        with suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and not status.st_size:
                os.unlink(path)
