"""Parts: the files of one rank, for ranks that do not share a local tier.

Each rank brings its own files to the destination and publishes a record there, ``.part-RANK-ID``,
when all of them are whole. The coordinator waits for the records of all files that its metadata
names. The same record, in the rank's directory of the local tier, says what is to be brought; it is
renamed to ``.done-RANK-ID`` then, and tells which files can be removed. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from nostall._model.names import is_ours_to_remove
from nostall._model.values import WrittenFile
from nostall._storage.port import Files, Storage
from nostall._storage.posix_storage import PosixStorage
from nostall._storage.reading import open_to_read, read_metadata

_NAME = re.compile(r"\.(part|done)-(\d+)-[0-9a-f]{8}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The files of one rank of one save."""

    name: str
    """Of its record."""
    at_s: float
    """When they were written, by the clock of the rank's host."""
    files: tuple[WrittenFile, ...]
    damage: str = ""
    """Why they will never be at the destination; empty if nothing prevents that."""

    @property
    def rank(self) -> int:
        """The rank."""
        return int(self.name.split("-")[1])

    def encoded(self) -> bytes:
        """The content of its record."""
        files = [{"name": n, "nbytes": nbytes, "crc32": crc32} for n, nbytes, crc32 in self.files]
        return json.dumps({"at": self.at_s, "files": files, "damage": self.damage}).encode()


def new_name(rank: int) -> str:
    """A name for the record of a part that is to be brought to its destination."""
    return f".part-{rank}-{os.urandom(4).hex()}"


def done(name: str) -> str:
    """The name of a record whose part is at its destination."""
    return name.replace("part", "done", 1)


def is_record(name: str) -> bool:
    """Whether a name is that of a part's record."""
    return _NAME.fullmatch(name) is not None


def parts_at(files: Files, *, are_done: bool = False) -> list[Part]:
    """The parts with a record in a directory, oldest first; damaged records are left out.

    Args:
        files: The directory, of a local tier or a destination.
        are_done: Whether to look for those of a local tier that are at their destination.
    """
    wanted, found = ".done-" if are_done else ".part-", []
    for name in files.list():
        if is_record(name) and name.startswith(wanted):
            # Others remove records meanwhile, and the destination may hold anything.
            with suppress(FileNotFoundError, ValueError, LookupError, TypeError):
                found.append(_read(files, name))
    return sorted(found, key=lambda part: part.at_s)


def _read(files: Files, name: str) -> Part:
    with open_to_read(files, name) as stream:
        plain = json.loads(read_metadata(stream, files.where(name)))
    written = tuple(WrittenFile(**each) for each in plain["files"])
    if not all(is_ours_to_remove(file.name) for file in written):  # they will be removed some day
        raise ValueError("a record that names other files than shards")
    return Part(name=name, at_s=float(plain["at"]), files=written, damage=str(plain["damage"]))


def read_part(directory: str, name: str) -> Part | None:
    """A part that is to be brought to its destination; ``None`` if its record is gone.

    Raises:
        OSError: The local disk refuses.
    """
    with suppress(FileNotFoundError):
        return _read(PosixStorage(directory), name)
    return None


def end(directory: str, name: str) -> None:
    """Record that a part is at its destination; raises ``OSError``."""
    storage = PosixStorage(directory)
    os.rename(storage.where(name), storage.where(done(name)))
    storage.flush()


def remove_old(directory: str, old: Iterable[Part]) -> None:
    """Remove parts that are at their destination; errors are ignored.

    Args:
        directory: In the local tier.
        old: The parts. All others stay, also those that have reached their destination since.
    """
    storage = PosixStorage(directory)
    with suppress(OSError):  # another rank of this host does the same
        parts = {part.name: part for part in old}
        others = [*parts_at(storage), *parts_at(storage, are_done=True)]
        used = {file.name for part in others if part.name not in parts for file in part.files}
        for part in parts.values():
            storage.remove(file.name for file in part.files if file.name not in used)
            storage.remove([part.name])


def obsolete(destination: Storage, mine: set[str]) -> tuple[list[str], list[str]]:
    """What is left of parts once a checkpoint is published.

    Args:
        destination: Its place.
        mine: Names of its files.

    Returns:
        Names of records that nobody needs any more, and of files of earlier saves that were never
        committed. A rank's saves are in the order of its clock; what is later is left alone.
    """
    parts = parts_at(destination)
    committed = [part for part in parts if mine.issuperset(file.name for file in part.files)]
    upto_s = {part.rank: part.at_s for part in committed}
    earlier = [part for part in parts if part.at_s < upto_s.get(part.rank, 0.0)]
    files = {file.name for part in earlier for file in part.files} - mine
    return sorted({part.name for part in (*committed, *earlier)}), sorted(files)
