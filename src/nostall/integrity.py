"""Is this checkpoint whole? By its manifest where it has one, else by the checksums that ``torch.save`` puts into its files.

Reading is all that happens here: nothing is changed, and nothing that is read is executed (metadata goes through the
allow-list of :mod:`nostall._commit.metadata`).
"""

from __future__ import annotations

import logging
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import BinaryIO

from torch.distributed.checkpoint.metadata import Metadata

from nostall import _torch
from nostall._commit.checking import Damage, Progress, look_at
from nostall._commit.manifest import Manifest, manifest_alone, manifest_of, split
from nostall._commit.metadata import Extent, extents_of, load_metadata, planned_indices
from nostall._commit.metadata_pickle import HINT
from nostall._model.checksum import use_fastest
from nostall._storage.posix import may_pass
from nostall._storage.reading import open_to_read, read_metadata
from nostall.errors import (
    DamagedCheckpointError,
    NostallError,
    ReadError,
    UnknownMetadataError,
    UntrustedMetadataError,
)

__all__ = ["Damage", "State", "Verification", "is_complete", "latest_complete", "verify"]

_log = logging.getLogger("nostall")
_THREADS = 8


class State(str, Enum):
    """What can be said of a checkpoint."""

    WHOLE = "whole"
    """It is what was written, as far as there are checksums."""
    DAMAGED = "damaged"
    NOT_UNDERSTOOD = "not understood"
    """There is no manifest, and the metadata has something that this nostall and this torch do not know."""
    NOT_THERE = "not there"
    """No checkpoint was committed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What :func:`verify` has found."""

    path: str
    state: State
    note: str | None = None
    """What is not there, or what of the metadata is not understood; with a manifest the files were compared all the same, but
    their items have no names."""
    damages: tuple[Damage, ...] = ()
    files: int = 0
    """Shard files that were looked at."""
    nbytes: int = 0
    """Their bytes, as far as they are there."""
    items: int = 0
    unchecked: tuple[str, ...] = ()
    """Names of items for which there is no checksum anywhere; of files if their items are not known."""
    has_manifest: bool = False
    """Whether files were compared with a manifest, or items with the checksums inside them."""

    @property
    def ok(self) -> bool:
        """Whether it is there, and nothing is wrong, as far as there are checksums."""
        return self.state is State.WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    """What a checkpoint says of itself."""

    path: str
    manifest: Manifest | None
    extents: Mapping[str, list[Extent]]
    """Per file, in file order."""
    crc32: Mapping[str, int | None]
    """Per file, by the manifest."""
    note: str | None = None
    """Why ``extents`` is empty although the metadata has items."""


def is_complete(path: str | os.PathLike[str], deep: bool = False) -> bool:
    """Whether there is a committed checkpoint, all of it.

    With a manifest this rests on the manifest, the checksum of the metadata and the sizes of the files; the metadata need not
    be understood.

    Args:
        path: Checkpoint directory.
        deep: Read every byte and compare it with its checksum, see :func:`verify`; else look at the metadata and at the sizes
            of the files only, which takes milliseconds.

    Raises:
        UnknownMetadataError: There is no manifest, and the metadata is not understood: a newer torch or a planner with classes
            of its own may have written it.
    """
    directory = os.fspath(path)
    if deep:
        found = verify(directory)
        if found.state is State.NOT_UNDERSTOOD:
            note = found.note or "the metadata is not understood"
            raise UnknownMetadataError(note, phase="verify", path=directory, hint=HINT)
        return found.ok
    try:
        checkpoint = _read(directory, with_items=False)
    except UnknownMetadataError:
        raise
    except (OSError, DamagedCheckpointError, UntrustedMetadataError):
        return False
    return not any(_sizes(checkpoint))


def latest_complete(root: str | os.PathLike[str], deep: bool = False) -> str | None:
    """The complete checkpoint that was committed last among the directories in ``root``; ``None`` if there is none, or no ``root``.

    Directories that hold something else, or a checkpoint that is not complete or not understood, are passed over; those that
    are newer than the one returned are named in a warning.

    Args:
        root: Directory of checkpoint directories.
        deep: As for :func:`is_complete`.

    Raises:
        UnknownMetadataError: None is known to be complete, but one is not understood; to begin anew might lose it.
        ReadError: ``root`` is not a directory, or cannot be read; or none is known to be complete, but storage does not say what
            one of them is.
    """
    unknown: list[UnknownMetadataError | ReadError] = []
    for path in _latest_first(os.fspath(root)):
        try:
            if is_complete(path, deep):
                return path
            _require_answers(path)
            _log.warning("passed over path=%s: the checkpoint is not complete", path)
        except (UnknownMetadataError, ReadError) as error:
            _log.warning("passed over path=%s: %s", path, error.message)
            unknown.append(error)
    if unknown:
        newest = unknown[0]
        raise type(newest)(
            f"no complete checkpoint is known, and {len(unknown)} are not understood or cannot be read;"
            f" the newest: {newest.message}",
            phase="read",
            path=newest.path,
            hint=newest.hint,
        ) from newest
    return None


def _require_answers(directory: str) -> None:
    """Make sure that a checkpoint is passed over for what it is, and not because storage is away for a moment.

    Raises:
        ReadError: Storage is away.
    """
    try:
        with open_to_read(os.path.join(directory, _torch.METADATA_NAME)) as stream:
            manifest_alone(stream)
        with os.scandir(directory) as entries:
            for entry in entries:
                os.stat(entry.path)
    except OSError as error:
        if may_pass(error):
            raise ReadError(
                f"the checkpoint cannot be read: {error.strerror}",
                errno=error.errno,
                phase="read",
                path=directory,
                hint="ask again when storage answers",
            ) from error


def _latest_first(root: str) -> list[str]:
    """The directories in ``root`` that claim to be checkpoints.

    Raises:
        ReadError: It is not a directory, or cannot be read.
    """
    candidates = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                metadata = os.path.join(entry.path, _torch.METADATA_NAME)
                if _may_be_file(metadata):
                    # Of a directory and a link to it the directory.
                    rank = _committed_at_s(metadata), not entry.is_symlink()
                    candidates.append((rank, entry.path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ReadError(
            f"checkpoints cannot be looked for: {error.strerror}",
            errno=error.errno,
            phase="read",
            path=root,
            hint="pass the directory that the checkpoint directories are in",
        ) from error
    return [path for _, path in sorted(candidates, reverse=True)]


def _may_be_file(path: str) -> bool:
    """Whether a regular file has that name; true also if storage is away for a moment."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        return may_pass(error)


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
        checkpoint = _read(directory, with_items=True)
    except (FileNotFoundError, NotADirectoryError):
        note = f"no checkpoint was committed here: there is no {_torch.METADATA_NAME}"
        return Verification(path=directory, state=State.NOT_THERE, note=note)
    except UnknownMetadataError as error:
        return Verification(path=directory, state=State.NOT_UNDERSTOOD, note=error.message)
    except (OSError, DamagedCheckpointError, UntrustedMetadataError) as error:
        what = error.message if isinstance(error, NostallError) else _unreadable(error)
        damage = Damage(file=_torch.METADATA_NAME, what=what)
        return Verification(path=directory, state=State.DAMAGED, damages=(damage,))
    return _compared(checkpoint, threads, progress)


def _compared(
    checkpoint: _Checkpoint, threads: int, tell: Callable[[int, int], object] | None
) -> Verification:
    directory = checkpoint.path
    damages = {damage.file: damage for damage in _sizes(checkpoint)}
    whole = [name for name in _names(checkpoint) if name not in damages]
    use_fastest()
    progress = Progress(sum(_nbytes(directory, name) for name in whole), tell)
    with ThreadPoolExecutor(max(1, threads), "nostall-verify") as pool:
        looked_at = list(
            pool.map(
                lambda name: look_at(
                    directory,
                    name,
                    extents=checkpoint.extents.get(name, ()),
                    crc32=checkpoint.crc32.get(name),
                    progress=progress,
                ),
                whole,
            )
        )
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
        state=State.DAMAGED if damages or found else State.WHOLE,
        note=checkpoint.note,
        damages=(*damages.values(), *found),
        files=len(whole) + len(damages),
        nbytes=sum(_nbytes(directory, name) for name in _names(checkpoint)),
        items=sum(map(len, checkpoint.extents.values())),
        unchecked=tuple(unchecked),
        has_manifest=checkpoint.manifest is not None,
    )


def _read(directory: str, *, with_items: bool) -> _Checkpoint:
    """What a checkpoint says of itself; where it has a manifest, of its items only if it is asked for them."""
    path = os.path.join(directory, _torch.METADATA_NAME)
    extents: Mapping[str, list[Extent]] = {}
    note = None
    with open_to_read(path) as stream:
        manifest = manifest_of(stream, path=path)
        if with_items or manifest is None:
            try:
                extents = _extents(stream, path)
            except (DamagedCheckpointError, UntrustedMetadataError) as error:
                if manifest is None:
                    raise
                note = error.message  # but it is what was written
    files = manifest.files if manifest is not None else ()
    return _Checkpoint(
        path=directory,
        manifest=manifest,
        extents=extents,
        crc32={file.name: file.crc32 for file in files},
        note=note,
    )


def _extents(stream: BinaryIO, path: str) -> Mapping[str, list[Extent]]:
    """Where the items of a checkpoint are, by file."""
    try:
        content = read_metadata(stream, path)
    except ReadError as error:
        raise UnknownMetadataError(error.message, phase="read", path=path) from error
    pickled, _ = split(content, path=path)
    metadata: Metadata = load_metadata(pickled, path=path)
    missing = set(planned_indices(metadata)).difference(metadata.storage_data or ())
    if missing:
        named = sorted({str(index.fqn) for index in missing})[:3]
        raise DamagedCheckpointError(
            f"it does not say where {len(missing)} of its items are, {named} among them", path=path
        )
    by_file: dict[str, list[Extent]] = defaultdict(list)
    for extent in extents_of(metadata, path=path):
        by_file[extent.file].append(extent)
    return by_file


def _unreadable(error: OSError) -> str:
    return f"it cannot be read: {error.strerror}"


def _names(checkpoint: _Checkpoint) -> list[str]:
    return sorted(checkpoint.extents if checkpoint.manifest is None else checkpoint.crc32)


def _nbytes(directory: str, name: str) -> int:
    try:
        return os.stat(os.path.join(directory, name)).st_size
    except OSError:
        return 0


def _sizes(checkpoint: _Checkpoint) -> Iterator[Damage]:
    """Files that are missing, or too short or too long to be what was written."""
    if checkpoint.manifest is None:
        wanted = {name: extents[-1].end for name, extents in checkpoint.extents.items()}
    else:
        wanted = {file.name: file.nbytes for file in checkpoint.manifest.files}
    exactly = checkpoint.manifest is not None
    for name, nbytes in sorted(wanted.items()):
        items = tuple(extent.item for extent in checkpoint.extents.get(name, ()))
        try:
            status = os.stat(os.path.join(checkpoint.path, name))
        except FileNotFoundError:
            yield Damage(file=name, what="it is missing", items=items)
            continue
        except OSError as error:
            yield Damage(file=name, what=_unreadable(error), items=items)
            continue
        if not stat.S_ISREG(status.st_mode):
            yield Damage(file=name, what="it is not a regular file", items=items)
            continue
        there = status.st_size
        if there < nbytes or (exactly and there != nbytes):
            beyond = (each.item for each in checkpoint.extents.get(name, ()) if each.end > there)
            what = f"it has {there} bytes instead of {nbytes}"
            yield Damage(file=name, what=what, items=tuple(beyond))


def _committed_at_s(metadata_path: str) -> float:
    try:
        with open_to_read(metadata_path) as stream:
            manifest = manifest_alone(stream)
        if manifest is not None:
            return manifest.committed_at_s
        return os.stat(metadata_path).st_mtime
    except OSError:
        return 0.0  # it will be passed over, and named if it is newer than what is taken
