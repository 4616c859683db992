"""Promote a checkpoint from a local tier: copy its files, then publish its metadata.

Runs in a process of its own, which never imports torch.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from nostall._commit.manifest import Manifest, manifest_alone
from nostall._commit.publish import commit
from nostall._model import checksum
from nostall._model.jobs import Failure
from nostall._model.names import METADATA_NAME, is_ours_to_remove
from nostall._model.values import WrittenFile
from nostall._storage import posix
from nostall._storage.places import is_address, may_have, storage_at
from nostall._storage.port import Files, Storage
from nostall._storage.posix_storage import PosixStorage
from nostall._storage.reading import open_to_read, read_metadata
from nostall._storage.unused_files import remove_files
from nostall._tier import parts
from nostall._tier.copied_files import CopiedFiles
from nostall._tier.copying import Copying, Replaced, Unpromotable, copy_file
from nostall._tier.local import (
    Promoted,
    held,
    is_by_rank,
    may_replace,
    promoted_from,
    record_promoted,
)


class Existing(Exception):
    """The destination has a checkpoint that is not replaced."""

    def __init__(self, message: str, path: str, crc32: int) -> None:
        super().__init__(message)
        self.crc32 = crc32
        """Of its metadata."""
        self.failure = Failure(
            kind="CheckpointExistsError",
            message=message,
            phase="promote",
            path=path,
            hint="the checkpoint stays in the local tier until a newer one is promoted",
        )


class NotYet(Exception):
    """Other ranks have not brought their files to the destination."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionJob(Copying):
    """What to promote, and how."""

    record: str
    """``.metadata``, or the name of a part's record."""
    storage_options: str = "{}"


class Promote(NamedTuple):
    """The message that requests a promotion."""

    job: str
    promotion: PromotionJob
    sys_path: Sequence[str]
    """Import path of an object store's client; empty without one."""


class Promoting(NamedTuple):
    """The message about a promotion in progress: bytes written, or why none are."""

    job: str
    nbytes: int = 0
    of_nbytes: int = 0
    waits: str = ""
    """Which other ranks it waits for."""
    trouble: str = ""
    """Why the destination refused."""


def promote(job: PromotionJob, on_progress: Callable[[int, int], None]) -> None:
    """Make the destination have what is committed in a directory; once more if that changes.

    Args:
        job: What to promote.
        on_progress: Called with the bytes at the destination, and those of all files.

    Raises:
        Unpromotable: The local checkpoint is damaged, or gone.
        Existing: The destination has a checkpoint that stays.
        Refused: The destination has not taken a file.
        NotYet: Other ranks have not brought their files.
        OSError: Another process is promoting it, or the destination refuses.
        WriteError: The metadata could not be published.
        NotDurableError: It was or may have been published, but may not last.
    """
    if job.record != METADATA_NAME:
        _promote_part(job, on_progress)
        return
    local = PosixStorage(job.directory)
    if not may_have(local, METADATA_NAME):  # removed; what is left of the directory does not matter
        raise Unpromotable("the local checkpoint is gone", job.directory)
    with held(job.directory):
        while True:
            version = local.stat(METADATA_NAME).version
            if promoted_from(job.directory).version == version:
                return  # another process was faster; what became of it there is not our business
            try:
                crc32 = _promote(job, local, on_progress)
            except Replaced as error:
                if local.stat(METADATA_NAME).version == version:
                    raise Unpromotable(str(error), job.directory) from None
            except Existing as error:
                record_promoted(job.directory, Promoted(version, error.crc32))  # not tried again
                raise
            else:
                record_promoted(job.directory, Promoted(version, crc32))


def _promote(job: PromotionJob, local: Storage, on_progress: Callable[[int, int], None]) -> int:
    """Promote what is committed now; the checksum of the metadata."""
    content, manifest = _committed(local)
    destination, copied = storage_at(job.destination), CopiedFiles(job.directory)
    mine = {file.name for file in manifest.files}
    by_rank = is_by_rank(job.directory)
    destination.make_place()
    there = _metadata_at(destination)
    if there != content:
        _require_replaceable(there, manifest, job)
        if by_rank:
            _await_parts(manifest.files, destination, on_progress)
        else:
            _copy_all(manifest.files, job, copied, on_progress)
        there = _metadata_at(destination)  # it may have taken hours
        _require_replaceable(there, manifest, job)
        copied.add_names(_files_in(there) - mine)
        _require_there(manifest.files, destination)
        commit(destination, [content], metadata_name=METADATA_NAME, replaced_files=())
    drafts = posix.drafts_of_others(destination.list())  # of promotions that were killed
    remove_files(destination.where(name) for name in sorted(drafts | (copied.names - mine)))
    if by_rank:
        records, files = parts.obsolete(destination, mine)
        destination.remove([*files, *records])
    destination.flush()
    return checksum.crc32(content)


def _require_replaceable(there: bytes | None, manifest: Manifest, job: PromotionJob) -> None:
    """Keep what another job has committed at the destination, if it is newer or must stay.

    Raises:
        Existing: It stays.
    """
    if there is None:
        return
    crc32 = checksum.crc32(there)
    if crc32 == promoted_from(job.directory).crc32:
        return
    other = manifest_alone(io.BytesIO(there))
    is_newer = other is not None and other.committed_at_s > manifest.committed_at_s
    if is_newer or not may_replace(job.directory):
        why = "a newer checkpoint" if is_newer else "a checkpoint, and overwrite=False"
        raise Existing(f"the destination has {why}", job.destination, crc32)


def _await_parts(
    files: Sequence[WrittenFile],
    destination: Storage,
    on_progress: Callable[[int, int], None],
) -> None:
    wanted, there = set(files), set[WrittenFile]()
    for part in parts.parts_at(destination):
        if part.damage and not wanted.isdisjoint(part.files):
            raise Unpromotable(f"rank {part.rank}: {part.damage}", destination.where(part.name))
        there.update(() if part.damage else part.files)
    missing = [file for file in files if file not in there]
    total_nbytes = sum(file.nbytes for file in files)
    on_progress(total_nbytes - sum(file.nbytes for file in missing), total_nbytes)
    if missing:
        raise NotYet(f"{len(missing)} of {len(files)} files are not there yet: {missing[0].name}")


def _promote_part(job: PromotionJob, on_progress: Callable[[int, int], None]) -> None:
    """Bring the files of one rank, or a record of why that is not possible."""
    if not os.path.exists(os.path.join(job.directory, job.record)):
        return  # another process has done it
    destination = storage_at(job.destination)
    damage: Exception | None = None
    with held(job.directory, job.record):
        part = parts.read_part(job.directory, job.record)
        if part is None:  # done since: its files may be part of a checkpoint by now
            return
        copied = CopiedFiles(job.directory, part.name)
        destination.make_place()
        try:
            _copy_all(part.files, job, copied, on_progress)
            _require_there(part.files, destination)
        except (Replaced, Unpromotable) as error:
            damage = error
            remove_files(destination.where(name) for name in sorted(copied.names))
            part = replace(part, damage=str(error))
        destination.publish(part.name, [part.encoded()])
        destination.flush()
        parts.end(job.directory, part.name)
        copied.remove()
    if isinstance(damage, Unpromotable):  # otherwise a later save may have replaced the files
        raise damage


def _copy_all(
    files: Sequence[WrittenFile],
    job: PromotionJob,
    copied: CopiedFiles,
    on_progress: Callable[[int, int], None],
) -> None:
    destination = storage_at(job.destination)
    total_nbytes, done_nbytes = sum(file.nbytes for file in files), 0
    copied.add_names(file.name for file in files)
    for file in files:
        if not copied.is_whole(file) or not _is_there(destination, file):
            # Only a promotion that was interrupted has made a file of this name. One in a store is
            # replaced: a removal that is done late would hit the new one.
            if not is_address(job.destination):
                remove_files([destination.where(file.name)])
            copy_file(file, job, partial(_further, on_progress, done_nbytes, total_nbytes))
            copied.add_whole(file)
        done_nbytes += file.nbytes


def _further(
    on_progress: Callable[[int, int], None], before_nbytes: int, total_nbytes: int, nbytes: int
) -> None:
    on_progress(before_nbytes + nbytes, total_nbytes)


def _committed(local: Storage) -> tuple[bytes, Manifest]:
    path = local.where(METADATA_NAME)
    with open_to_read(local, METADATA_NAME) as stream:
        manifest = manifest_alone(stream)
        if manifest is None:
            raise Unpromotable("the local metadata has no intact manifest", path)
        return read_metadata(stream, path), manifest


def _metadata_at(destination: Storage) -> bytes | None:
    """The metadata at the destination: those to be published, after a crash right behind that."""
    try:
        with open_to_read(destination, METADATA_NAME) as stream:
            return read_metadata(stream, destination.where(METADATA_NAME))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_there(destination: Files, file: WrittenFile) -> bool:
    with suppress(FileNotFoundError):
        return destination.stat(file.name).nbytes == file.nbytes
    return False


def _require_there(files: Sequence[WrittenFile], destination: Files) -> None:
    """Check that nobody has removed files since they were copied, as clearing up does."""
    for file in files:
        if not _is_there(destination, file):
            raise OSError(errno.ENOENT, "a copied file is gone again", destination.where(file.name))


def _files_in(metadata: bytes | None) -> set[str]:
    """Names of the files that a manifest lists; without one, only torch could tell: they stay."""
    manifest = None if metadata is None else manifest_alone(io.BytesIO(metadata))
    names = () if manifest is None else (file.name for file in manifest.files)
    return set(filter(is_ours_to_remove, names))
