"""What a save replaces, from before its first file until it is committed or given up.

Two jobs may save to one place. Files that no metadata refers to can be removed at once only if it
is certain that nobody will come to name them: that no save is committed which began before another
job's commit, or that none is under way. Where storage cannot tell, they are kept until they are
old.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Protocol

from nostall._storage.places import is_address, may_have, storage_at
from nostall._storage.port import ABSENT, Published, Version

_ATTEMPTS = 20
_PAUSE_S = 0.001
"""Between attempts to lock: another save holds the lock alone for less than that."""

_LOCAL = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0x794C7630: "overlay",
}
"""File systems of one host, whose locks all savers see. Numbers: ``linux/magic.h``."""
_STATFS_NBYTES = 256
"""More than ``struct statfs`` has on any architecture."""


class Basis(Protocol):
    """What a save found under the name that it will publish."""

    is_taken: bool
    """Whether there was something, or storage could not tell."""

    def expected(self) -> Version | None:
        """What :meth:`~nostall._storage.port.Storage.publish` has to expect there now."""

    def settle(self, published: Published | None) -> bool:
        """Close it after the publication.

        Returns:
            Whether no other process can still publish the name that began before. This process can,
            and others that begin now.
        """

    def close(self) -> None:
        """Give it up. Idempotent."""


def basis_at(place: str, name: str) -> Basis:
    """Begin a save.

    Args:
        place: The directory, which exists, or the address.
        name: The name that the save will publish.
    """
    return _InStore(place, name) if is_address(place) else _InDirectory(place, name)


class _InStore:
    """A version: a store publishes only if the name still has it.

    Saves of this process may overlap, so each that is published becomes what the others expect.
    """

    def __init__(self, place: str, name: str) -> None:
        self._where = place, name
        self._since: list[tuple[Version, Version]] = []
        """What this process has published since the look, after what."""
        with _lock:
            _living.add(self)
        self._version = _version_at(place, name)
        self.is_taken = self._version != ABSENT

    def expected(self) -> Version | None:
        if self._version is None:  # a late look is better than none
            return _version_at(*self._where)
        with _lock:
            for before, after in self._since:
                self._version = after if before == self._version else self._version
            self._since.clear()
        return self._version

    def settle(self, published: Published | None) -> bool:
        assert published is not None
        with _lock:
            for other in _living - {self}:
                if other._where == self._where and self._version is not None:
                    other._since.append((self._version, published.version))
        self.close()
        return published.at_once

    def close(self) -> None:
        with _lock:
            _living.discard(self)


_lock = threading.Lock()
_living = weakref.WeakSet[_InStore]()


def _version_at(place: str, name: str) -> Version | None:
    """``None`` if the store does not say."""
    try:
        return storage_at(place).stat(name).version
    except FileNotFoundError:
        return ABSENT
    except OSError:
        return None


class _InDirectory:
    """A shared lock on the directory, if that is in a file system of this host alone.

    A save that gets the lock for itself was the last one under way.
    """

    def __init__(self, directory: str, name: str) -> None:
        self.is_taken = may_have(storage_at(directory), name)
        self._fd = _locked(directory)
        self._finalizer = weakref.finalize(self, _unlock, self._fd, os.getpid())
        self._finalizer.atexit = False  # the end of the process is enough

    def expected(self) -> Version | None:
        return None  # nothing that is published depends on it

    def settle(self, published: Published | None) -> bool:
        del published
        try:
            return self._finalizer.alive and self._fd is not None and _is_alone(self._fd)
        finally:
            self.close()

    def close(self) -> None:
        self._finalizer()


def _locked(directory: str) -> int | None:
    """A descriptor with a shared lock; ``None`` if that would tell nothing, or is not possible."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    for _ in range(_ATTEMPTS if _is_local(fd) else 0):
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return fd
        time.sleep(_PAUSE_S)
    os.close(fd)
    return None


def _is_alone(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _unlock(fd: int | None, process: int) -> None:
    if fd is None:
        return
    if os.getpid() == process:  # a fork has the same lock, and may outlive the save
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _is_local(fd: int) -> bool:
    if sys.platform != "linux":
        return False
    found = ctypes.create_string_buffer(_STATFS_NBYTES)
    if ctypes.CDLL(None).fstatfs(fd, found):
        return False
    return ctypes.c_long.from_buffer(found).value in _LOCAL
