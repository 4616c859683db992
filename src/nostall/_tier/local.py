"""The directory of a checkpoint in a local tier, and the records beside its files.

A local tier is a directory on a fast disk. A checkpoint on its way through it is a committed
checkpoint in a directory of its own, and ``.metadata`` is all that says so. Records:

* ``.destination``, made before the first file: the place where the checkpoint belongs, and options;
* ``.copied``, until a promotion is over: the files that it has made or replaces there;
* ``.promoted``: which ``.metadata`` were dealt with last, and the checksum of what is there since;
* those of :mod:`nostall._tier.parts`, if each rank brings its own files.

Nothing here imports torch.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nostall._model.names import METADATA_NAME
from nostall._model.values import WrittenFile
from nostall._storage.port import Version
from nostall._storage.posix_storage import PosixStorage
from nostall._tier.copied_files import COPIED
from nostall._tier.parts import Part, is_record, new_name, parts_at, remove_old

_DESTINATION = ".destination"
_PROMOTED = ".promoted"
_REMOVED = ".removed-"
_BY_RANK = "by rank"
_ONLY_NEW = "only new"
_HASH_DIGITS = 12
_MOST_NAME_NBYTES = 100
"""Of a destination's name; file systems allow 255."""
_LATER_S = 1e-3
"""By which a part is later than the one before, whatever the clock says."""
_PARTS_KEPT = 2
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK}


def directory_in(tier: str, destination: str) -> str:
    """The directory in a local tier of checkpoints that belong at a destination."""
    digest = hashlib.sha256(os.fsencode(destination)).hexdigest()[:_HASH_DIGITS]
    encoded = os.fsencode(os.path.basename(destination).lstrip("."))[:_MOST_NAME_NBYTES]
    name = encoded.decode(errors="ignore")
    return os.path.join(tier, f"{name}-{digest}")


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
    """Whether the destination has this checkpoint, too, or has kept another one."""


def committed_in(tier: str) -> list[LocalCheckpoint]:
    """The committed checkpoints in a local tier, oldest first.

    Raises:
        OSError: The local disk refuses.
    """
    found = map(_checkpoint_at, directories_in(tier))
    return sorted(
        (each for each in found if each is not None), key=lambda each: each.committed_at_s
    )


def left_by_crashes(tier: str, older_than_s: float) -> list[str]:
    """Directories of saves that were never committed, and that nothing has changed for a while.

    Raises:
        OSError: The local disk refuses.
    """
    left = []
    for directory in directories_in(tier):
        with suppress(FileNotFoundError):
            is_old = time.time() - os.stat(directory).st_mtime > older_than_s
            if is_old and not _has_records(directory):
                left.append(directory)
    return left


def _has_records(directory: str) -> bool:
    """Whether something in a directory is committed, or a part of something that may be."""
    return any(name == METADATA_NAME or is_record(name) for name in os.listdir(directory))


def _checkpoint_at(directory: str) -> LocalCheckpoint | None:
    destination = destination_of(directory)
    if destination is None:
        return None
    try:
        metadata = PosixStorage(directory).stat(METADATA_NAME)
    except FileNotFoundError:  # not committed
        return None
    is_over = promoted_from(directory).version == metadata.version
    return LocalCheckpoint(directory, destination, metadata.modified_s, is_over)


def is_promoted(directory: str) -> bool:
    """Whether the promotion of the checkpoint that is committed in a directory is over."""
    found = _checkpoint_at(directory)
    return found is not None and found.is_promoted


def destination_of(directory: str) -> str | None:
    """The destination that is recorded in a directory; ``None`` for other directories."""
    content = _content(directory, _DESTINATION)
    return None if content is None else content.split("\0")[0]


def is_by_rank(directory: str) -> bool:
    """Whether each rank brings its own files from there to the destination."""
    return _BY_RANK in (_content(directory, _DESTINATION) or "").split("\0")


def may_replace(directory: str) -> bool:
    """Whether a checkpoint of somebody else at the destination may be replaced."""
    return _ONLY_NEW not in (_content(directory, _DESTINATION) or "").split("\0")


def record_destination(
    directory: str, destination: str, *, by_rank: bool = False, only_new: bool = False
) -> None:
    """Make the directory of a checkpoint, and record where it belongs.

    Args:
        directory: In the local tier.
        destination: Where its checkpoint belongs.
        by_rank: Whether each rank brings its own files there.
        only_new: Whether a checkpoint of somebody else must not be replaced there.

    Raises:
        OSError: The local disk refuses.
    """
    storage = PosixStorage(directory)
    storage.make_place()
    options = [_BY_RANK] * by_rank + [_ONLY_NEW] * only_new
    content = "\0".join([destination, *options])  # no path has this character
    if _content(directory, _DESTINATION) != content:
        storage.publish(_DESTINATION, [os.fsencode(content)])


def directories_in(tier: str) -> list[str]:
    """The directories of a local tier that belong to a destination.

    Raises:
        OSError: The local disk refuses.
    """
    with suppress(FileNotFoundError), os.scandir(tier) as entries:
        paths = sorted(each.path for each in entries if not each.name.startswith(_REMOVED))
        return [path for path in paths if destination_of(path) is not None]
    return []


def write_part(directory: str, rank: int, files: Sequence[WrittenFile]) -> str:
    """Record durably that files of a rank are to be brought to the destination.

    Returns:
        The name of the record.

    Raises:
        OSError: The local disk refuses.
    """
    storage = PosixStorage(directory)
    before = [*parts_at(storage), *parts_at(storage, are_done=True)]
    newest_s = max((part.at_s for part in before if part.rank == rank), default=0.0)
    at_s = max(time.time(), newest_s + _LATER_S)  # a clock may be set back
    part = Part(name=new_name(rank), at_s=at_s, files=tuple(files))
    storage.publish(part.name, [part.encoded()])
    return part.name


@dataclass(frozen=True, slots=True)
class Left:
    """What is to be promoted."""

    directory: str
    destination: str
    record: str
    """``.metadata``, or the name of a part's record."""


def left_in(tier: str) -> list[Left]:
    """What is to be promoted from a local tier: checkpoints, then parts, each oldest first.

    Raises:
        OSError: The local disk refuses.
    """
    parts = [
        (part.at_s, part.name, directory)
        for directory in directories_in(tier)
        for part in parts_at(PosixStorage(directory))
    ]
    return [
        *(
            Left(each.path, each.destination, METADATA_NAME)
            for each in committed_in(tier)
            if not each.is_promoted
        ),
        *(
            Left(directory, destination_of(directory) or "", name)
            for _, name, directory in sorted(parts)
        ),
    ]


def has_waiting_parts(directory: str) -> bool:
    """Whether a part in a directory is not at its destination."""
    return bool(parts_at(PosixStorage(directory)))


def remove_done_parts(tier: str, directory: str) -> None:
    """Remove old parts; errors are ignored, as other ranks of the host do the same.

    Args:
        tier: The local tier.
        directory: The directory in it that the present save writes to.
    """
    with suppress(OSError):
        for path, old in old_parts(tier, directory).items():
            remove_old(path, old)


def old_parts(tier: str, directory: str) -> dict[str, list[Part]]:
    """By directory, the parts at their destination, but for the newest two of each rank.

    None of those in ``directory``, whatever the clock says: their save may not be committed yet.

    Raises:
        OSError: The local disk refuses.
    """
    found = {path: parts_at(PosixStorage(path), are_done=True) for path in directories_in(tier)}
    newest: dict[int, list[Part]] = {}
    for part in sorted(
        (part for parts in found.values() for part in parts), key=lambda part: part.at_s
    ):
        newest[part.rank] = [*newest.get(part.rank, []), part][-_PARTS_KEPT:]
    kept = {part.name for parts in newest.values() for part in parts}
    old = {path: [each for each in parts if each.name not in kept] for path, parts in found.items()}
    return {path: parts for path, parts in old.items() if parts and path != directory}


@dataclass(frozen=True, slots=True)
class Promoted:
    """The end of the last promotion from a directory."""

    version: Version
    """Of the metadata in the directory; empty if there was none."""
    crc32: int | None
    """Of the metadata at the destination since."""


def record_promoted(directory: str, promoted: Promoted) -> None:
    """Record that a promotion is over.

    Raises:
        OSError: The local disk refuses.
    """
    storage = PosixStorage(directory)
    storage.publish(_PROMOTED, [f"{promoted.version} {promoted.crc32}".encode()])
    storage.remove([COPIED])


def promoted_from(directory: str) -> Promoted:
    """What was recorded last.

    Raises:
        OSError: The local disk refuses.
    """
    version, _, crc32 = (_content(directory, _PROMOTED) or "").partition(" ")
    return Promoted(Version(version), int(crc32) if crc32.isdecimal() else None)


def records_in(directory: str, names: Iterable[str]) -> list[str]:
    """Those of the names that are records of a local tier, the one that shows it last.

    None, unless the directory is one of a local tier: users may give files the same names.
    """
    destination = destination_of(directory)
    if destination is None or directory_in(os.path.dirname(directory), destination) != directory:
        return []
    found = [
        name
        for name in names
        if name in (_PROMOTED, COPIED)
        or (name.startswith(COPIED) and is_record(name.removeprefix(COPIED)))
    ]
    return [*found, _DESTINATION]


def _content(directory: str, name: str) -> str | None:
    try:
        with open(os.path.join(directory, name), "rb") as stream:
            return os.fsdecode(stream.read())
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextmanager
def held(directory: str, name: str = _DESTINATION) -> Iterator[None]:
    """Keep other processes from promoting a directory, or the part with this record, meanwhile.

    Raises:
        BlockingIOError: Another process is promoting it.
        OSError: It is gone.
    """
    fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # of some shared file systems
                raise
        yield
    finally:
        os.close(fd)


def set_aside(directory: str) -> str:
    """Rename a directory of a local tier, for :func:`remove_set_aside`; the new path."""
    tier = os.path.dirname(directory)
    aside = os.path.join(tier, f"{_REMOVED}{os.urandom(8).hex()}")
    os.rename(directory, aside)
    return aside


def remove_set_aside(tier: str) -> None:
    """Remove what :func:`set_aside` has renamed, now or before a crash; errors are ignored."""
    with suppress(OSError), os.scandir(tier) as entries:
        for entry in entries:
            if entry.name.startswith(_REMOVED):
                shutil.rmtree(entry.path, ignore_errors=True)
