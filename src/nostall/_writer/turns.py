"""Limit how many processes of this user write on this host at a time.

Each writer holds the lock of one of *n* files while it writes. The system releases it when the
process, and children that it has forked meanwhile, have ended, however they end.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nostall._writer.position import Position

_SHARED = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"  # noqa: S108  # owners are checked
_PAUSE_S = 0.02
"""Between two looks for a free lock."""
WAIT = "wait"
"""The phase of a writer that waits for its turn."""


@contextmanager
def turn(writers: int, timeout_s: float, at: Position) -> Iterator[None]:
    """Wait until fewer than ``writers`` others write, and write as one of them.

    Args:
        writers: The limit; 0 for none.
        timeout_s: The longest wait.
        at: The position of the job.

    Raises:
        Cancelled: The job was cancelled.
        OSError: The wait is over, or the files to lock cannot be made.
    """
    if not writers:
        yield
        return
    phase, path = at.phase, at.path
    directory = os.path.join(_SHARED, f"nostall-writers-{os.geteuid()}")
    at.move(WAIT, directory)
    end_s = time.monotonic() + timeout_s
    while (lock := _free_lock(directory, writers)) is None:
        if time.monotonic() > end_s:
            why = f"{writers} other writers of this host have not finished in {timeout_s:g} s"
            raise TimeoutError(errno.ETIMEDOUT, why, directory)
        at.cancelled.wait(_PAUSE_S)
        at.raise_if_cancelled()
    with lock:
        at.move(phase, path)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may have the descriptor, too


def _make_directory(path: str) -> None:
    """Make the directory of this user's locks; again, if something has removed it meanwhile."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(errno.EACCES, "not a directory of this user", path)


def _free_lock(directory: str, writers: int) -> io.FileIO | None:
    """A lock that nobody had; ``None`` if there is none."""
    _make_directory(directory)
    for number in range(writers):
        lock = io.FileIO(os.path.join(directory, f"{number}"), "a", opener=_opened)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        except BaseException:  # passed on
            lock.close()
            raise
        else:
            return lock
    return None


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
