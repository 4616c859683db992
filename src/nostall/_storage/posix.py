"""Files on a POSIX file system, written in large positional chunks past the page cache if possible.

A save changes storage only through this module, and this module only through ``os``, but for
``fallocate``: tests replace ``os`` to record operations, or to lose them as in a crash.

All blocks of a file are allocated when it is made. ``O_DIRECT`` requires page-aligned memory,
offsets and lengths. Images are page-aligned; the last chunk is written with its padding, and the
file is truncated to its length before fsync. A file system without ``O_DIRECT`` refuses the flag,
or the first write with ``EINVAL``; the page cache is used then, with the same result.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache

from nostall._model.jobs import page_aligned

_NOTHING_WRITTEN = "the system wrote nothing, without an error"
_NAMES_TRIED = 100


class ImageFile:
    """A new file being written; several threads may write chunks at once.

    Args:
        path: Its path; if that exists, :attr:`name` is that of a similar one.
        nbytes: Its final length.
        root: The directory that :attr:`name` is relative to.
        direct: Whether to bypass the page cache.
        sync: Whether to fsync the finished file.
        on_created: Called with the name as soon as the file exists, still empty, so that it can be
            removed if this process dies.
    """

    def __init__(
        self,
        path: str,
        nbytes: int,
        *,
        root: str,
        direct: bool,
        sync: bool,
        on_created: Callable[[str], None],
    ) -> None:
        self._nbytes = nbytes
        self._sync = sync
        self._lock = threading.Lock()
        self._path, self._fd = create_new(path)
        self.name = os.path.relpath(self._path, root)
        self._direct = False
        try:
            on_created(self.name)
            if direct:
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
        """As :meth:`nostall._storage.port.Upload.write`.

        Raises:
            OSError: The system refused, or wrote nothing without an error.
        """
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

    def finish(self, crc32: int | None = None) -> None:
        """Truncate the file to its length, fsync it if asked, and close it.

        Args:
            crc32: Not compared: a file system has no checksum.

        Raises:
            OSError: The system refused. Some file systems report a full disk or a lost server only
                at close.
        """
        del crc32
        os.ftruncate(self._fd, self._nbytes)
        if self._sync:
            os.fsync(self._fd)
        fd, self._fd = self._fd, -1
        try:
            os.close(fd)
        except BaseException:  # passed on; close() finds nothing to remove
            remove_files([self._path])
            raise

    def close(self) -> None:
        """Remove the file unless it is finished; errors are ignored. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            is_there = is_same(fd, self._path)  # and not the file of a later save
            close_all([fd])
            if is_there:
                remove_files([self._path])

    def _set_direct(self, *, direct: bool) -> None:
        """Bypass the page cache from now on, or not; several threads may call this at once."""
        with self._lock:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            self._direct = direct


def create_new(path: str) -> tuple[str, int]:
    """Open a new file with this path, or a similar one if it exists: existing files stay.

    Storage itself is asked (``O_EXCL``): a cache of names can be out of date.

    Returns:
        The file's path and its descriptor.
    """
    root, suffix = os.path.splitext(path)
    for _ in range(_NAMES_TRIED):
        with suppress(FileExistsError):
            return path, _create(path)
        path = f"{root}-{os.urandom(4).hex()}{suffix}"
    return path, _create(path)


def _create(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _preallocate(fd: int, nbytes: int) -> None:
    """Allocate a file's blocks and set its length, where supported.

    A full disk is reported early. Direct writes beyond the end of a file wait for each other;
    writes inside it do not (ext4, XFS).

    Raises:
        OSError: There is not enough space.
    """
    if not nbytes:
        return
    # Not os.posix_fallocate(), which writes zeros where the file system does not support it.
    if _libc().fallocate(fd, 0, 0, nbytes):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return libc


def make_directory(path: str) -> None:
    """Make a directory if it does not exist.

    Missing parents are made, too, and their names fsynced. The directory's own name is fsynced at
    commit.
    """
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    except FileNotFoundError:
        parent = os.path.dirname(os.path.abspath(path))
        if os.path.isdir(parent):  # a file system without directories
            raise
        make_directory(parent)
        sync_directory(os.path.dirname(parent))
        make_directory(path)


def identity_of(path: str | int) -> tuple[int, int]:
    """Device and inode of a path or descriptor.

    Raises:
        OSError: It does not exist.
    """
    status = os.stat(path)
    return status.st_dev, status.st_ino


def has_identity(path: str, identity: tuple[int, int]) -> bool:
    """Whether the path has this device and inode; false if that is unknown."""
    try:
        return identity_of(path) == identity
    except OSError:
        return False


def is_same(one: str | int, other: str) -> bool:
    """Whether both lead to the same existing file or directory."""
    try:
        return identity_of(one) == identity_of(other)
    except OSError:
        return False


def write_draft(path: str, content: Sequence[bytes], *, sync: bool) -> int:
    """Make a file that is to be renamed; an existing file of that path is removed first.

    Args:
        path: Its path.
        content: In pieces.
        sync: Whether to fsync it.

    Returns:
        A descriptor that cannot be read. Until it is closed no other file of this machine can have
        the same device and inode, even if this one is removed.

    Raises:
        OSError: The system refused, wrote nothing without an error, or has another file there.
    """
    descriptors: list[int] = []
    try:
        try:
            descriptors.append(_create(path))
        except FileExistsError:
            # Never overwritten: it may be a link to another file, or have another name.
            os.unlink(path)
            descriptors.append(_create(path))
        whole, at = memoryview(b"".join(content)), 0
        while at < len(whole):
            written = os.pwrite(descriptors[0], whole[at:], at)
            if written == 0:
                raise OSError(errno.EIO, _NOTHING_WRITTEN, path)
            at += written
        if sync:
            os.fsync(descriptors[0])
        descriptors.append(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
        if identity_of(descriptors[0]) != identity_of(descriptors[1]):
            raise OSError(errno.ESTALE, "another process has replaced the file", path)
        # Some file systems store it, or report a full disk, only now.
        os.close(descriptors.pop(0))
        return descriptors[0]
    except BaseException:  # passed on; no caller gets a descriptor
        if not descriptors:  # storage may have made it although it reported an error
            remove_empty_files([path])
        else:
            remove_draft(path, descriptors[0])
        close_all(descriptors)
        raise


def remove_draft(path: str, fd: int) -> None:
    """Remove the file of a descriptor, unless another process has replaced it with its own."""
    if is_same(fd, path):
        remove_files([path])


def replace_file(path: str, by: str) -> None:
    """Rename ``by`` to ``path``; at every moment a file of that path exists."""
    os.replace(by, path)


def keep_mode_and_owner(path: str, of: str) -> None:
    """Give a file the mode and owner of the file that it is to replace, if one exists.

    Raises:
        OSError: That is a device, a FIFO or a socket.
    """
    try:
        old = os.stat(of)
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(old.st_mode) or stat.S_ISDIR(old.st_mode)):  # rename refuses a directory
        raise OSError(errno.EINVAL, "the path is that of a device, a FIFO or a socket")
    with suppress(PermissionError):  # another user's file; the directory may be shared
        os.chown(path, old.st_uid, old.st_gid)
    with suppress(PermissionError):  # this file system has no modes
        os.chmod(path, stat.S_IMODE(old.st_mode))


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_name(directory: str) -> None:
    """Make a directory's own name durable.

    If its parent may not be read, the directory is not new, and its name is durable.
    """
    with suppress(PermissionError):
        sync_directory(os.path.dirname(os.path.realpath(directory)))


def remove_file(path: str) -> None:
    """Remove a file if it exists."""
    with suppress(FileNotFoundError):
        os.unlink(path)


class HeldDirectory:
    """A directory that is opened once: what gets its name meanwhile is not touched.

    Args:
        path: Its path, which must not be a symbolic link.

    Raises:
        NotADirectoryError: It is a symbolic link, or a file.
        OSError: It cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def list(self) -> list[str]:
        """The names in it."""
        return os.listdir(self._fd)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files if they exist."""
        for name in names:
            try:
                os.unlink(name, dir_fd=self._fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                error.filename = os.path.join(self._path, name)
                raise

    def flush(self) -> None:
        """Make that durable."""
        os.fsync(self._fd)

    def remove_place(self) -> None:
        """Remove the directory if it is empty, and make that durable."""
        with suppress(FileNotFoundError):
            os.rmdir(self._path)
        sync_directory(os.path.dirname(self._path))

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


def remove_files(paths: Iterable[str]) -> None:
    """Remove files that will never be committed; errors are ignored."""
    for path in paths:
        try:
            os.unlink(path)
        except OSError:
            # The failure being cleaned up after is the one to report; a leftover file only takes
            # room.
            continue


def remove_empty_files(paths: Iterable[str]) -> None:
    """Remove those of the files that are empty."""
    for path in paths:
        with suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and not status.st_size:
                os.unlink(path)


def close_all(descriptors: list[int]) -> None:
    """Close all descriptors; errors are ignored."""
    for fd in descriptors:
        with suppress(OSError):
            os.close(fd)
