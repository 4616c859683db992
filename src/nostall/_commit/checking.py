"""Verification of one shard file, by its checksum or by those of the archives in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from nostall._commit.metadata import Extent
from nostall._storage.port import Files
from nostall._storage.reading import (
    ChecksumMissing,
    NoArchive,
    crc32_of_file,
    damage_of_container,
)
from nostall.errors import NostallError


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A difference from what was written."""

    file: str
    """Path below the checkpoint directory."""
    what: str
    items: tuple[str, ...] = ()
    """Names of the items concerned, as far as they are known."""

    def __str__(self) -> str:
        items = f" (items {', '.join(self.items)})" if self.items else ""
        return f"{self.file}: {self.what}{items}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """Result of the verification of one file of the right size."""

    file: str
    damage: Damage | None = None
    unchecked: tuple[str, ...] = ()
    """Items stored without checksums."""
    strangers: tuple[str, ...] = ()
    """Objects that are not archives; a planner may use another form."""
    archives: int = 0
    """Number of items that are archives."""


def look_at(
    files: Files,
    name: str,
    *,
    extents: Sequence[Extent],
    crc32: int | None,
    progress: Progress,
) -> Looked:
    """Verify a shard file of the right size.

    Args:
        files: The checkpoint's files.
        name: Name of the file.
        extents: The items in the file, as far as they are known.
        crc32: Checksum in the manifest, if any.
        progress: Counts the bytes read.
    """
    try:
        if crc32 is None:
            return _look_into(files, name, extents, progress)
        found = crc32_of_file(files, name, progress.add)
        if found == crc32:
            return Looked(file=name)
        inside = _look_into(files, name, extents, Progress(0, None))
    except OSError as error:
        return Looked(file=name, damage=Damage(file=name, what=unreadable(error)))
    items = (*(inside.damage.items if inside.damage is not None else ()), *inside.strangers)
    what = f"CRC-32 is {found:08x}, expected {crc32:08x}"
    return Looked(file=name, damage=Damage(file=name, what=what, items=items))


def unreadable(error: OSError | NostallError) -> str:
    """Why a file cannot be read."""
    return error.message if isinstance(error, NostallError) else f"cannot be read: {error.strerror}"


def _look_into(files: Files, name: str, extents: Sequence[Extent], progress: Progress) -> Looked:
    """As :func:`look_at`, by the checksums of the archives in the file."""
    wrong: list[tuple[str, str]] = []
    unchecked: list[str] = []
    strangers: list[str] = []
    archives = 0
    if not extents:
        crc32_of_file(files, name, progress.add)  # raises if the file cannot be read
        return Looked(file=name, unchecked=(name,))
    with closing(files.open(name)) as source:
        for extent in extents:
            if extent.is_transformed:
                unchecked.append(extent.item)
                continue
            try:
                why = damage_of_container(source, extent.offset, extent.length)
                archives += 1
            except ChecksumMissing:
                unchecked.append(extent.item)
                archives += 1
                continue
            except NoArchive:
                if not extent.is_tensor:
                    strangers.append(extent.item)
                    continue
                # Required of a tensor without a transform.
                why = "contains a tensor that is not an archive of torch.save"
            finally:
                progress.add(extent.length)
            if why is not None:
                wrong.append((extent.item, why))
    items = tuple(item for item, _ in wrong)
    return Looked(
        file=name,
        damage=Damage(file=name, what=wrong[0][1], items=items) if wrong else None,
        unchecked=tuple(unchecked),
        strangers=tuple(strangers),
        archives=archives,
    )


@dataclass(slots=True)
class Progress:
    """Counts the bytes that several threads have read."""

    total: int
    report: Callable[[int, int], object] | None
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, nbytes: int) -> None:
        with self.lock:
            self.done += nbytes
            if self.report is not None:
                self.report(self.done, self.total)
