"""The states that a crash can leave of a sequence of operations on storage.

A model of what POSIX promises and no more: the content of a file is durable when it was fsynced,
its name when the directory that holds it was. Whatever was not may be there after a crash, or not,
or in part; the names of one directory in any combination. (Journaling file systems keep order among
names and are kinder than that.)
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nostall
from nostall._storage import posix

_MOST_UNDURABLE_NAMES = 6
"""Up to here all combinations are tried, beyond it prefixes, single ones, and all but one."""


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    path: str
    other: str = ""
    offset: int = 0
    content: bytes = b""
    at_ns: int = field(default=0, compare=False)
    """When it had succeeded, by the clock that all processes of a machine share."""


class RecordingOs:
    """``os`` for ``_storage.posix``: does what is asked and records what changes storage."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._paths: dict[int, str] = {}
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _note(
        self, name: str, path: str, other: str = "", offset: int = 0, content: bytes = b""
    ) -> None:
        at_ns = time.monotonic_ns()
        self.operations.append(Operation(name, path, other, offset, content, at_ns))

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        with self._lock:
            fd = os.open(path, flags, mode)
            self._paths[fd] = path
            if flags & os.O_CREAT:
                self._note("create", path)
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._paths.pop(fd, None)  # one that was opened before the block
            os.close(fd)

    def pwrite(self, fd: int, content: Any, offset: int) -> int:
        with self._lock:
            written = os.pwrite(fd, content, offset)
            self._note("write", self._paths[fd], "", offset, bytes(content[:written]))
            return written

    def ftruncate(self, fd: int, nbytes: int) -> None:
        with self._lock:
            os.ftruncate(fd, nbytes)
            self._note("truncate", self._paths[fd], "", nbytes)

    def fsync(self, fd: int) -> None:
        with self._lock:
            os.fsync(fd)
            self._note("fsync", self._paths[fd])

    def replace(self, source: str, target: str) -> None:
        with self._lock:
            os.replace(source, target)
            self._note("rename", source, target)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        with self._lock:
            os.unlink(path, dir_fd=dir_fd)
            inside = "" if dir_fd is None else self._paths[dir_fd]
            self._note("unlink", os.path.join(inside, path))

    def rmdir(self, path: str) -> None:
        with self._lock:
            os.rmdir(path)
            self._note("rmdir", path)

    def mkdir(self, path: str) -> None:
        with self._lock:
            os.mkdir(path)
            self._note("mkdir", path)


@contextmanager
def recorded() -> Iterator[list[Operation]]:
    """The operations of the saves that this process makes in the block."""
    recording = RecordingOs()
    with patch.object(posix, "os", recording):
        yield recording.operations


# --- the model ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _File:
    durable: bytes = b""
    now: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class Disk:
    """A disk with what is durable on it and what is not yet."""

    names: dict[str, _File | None]
    """Durable ones; ``None`` for a directory."""
    now: dict[str, _File | None]
    undurable: list[tuple[str, dict[str, _File | None]]]
    """Changes of names, each with its directory and effect; a removed name is not in ``now``."""

    @classmethod
    def holding(cls, root: Path) -> Disk:
        """A disk on which everything below ``root`` is durable."""
        names: dict[str, _File | None] = {str(root): None}
        for path in sorted(root.rglob("*")):
            content = None if path.is_dir() else path.read_bytes()
            names[str(path)] = None if content is None else _File(content, bytearray(content))
        return cls(dict(names), dict(names), [])

    def apply(self, operation: Operation) -> None:
        path, directory = operation.path, os.path.dirname(operation.path)
        file = self.now.get(path)
        match operation.name:
            case "create":
                if file is None:
                    file = _File()
                    self._change(directory, {path: file})
                file.now.clear()
            case "write":
                assert file is not None
                end = operation.offset + len(operation.content)
                file.now.extend(bytes(max(0, end - len(file.now))))
                file.now[operation.offset : end] = operation.content
            case "truncate":
                assert file is not None
                file.now[operation.offset :] = b""
                file.now.extend(bytes(operation.offset - len(file.now)))
            case "fsync":
                if file is not None:
                    file.durable = bytes(file.now)
                else:
                    for changed, names in self.undurable:
                        if changed == path:
                            _update(self.names, names)
                    self.undurable = [each for each in self.undurable if each[0] != path]
            case "rename":
                self._change(directory, {operation.other: file, path: _GONE})
            case "unlink" | "rmdir":
                self._change(directory, {path: _GONE})
            case "mkdir":
                self._change(directory, {path: None})
            case unknown:
                raise AssertionError(unknown)

    def _change(self, directory: str, names: dict[str, Any]) -> None:
        self.undurable.append((directory, names))
        _update(self.now, names)

    def after_crash(self) -> Iterator[dict[str, bytes | None]]:
        """Every state that a crash may leave: content by path, ``None`` for a directory."""
        seen = set()
        for kept in _combinations(len(self.undurable)):
            names = dict(self.names)
            for number in kept:
                _update(names, self.undurable[number][1])
            contents = (attrgetter("durable"), lambda file: bytes(file.now), _in_part)
            for content_of in contents:
                left = {
                    path: None if file is None else content_of(file)
                    for path, file in names.items()
                    if all(str(parent) in names for parent in _parents(path, self.names))
                }
                key = tuple(
                    sorted((path, content) for path, content in left.items() if content is not None)
                )
                if key not in seen:
                    seen.add(key)
                    yield left


_GONE: Any = object()


def _update(names: dict[str, Any], changes: dict[str, Any]) -> None:
    for path, file in changes.items():
        if file is _GONE:
            names.pop(path, None)
        else:
            names[path] = file


def _parents(path: str, durable: dict[str, Any]) -> list[Path]:
    """The directories above a path, up to the one that the disk begins with."""
    root = min(durable, key=len)
    return [parent for parent in Path(path).parents if str(parent).startswith(root)]


def _combinations(count: int) -> Iterator[tuple[int, ...]]:
    everything = tuple(range(count))
    if count <= _MOST_UNDURABLE_NAMES:
        for length in range(count + 1):
            yield from itertools.combinations(everything, length)
        return
    for number in range(count + 1):
        yield everything[:number]
        yield everything[:number] + everything[number + 1 :]
        yield everything[number : number + 1]


def _in_part(file: _File) -> bytes:
    """The new length, and every other page of the new content."""
    if file.durable == file.now:
        return file.durable
    mixed = bytearray(file.durable[: len(file.now)].ljust(len(file.now), b"\0"))
    for begin in range(0, len(mixed), 2 * 4096):
        mixed[begin : begin + 4096] = file.now[begin : begin + 4096]
    return bytes(mixed)


def found_in(checkpoint: Path, load: Callable[[Path], int]) -> int | None:
    """The save that a resuming job loads from a directory; ``None`` if there is no checkpoint."""
    if nostall.is_complete(checkpoint, deep=True):
        return load(checkpoint)
    # Not even stock, which checks nothing, may take it for a checkpoint.
    assert not (checkpoint / ".metadata").exists()
    return None


def rebuild(left: dict[str, bytes | None], root: Path, out: Path) -> None:
    """Put what a crash has left of ``root`` into ``out``."""
    for path, content in sorted(left.items()):
        place = out / Path(path).relative_to(root)
        if content is None:
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.write_bytes(content)
