"""Is this checkpoint whole? By its manifest where it has one, else by the checksums that ``torch.save`` puts into its files.

Reading is all that happens here: nothing is changed, and nothing that is read is executed (metadata goes through the
allow-list of :mod:`nostall._metadata`).
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import Metadata

from nostall import _torch
from nostall._checksum import use_fastest
from nostall._manifest import Manifest, split
from nostall._metadata import Extent, extents_of, load_metadata, planned_indices
from nostall._storage.reading import (
    ChecksumMissing,
    NoArchive,
    crc32_of_file,
    damage_of_container,
    read_metadata_file,
)
from nostall.errors import DamagedCheckpointError, UntrustedMetadataError

__all__ = ["Damage", "Verification", "is_complete", "latest_complete", "verify"]

_log = logging.getLogger("nostall")
_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Something that is not as it was written."""

    file: str
    """Path below the checkpoint directory."""
    what: str
    items: tuple[str, ...] = ()
    """Names of the items concerned, as far as they can be told."""

    def __str__(self) -> str:
        items = f" (items {', '.join(self.items)})" if self.items else ""
        return f"{self.file}: {self.what}{items}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What :func:`verify` has found."""

    path: str
    damages: tuple[Damage, ...]
    files: int = 0
    """Shard files that were looked at."""
    nbytes: int = 0
    """Their bytes, as far as they are there."""
    items: int = 0
    unchecked: tuple[str, ...] = ()
    """Names of items for which there is no checksum anywhere."""
    has_manifest: bool = False
    """Whether files were compared with a manifest, or items with the checksums inside them."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, as far as there are checksums."""
        return not self.damages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    """What a checkpoint says of itself."""

    path: str
    manifest: Manifest | None
    extents: Mapping[str, list[Extent]]
    """Per file, in file order."""
    crc32: Mapping[str, int | None]
    """Per file, by the manifest."""


def is_complete(path: str | os.PathLike[str], deep: bool = False) -> bool:
    """Whether there is a committed checkpoint, all of it.

    Args:
        path: Checkpoint directory.
        deep: Read every byte and compare it with its checksum, see :func:`verify`; else look at the metadata and at the sizes
            of the files only, which takes milliseconds.
    """
    if deep:
        return verify(path).ok
    try:
        checkpoint = _read(os.fspath(path))
    except (OSError, DamagedCheckpointError, UntrustedMetadataError):
        return False
    return not any(_sizes(checkpoint))


def latest_complete(root: str | os.PathLike[str], deep: bool = False) -> str | None:
    """The complete checkpoint that was committed last among the directories in ``root``; ``None`` if there is none, or no ``root``.

    Directories that hold something else, or a checkpoint that is not complete, are passed over; those that are newer than
    the one returned are named in a warning.

    Args:
        root: Directory of checkpoint directories.
        deep: As for :func:`is_complete`.

    Raises:
        OSError: ``root`` cannot be read.
    """
    candidates = []
    if not os.path.lexists(root):
        return None
    with os.scandir(root) as entries:
        for entry in entries:
            metadata = os.path.join(entry.path, _torch.METADATA_NAME)
            if os.path.isfile(metadata):
                # Of a directory and a link to it the directory.
                rank = _committed_at_s(metadata), not entry.is_symlink()
                candidates.append((rank, entry.path))
    for _, path in sorted(candidates, reverse=True):
        if is_complete(path, deep):
            return path
        _log.warning("passed over path=%s: the checkpoint is not complete", path)
    return None


def verify(
    path: str | os.PathLike[str],
    *,
    threads: int = _THREADS,
    progress: Callable[[int, int], object] | None = None,
) -> Verification:
    """Read a checkpoint from end to end and say what is wrong with it.

    With a manifest, which every checkpoint of nostall's has unless a user's stream wrote it, every bit of shard files and
    metadata counts. Without, as with stock DCP's checkpoints, files and the records inside them are checked against sizes and
    CRC-32 sums that ``torch.save`` has stored; two files of the same layout that were exchanged are not found then.

    Args:
        path: Checkpoint directory.
        threads: How many files to read at a time.
        progress: Called with bytes read and bytes to read, from any thread.

    Returns:
        What was found; it never raises because of what it reads.
    """
    directory = os.fspath(path)
    try:
        checkpoint = _read(directory)
    except FileNotFoundError:
        return _not_readable(directory, "there is none: no checkpoint was committed here")
    except OSError as error:
        return _not_readable(directory, f"it cannot be read: {error.strerror}")
    except (DamagedCheckpointError, UntrustedMetadataError) as error:
        return _not_readable(directory, error.message)
    damages = {damage.file: damage for damage in _sizes(checkpoint)}
    whole = [name for name in _names(checkpoint) if name not in damages]
    use_fastest()
    reading = _Progress(sum(_nbytes(directory, name) for name in whole), progress)
    with ThreadPoolExecutor(max(1, threads), "nostall-verify") as pool:
        looked_at = list(pool.map(lambda name: _look_at(checkpoint, name, reading), whole))
    found = [each.damage for each in looked_at if each.damage is not None]
    unchecked = [item for each in looked_at for item in each.unchecked]
    written_as_archives = any(each.archives for each in looked_at)
    for each in looked_at:
        if not each.strangers:
            continue
        if written_as_archives:
            # Written as archives, then; these were overwritten from end to end.
            what = "an archive in it is not one any more"
            found.append(Damage(file=each.file, what=what, items=each.strangers))
        else:
            unchecked += each.strangers
    return Verification(
        path=directory,
        damages=(*damages.values(), *found),
        files=len(whole) + len(damages),
        nbytes=sum(_nbytes(directory, name) for name in _names(checkpoint)),
        items=sum(map(len, checkpoint.extents.values())),
        unchecked=tuple(unchecked),
        has_manifest=checkpoint.manifest is not None,
    )


def _read(directory: str) -> _Checkpoint:
    path = os.path.join(directory, _torch.METADATA_NAME)
    pickled, manifest = split(read_metadata_file(path), path=path)
    metadata: Metadata = load_metadata(pickled, path=path)
    missing = set(planned_indices(metadata)).difference(metadata.storage_data or ())
    if missing:
        named = sorted({index.fqn for index in missing})[:3]
        raise DamagedCheckpointError(
            f"it does not say where {len(missing)} of its items are, {named} among them", path=path
        )
    by_file: dict[str, list[Extent]] = defaultdict(list)
    for extent in extents_of(metadata, path=path):
        by_file[extent.file].append(extent)
    files = manifest.files if manifest is not None else ()
    return _Checkpoint(
        path=directory,
        manifest=manifest,
        extents=by_file,
        crc32={file.name: file.crc32 for file in files},
    )


def _not_readable(directory: str, what: str) -> Verification:
    return Verification(path=directory, damages=(Damage(file=_torch.METADATA_NAME, what=what),))


def _names(checkpoint: _Checkpoint) -> list[str]:
    return sorted({*checkpoint.extents, *checkpoint.crc32})


def _nbytes(directory: str, name: str) -> int:
    try:
        return os.stat(os.path.join(directory, name)).st_size
    except OSError:
        return 0


def _sizes(checkpoint: _Checkpoint) -> Iterator[Damage]:
    """Files that are missing, or too short or too long to be what was written."""
    wanted = {name: (extents[-1].end, False) for name, extents in checkpoint.extents.items()}
    if checkpoint.manifest is not None:
        wanted |= {file.name: (file.nbytes, True) for file in checkpoint.manifest.files}
    for name, (nbytes, exactly) in sorted(wanted.items()):
        items = tuple(extent.item for extent in checkpoint.extents.get(name, ()))
        try:
            status = os.stat(os.path.join(checkpoint.path, name))
        except FileNotFoundError:
            yield Damage(file=name, what="it is missing", items=items)
            continue
        except OSError as error:
            yield Damage(file=name, what=f"it cannot be read: {error.strerror}", items=items)
            continue
        if not stat.S_ISREG(status.st_mode):
            yield Damage(file=name, what="it is no file", items=items)
            continue
        there = status.st_size
        if there < nbytes or (exactly and there != nbytes):
            beyond = (each.item for each in checkpoint.extents.get(name, ()) if each.end > there)
            what = f"it has {there} bytes instead of {nbytes}"
            yield Damage(file=name, what=what, items=tuple(beyond))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    """What was seen in one file of the right size."""

    file: str
    damage: Damage | None = None
    unchecked: tuple[str, ...] = ()
    """Items that were stored without checksums."""
    strangers: tuple[str, ...] = ()
    """Items that are no archives."""
    archives: int = 0
    """How many items are."""


def _look_at(checkpoint: _Checkpoint, name: str, reading: _Progress) -> _Looked:
    path = os.path.join(checkpoint.path, name)
    extents = checkpoint.extents.get(name, [])
    expected = checkpoint.crc32.get(name)
    try:
        if expected is None:
            return _look_into(path, name, extents, reading)
        found = crc32_of_file(path, reading.add)
        if found == expected:
            return _Looked(file=name)
        inside = _look_into(path, name, extents, _Progress(0, None))
    except OSError as error:
        what = f"it cannot be read: {error.strerror}"
        return _Looked(file=name, damage=Damage(file=name, what=what))
    items = (*(inside.damage.items if inside.damage is not None else ()), *inside.strangers)
    what = f"its CRC-32 is {found:08x} instead of {expected:08x}"
    return _Looked(file=name, damage=Damage(file=name, what=what, items=items))


def _look_into(path: str, name: str, extents: Iterable[Extent], reading: _Progress) -> _Looked:
    """As :func:`_look_at`, by the checksums of the archives in the file."""
    wrong: list[tuple[str, str]] = []
    unchecked: list[str] = []
    strangers: list[str] = []
    archives = 0
    with open(path, "rb") as stream:
        for extent in extents:
            if extent.is_transformed:
                unchecked.append(extent.item)
                continue
            try:
                why = damage_of_container(stream, extent.offset, extent.length)
                archives += 1
            except ChecksumMissing:
                unchecked.append(extent.item)
                archives += 1
                continue
            except NoArchive:
                strangers.append(extent.item)
                continue
            finally:
                reading.add(extent.length)
            if why is not None:
                wrong.append((extent.item, why))
    items = tuple(item for item, _ in wrong)
    return _Looked(
        file=name,
        damage=Damage(file=name, what=wrong[0][1], items=items) if wrong else None,
        unchecked=tuple(unchecked),
        strangers=tuple(strangers),
        archives=archives,
    )


def _committed_at_s(metadata_path: str) -> float:
    try:
        _, manifest = split(read_metadata_file(metadata_path), path=metadata_path)
        if manifest is not None:
            return manifest.committed_at_s
    except (OSError, DamagedCheckpointError):
        pass  # it will be passed over, and named if it is newer than what is taken
    try:
        return os.stat(metadata_path).st_mtime
    except OSError:
        return 0.0


@dataclass(slots=True)
class _Progress:
    """Counts what several threads have read."""

    total: int
    tell: Callable[[int, int], object] | None
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, nbytes: int) -> None:
        with self.lock:
            self.done += nbytes
            if self.tell is not None:
                self.tell(self.done, self.total)
