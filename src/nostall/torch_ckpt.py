"""``torch.save`` in the background, for checkpoints that are one file."""

from __future__ import annotations

import errno
import io
import os
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from nostall._engine import default_engine
from nostall._memory.arena import Lease
from nostall._memory.snapshot import write_over
from nostall._model.interrupts import is_done, on_done
from nostall._model.jobs import (
    FileImage,
    RankFailed,
    RankReport,
    SealTable,
    WriteJob,
)
from nostall._model.lifecycle import State
from nostall._model.threads import start_apart
from nostall._save.background import BackgroundSave
from nostall._storage.destination import absolute, without_links
from nostall._storage.posix import (
    has_identity,
    identity_of,
    keep_mode_and_owner,
    remove_files,
    sync_name,
)
from nostall._storage.posix_storage import give_name, make_name_durable
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


_NAME_NBYTES = 200
"""Of 255 that file systems allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Archive:
    """A finished ``torch.save`` archive in snapshot memory."""

    lease: Lease
    nbytes: int


class _FileSave(BackgroundSave):
    """One ``torch.save`` to a path: written under a temporary name, then renamed."""

    def __init__(
        self, state_dict: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # As torch.save does, which writes to what a link leads to.
        job, self._path = uuid.uuid4().hex, without_links(str(absolute(path)))
        progress = default_engine().under_way.begin(job, path=self._path, rank=0)
        super().__init__(rank=0, job=job, progress=progress)
        self._state_dict = state_dict
        self._args = args
        self._kwargs = kwargs

    def stage(self) -> _Archive:
        self.progress.to(State.STAGING)
        nbytes = self._archive_nbytes()
        self.progress.expect(nbytes)
        lease = self.engine.lease(nbytes)
        write_over(lease.block)
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
        return _Archive(lease=lease, nbytes=sink.tell())  # may be less, for the same reason

    def submit(self, snapshot: _Archive) -> Future[RankReport]:
        self.progress.to(State.STAGED)
        placed: Future[RankReport] = Future()

        def settle(done: Future[RankReport]) -> None:
            placed.set_result(self._placed(done.result(), after=before))

        written = self.engine.submit(self._job(snapshot), snapshot.lease)
        file = os.getpid(), self._path
        before, _last_to[file] = _last_to.get(file), placed
        on_done(written, lambda done: start_apart("nostall-placing", lambda: settle(done)))
        return placed

    def _archive_nbytes(self) -> int:
        """Length of the archive; without copying tensor data where torch supports it."""
        nothing = memoryview(bytearray())
        counter = _Archiver(nothing)
        try:
            with torch.serialization.skip_data():
                torch.save(self._state_dict, counter, *self._args, **self._kwargs)
        except (NotImplementedError, RuntimeError, TypeError):  # the old format cannot skip data
            counter = _Archiver(nothing)
            torch.save(self._state_dict, counter, *self._args, **self._kwargs)
        return counter.tell()

    def _job(self, archive: _Archive) -> WriteJob:
        options = self.engine.options
        nothing_to_seal = SealTable(
            templates=((0, archive.nbytes, None),), blob_offsets=(0,), template_of_slot=(0,)
        )
        image = FileImage(
            name=f".{_beginning_of(os.path.basename(self._path))}.{self.job[:8]}.tmp",
            nbytes=archive.nbytes,
            block=archive.lease.block.id,
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
            faults=self.engine.faults,
        )

    def _settle(self, report: RankReport) -> None:
        self.progress.end()  # there are no other ranks, and no metadata
        super()._settle(report)

    def _placed(self, report: RankReport, *, after: Future[RankReport] | None) -> RankReport:
        """The report after renaming the file; never raises an ordinary exception."""
        if isinstance(report, RankFailed):
            return report
        try:
            self._put_in_place(report.receipts[0].name, after)
        except Exception as error:  # reported to the waiting caller
            return self.failed(error, phase="commit")
        return report

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
        try:
            sync_name(directory)
            if after is not None:
                self._let_go_first(after)
            if self.aborted:
                raise SaveAbortedError("the save was aborted", phase="commit", path=self._path)
            keep_mode_and_owner(temporary, of=self._path)
            identity = identity_of(temporary)
            give_name(
                self._path,
                temporary,
                what="the file",
                is_there=lambda: has_identity(self._path, identity),
            )
        except NotDurableError:
            raise
        except BaseException as error:  # whatever ended it, the temporary file goes
            remove_files([temporary])
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

    def _let_go_first(self, earlier: Future[RankReport]) -> None:
        timeout_s = self.engine.options.save_timeout_s
        if not is_done(earlier, timeout_s):
            raise SaveTimeoutError(
                f"an earlier save to this file did not end within {timeout_s:g} s",
                phase="commit",
                path=self._path,
                hint="storage hangs, or EngineOptions.save_timeout_s is too short",
            )


def _beginning_of(name: str) -> str:
    """As much of a file's name as leaves room for more: it may be as long as names can be."""
    return os.fsencode(name)[:_NAME_NBYTES].decode(errors="ignore")


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
            """As ``torch.save(state_dict, path, ...)``, writing in the background.

            Directories are made. The mode and, where permitted, the owner of an existing file are
            kept; a device, a FIFO or a socket is refused. :meth:`finalize_async_save` raises errors
            of pickling and writing.

            Raises:
                OptionError: The target is not a path.
            """
            self._schedule(state_dict, args, kwargs)

    def _schedule(self, state_dict: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = kwargs.pop("f", None)
        if target is None and args:
            target, *rest = args
            args = tuple(rest)
        if not isinstance(target, str | os.PathLike):
            raise OptionError(
                f"an object of type {type(target).__name__} cannot be written in the background",
                hint="pass a path: async_save(state_dict, path)",
            )
        save = _FileSave(state_dict, os.fspath(target), args, kwargs)
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

    def __init__(self, memory: memoryview) -> None:
        super().__init__()
        self._memory = memory
        self._at = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

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
