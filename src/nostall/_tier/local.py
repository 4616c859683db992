"""A local root: checkpoints that were committed on a local disk, and the record of the promoted.

``ROOT/NAME`` belongs at ``DESTINATION/NAME``. Nothing that is read here is trusted: names are
checked; files are opened without following links or waiting, must be regular and of this user.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from contextlib import closing, suppress
from io import BufferedReader
from typing import Any

from nostall._model import checksum
from nostall._model.names import METADATA_NAME, is_ours_to_remove, is_shard_name
from nostall._storage.posix import HeldDirectory, PosixStorage

RECORD, LOCK = ".nostall-tier", ".nostall-tier.lock"
_MOST_RECORD_NBYTES, _MOST_PROMOTED = 1 << 20, 500


def is_plain(name: object) -> bool:
    """Whether this is the name of a file or directory directly inside of another directory."""
    return isinstance(name, str) and is_shard_name(name) and os.path.basename(name) == name


def open_own(name: str, dir_fd: int | None = None, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of this user; raises ``OSError`` if it is anything else."""
    safely = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags | safely, 0o600, dir_fd=dir_fd)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise OSError(errno.EPERM, "not a regular file of this user", name)


class Directory(HeldDirectory):
    """The directory of a checkpoint in a local root; opened once, so that links change nothing."""

    def __init__(self, root: str, name: str) -> None:
        super().__init__(os.path.join(root, name))
        if os.fstat(self._fd).st_uid != os.geteuid():
            self.close()
            raise OSError(errno.EPERM, "not a directory of this user", self.path)

    def open(self, name: str) -> BufferedReader:
        """A file in it."""
        return open(open_own(name, self._fd), "rb")

    def version(self) -> str | None:
        """Identifies the metadata, and sorts in the order of commits; ``None`` without metadata."""
        with suppress(OSError), self.open(METADATA_NAME) as stream:
            status = os.fstat(stream.fileno())
            return f"{status.st_mtime_ns:020}-{status.st_ino}-{status.st_size}"
        return None

    def shards(self) -> dict[str, float]:
        """Names of the shard files, and when each was changed last."""
        found = {}
        for name in filter(is_ours_to_remove, self.list()):
            with suppress(FileNotFoundError):
                found[name] = os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime
        return found


def names_in(root: str) -> list[str]:
    """Names in a local root that are not hidden."""
    return sorted(name for name in os.listdir(root) if not name.startswith("."))


def committed_at(root: str, name: str) -> str | None:
    """Version of the checkpoint that a directory of this user holds; ``None`` without one."""
    with suppress(OSError), closing(Directory(root, name)) as directory:
        return directory.version()
    return None


def committed_in(root: str) -> dict[str, str]:
    """Names and versions of the committed checkpoints in a local root, oldest first."""
    found = ((committed_at(root, name), name) for name in names_in(root))
    return {name: version for version, name in sorted((v, name) for v, name in found if v)}


class Record:
    """The file in a local root that names its destination, and the promoted checkpoints.

    ``OSError`` if the root belongs to another destination, or the record cannot be read.
    """

    def __init__(self, root: str, destination: str) -> None:
        self._root, self._destination = root, destination
        self._promoted: dict[str, tuple[str, tuple[int, ...]]] = {}
        path = os.path.join(root, RECORD)
        try:
            with open(open_own(path), "rb") as stream:
                plain: Any = json.loads(stream.read(_MOST_RECORD_NBYTES))
            wanted = str(plain["destination"])
            for name, version, crcs in plain["promoted"]:
                self._promoted[str(name)] = str(version), tuple(map(int, crcs))
        except FileNotFoundError:
            return
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise OSError(errno.EINVAL, "the record is damaged; remove it", path) from error
        if wanted != destination:
            raise OSError(errno.EEXIST, f"it is the local directory of {wanted}", root)

    def has(self, name: str, version: str) -> bool:
        """Whether a checkpoint was promoted."""
        return self._promoted.get(name, ("",))[0] == version

    def may_have_put(self, name: str, metadata: bytes) -> bool:
        """Whether this metadata may be what was published last under this name."""
        return checksum.crc32(metadata) in self._promoted.get(name, ("", ()))[1]

    def note(self, name: str, version: str, *metadata: bytes | None) -> None:
        """Record durably what was promoted, and the metadata of which one may be published."""
        self._promoted.pop(name, None)
        self._promoted[name] = version, tuple(checksum.crc32(each) for each in metadata if each)
        self.write()

    def write(self) -> None:
        """Make the record durable; it keeps the newest entries."""
        promoted = [(name, *values) for name, values in self._promoted.items()]
        plain = {"destination": self._destination, "promoted": promoted[-_MOST_PROMOTED:]}
        PosixStorage(self._root).publish(RECORD, [json.dumps(plain).encode()])


def is_locked(fd: int) -> bool:
    """Lock a root against other processes that promote from it; whether that was possible."""
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
