"""Copy one checkpoint to its destination: files first, then ``.metadata``, at one instant.

A file of a directory is copied under another name and renamed, so all hosts see it whole or not at
all. Hosts without the metadata learn from a draft at the destination which files to bring; the
coordinator's host leaves it there until it publishes.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

from nostall._commit.manifest import Manifest, manifest_alone, split
from nostall._commit.publish import commit
from nostall._model import checksum
from nostall._model.jobs import Failure, page_aligned
from nostall._model.names import METADATA_NAME, is_draft, is_ours_to_remove
from nostall._model.values import WrittenFile
from nostall._storage.places import is_address, storage_at
from nostall._storage.port import reason
from nostall._storage.posix import replace_file
from nostall._storage.reading import crc32_of_file, open_to_read, read_metadata
from nostall.errors import DamagedCheckpointError
from nostall.tier._local import Committed, Directory, Record, is_plain

OLD_S = 3600.0
"""A file that no metadata names is of no save under way if it is older."""
DRAFT = f"{METADATA_NAME}.tmp"
_COPY = "copy-of-"
_FILES_AT_A_TIME = 4
_CHUNK_NBYTES = 8 << 20


class Hopeless(Exception):
    """The checkpoint will not be promoted: trying again would not help."""

    def __init__(self, message: str, path: str, kind: str = "DamagedCheckpointError") -> None:
        super().__init__(message)
        hint = "the checkpoints at the destination are untouched; save again, or remove this one"
        self.failure = Failure(kind=kind, message=message, phase="promote", path=path, hint=hint)


class Waiting(Exception):
    """Others have not done their part."""


class Copier:
    """Copies files to a destination, of which ``verified`` are known to be whole.

    ``on_progress`` is called with bytes that the destination has accepted, and those of all files.
    """

    def __init__(
        self, destination: str, verified: set[str], on_progress: Callable[[int, int], None]
    ) -> None:
        if os.path.islink(destination):  # false for an address
            raise OSError(f"{destination} is a symbolic link, which may lead anywhere: remove it")
        self.storage = storage_at(destination, direct=True)
        self._verified = verified
        self._on_progress = on_progress

    def bring(self, source: Directory, files: Sequence[WrittenFile]) -> None:
        """Copy those files that are not whole at the destination; raises as :func:`promote`."""
        total_nbytes = sum(file.nbytes for file in files)

        def bring_one(file: WrittenFile) -> None:
            if not self.has([file]) or not self._is_whole(file):
                self._copy(source, file, lambda nbytes: self._on_progress(nbytes, total_nbytes))
            self._verified.add(file.name)

        self.storage.make_place()
        with ThreadPoolExecutor(_FILES_AT_A_TIME, "nostall-copy") as pool:
            list(pool.map(bring_one, files))
        self.storage.flush()

    def nbytes_of(self, file: WrittenFile) -> int | None:
        """The length of a file at the destination; ``None`` if it does not exist."""
        if not os.path.islink(self.storage.where(file.name)):
            with suppress(FileNotFoundError, NotADirectoryError):
                return self.storage.stat(file.name).nbytes
        return None

    def has(self, files: Sequence[WrittenFile]) -> bool:
        """Whether the destination has files of these names and lengths."""
        return all(self.nbytes_of(file) == file.nbytes for file in files)

    def _is_whole(self, file: WrittenFile) -> bool:
        if file.name in self._verified or file.crc32 is None:
            return file.name in self._verified
        return crc32_of_file(self.storage, file.name, lambda _: None) == file.crc32

    def _copy(self, source: Directory, file: WrittenFile, wrote: Callable[[int], None]) -> None:
        path, where = os.path.join(source.path, file.name), self.storage.where
        name = file.name if is_address(where()) else _COPY + file.name
        if name != file.name:
            self.storage.remove([name])  # of a copy that was interrupted
        chunk_nbytes = page_aligned(max(_CHUNK_NBYTES, self.storage.least_part(file.nbytes)))
        memory_nbytes = min(chunk_nbytes, page_aligned(file.nbytes)) or 1
        memory, crc32 = memoryview(mmap.mmap(-1, memory_nbytes)), 0
        with _readable(path):
            opened = source.open(file.name)
        with (
            opened as local,
            closing(self.storage.put(name, file.nbytes, on_created=lambda _: None)) as upload,
        ):
            for begin in range(0, file.nbytes, memory_nbytes):
                end = min(begin + memory_nbytes, file.nbytes)
                if begin and name == file.name:  # a store's client may still be sending from it
                    memory = memoryview(mmap.mmap(-1, memory_nbytes))
                _fill(memory[: end - begin], local, path)
                crc32 = checksum.crc32(memory[: end - begin], crc32)
                upload.write(memory, begin, end, origin=begin)
                wrote(end - begin)
            if local.read(1) or file.crc32 not in (None, crc32):
                raise Hopeless("a local file has another checksum than was committed", path)
            upload.finish(crc32)
        if name != file.name:
            replace_file(where(file.name), by=where(upload.name))

    def content(self, name: str = METADATA_NAME) -> bytes | None:
        """A metadata file at the destination; ``None`` if it does not exist."""
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            open_to_read(self.storage, name) as stream,
        ):
            return read_metadata(stream, self.storage.where(name))
        return None

    def clean_up(self, manifest: Manifest, replaced: set[str]) -> None:
        """Remove the replaced checkpoint's files, drafts, and what killed processes have left."""
        storage = self.storage
        names, now_s = storage.list(), storage.stat(METADATA_NAME).modified_s
        unused = {name for name in names if is_draft(name)}
        for name in filter(is_ours_to_remove, {*names} - {file.name for file in manifest.files}):
            with suppress(OSError):
                if name in replaced or storage.stat(name).changed_s < now_s - OLD_S:
                    unused.add(name)
        storage.remove(sorted(unused))
        storage.flush()


@contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:  # a later save may have removed it
        raise
    except OSError as error:
        raise Hopeless(f"a local file cannot be read: {reason(error)}", path) from error


def _fill(memory: memoryview, local: Any, path: str) -> None:
    while memory:
        with _readable(path):
            nbytes = local.readinto(memory)
        if not nbytes:
            raise Hopeless(f"a local file has only {local.tell()} bytes", path)
        memory = memory[nbytes:]


def files_of(content: bytes | None) -> tuple[WrittenFile, ...]:
    """The files that a manifest names; none without a manifest, or with a name that leads away."""
    manifest = None if content is None else manifest_alone(io.BytesIO(content))
    if manifest is None or not all(is_plain(file.name) for file in manifest.files):
        return ()
    return manifest.files


def promote(
    source: Directory,
    copier: Copier,
    record: Record,
    checkpoint: Committed,
    *,
    shared: bool,
    overwrite: bool,
) -> None:
    """Make the destination have the checkpoint that is committed in a local directory.

    All files are in it, if ``shared``. ``overwrite``: a checkpoint at the destination may be
    replaced that is not from here.

    Raises:
        Hopeless: The local checkpoint is damaged, or the destination has one that stays.
        Waiting: Other hosts have not brought all files, or a save replaces the local checkpoint.
        Exception: The destination refuses.
    """
    try:
        content, manifest = _committed(source)
        crc32, there = checksum.crc32(content), copier.content()
        if there != content or not copier.has(manifest.files):
            _require_replaceable(there, record, checkpoint, copier, overwrite=overwrite)
            _bring_all(source, copier, content, manifest.files, shared=shared)
    except (FileNotFoundError, Hopeless):
        if source.version() != checkpoint[:2]:
            raise Waiting("a later save replaces the local checkpoint") from None
        raise
    if there != content:
        there = copier.content()  # it may have taken hours
        _require_replaceable(there, record, checkpoint, copier, overwrite=overwrite)
        before = [] if there is None else [checksum.crc32(there)]
        record.note(checkpoint.name, "", *before, crc32)
        commit(copier.storage, [content], metadata_name=METADATA_NAME, replaced_files=())
    if not copier.has(manifest.files):
        raise OSError(f"files vanish at the destination: {copier.storage.where()}")
    replaced = {file.name for file in files_of(there)}
    copier.clean_up(manifest, replaced)
    record.note(checkpoint.name, checkpoint.version, crc32)


def _committed(source: Directory) -> tuple[bytes, Manifest]:
    path = os.path.join(source.path, METADATA_NAME)
    with io.BufferedReader(source.open(METADATA_NAME)) as stream:  # type: ignore[type-var]  # a raw file
        content = read_metadata(stream, path)
    try:
        _, manifest = split(content, path=path)
    except DamagedCheckpointError as error:
        raise Hopeless(error.message, path) from error
    if manifest is None or not all(is_plain(file.name) for file in manifest.files):
        raise Hopeless("the local metadata has no manifest, or names files elsewhere", path)
    return content, manifest


def _require_replaceable(
    there: bytes | None, record: Record, checkpoint: Committed, copier: Copier, *, overwrite: bool
) -> None:
    is_ours = there is None or record.may_have_put(checkpoint.name, checksum.crc32(there))
    if not is_ours and not overwrite:
        why = "the destination has a checkpoint that was not promoted from here"
        raise Hopeless(why, copier.storage.where(), "CheckpointExistsError")


def _bring_all(
    source: Directory, copier: Copier, content: bytes, files: Sequence[WrittenFile], *, shared: bool
) -> None:
    here = source.shards()
    elsewhere = [file for file in files if file.name not in here]
    if elsewhere and shared:
        raise Hopeless("a local file is gone", os.path.join(source.path, elsewhere[0].name))
    copier.bring(source, [file for file in files if file.name in here])
    if elsewhere and copier.content(DRAFT) != content:
        copier.storage.publish(DRAFT, [content])
    lengths = {file: copier.nbytes_of(file) for file in elsewhere}
    for file, nbytes in lengths.items():
        if nbytes not in (None, file.nbytes):
            path = copier.storage.where(file.name)
            raise Hopeless("another host could not read a file; its log says why", path)
    missing = [file.name for file, nbytes in lengths.items() if nbytes is None]
    if missing:
        raise Waiting(f"{len(missing)} of {len(files)} files are not there yet: {missing[0]}")
