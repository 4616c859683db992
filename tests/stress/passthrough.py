"""A file system that passes everything on to a directory, but for the faults that it is given.

    python tests/stress/passthrough.py DIRECTORY MOUNTPOINT CONTROL OPTIONS

``CONTROL`` is where it makes a socket that takes one JSON object per connection: ``{"faults":
[...]}`` replaces the faults and lets go of whatever hangs, ``{}`` only asks. The answer says which
operations hang, how often each fault happened, and how many files are open. ``OPTIONS`` are those
of ``fuse_main`` as a JSON object, and ``write_nbytes_per_s`` for all writes together. The process
ends with its standard input, and when nobody has asked it anything for a quarter of an hour, as a
test that was killed may be stuck in it; requests that it has not answered then fail in the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from math import inf
from typing import Any, TypeVar

import mfusepy

F = TypeVar("F", bound=Callable[..., Any])
_STAT = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_blksize")
_TIMES = ("st_atime_ns", "st_mtime_ns", "st_ctime_ns")
_LIFE_S = 900
_OPENING = ("create", "open", "opendir")
_THREADS = 64
"""The number of operations that may hang at a time."""
_STATVFS = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files")


class Faults:
    """The faults that are set, and the operations that hang because of them.

    A fault is an object with ``op``, an operation; ``name``, a part of the path; ``do``: ``errno``
    (nothing is done), ``errno-after`` (it is done, and answered with an error), ``hang`` or
    ``hang-after``; ``errno``; ``skip``, how many passages it spares; ``times``, how many it meets.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._set: list[dict[str, Any]] = []
        self._generation = 0
        self._hanging: list[str] = []

    def replace(self, faults: list[dict[str, Any]]) -> None:
        with self._changed:
            self._set = [{**fault, "passed": 0, "happened": 0} for fault in faults]
            self._generation += 1
            self._changed.notify_all()

    def state(self) -> dict[str, Any]:
        with self._changed:
            return {
                "hanging": list(self._hanging),
                "happened": [fault["happened"] for fault in self._set],
            }

    @contextmanager
    def around(self, op: str, path: str) -> Iterator[None]:
        due = self._due(op, path)
        self._happen(due, op, path, "")
        yield
        self._happen(due, op, path, "-after")

    def _due(self, op: str, path: str) -> list[dict[str, Any]]:
        due = []
        with self._changed:
            for fault in self._set:
                if fault["op"] != op or fault.get("name", "") not in path:
                    continue
                fault["passed"] += 1
                if 0 < fault["passed"] - fault.get("skip", 0) <= fault.get("times", sys.maxsize):
                    fault["happened"] += 1
                    due.append(fault)
        return due

    def _happen(self, due: list[dict[str, Any]], op: str, path: str, when: str) -> None:
        for fault in due:
            if fault["do"] == f"hang{when}":
                self._hang(f"{op} {path}")
            if fault["do"] == f"errno{when}":
                raise OSError(fault["errno"], os.strerror(fault["errno"]))

    def _hang(self, what: str) -> None:
        with self._changed:
            generation = self._generation
            self._hanging.append(what)
            self._changed.wait_for(lambda: self._generation != generation)
            self._hanging.remove(what)


def faulty(op: F) -> F:
    """An operation whose last argument, or first one, leads to what it is about."""

    @wraps(op)
    def wrapped(self: Passthrough, path: str | None, *args: Any) -> Any:
        name = self.names.get(args[-1], "") if path is None and args else path
        result = None
        try:
            with self.faults.around(op.__name__, name or ""):
                result = op(self, path, *args)
        except OSError:
            if op.__name__ in _OPENING and result is not None:  # the kernel will not ask for that
                self.forget(result)
            raise
        return result

    return wrapped  # type: ignore[return-value]  # the same signature


class Passthrough(mfusepy.Operations):  # type: ignore[misc]  # mfusepy has no types
    """The operations, on a directory."""

    use_ns = True
    flag_nopath = True
    flag_nullpath_ok = True

    def __init__(self, root: str, *, o_direct: bool, write_nbytes_per_s: float = inf) -> None:
        self._root = root
        self._writing = threading.Lock()
        self._write_nbytes_per_s = write_nbytes_per_s
        self._o_direct = o_direct
        self.faults = Faults()
        self.names: dict[int, str] = {}
        """Paths of open files, by descriptor."""

    def _at(self, path: str) -> str:
        return self._root + path

    def _opened(self, path: str, fd: int) -> int:
        self.names[fd] = path
        return fd

    def forget(self, fd: int) -> None:
        del self.names[fd]
        os.close(fd)

    @faulty
    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, Any]:
        if path is None and fh is None:  # the library does not say which file without a name
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        found = os.lstat(self._at(path)) if path is not None else os.fstat(fh or 0)
        attributes = {name: getattr(found, name) for name in _STAT}
        return {**attributes, **{name.removesuffix("_ns"): getattr(found, name) for name in _TIMES}}

    @faulty
    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        return {name: getattr(found, name) for name in _STATVFS}

    @faulty
    def create(self, path: str, mode: int, flags: int) -> int:
        return self._open(path, flags | os.O_CREAT, mode)

    @faulty
    def open(self, path: str, flags: int) -> int:
        return self._open(path, flags & ~os.O_CREAT, 0)

    def _open(self, path: str, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT and not self._o_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        # The kernel has aligned nothing of what it passes on.
        return self._opened(path, os.open(self._at(path), flags & ~os.O_DIRECT, mode))

    @faulty
    def read(self, path: str | None, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    @faulty
    def write(self, path: str | None, content: bytes, offset: int, fh: int) -> int:
        with self._writing:
            time.sleep(len(content) / self._write_nbytes_per_s)
        return os.pwrite(fh, content, offset)

    @faulty
    def truncate(self, path: str | None, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path) if path is not None else fh or 0, length)
        return 0

    @faulty
    def fallocate(self, path: str | None, mode: int, offset: int, size: int, fh: int) -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (fh, mode, ctypes.c_int64(offset), ctypes.c_int64(size))
        return -ctypes.get_errno() if libc.fallocate(*arguments) else 0

    @faulty
    def flush(self, path: str | None, fh: int) -> int:
        return 0

    @faulty
    def fsync(self, path: str | None, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    @faulty
    def release(self, path: str | None, fh: int) -> int:
        self.forget(fh)
        return 0

    @faulty
    def opendir(self, path: str) -> int:
        return self._opened(path, os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY))

    @faulty
    def readdir(self, path: str | None, fh: int) -> list[tuple[str, dict[str, int], int]]:
        entries = [(entry.name, {"st_ino": entry.inode()}, 0) for entry in os.scandir(fh)]
        here = {"st_ino": os.fstat(fh).st_ino}
        return [(".", here, 0), ("..", here, 0), *entries]

    @faulty
    def fsyncdir(self, path: str | None, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    @faulty
    def releasedir(self, path: str | None, fh: int) -> int:
        self.forget(fh)
        return 0

    @faulty
    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._at(path), mode)
        return 0

    @faulty
    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        return 0

    @faulty
    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))
        return 0

    @faulty
    def rename(self, old: str, new: str) -> int:
        os.rename(self._at(old), self._at(new))
        return 0

    @faulty
    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._at(path), mode)
        return 0


class Fuse(mfusepy.FUSE):  # type: ignore[misc]  # mfusepy has no types
    """With the file handle where a file is cut that is open."""

    def truncate_fuse_3(self, path: bytes | None, length: int, fip: Any) -> int:
        handle = fip.contents.fh if fip else None
        result: int = self.operations.truncate(
            None if path is None else os.fsdecode(path), length, handle
        )
        return result


def _answer(listener: socket.socket, operations: Passthrough) -> None:
    while True:
        connection, _ = listener.accept()
        signal.alarm(_LIFE_S)
        with connection, connection.makefile("rw") as stream:
            asked = json.loads(stream.readline())
            if "faults" in asked:
                operations.faults.replace(asked["faults"])
            answer = operations.faults.state() | {"open": sorted(operations.names.values())}
            stream.write(json.dumps(answer) + "\n")


def _end_with_input(mountpoint: str) -> None:
    os.read(0, 1)
    subprocess.run(["umount", "-l", mountpoint], check=False, capture_output=True)
    os._exit(0)


def main(root: str, mountpoint: str, control: str, options: str) -> None:
    signal.alarm(_LIFE_S)
    wanted = json.loads(options)
    operations = Passthrough(
        root,
        o_direct=wanted.pop("o_direct", True),
        write_nbytes_per_s=wanted.pop("write_nbytes_per_s", inf),
    )
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(control)
    listener.listen()
    threading.Thread(target=_answer, args=(listener, operations), daemon=True).start()
    threading.Thread(target=_end_with_input, args=(mountpoint,), daemon=True).start()
    if mfusepy.fuse_version_minor >= 12:  # before, there was no limit
        wanted["max_threads"] = _THREADS
    Fuse(operations, mountpoint, foreground=True, use_ino=True, hard_remove=True, **wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
