"""The process that copies: a thread for each local root. It imports no torch.

Files are copied first, then ``.metadata`` is published, at one instant. In a directory a file is
copied under another name and renamed, so all hosts see it whole or not at all. Hosts without the
metadata learn from a draft at the destination which files to bring; the coordinator's host leaves
it there until it publishes.

Whatever the destination refuses is tried again after a pause, without end. The process ends with
the trainer; the next one finds out what the destination has, and does the rest.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any, NamedTuple, TypeAlias

from nostall._commit.commit import commit
from nostall._commit.manifest import split
from nostall._model import checksum
from nostall._model.jobs import Failure, page_aligned
from nostall._model.names import METADATA_NAME, counted, is_draft, is_ours_to_remove
from nostall._model.values import WrittenFile
from nostall._storage.damage import crc32_of_file
from nostall._storage.locations import (
    is_address,
    require_directory,
    storage_at,
    take_storage_options,
)
from nostall._storage.port import open_to_read, read_metadata, reason
from nostall._tier.local import Directory, Record, committed_at, is_locked, is_plain, names_in
from nostall._writer.messages import (
    Answer,
    Message,
    ignore_signals,
    make_importable,
    messages_from_parent,
    say_ready,
    send,
)
from nostall.errors import DamagedCheckpointError, NostallError

OLD_S = 3600.0
"""A file that no metadata names belongs to no unfinished save if it is older."""
DRAFT = f"{METADATA_NAME}.tmp"
_FILES_AT_A_TIME = 4
_CHUNK_NBYTES = 8 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 20.0


Job: TypeAlias = dict[str, Any]
"""A promotion in plain values: name, places, options."""


class Ask(NamedTuple):
    """A promotion; the lock's descriptor is sent with it."""

    job: Job


class News(NamedTuple):
    """Fields of a promotion's status that have changed."""

    job: str
    news: Job
    is_expected: bool = False
    """Whether the reason for a wait is usual, so that it is not logged."""


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

    ``on_progress`` is called with the number of bytes that the destination has accepted from this
    copier, and that of all files.
    """

    def __init__(
        self, destination: str, verified: set[str], on_progress: Callable[[int, int], None]
    ) -> None:
        if os.path.islink(destination):  # false for an address
            raise OSError(f"{destination} is a symbolic link, which may lead anywhere: remove it")
        require_directory(destination)
        self.storage = storage_at(destination, direct=True)
        self._verified = verified
        self._on_progress = on_progress
        self._written_nbytes = 0

    def bring(self, source: Directory, files: Sequence[WrittenFile]) -> None:
        """Copy those files that are not whole at the destination; raises as :func:`promote`."""
        total_nbytes = sum(file.nbytes for file in files)

        def bring_one(file: WrittenFile) -> None:
            is_whole = self.has([file]) and (
                file.name in self._verified
                or crc32_of_file(self.storage, file.name, lambda _: None) == file.crc32
            )
            if not is_whole:
                self._copy(source, file, total_nbytes)
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

    def _copy(self, source: Directory, file: WrittenFile, total_nbytes: int) -> None:
        storage, is_store, begin = self.storage, is_address(self.storage.where()), 0
        name = file.name if is_store else f"copy-of-{file.name}"
        if not is_store:
            storage.remove([name])  # of a copy that was interrupted
        chunk_nbytes = page_aligned(max(_CHUNK_NBYTES, storage.least_part(file.nbytes)))
        # A store's client may still be sending from the memory.
        pieces = _pieces(source, file, min(chunk_nbytes, page_aligned(file.nbytes)), anew=is_store)
        with closing(storage.put(name, file.nbytes, on_created=lambda _: None)) as upload:
            for memory, nbytes in pieces:
                upload.write(memory, begin, begin + nbytes, origin=begin)
                begin += nbytes
                self._written_nbytes += nbytes
                self._on_progress(self._written_nbytes, total_nbytes)
            upload.finish()
        if not is_store:
            os.replace(storage.where(upload.name), storage.where(file.name))

    def content(self, name: str = METADATA_NAME) -> bytes | None:
        """A metadata file at the destination; ``None`` if it does not exist."""
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            open_to_read(self.storage, name) as stream,
        ):
            return read_metadata(stream, self.storage.where(name))
        return None

    def clean_up(self, files: Sequence[WrittenFile], replaced: set[str]) -> None:
        """Remove the replaced checkpoint's files, drafts, and what killed processes have left."""
        storage = self.storage
        names, now_s = storage.list(), storage.stat(METADATA_NAME).modified_s
        unused = {name for name in names if is_draft(name)}
        for name in filter(is_ours_to_remove, {*names} - {file.name for file in files}):
            with suppress(OSError):
                if name in replaced or storage.stat(name).changed_s < now_s - OLD_S:
                    unused.add(name)
        storage.remove(sorted(unused))
        storage.flush()


def _pieces(
    source: Directory, file: WrittenFile, memory_nbytes: int, *, anew: bool
) -> Iterator[tuple[memoryview, int]]:
    """The content of a local file: page-aligned memory, with the number of bytes in it.

    ``anew``: each piece has memory of its own.
    """
    path, left_nbytes, crc32 = os.path.join(source.path, file.name), file.nbytes, 0
    memory = memoryview(b"")
    try:
        with source.open(file.name) as stream:
            while left_nbytes:
                if anew or not memory:
                    memory = memoryview(mmap.mmap(-1, memory_nbytes))
                wanted = memory[:left_nbytes]
                if stream.readinto(wanted) < len(wanted):
                    raise Hopeless(f"a local file has {stream.tell()} of {file.nbytes} bytes", path)
                crc32 = checksum.crc32(wanted, crc32)
                yield memory, len(wanted)
                left_nbytes -= len(wanted)
            if stream.read(1) or file.crc32 not in (None, crc32):
                raise Hopeless("a local file does not match its committed length or checksum", path)
    except FileNotFoundError:  # a later save may have removed it
        raise
    except OSError as error:
        raise Hopeless(f"a local file cannot be read: {reason(error)}", path) from error


def files_of(content: bytes | None) -> tuple[WrittenFile, ...]:
    """The files that metadata names; none without a manifest, or with a name that leads away."""
    with suppress(Hopeless):
        return _checked_files_of(content or b"", "")
    return ()


def _checked_files_of(content: bytes, path: str) -> tuple[WrittenFile, ...]:
    try:
        _, manifest = split(content, path=path)
    except DamagedCheckpointError as error:
        raise Hopeless(error.message, path) from error
    if manifest is None or not all(is_plain(file.name) for file in manifest.files):
        raise Hopeless("the local metadata has no manifest, or names files elsewhere", path)
    return manifest.files


def promote(
    source: Directory,
    copier: Copier,
    record: Record,
    version: str,
    *,
    shared: bool,
    overwrite: bool,
) -> None:
    """Make the destination have the checkpoint of a version that a local directory has.

    All files are in it, if ``shared``. ``overwrite``: a checkpoint at the destination may be
    replaced that is not from here.

    Raises :class:`Hopeless` if the local checkpoint is damaged, or the destination has one that
    stays; :class:`Waiting` if other hosts have not brought all files, or a save replaces the local
    checkpoint; and anything if the destination refuses.
    """
    name, path = os.path.basename(source.path), os.path.join(source.path, METADATA_NAME)

    def replaceable() -> bytes | None:
        """The metadata at the destination."""
        there = copier.content()
        if there not in (None, content) and not overwrite and not record.may_have_put(name, there):
            why = "the destination has a checkpoint that was not promoted from here"
            raise Hopeless(why, copier.storage.where(), "CheckpointExistsError")
        return there

    try:
        with source.open(METADATA_NAME) as stream:
            content = read_metadata(stream, path)
        files = _checked_files_of(content, path)
        there = replaceable()
        if there != content or not copier.has(files):
            _bring_all(source, copier, content, files, shared=shared)
            there = replaceable()  # it may have taken hours
            if not copier.has(files):
                raise OSError(f"files vanish at the destination: {copier.storage.where()}")
    except (FileNotFoundError, Hopeless):
        if source.version() != version:
            raise Waiting("a later save replaces the local checkpoint") from None
        raise
    if there != content:
        record.note(name, "", there, content)
        commit(copier.storage, [content], metadata_name=METADATA_NAME, replaced_files=())
    copier.clean_up(files, {file.name for file in files_of(there)})
    record.note(name, version, content)


def _bring_all(
    source: Directory, copier: Copier, content: bytes, files: Sequence[WrittenFile], *, shared: bool
) -> None:
    here = source.shards()
    elsewhere = [file for file in files if file.name not in here]
    if elsewhere and shared:
        raise Hopeless("a local file is missing", os.path.join(source.path, elsewhere[0].name))
    copier.bring(source, [file for file in files if file.name in here])
    if elsewhere and copier.content(DRAFT) != content:
        copier.storage.publish(DRAFT, [content])
    missing = []
    for file in elsewhere:
        nbytes = copier.nbytes_of(file)
        if nbytes is None:
            missing.append(file.name)
        elif nbytes != file.nbytes:
            path = copier.storage.where(file.name)
            raise Hopeless("another host's local file is damaged or unreadable; see its log", path)
    if missing:
        of_all = counted(len(files), "file")
        raise Waiting(f"{len(missing)} of {of_all} still to arrive: {missing[0]}")


def bring_part(
    source: Directory, copier: Copier, files: Collection[str], *, removes_old: bool
) -> None:
    """Bring files of a checkpoint whose metadata another host has; returns once it is published.

    The checkpoint has to have ``files``, or all files of this host. What it has is removed here. If
    ``removes_old``, so is what is too old for an unfinished save, and was not drafted: it was not
    committed. Raises as :func:`promote`.
    """
    here, old_s = source.shards(), time.time() - OLD_S
    drafted = [file for file in files_of(copier.content(DRAFT)) if file.name in here]
    try:
        if drafted:
            copier.bring(source, drafted)
    except Hopeless as error:  # the coordinator's host sees that it will not come
        copier.storage.publish(os.path.basename(error.failure.path or ""), [b""])
        raise
    published = {file.name for file in files_of(copier.content()) if copier.has([file])}
    old = {name for name, at_s in here.items() if removes_old and at_s < old_s}
    source.remove((published | old - {file.name for file in drafted}) & here.keys())
    if not published.issuperset(files or here):
        raise Waiting("the coordinator's host has not published the checkpoint")


def main(socket_fd: int, parent_pid: int, checksums_from: str) -> None:
    """Serve one trainer until it closes the socket or ends; arguments as of the writer process."""
    ignore_signals(signal.SIGTERM)
    sock = socket.socket(fileno=socket_fd)
    say_ready(sock, parent_pid, "nostall-tier")
    if checksums_from:
        checksum.use_fastest_from(checksums_from)
    sending, roots = threading.Lock(), dict[str, _Promoter]()

    def tell(message: Message) -> None:
        try:
            with sending:
                send(sock, message)
        except OSError:  # the trainer has ended
            os._exit(0)

    for message, descriptors in messages_from_parent(sock, parent_pid):
        assert isinstance(message, Ask)
        path = message.job["root"]
        if path not in roots:
            make_importable(message.job["sys_path"])
            take_storage_options(message.job["destination"], message.job["storage_options"])
            roots[path] = _Promoter(descriptors.pop(), tell)
            threading.Thread(target=roots[path].serve, name="nostall-tier", daemon=True).start()
        for fd in descriptors:
            os.close(fd)
        roots[path].asked.put(message.job)
    os._exit(0)  # whatever the other threads are doing


class _Promoter:
    def __init__(self, lock_fd: int, tell: Callable[[Message], None]) -> None:
        self.asked: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock_fd = lock_fd
        self._tell = tell
        self._jobs: list[Job] = []
        self._has_saved = False
        """Whether a checkpoint that this trainer has saved was promoted."""

    def serve(self) -> None:
        """Promote forever, in the order of the commits."""
        pause_s = _FIRST_PAUSE_S
        while True:
            with suppress(queue.Empty):
                self._jobs.append(self.asked.get(timeout=pause_s if self._jobs else None))
                pause_s = _FIRST_PAUSE_S
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            for job in list(self._jobs):
                failure = None
                try:
                    self._try(job)
                except Waiting as error:
                    self._tell(News(job["job"], {"trouble": str(error)}, is_expected=True))
                    if not job["is_left"] or not self._has_saved:
                        continue
                    failure = Hopeless(str(error), job["root"]).failure  # its hosts may not return
                except Hopeless as error:
                    failure = error.failure
                except Exception as error:  # whatever the client of a store raises; it may pass
                    is_text = isinstance(error, NostallError | OSError)
                    trouble = str(error) if is_text else repr(error)
                    self._tell(News(job["job"], {"trouble": trouble}))
                    break  # the next ones wait
                self._end(job, failure)
                pause_s = _FIRST_PAUSE_S

    def _try(self, job: Job) -> None:
        if not is_locked(self._lock_fd):
            raise Waiting("another process promotes from this directory")
        root, name, files = job["root"], job["name"], job["files"]
        if files is None:
            if (version := committed_at(root, name)) is None:
                raise Hopeless("the local checkpoint no longer exists", os.path.join(root, name))
            if not (record := Record(root, job["destination"])).has(name, version):
                options = {option: job[option] for option in ("shared", "overwrite")}
                with closing(Directory(root, name)) as source:
                    promote(source, self._copier(job), record, version, **options)
        elif name in names_in(root):
            with closing(Directory(root, name)) as source:
                bring_part(source, self._copier(job), files, removes_old=self._has_saved)
            for each in names_in(root):
                with suppress(OSError):  # not empty
                    path = os.path.join(root, each)
                    if os.lstat(path).st_mtime < time.time() - OLD_S:
                        os.rmdir(path)

    def _copier(self, job: Job) -> Copier:
        def on_progress(nbytes: int, of_nbytes: int) -> None:
            self._tell(News(job["job"], {"nbytes": of_nbytes, "written_nbytes": nbytes}))

        verified = job.setdefault("verified", set())
        return Copier(f"{job['destination']}/{job['name']}", verified, on_progress)

    def _end(self, job: Job, failure: Failure | None) -> None:
        """Answer a job, and earlier ones of the same name: it is in their place."""
        self._has_saved |= failure is None and not job["is_left"]
        for each in self._jobs[: self._jobs.index(job) + 1]:
            if each["name"] == job["name"]:
                self._jobs.remove(each)
                self._tell(Answer(each["job"], failure))
        if job["shared"] and not self._jobs:  # another rank may promote, too
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
