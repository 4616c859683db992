"""The lock of a root: one process at a time saves below it.

``flock`` locks a file in the root. The lock belongs to an open file description, so nothing else
that a process does with the file releases it. The system does when the process ends, however that
happens; a forked child closes its copy. So a job that was killed never keeps the next one from
saving. Among machines the lock is as good as the file system: NFS passes it to the server, which
may keep that of a crashed machine for some time. A lock of another machine is therefore a warning.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from nostall._storage.places import is_address
from nostall.errors import OptionError

_log = logging.getLogger("nostall")

NAME = ".nostall.lock"
_LONGEST_NBYTES = 300
_OPENING = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(slots=True, eq=False)
class _Taken:
    fd: int
    users: int = 0


class _Process:
    """The locks of this process, which its managers share. A forked child has none."""

    def __init__(self) -> None:
        self.taken: list[_Taken] = []
        self.start_over()

    def start_over(self) -> None:
        while self.taken:  # the parent keeps its descriptors, and with them the locks
            os.close(self.taken.pop().fd)
        self.changing = threading.Lock()  # a thread of the parent may hold it at the fork


_process = _Process()


class RootLock:
    """The lock of one root, which is made; shared by the managers of this process."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._path = f"{root}/{NAME}"
        self._taken: _Taken | None = None

    def take(self) -> None:
        """Take the lock, until :meth:`release` or the end of the process.

        A warning tells if the file system has no locks, or another machine has this one; if another
        process of this machine has it, this is an error. An object store has no locks.
        """
        if self._taken is not None or is_address(self._root):
            return
        try:
            with _process.changing:
                self._taken = self._take()
                if self._taken is not None:
                    self._taken.users += 1
        except OSError as error:
            _log.warning(
                "root=%s cannot be locked: %s. A second job that saves here is not noticed",
                self._root,
                error.strerror,
            )

    def _take(self) -> _Taken | None:
        """The lock; ``None`` if another machine has it.

        Nothing is written to a file that may be somebody else's: its name in the root is removed.
        """
        os.makedirs(self._root, exist_ok=True)
        while True:
            if os.path.islink(self._path):
                os.unlink(self._path)
            with ExitStack() as opened:
                fd = os.open(self._path, _OPENING, 0o666)
                opened.callback(os.close, fd)
                status = os.fstat(fd)
                for taken in _process.taken:
                    if os.path.samestat(os.fstat(taken.fd), status):
                        return taken
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._report(os.read(fd, _LONGEST_NBYTES).decode(errors="replace"))
                    return None
                if not self._is_present(fd):  # its former owner has removed it meanwhile
                    continue
                # Made by this user, or by the one who owns the root.
                is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
                if is_plain and status.st_uid in (os.geteuid(), os.stat(self._root).st_uid):
                    os.truncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
                    opened.pop_all()
                    _process.taken.append(_Taken(fd))
                    return _process.taken[-1]
                os.unlink(self._path)

    def _is_present(self, fd: int) -> bool:
        """Whether an open file is still the one in the root."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(fd), os.stat(self._path))
        return False

    def _report(self, owner: str) -> None:
        pid, _, host = owner.strip().partition(" ")
        if host in ("", socket.gethostname()):
            raise OptionError(
                f"another process saves below this root: pid {pid or 'unknown'}",
                path=self._root,
                hint="use another root, or end that process first",
            )
        _log.warning(
            "process %s on %s has locked root=%s. If it still saves here, each of the two jobs"
            " removes steps of the other",
            pid,
            host,
            self._root,
        )

    def release(self) -> None:
        """Release the lock, if no other manager of this process needs it. Idempotent."""
        taken, self._taken = self._taken, None
        with _process.changing:
            if taken is None or taken not in _process.taken:  # in a forked child
                return
            taken.users -= 1
            if taken.users:
                return
            _process.taken.remove(taken)
            with suppress(OSError):  # it may stay
                if self._is_present(taken.fd):
                    os.unlink(self._path)
            os.close(taken.fd)


os.register_at_fork(after_in_child=_process.start_over)
