"""Files on a POSIX file system, written in large positional chunks, past the page cache where that is possible.

Whatever a save changes on storage it changes through this module, and this module through ``os``: tests that record the
operations of a save, or lose them as a crash would, put something else in place of that.

A file gets all its blocks when it is made. ``O_DIRECT`` asks for page-aligned memory, offsets and lengths. Images are
page-aligned; the last chunk is written with its padding and the file cut to length before it is synced. A file system
that does not take ``O_DIRECT`` refuses the open or the first write with ``EINVAL``: the file then goes through the page
cache, with the same result.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import groupby

from nostall._model.jobs import page_aligned

_LARGE_PIECE_NBYTES = 64 << 10
_MOST_TO_HOLD = 64
"""Removed files; a rank has a few, and a process may have open about a thousand."""
_NOTHING_WRITTEN = "the system wrote nothing and gave no reason"
_NAMES_TRIED = 100


class ImageFile:
    """One new file under construction; chunks may be written from several threads at once.

    Args:
        path: What to call it; if something has that name, :attr:`path` is a similar one.
        nbytes: How long it is going to be.
        direct: Whether to write past the page cache.
        on_created: Told the path as soon as there is a file to remove if anything goes wrong; it is empty then.
    """

    def __init__(
        self,
        path: str,
        nbytes: int,
        *,
        direct: bool,
        on_created: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self.path, self._fd = create_new(path)
        self._direct = False
        try:
            on_created(self.path)
            if direct:
                self._go_past_page_cache()
            _preallocate(self._fd, nbytes)
        except BaseException:
            self.close()
            raise

    @property
    def is_direct(self) -> bool:
        """Whether it is written past the page cache, so that several threads can write into it at a time."""
        return self._direct

    def write(self, memory: memoryview, begin: int, end: int, *, origin: int = 0) -> None:
        """Write the bytes of the file from ``begin`` to ``end``.

        Args:
            memory: They are in here, page-aligned and padded to whole pages.
            begin: First byte, a multiple of the page size.
            end: One past the last byte; a multiple of the page size or the file's length.
            origin: Which byte of the file ``memory`` begins with.

        Raises:
            OSError: The system refused, or took fewer bytes without saying why.
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
                self._go_through_page_cache()
                continue
            if written == 0:
                raise OSError(errno.EIO, _NOTHING_WRITTEN, self.path)
            begin += written

    def finish(self, *, sync: bool) -> None:
        """Cut the file to its length, wait until the device has it, if asked, and close it.

        Raises:
            OSError: The system refused; some file systems find no room for a file, or no server, only when it is closed.
        """
        os.ftruncate(self._fd, self._nbytes)
        if sync:
            os.fsync(self._fd)
        os.close(self._taken())

    def close(self) -> None:
        """Close what is open of a file that is given up, whatever storage says to that; idempotent."""
        fd = self._taken()
        if fd >= 0:
            close_all([fd])

    def _taken(self) -> int:
        """The descriptor, which is nobody else's any more."""
        with self._lock:
            fd, self._fd = self._fd, -1
        return fd

    def _go_past_page_cache(self) -> None:
        """Open it once more with ``O_DIRECT``: a system that refuses that when it makes a file has made it all the same."""
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EACCES):  # the latter by the umask
                raise
            return
        try:
            if identity_of(fd) == identity_of(self._fd):
                self._fd, fd = fd, self._fd
                self._direct = True
        finally:
            close_all([fd])  # nothing was written through it

    def _go_through_page_cache(self) -> None:
        """Switch ``O_DIRECT`` off for all further writes; several threads may find out at once."""
        with self._lock:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self._direct = False


def create_new(path: str) -> tuple[str, int]:
    """Open a new file of that name, or of a similar one where something has it: that is somebody else's and stays.

    Storage itself is asked, not a cache of its names, which may say for a while that nothing is there.

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
    """Give a file its blocks and its length at once, where the file system can; too little room shows here, not later.

    Direct writes beyond the end of a file wait for each other, those inside it do not (ext4, XFS).

    Raises:
        OSError: There is not that much room.
    """
    if not nbytes:
        return
    # Not os.posix_fallocate(), which writes zeros where the file system cannot do it.
    if _libc().fallocate(fd, 0, 0, nbytes):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return libc


_PASSING = {
    getattr(errno, name)
    for name in (
        *("EIO", "EREMOTEIO", "EAGAIN", "EBUSY", "ENOLINK", "ESTALE", "ETIMEDOUT", "ECONNABORTED"),
        *("ECONNRESET", "ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH"),
    )
}
"""What network file systems answer while a server is away. A full disk or a wrong owner is not among them."""


def may_pass(error: Exception) -> bool:
    """Whether the same operation may succeed in a moment."""
    return isinstance(error, OSError) and error.errno in _PASSING


def may_be_there(path: str) -> bool:
    """Whether something has that name; true also if that cannot be told.

    ``os.path.exists`` takes whatever storage answers for a no.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def make_directory(path: str) -> None:
    """Make a directory if it is not there.

    The levels above it that have to be made, too, are made durable here; its own name is by whoever commits into it.
    """
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    except FileNotFoundError:
        parent = os.path.dirname(os.path.abspath(path))
        if os.path.isdir(parent):  # a file system that makes no directories
            raise
        make_directory(parent)
        sync_directory(os.path.dirname(parent))
        make_directory(path)


def identity_of(path: str | int) -> tuple[int, int]:
    """Which file has that name, or descriptor.

    Raises:
        OSError: None has.
    """
    status = os.stat(path)
    return status.st_dev, status.st_ino


def has_identity(path: str, identity: tuple[int, int]) -> bool:
    """Whether that file has this name, as far as can be seen."""
    try:
        return identity_of(path) == identity
    except OSError:
        return False


def is_same(one: str | int, other: str) -> bool:
    """Whether two paths, or a descriptor and a path, lead to the same file or directory, which is there."""
    try:
        return identity_of(one) == identity_of(other)
    except OSError:
        return False


def require_file(path: str, nbytes: int) -> None:
    """Make sure that a file is where it was written.

    Raises:
        OSError: It is not there, or has another size.
    """
    found = os.stat(path).st_size
    if found != nbytes:
        raise OSError(errno.EIO, f"the file has {found} bytes instead of {nbytes}", path)


class UnfinishedFile:
    """A new file, in place of what has that name, that is written from front to back."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._at = 0
        try:
            self._opened = [_create(path)]
        except FileExistsError:
            # Never written into: it may be a link to something else, or have another name.
            os.unlink(path)
            self._opened = [_create(path)]

    def append(self, content: Iterable[bytes]) -> None:
        """Write what comes next, in pieces.

        Raises:
            OSError: The system refused, or took nothing without saying why.
        """
        (fd,) = self._opened
        for piece in _large_pieces(content):
            rest = memoryview(piece)
            while rest:
                written = os.pwrite(fd, rest, self._at)
                if written == 0:
                    raise OSError(errno.EIO, _NOTHING_WRITTEN, self.path)
                self._at += written
                rest = rest[written:]

    def sync(self) -> None:
        """Wait until the device has what was written so far."""
        (fd,) = self._opened
        os.fsync(fd)

    def is_untouched(self) -> bool:
        """Whether it is what has its name, and as long as it was written; nobody else is asked to leave it alone."""
        try:
            named = os.stat(self.path)
            return is_same(self._opened[0], self.path) and named.st_size == self._at
        except OSError:
            return False

    def finish(self) -> tuple[int, int]:
        """Close it, as some file systems store it, and find no room for it, only then.

        Returns:
            Which file it is; until :meth:`close` no other file of this machine can be taken for it, even if it is removed.

        Raises:
            OSError: The system refused, or another file has its name.
        """
        (fd,) = self._opened
        self._opened.insert(0, os.open(self.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
        if identity_of(self._opened[0]) != identity_of(fd):
            raise OSError(errno.ESTALE, "another process has replaced the file", self.path)
        os.close(self._opened.pop())
        return identity_of(self._opened[0])

    def remove(self) -> None:
        """Remove it, unless its name is known to be another file's by now: that is another process's, and about to be published."""
        with suppress(OSError):
            if identity_of(self.path) != identity_of(self._opened[-1]):
                return
        remove_files([self.path])

    def close(self) -> None:
        """Close what is open of it, whatever storage says to that; idempotent."""
        close_all(self._opened)


def _large_pieces(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, with small pieces put together, as each costs a call, and large ones as they are."""
    for is_large, group in groupby(pieces, lambda piece: len(piece) >= _LARGE_PIECE_NBYTES):
        if is_large:
            yield from group
        else:
            yield b"".join(group)


def replace_file(path: str, by: str) -> None:
    """Give a file another's name; at every moment there is one of that name."""
    os.replace(by, path)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_name(directory: str) -> None:
    """Make a directory's own name durable; who may not read its parent has not made it either."""
    with suppress(PermissionError):
        sync_directory(os.path.dirname(os.path.realpath(directory)))


def remove_file(path: str) -> None:
    """Remove a file; one that is not there is no error."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_directory(path: str) -> None:
    """Remove an empty directory; one that is not there is no error."""
    with suppress(FileNotFoundError):
        os.rmdir(path)


def remove_files(paths: Iterable[str]) -> None:
    """Remove what is left of files that will never be committed; one that is not there is no error."""
    for path in paths:
        try:
            os.unlink(path)
        except OSError:
            # The failure being cleaned up after is the one to report; a file that stays is only wasted space.
            continue


def remove_empty_files(paths: Iterable[str]) -> None:
    """Remove those of the files that have nothing in them, which nobody misses."""
    for path in paths:
        with suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and not status.st_size:
                os.unlink(path)


def remove_and_hold(paths: Iterable[str], held: list[int]) -> None:
    """As :func:`remove_files`, but storage keeps what the first files hold until their descriptors are closed.

    A name goes at once. To give the blocks back is what takes long: 0.2 s per GiB on ext4 on the machine of the benchmarks.

    Args:
        paths: What to remove.
        held: Gets the descriptors, while there are few of them; what further files hold is given back at once.
    """
    for path in paths:
        if len(held) < _MOST_TO_HOLD:
            with suppress(OSError):
                held.append(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
        remove_files([path])


def has_room_for(held: list[int]) -> bool:
    """Whether storage has room for these files once more; false if that cannot be told."""
    try:
        room = os.fstatvfs(held[0])
        return room.f_bavail * room.f_frsize > sum(os.fstat(fd).st_size for fd in held)
    except (IndexError, OSError):  # another thread may have closed them
        return False


def close_all(descriptors: list[int]) -> None:
    """Close descriptors of files that nobody needs, all of them, whatever storage says to each.

    Each is taken out of the list first of all: a child that is forked meanwhile closes the others.
    """
    while descriptors:
        with suppress(OSError):
            os.close(descriptors.pop())
