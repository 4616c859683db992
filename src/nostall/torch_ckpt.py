"""``torch.save`` in the background, for checkpoints that are one file."""

from __future__ import annotations

import errno
import io
import os
import stat
import uuid
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from nostall._engine import default_engine
from nostall._memory.arena import Lease
from nostall._model.jobs import FileImage, RankFailed, RankReport, SealTable, WriteJob
from nostall._model.progress import SaveState
from nostall._model.threads import is_done, spawn_or_run, uninterrupted
from nostall._save.split_save import BackgroundSave
from nostall._storage.locations import absolute, require_possible, without_links
from nostall._storage.posix import give_name, make_name_durable, remove_leftover, sync_name
from nostall._writer.trainer_side import import_paths
from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.errors import (
    NotDurableError,
    OptionError,
    SaveAbortedError,
    SaveError,
    SaveTimeoutError,
    StagingError,
    WriteError,
)

__all__ = ["TorchAsyncCheckpoint"]

_last_to: WeakValueDictionary[tuple[int, str], Future[RankReport]] = WeakValueDictionary()
"""The last save by process and file: saves to one file are renamed in the order of their calls."""

_NAME_LENGTH = 48
"""Characters of a temporary file's name, which may have 255 bytes: up to four each."""


def _keep_mode_and_owner(path: str, *, of: str) -> None:
    """Give a file the mode and owner of the file that it is to replace, if one exists.

    ``OSError`` if that is a device, a FIFO or a socket.
    """
    try:
        old = os.stat(of)
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(old.st_mode) or stat.S_ISDIR(old.st_mode)):  # rename refuses a directory
        raise OSError(errno.EINVAL, "the path is that of a device, a FIFO or a socket")
    with suppress(PermissionError):  # another user's file; the directory may be shared
        os.chown(path, old.st_uid, old.st_gid)
    with suppress(PermissionError):  # this file system has no modes
        os.chmod(path, stat.S_IMODE(old.st_mode))


class _FileSave(BackgroundSave):
    """One ``torch.save`` to a path: written under a temporary name, then renamed."""

    def __init__(
        self, state_dict: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # As torch.save does, which writes to what a link leads to.
        job, self._path = uuid.uuid4().hex, without_links(absolute(path))
        progress = default_engine().in_progress.begin(path=self._path, rank=0)
        super().__init__(rank=0, job=job, progress=progress)
        self._state_dict = state_dict
        self._args = args
        self._kwargs = kwargs

    def stage(self) -> tuple[Lease, int]:
        """The archive in snapshot memory, and its length."""
        with uninterrupted():
            self.progress.to(SaveState.STAGING)
            nbytes = self._archive_nbytes()
            self.progress.nbytes = nbytes
            lease = self.engine.lease(nbytes)
            lease.block.prepared_views = None  # they are written over
            try:
                sink = _Archiver(lease.block.image(0, nbytes))
                torch.save(self._state_dict, sink, *self._args, **self._kwargs)
                if sink.tell() > nbytes:
                    raise StagingError(
                        f"torch.save wrote {sink.tell()} bytes, but {nbytes} when the archive was"
                        " measured",
                        phase="stage",
                        path=self._path,
                        hint="an object in it is pickled differently each time; give its pickle a"
                        " constant length",
                    )
            except BaseException:  # of the user's pickling code, or an interrupt
                lease.release()
                raise
            self._state_dict = None
            return lease, sink.tell()  # may be less, for the same reason

    def submit(self, snapshot: tuple[Lease, int]) -> Future[RankReport]:
        self.progress.to(SaveState.STAGED)
        lease, nbytes = snapshot
        placed: Future[RankReport] = Future()

        def place(report: RankReport) -> None:
            if not isinstance(report, RankFailed):
                try:
                    self._put_in_place(report.receipts[0].name, before)
                except Exception as error:  # reported to the waiting caller
                    report = self.failed(error, phase="commit")
            placed.set_result(report)

        written = self.engine.submit(self._job(lease, nbytes), lease, self.progress)
        file = os.getpid(), self._path
        before, _last_to[file] = _last_to.get(file), placed
        written.add_done_callback(
            lambda done: spawn_or_run("nostall-placing", lambda: place(done.result()))
        )
        return placed

    def _archive_nbytes(self) -> int:
        """Length of the archive; without copying tensor data where torch supports it."""
        counter = _Archiver()
        try:
            with torch.serialization.skip_data():
                torch.save(self._state_dict, counter, *self._args, **self._kwargs)
        except (NotImplementedError, RuntimeError, TypeError):  # the old format cannot skip data
            counter = _Archiver()
            torch.save(self._state_dict, counter, *self._args, **self._kwargs)
        return counter.tell()

    def _job(self, lease: Lease, nbytes: int) -> WriteJob:
        options = self.engine.options
        nothing_to_seal = SealTable(
            templates=((0, nbytes, None),), blob_offsets=(0,), template_of_slot=(0,)
        )
        image = FileImage(
            name=f".{os.path.basename(self._path)[:_NAME_LENGTH]}.{self.job[:8]}.tmp",
            nbytes=nbytes,
            block=lease.block.id,
            block_offset=0,
            seals=nothing_to_seal,
        )
        return WriteJob(
            job=f"{self.job}/0/0",
            rank=0,
            directory=os.path.dirname(self._path),
            files=(image,),
            sync_files=True,
            io_threads=self.engine.io_threads,
            chunk_nbytes=options.chunk_nbytes,
            direct=options.direct_io,
            checksum_files=False,
            retries=options.write_retries,
            sys_path=tuple(import_paths()) if self.engine.faults else (),
            faults=self.engine.faults,
        )

    def _settle(self, report: RankReport) -> None:
        # There are no other ranks, and no metadata.
        if isinstance(report, RankFailed):
            self.progress.to(SaveState.FAILED)
        elif self.progress.to(SaveState.WRITTEN):
            self.progress.to(SaveState.COMMITTED)
        super()._settle(report)

    def _put_in_place(self, temporary_name: str, after: Future[RankReport] | None) -> None:
        """Rename the file durably, after the earlier save has done so or has failed.

        Raises:
            WriteError: The rename failed; an earlier file of this name is unchanged.
            NotDurableError: The new file has the name, or may have it.
            SaveTimeoutError: The earlier save has not ended.
            SaveAbortedError: The save was aborted before.
        """
        directory = os.path.dirname(self._path)
        temporary = os.path.join(directory, temporary_name)
        timeout_s = self.engine.options.save_timeout_s
        try:
            sync_name(directory)
            if after is not None and not is_done(after, timeout_s):
                raise SaveTimeoutError(
                    f"an earlier save to this file did not end within {timeout_s:g} s",
                    phase="commit",
                    path=self._path,
                    hint="storage hangs, or EngineOptions.save_timeout_s is too short",
                )
            if self.progress.is_over:
                raise SaveAbortedError("the save was aborted", phase="commit", path=self._path)
            _keep_mode_and_owner(temporary, of=self._path)
            status = os.stat(temporary)
            give_name(
                self._path,
                temporary,
                what="the file",
                is_there=lambda: os.path.samestat(os.stat(self._path), status),
            )
        except NotDurableError:
            raise
        except BaseException as error:  # whatever ended it, the temporary file goes
            remove_leftover(temporary)
            if not isinstance(error, OSError) or isinstance(error, SaveError):
                raise
            raise WriteError(
                f"{type(error).__name__}: {error.strerror}",
                errno=error.errno,
                phase="commit",
                path=self._path,
                hint="pass the path of a regular file, existing or not"
                if isinstance(error, IsADirectoryError) or error.errno == errno.EINVAL
                else None,
            ) from error
        make_name_durable(self._path, what="the new file")


class TorchAsyncCheckpoint:
    """Saves with ``torch.save`` while training continues.

    :meth:`async_save` makes the archive in snapshot memory, so the caller may change the state dict
    when it returns; the writer process writes the archive to storage. The file appears under its
    name only when it is complete and durable.

    Args:
        persistent_queue: Accepted for compatibility; the writer process is always kept.
    """

    save = staticmethod(torch.save)
    """The function that :meth:`async_save` replaces, for saves in the foreground."""

    def __init__(self, persistent_queue: bool = True) -> None:
        self._queue = AsyncCallsQueue(persistent=persistent_queue)

    @property
    def pending(self) -> int:
        """Number of saves that are not finalised."""
        return self._queue.pending

    if TYPE_CHECKING:
        # The arguments of torch.save, behind the signature that frameworks inspect.
        def async_save(
            self,
            state_dict: object,
            f: str | os.PathLike[str],
            pickle_module: Any = ...,
            pickle_protocol: int = ...,
            _use_new_zipfile_serialization: bool = True,
            _disable_byteorder_record: bool = False,
        ) -> None: ...

    else:

        def async_save(self, state_dict: object, *args: Any, **kwargs: Any) -> None:
            """Save as ``torch.save(state_dict, path, ...)`` does, writing in the background.

            Directories are made. The mode and, where permitted, the owner of an existing file are
            kept; a device, a FIFO or a socket is refused. :meth:`finalize_async_save` raises errors
            of pickling and writing.

            Raises:
                OptionError: The target is not a path, or one that no file can have.
            """
            target = kwargs.pop("f", None)
            if target is None and args:
                target, *args = args
            if not isinstance(target, str | os.PathLike):
                kind = type(target).__name__
                raise OptionError(
                    f"an object of type {kind} cannot be written in the background",
                    hint="pass a path: async_save(state_dict, path)",
                )
            require_possible(target)
            save = _FileSave(state_dict, os.fspath(target), tuple(args), kwargs)
            request = AsyncRequest(save, [0, None], [], preload_fn=save.stage)
            self._queue.schedule_async_request(request)

    def finalize_async_save(
        self, blocking: bool = False, no_dist: bool = True, terminate: bool = False
    ) -> None:
        """Finalise finished saves, or all of them with ``blocking``.

        With ``terminate``, worker processes are ended afterwards.

        Raises:
            CheckpointException: A save failed; the text names the file and the cause.
        """
        self._queue.maybe_finalize_async_calls(blocking=blocking, no_dist=no_dist)
        if terminate:
            self.close()

    def close(self, abort: bool = False) -> None:
        """Wait for all saves, or give them up with ``abort``. Idempotent."""
        if not abort:
            self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        self._queue.close(abort=abort)


class _Archiver(io.BytesIO):
    """Counts bytes written or skipped, and writes them into memory as far as it reaches."""

    def __init__(self, memory: memoryview | None = None) -> None:
        super().__init__()
        self._memory = memory or memoryview(bytearray())
        self._at = 0

    def write(self, piece: Any) -> int:
        view = memoryview(piece).cast("B")
        if self._at + view.nbytes <= len(self._memory):
            self._memory[self._at : self._at + view.nbytes] = view
        self._at += view.nbytes
        return view.nbytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR:
            raise io.UnsupportedOperation("only relative seeks are expected")
        self._at += offset
        return self._at

    def tell(self) -> int:
        return self._at
