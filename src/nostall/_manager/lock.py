"""The lock of a root: one process at a time saves below it.

It is a POSIX record lock on a file in the root. The system releases it when its process ends,
however that happens, and children do not inherit it. So a job that was killed never keeps the next
one from saving. Among machines it is as good as the file system: NFS passes it to the server, which
may keep that of a crashed machine for some time. A lock of another machine is therefore a warning.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass

from nostall._storage.places import is_address
from nostall.errors import OptionError

_log = logging.getLogger("nostall")

NAME = ".nostall.lock"
_LONGEST_NBYTES = 300


@dataclass(slots=True)
class _Taken:
    fd: int
    users: int = 1


class _Process:
    """The locks of this process. A forked child has none: the system does not inherit them."""

    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        # Closing any descriptor of a file would end its lock, so a process's managers share one.
        self.taken: dict[str, _Taken] = {}
        self.changing = threading.Lock()  # a thread of the parent may hold it at the fork


_process = _Process()


class RootLock:
    """The lock of one root, shared by the managers of this process.

    Args:
        root: The directory; it is made. An address has no lock.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._path = f"{root}/{NAME}"
        self._is_user = False

    def take(self) -> None:
        """Take the lock, until :meth:`release` or the end of the process.

        A warning tells if the file system has no locks, or another machine has this one.

        Raises:
            OptionError: Another process of this machine has it.
        """
        if self._is_user or is_address(self._root):  # an object store has no locks
            return
        try:
            with _process.changing:
                self._is_user = self._take()
        except OSError as error:
            _log.warning(
                "root=%s cannot be locked: %s. A second job that saves here is not noticed",
                self._root,
                error.strerror,
            )

    def _take(self) -> bool:
        taken = _process.taken.get(self._path)
        if taken is not None and self._is_present(taken.fd):
            taken.users += 1
            return True
        os.makedirs(self._root, exist_ok=True)
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                with os.fdopen(fd, "rb") as file:
                    if not isinstance(error, BlockingIOError | PermissionError):
                        raise
                    self._report(file.read(_LONGEST_NBYTES).decode(errors="replace"))
                return False
            if self._is_present(fd):
                break
            os.close(fd)  # its former owner has removed it meanwhile
        os.truncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        if taken is not None:  # the root was removed and made again
            os.close(taken.fd)
        _process.taken[self._path] = _Taken(fd, users=1 if taken is None else taken.users + 1)
        return True

    def _is_present(self, fd: int) -> bool:
        """Whether an open file is still the one in the root."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(fd), os.stat(self._path))
        return False

    def _report(self, owner: str) -> None:
        pid, _, host = owner.strip().partition(" ")
        if host not in ("", socket.gethostname()):
            _log.warning(
                "process %s on %s has locked root=%s. If it still saves here, each of the two jobs"
                " removes steps of the other",
                pid,
                host,
                self._root,
            )
            return
        raise OptionError(
            f"another process saves below this root: pid {pid or 'unknown'}",
            path=self._root,
            hint="use another root, or end that process first",
        )

    def release(self) -> None:
        """Release the lock, if no other manager of this process needs it. Idempotent."""
        if not self._is_user:
            return
        self._is_user = False
        with _process.changing:
            taken = _process.taken.get(self._path)
            if taken is None:  # in a forked child
                return
            taken.users -= 1
            if taken.users:
                return
            del _process.taken[self._path]
            with suppress(OSError):  # it may stay
                if self._is_present(taken.fd):
                    os.unlink(self._path)
            os.close(taken.fd)


os.register_at_fork(after_in_child=_process.start_over)
