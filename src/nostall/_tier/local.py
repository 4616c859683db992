"""The directory of a checkpoint in a local tier, and the records beside its files.

A local tier is a directory on a fast disk that all ranks share. A checkpoint on its way through it
is a committed checkpoint in a directory of its own, and ``.metadata`` is all that says so. Records:

* ``.destination``, made before the first file: the place where the checkpoint belongs;
* ``.copied``, until a promotion is over: the files that it has made or replaces there;
* ``.promoted``: the version of ``.metadata`` that was published there.

Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nostall._model.names import METADATA_SUFFIX as METADATA_NAME
from nostall._model.values import WrittenFile
from nostall._storage.places import may_have
from nostall._storage.port import Version
from nostall._storage.posix_storage import PosixStorage

_DESTINATION = ".destination"
_COPIED = ".copied"
_PROMOTED = ".promoted"
_REMOVED = ".removed-"
_HASH_DIGITS = 12


def directory_in(tier: str, destination: str) -> str:
    """The directory in a local tier of checkpoints that belong at a destination."""
    digest = hashlib.sha256(os.fsencode(destination)).hexdigest()[:_HASH_DIGITS]
    return os.path.join(tier, f"{os.path.basename(destination)}-{digest}")


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """A checkpoint in a local tier."""

    path: str
    """Its directory there."""
    destination: str
    """Where it belongs: a directory, or an address in an object store."""
    committed_at_s: float
    """Seconds since the epoch."""
    is_promoted: bool
    """Whether the destination has this checkpoint, too."""


def local_checkpoints(tier: str) -> list[LocalCheckpoint]:
    """The committed checkpoints in a local tier, oldest first.

    Raises:
        OSError: The local disk refuses.
    """
    with suppress(FileNotFoundError), os.scandir(tier) as entries:
        found = [
            _checkpoint_at(entry.path) for entry in entries if not entry.name.startswith(_REMOVED)
        ]
        there = [each for each in found if each is not None]
        return sorted(there, key=lambda each: each.committed_at_s)
    return []


def left_by_crashes(tier: str, older_than_s: float) -> list[str]:
    """Directories of saves that were never committed, and that nothing has changed for a while.

    Raises:
        OSError: The local disk refuses.
    """
    left = []
    with suppress(FileNotFoundError), os.scandir(tier) as entries:
        for entry in entries:
            is_old = time.time() - entry.stat().st_mtime > older_than_s
            if is_old and destination_of(entry.path) and not _is_committed(entry.path):
                left.append(entry.path)
    return left


def _is_committed(directory: str) -> bool:
    return may_have(PosixStorage(directory), METADATA_NAME)


def _checkpoint_at(directory: str) -> LocalCheckpoint | None:
    destination = destination_of(directory)
    if destination is None:
        return None
    try:
        metadata = PosixStorage(directory).stat(METADATA_NAME)
    except OSError:  # not committed
        return None
    is_there = _content(directory, _PROMOTED) == metadata.version
    return LocalCheckpoint(directory, destination, metadata.modified_s, is_there)


def is_promoted(directory: str) -> bool:
    """Whether the destination has, or had, the checkpoint that is committed in a directory."""
    found = _checkpoint_at(directory)
    return found is not None and found.is_promoted


def destination_of(directory: str) -> str | None:
    """The destination that is recorded in a directory; ``None`` if it is none of a local tier."""
    return _content(directory, _DESTINATION)


def record_destination(directory: str, destination: str) -> None:
    """Make the directory of a checkpoint, and record where it belongs.

    Raises:
        OSError: The local disk refuses.
    """
    storage = PosixStorage(directory)
    storage.make_place()
    if destination_of(directory) != destination:
        storage.publish(_DESTINATION, [os.fsencode(destination)])


def record_promoted(directory: str, version: Version) -> None:
    """Record that the metadata of this version is published at the destination."""
    storage = PosixStorage(directory)
    storage.publish(_PROMOTED, [version.encode()])
    storage.remove([_COPIED])


def _content(directory: str, name: str) -> str | None:
    try:
        with open(os.path.join(directory, name), "rb") as stream:
            return os.fsdecode(stream.read())
    except OSError:
        return None


@contextmanager
def held(directory: str) -> Iterator[None]:
    """Keep other processes from promoting a directory meanwhile.

    Raises:
        BlockingIOError: Another process is promoting it.
        OSError: It is gone.
    """
    fd = os.open(os.path.join(directory, _DESTINATION), os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


class CopiedFiles:
    """The record of a promotion: what it has made at the destination, and what it replaces there.

    It survives crashes, and lasts until a promotion is over. Names of files that the checkpoint
    does not have are then those to remove.
    """

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, _COPIED)
        self._lines: set[str] = set()
        with suppress(OSError), open(self._path, encoding="utf-8") as stream:
            self._lines.update(line.strip() for line in stream)

    @property
    def names(self) -> set[str]:
        """Names of all files in it."""
        found = set()
        for line in self._lines:
            with suppress(ValueError):  # cut off by a crash
                found.add(str(json.loads(line)[0]))
        return found

    def is_whole(self, file: WrittenFile) -> bool:
        """Whether a file was copied to its end; one cut off by a crash may have its length."""
        return _line(file.name, file.crc32) in self._lines

    def add_names(self, names: Iterable[str]) -> None:
        """Record files before they are made, or replaced; durably.

        Raises:
            OSError: The local disk refuses.
        """
        self._add(map(_line, names))

    def add_whole(self, file: WrittenFile) -> None:
        """Record that a file was copied to its end; as :meth:`add_names`."""
        self._add([_line(file.name, file.crc32)])

    def _add(self, lines: Iterable[str]) -> None:
        new = [line for line in lines if line not in self._lines]
        if new:
            with open(self._path, "a", encoding="utf-8") as stream:
                stream.write("\n".join(["", *new, ""]))  # the last line may be cut off by a crash
                stream.flush()
                os.fsync(stream.fileno())
        self._lines.update(new)


def _line(*values: str | int | None) -> str:
    return json.dumps(values)


def set_aside(directory: str) -> str:
    """Rename a directory of a local tier, so that it is none any more; the new path."""
    tier, name = os.path.split(directory)
    aside = os.path.join(tier, f"{_REMOVED}{os.urandom(4).hex()}-{name}")
    os.rename(directory, aside)
    return aside


def remove_set_aside(tier: str) -> None:
    """Remove what :func:`set_aside` has renamed, now or before a crash; errors are ignored."""
    with suppress(OSError), os.scandir(tier) as entries:
        for entry in entries:
            if entry.name.startswith(_REMOVED):
                shutil.rmtree(entry.path, ignore_errors=True)
