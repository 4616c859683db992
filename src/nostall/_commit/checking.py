"""The shard files that a checkpoint describes, and the verification of one of them.

A file is verified by its size, and by its checksum in the manifest or those of the archives in it.
Imports torch for items only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nostall._commit.manifest import manifest_alone, manifest_of
from nostall._model.names import METADATA_NAME, some
from nostall._model.values import WrittenFile
from nostall._storage.damage import ChecksumMissing, NoArchive, crc32_of_file, damage_of_container
from nostall._storage.locations import storage_at
from nostall._storage.port import (
    Files,
    PartStream,
    Stat,
    how_to_read,
    leaves_open,
    open_to_read,
    reason,
)
from nostall.errors import NostallError, ReadError

if TYPE_CHECKING:
    from nostall._commit.metadata import Extent

_FEW = 3
"""Names in a text; the attribute has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A difference from what was written."""

    file: str
    """Path below the checkpoint directory."""
    what: str
    items: tuple[str, ...] = ()
    """Names of the items concerned, as far as they are known."""
    is_certain: bool = True
    """False if storage did not let the file be read: it may be as it was written."""

    def __str__(self) -> str:
        items = f" (items {some(self.items, _FEW)})" if self.items else ""
        return f"{self.file}: {self.what}{items}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedFile:
    """A shard file, as its checkpoint describes it."""

    name: str
    nbytes: int
    """Its length with a manifest; otherwise the end of its last item, and it may be longer."""
    is_exact: bool
    """Whether it must not be longer."""
    crc32: int | None
    """Checksum in the manifest, if any."""
    extents: Sequence[Extent]
    """Its items in file order, as far as they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Files and items that a checkpoint says it has."""

    files: tuple[ExpectedFile, ...]
    """By name."""
    items: int
    """Number of items, as far as they are known."""
    has_manifest: bool
    note: str | None
    """Why no items are known although the metadata has some."""


def read_inventory(files: Files, *, with_items: bool) -> Inventory:
    """Read a checkpoint's inventory; with a manifest, items are read only if ``with_items``.

    Without a manifest, metadata raises ``UnknownMetadataError`` if it is not understood,
    ``UntrustedMetadataError`` if it is malformed, and ``DamagedCheckpointError`` if it is damaged
    or lacks the location of an item. With one, a malformed index raises ``UntrustedMetadataError``;
    a damaged manifest or metadata, and an index that differs from the pickle,
    ``DamagedCheckpointError``.
    """
    path = files.where(METADATA_NAME)
    extents: Mapping[str, Sequence[Extent]] = {}
    note: str | None = None
    with open_to_read(files, METADATA_NAME) as stream:
        manifest = manifest_of(stream, path=path)
        if with_items or manifest is None:
            from nostall._commit.metadata import extents_in

            extents, note = extents_in(stream, path=path, is_confirmed=manifest is not None)
    if manifest is None:
        listed = [WrittenFile(name, each[-1].end, crc32=None) for name, each in extents.items()]
    else:
        listed = list(manifest.files)
    return Inventory(
        files=tuple(
            ExpectedFile(
                name=file.name,
                nbytes=file.nbytes,
                is_exact=manifest is not None,
                crc32=file.crc32,
                extents=extents.get(file.name, ()),
            )
            for file in sorted(listed, key=lambda file: file.name)
        ),
        items=sum(map(len, extents.values())),
        has_manifest=manifest is not None,
        note=note,
    )


def size_of(files: Files, expected: ExpectedFile) -> tuple[int, Damage | None]:
    """The length of a shard file, 0 if it cannot be read, and its damage if that is wrong."""
    name, extents = expected.name, expected.extents
    try:
        nbytes = _stat_of(files, name).nbytes
    except OSError as error:
        items = tuple(each.item for each in extents)
        return 0, replace(damage_by(error, name), items=items)
    if nbytes == expected.nbytes or (nbytes > expected.nbytes and not expected.is_exact):
        return nbytes, None
    what = f"has {nbytes} bytes, expected {expected.nbytes}"
    beyond = tuple(each.item for each in extents if each.end > nbytes)
    return nbytes, Damage(file=name, what=what, items=beyond)


def _stat_of(files: Files, name: str) -> Stat:
    """The status of a file that should exist; ``open`` looks twice."""
    try:
        return files.stat(name)
    except FileNotFoundError:
        with closing(files.open(name)) as source:
            return source.stat


def require_answers(directory: str) -> None:
    """Raise ``ReadError`` if storage reports a transient error, or denies access: then a checkpoint
    was not skipped for its content.
    """
    files = storage_at(directory)
    try:
        with open_to_read(files, METADATA_NAME) as stream:
            manifest_alone(stream)
        for name in files.list():
            with suppress(ReadError):  # not a regular file
                files.stat(name)
                files.open(name).close()
    except OSError as error:
        if leaves_open(error):
            raise ReadError(
                f"the checkpoint cannot be read: {reason(error)}",
                errno=error.errno,
                phase="read",
                path=directory,
                hint=how_to_read(error),
            ) from error


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


def look_at(files: Files, expected: ExpectedFile, on_read: Callable[[int], object]) -> Looked:
    """Verify a shard file of the right size; ``on_read`` gets the numbers of bytes read."""
    name, crc32 = expected.name, expected.crc32
    try:
        if crc32 is None:
            return _look_into(files, expected, on_read)
        found = crc32_of_file(files, name, on_read)
        if found == crc32:
            return Looked(file=name)
        inside = _look_into(files, expected, lambda _: None)
    except OSError as error:
        return Looked(file=name, damage=damage_by(error, name))
    items = (*(inside.damage.items if inside.damage is not None else ()), *inside.strangers)
    what = f"CRC-32 is {found:08x}, expected {crc32:08x}"
    return Looked(file=name, damage=Damage(file=name, what=what, items=items))


def damage_by(error: OSError | NostallError, file: str) -> Damage:
    """The damage of a file that an error tells of."""
    if isinstance(error, FileNotFoundError):
        return Damage(file=file, what="missing")
    what = error.message if isinstance(error, NostallError) else f"cannot be read: {reason(error)}"
    return Damage(file=file, what=what, is_certain=not leaves_open(error))


def _look_into(files: Files, expected: ExpectedFile, on_read: Callable[[int], object]) -> Looked:
    """Verify a file by the checksums of the archives in it."""
    name = expected.name
    wrong: list[tuple[str, str]] = []
    unchecked: list[str] = []
    strangers: list[str] = []
    archives = 0
    if not expected.extents:
        crc32_of_file(files, name, on_read)  # raises if the file cannot be read
        return Looked(file=name, unchecked=(name,))
    with closing(files.open(name)) as source:
        for extent in expected.extents:
            if extent.is_transformed:
                unchecked.append(extent.item)
                continue
            try:
                why = damage_of_container(PartStream(source, extent.offset, extent.length))
                archives += 1
            except ChecksumMissing:
                unchecked.append(extent.item)
                archives += 1
                continue
            except NoArchive:
                if not extent.is_tensor:
                    strangers.append(extent.item)
                    continue
                # A tensor without a transform has to be one.
                why = "contains a tensor that is not an archive of torch.save"
            finally:
                on_read(extent.length)
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
