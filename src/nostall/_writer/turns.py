"""Let a few writers of a host write at a time: all processes of this user that have a limit.

A writer that writes holds the lock of one file of so many. The system releases it when the process
ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from nostall._writer.position import Position

_SHARED = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"  # noqa: S108  # owners are checked
_PAUSE_S = 0.02
"""Between two looks for a free lock."""


@contextmanager
def turn(writers: int, at: Position) -> Iterator[None]:
    """Wait until fewer than ``writers`` others write, and write as one of them.

    Args:
        writers: The limit; 0 for none.
        at: The position of the job.

    Raises:
        Cancelled: The job was cancelled.
        OSError: The files to lock cannot be made.
    """
    if not writers:
        yield
        return
    phase, path = at.phase, at.path
    at.move("wait", _SHARED)
    directory = _directory()
    while (lock := _free_lock(directory, writers)) is None:
        at.cancelled.wait(_PAUSE_S)
        at.raise_if_cancelled()
    try:
        at.move(phase, path)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
        os.close(lock)


def _directory() -> str:
    """Where the locks of this user are, in memory."""
    path = os.path.join(_SHARED, f"nostall-writers-{os.geteuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(errno.EACCES, "not a directory of this user", path)
    return path


def _free_lock(directory: str, writers: int) -> int | None:
    """The descriptor of a lock that nobody had; ``None`` if there is none."""
    for number in range(writers):
        lock = os.open(
            os.path.join(directory, str(number)),
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        except BaseException:  # passed on
            os.close(lock)
            raise
        else:
            return lock
    return None
