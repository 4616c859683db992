"""Where the bytes go: through the page cache or past it, durable or not, by users' callables."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import pickle
import stat
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, StorageReader
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall import _torch
from nostall._engine import default_engine
from nostall._model.jobs import FileImage, RankFailed, RankReport, RankWritten, SealTable, WriteJob
from nostall._model.names import is_draft
from nostall._save.split_save import SplitSave
from nostall._storage import posix
from nostall._storage.posix import PosixStorage
from nostall._writer.files import perform
from nostall._writer.shared import WholeImage
from nostall.core import AsyncCallsQueue
from nostall.errors import WriteError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan
from programs.openers import (
    FullUpload,
    OfOneThread,
    Upload,
    open_and_sign,
    open_but_one,
    open_nothing,
    open_pairs,
)
from programs.streams import Zlib
from support.faults import Fault, Hold, inject, writer_pids
from support.points import Planned
from support.states import blobs, read_metadata, save_stock_way, schedule, small_state

DEADLINE_S = 60.0
PAGE = 4096


def odd_state(seed: int = 0) -> dict[str, Any]:
    """A few hundred kilobytes that end nowhere near a page."""
    state = small_state(seed)
    state["large"] = torch.arange(70_001, dtype=torch.float32)
    return state


def save(path: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=FileSystemWriterAsync(path, **options))


def split_save(path: Path, state: dict[str, Any], **options: Any) -> None:
    with AsyncCallsQueue() as queue:
        schedule(queue, path, state, **options)


def async_save(path: Path, state: dict[str, Any], **options: Any) -> None:
    future = dcp.async_save(state, storage_writer=FileSystemWriterAsync(path, **options))
    assert isinstance(future, Future)
    future.result(DEADLINE_S)


WAYS = {"save": save, "split save": split_save, "async_save": async_save}


def stock(path: Path, state: dict[str, Any]) -> dict[Any, bytes]:
    dcp.save(state, storage_writer=FileSystemWriter(path))
    return blobs(path)


def report_of(path: Path, state: dict[str, Any], **options: Any) -> Callable[[], RankReport]:
    """Start a split save by hand; returns a function that gives its finalised report."""
    writer = FileSystemWriterAsync(path, **options)
    planned = save_state_dict_async_plan(state, writer)
    save_fn, preload_fn, _ = writer.get_save_function_and_args()
    assert isinstance(save_fn, SplitSave)
    report = save_fn.start(preload_fn())

    def finish() -> RankReport:
        ended = report.result(DEADLINE_S)
        save_state_dict_async_finalize(*planned)
        return ended

    return finish


def as_a_closure(open_file: Callable[..., Any]) -> Callable[..., Any]:
    """The function in a closure, which cannot be sent to another process."""

    def own_open(path: str, mode: str) -> Any:
        return open_file(path, mode)

    return own_open


def failure_of(caught: pytest.ExceptionInfo[CheckpointException]) -> WriteError:
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, WriteError)
    return error


# --- direct or not --------------------------------------------------------------------------------


@pytest.fixture
def takes_direct_io(tmp_path: Path) -> None:
    """Skip where the file system of the tests does not take O_DIRECT."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system does not take O_DIRECT")


@pytest.mark.usefixtures("takes_direct_io")
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_direct_io_is_used_where_it_is_taken_and_not_switched_off(
    tmp_path: Path,
    direct: bool,  # noqa: FBT001  # a parameter of the test
) -> None:
    """The writer's open descriptor carries O_DIRECT, or not if ``direct_io=False``."""
    nostall.configure(EngineOptions(direct_io=direct))
    with Hold("fsync") as hold, inject(hold.fault), AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "saved", odd_state())
        hold.wait_reached()
        process = psutil.Process(writer_pids()[0])
        (file,) = (each for each in process.open_files() if each.path.endswith("__0_0.distcp"))
        fdinfo = Path(f"/proc/{process.pid}/fdinfo/{file.fd}").read_text()
        hold.release()
    flags = next(line.split()[1] for line in fdinfo.splitlines() if line.startswith("flags:"))
    assert bool(int(flags, 8) & os.O_DIRECT) is direct


@pytest.fixture
def in_memory_directory() -> Iterator[Path]:
    """A directory on tmpfs, where every Linux has one."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_checkpoint_on_tmpfs_is_the_one_on_disk(
    way: Callable[..., None], in_memory_directory: Path, tmp_path: Path
) -> None:
    """Byte for byte, and once more over the first one."""
    for seed in (1, 2):
        way(in_memory_directory / "saved", odd_state(seed))
        way(tmp_path / "saved", odd_state(seed))
        assert blobs(in_memory_directory / "saved") == blobs(tmp_path / "saved")


def _refusing_flag(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuse the flag, like a file system without direct I/O."""
    refused = []
    real = fcntl.fcntl

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            refused.append(os.readlink(f"/proc/self/fd/{fd}"))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    return refused


def _refusing_write(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuse direct writes, but not the flag, like some file systems; returns the refused paths."""
    refused = []
    real = os.pwrite

    def refuse(fd: int, piece: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(os.readlink(f"/proc/self/fd/{fd}"))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, piece, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    return refused


@pytest.mark.usefixtures("takes_direct_io")
@pytest.mark.parametrize("refuse", [_refusing_flag, _refusing_write], ids=["flag", "write"])
@pytest.mark.parametrize("chunk_nbytes", [PAGE, 8 << 20], ids=["many chunks", "one chunk"])
def test_a_file_system_that_refuses_direct_io_gets_the_same_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refuse: Callable[[pytest.MonkeyPatch], list[str]],
    chunk_nbytes: int,
) -> None:
    """A file for which direct writes are refused goes through the page cache, the same to the byte.

    Refused with EINVAL: the flag, or a write, by one thread or several at once.
    """
    nostall.configure(EngineOptions(chunk_nbytes=chunk_nbytes))
    save(tmp_path / "direct", odd_state(), thread_count=2)
    refused = refuse(monkeypatch)
    save(tmp_path / "refused", odd_state(), thread_count=2)
    for name in ("__0_0.distcp", "__0_1.distcp"):
        assert str(tmp_path / "refused" / name) in refused
        written = (tmp_path / "refused" / name).read_bytes()
        assert written == (tmp_path / "direct" / name).read_bytes()


@pytest.mark.parametrize("thread_count", [1, 3])
def test_what_goes_through_the_page_cache_is_written_from_front_to_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread_count: int
) -> None:
    """One write of a file at a time, in order, as file systems in user space or networks prefer."""
    nostall.configure(EngineOptions(direct_io=False, chunk_nbytes=PAGE, io_threads=12))
    real, written = os.pwrite, defaultdict[str, list[tuple[int, int]]](list)

    def record(fd: int, piece: Any, offset: int) -> int:
        written[os.readlink(f"/proc/self/fd/{fd}")].append((offset, len(piece)))
        return real(fd, piece, offset)

    monkeypatch.setattr(os, "pwrite", record)
    state = {f"{number}": torch.full((100_000,), float(number)) for number in range(6)}
    save(tmp_path / "saved", state, thread_count=thread_count)
    shards = [writes for path, writes in written.items() if path.endswith(".distcp")]
    assert len(shards) == thread_count
    for writes in shards:
        assert len(writes) > 100
        ends = [offset + nbytes for offset, nbytes in writes]
        assert [offset for offset, _ in writes] == [0, *ends[:-1]]


def test_memory_that_the_device_does_not_take_is_written_through_the_page_cache(
    tmp_path: Path,
) -> None:
    """A real refusal by the kernel, for memory that is not aligned, is no error either.

    From then on the file is written through the page cache, and a last piece shorter than a page is
    exact.
    """
    content = bytes(range(256)) * 40 + b"the end"
    memory = mmap.mmap(-1, 4 * PAGE)
    memory[1 : 1 + len(content)] = content
    image = memoryview(memory)[1 : 1 + 3 * PAGE]
    files = PosixStorage(str(tmp_path), direct=True)
    file = files.put("file", len(content), on_created=lambda _: None)
    for begin in range(0, len(content), PAGE):
        file.write(image, begin, min(begin + PAGE, len(content)))
    file.finish()
    file.close()
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("chunk_nbytes", [PAGE, 8 << 20], ids=["many chunks", "one chunk"])
def test_files_end_where_their_last_item_does(
    tmp_path: Path,
    way: Callable[..., None],
    direct: bool,  # noqa: FBT001  # a parameter of the test
    chunk_nbytes: int,
) -> None:
    """A length that is no multiple of the page size is exact, and the file is stock's."""
    nostall.configure(EngineOptions(direct_io=direct, chunk_nbytes=chunk_nbytes))
    way(tmp_path / "saved", odd_state())
    save_stock_way(tmp_path / "stock", odd_state())
    content = (tmp_path / "saved" / "__0_0.distcp").read_bytes()
    assert content == (tmp_path / "stock" / "__0_0.distcp").read_bytes()
    assert len(content) % PAGE
    infos = read_metadata(tmp_path / "saved").storage_data.values()
    assert max(info.offset + info.length for info in infos) == len(content)


# --- durable or not -------------------------------------------------------------------------------


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what this process makes durable, in order."""
    names: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return names


def test_everything_is_durable_before_what_refers_to_it(tmp_path: Path, synced: list[str]) -> None:
    """Shard files, their directory, its name and temporary metadata, then the directory again."""
    save(tmp_path / "saved", odd_state(), thread_count=2)
    assert sorted(synced[:2]) == ["__0_0.distcp", "__0_1.distcp"]
    assert synced[2] == synced[-1] == "saved"
    temporary, parent = sorted(synced[3:-1])
    assert is_draft(temporary)
    assert parent == tmp_path.name


def test_nothing_is_synced_with_sync_files_off(tmp_path: Path, synced: list[str]) -> None:
    """``sync_files=False`` waits for no device, neither for shard files nor for the metadata."""
    save(tmp_path / "saved", odd_state(), sync_files=False, thread_count=2)
    save(tmp_path / "streamed", odd_state(), sync_files=False, open_file=as_a_closure(Upload))
    assert synced == []
    assert blobs(tmp_path / "saved") == blobs(tmp_path / "streamed")


@pytest.mark.parametrize("sync_files", [True, False])
def test_receipts_tell_whether_files_are_durable(
    tmp_path: Path,
    sync_files: bool,  # noqa: FBT001  # a parameter of the test
) -> None:
    """The writer process gets ``sync_files``, and its receipts say what it did."""
    report = report_of(tmp_path / "saved", odd_state(), sync_files=sync_files, thread_count=2)()
    assert isinstance(report, RankWritten)
    assert [receipt.fsynced for receipt in report.receipts] == [sync_files, sync_files]


@pytest.fixture
def umask() -> Iterator[None]:
    """An unusual umask; set before any writer process starts, which inherits it."""
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("options", [{}, {"open_file": Upload}], ids=["images", "streams"])
def test_files_get_the_permissions_that_the_umask_leaves(
    tmp_path: Path, way: Callable[..., None], options: dict[str, Any]
) -> None:
    """Shard files and metadata are as readable as the user's other files, in every way."""
    way(tmp_path / "saved", odd_state(), **options)
    modes = {
        name: stat.S_IMODE((tmp_path / "saved" / name).stat().st_mode)
        for name in os.listdir(tmp_path / "saved")
    }
    assert modes == {".metadata": 0o640, "__0_0.distcp": 0o640}


# --- the user's own callables ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "here"),
    [(save, True), (split_save, False), (async_save, False)],
    ids=WAYS,
)
def test_a_users_own_open_is_called_for_every_shard_file(
    tmp_path: Path,
    way: Callable[..., None],
    here: bool,  # noqa: FBT001  # a parameter of the test
) -> None:
    """An importable ``open_file`` opens all files, and what it stores is what stock stores.

    In the writer process unless the save is synchronous.
    """
    way(tmp_path / "saved", odd_state(), thread_count=3, open_file=open_and_sign)
    assert blobs(tmp_path / "saved") == stock(tmp_path / "stock", odd_state())
    signed = {path.name: int(path.read_text()) for path in (tmp_path / "saved").glob("*.opened-by")}
    assert sorted(signed) == [f"__0_{number}.distcp.opened-by" for number in range(3)]
    assert set(signed.values()) == ({os.getpid()} if here else set(writer_pids()))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_open_that_cannot_travel_is_called_in_the_trainer(
    tmp_path: Path, way: Callable[..., None]
) -> None:
    """A closure works as well; a thread of the trainer then writes files from the snapshot."""
    opened = []

    def own_open(path: str, mode: str) -> IO[Any]:
        opened.append((os.path.basename(path), os.getpid()))
        return open(path, mode)

    way(tmp_path / "saved", odd_state(), thread_count=2, open_file=own_open)
    assert sorted(opened) == [(f"__0_{number}.distcp", os.getpid()) for number in range(2)]
    assert blobs(tmp_path / "saved") == stock(tmp_path / "stock", odd_state())


def test_a_save_through_a_closure_does_not_stall_the_trainer(tmp_path: Path) -> None:
    """While the closure stands still the call has returned, and later changes do not show."""
    begun, go_on = threading.Event(), threading.Event()

    def slow_open(path: str, mode: str) -> IO[Any]:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return open(path, mode)

    state = odd_state()
    expected = stock(tmp_path / "stock", state)
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "saved", state, open_file=slow_open)
        assert begun.wait(DEADLINE_S)
        state["large"].fill_(99)
        go_on.set()
    assert blobs(tmp_path / "saved") == expected


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_stream_need_not_have_a_descriptor(tmp_path: Path, way: Callable[..., None]) -> None:
    """A stream that can be written, flushed and closed is enough, as an upload is."""
    way(tmp_path / "saved", odd_state(), open_file=Upload)
    assert blobs(tmp_path / "saved") == stock(tmp_path / "stock", odd_state())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("open_file", "code"),
    [
        (open_nothing, errno.EACCES),
        (FullUpload, errno.EDQUOT),
        (as_a_closure(open_nothing), errno.EACCES),
    ],
    ids=["open", "write", "open of a closure"],
)
def test_an_error_of_the_users_storage_is_a_write_error(
    tmp_path: Path, way: Callable[..., None], open_file: Callable[..., Any], code: int
) -> None:
    """An error of the user's stream arrives with path and errno; the next save works."""
    with pytest.raises(CheckpointException) as caught:
        way(tmp_path / "saved", odd_state(), open_file=open_file)
    error = failure_of(caught)
    assert (error.errno, error.path) == (code, str(tmp_path / "saved" / "__0_0.distcp"))
    assert os.listdir(tmp_path / "saved") == []
    way(tmp_path / "saved", odd_state())
    assert blobs(tmp_path / "saved") == stock(tmp_path / "stock", odd_state())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_stream_extensions_are_undone_by_stock_readers(
    tmp_path: Path, way: Callable[..., None]
) -> None:
    """Items compressed by a user's extension are loaded by stock DCP.

    The metadata tells it how. They are compressed in the writer process unless the save is
    synchronous.
    """
    state = odd_state(3)
    way(tmp_path / "saved", state, thread_count=2, _extensions=[Zlib()])
    infos = read_metadata(tmp_path / "saved").storage_data.values()
    assert {tuple(info.transform_descriptors) for info in infos} == {("stream.zlib/1",)}
    stored = sum(info.length for info in infos)
    assert stored == sum(path.stat().st_size for path in (tmp_path / "saved").glob("*.distcp"))
    assert stored < sum(map(len, stock(tmp_path / "stock", state).values()))
    registry = ExtensionRegistry()
    registry.register(Zlib)
    loaded = odd_state(4)
    loaded["large"].fill_(-1)
    reader = FileSystemReader(tmp_path / "saved", _extension_registry=registry)
    dcp.load(loaded, storage_reader=reader)
    assert stock(tmp_path / "again", loaded) == blobs(tmp_path / "stock")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_stocks_zstandard_compresses_is_loaded(
    tmp_path: Path, way: Callable[..., None]
) -> None:
    """By stock, which knows its own extension, and by nostall's readers, from several files."""
    state = odd_state(3)
    way(tmp_path / "saved", state, thread_count=3, _extensions=[_torch.compression()])
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 3
    stock(tmp_path / "stock", state)
    readers: list[StorageReader] = [
        FileSystemReader(tmp_path / "saved"),
        nostall.FileSystemReader(tmp_path / "saved"),
    ]
    for number, reader in enumerate(readers):
        loaded = odd_state(4)
        dcp.load(loaded, storage_reader=reader)
        assert stock(tmp_path / f"again {number}", loaded) == blobs(tmp_path / "stock")


# --- in parallel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [split_save, async_save])
def test_streams_are_written_several_at_a_time(tmp_path: Path, way: Callable[..., None]) -> None:
    """``io_threads`` streams are written at a time, each by one thread with its own extensions."""
    nostall.configure(EngineOptions(io_threads=2))
    options = {"open_file": open_pairs, "_extensions": [OfOneThread()]}
    way(tmp_path / "saved", odd_state(), thread_count=4, **options)
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 4
    assert blobs(tmp_path / "saved") == stock(tmp_path / "stock", odd_state())


def test_a_stream_that_fails_fails_the_save(tmp_path: Path) -> None:
    """Also while another one is written: its error is the save's, and no file is left."""
    nostall.configure(EngineOptions(io_threads=2, chunk_nbytes=PAGE))
    with pytest.raises(CheckpointException) as caught:
        split_save(tmp_path / "saved", odd_state(), thread_count=2, open_file=open_but_one)
    error = failure_of(caught)
    assert (error.errno, error.path) == (errno.EACCES, str(tmp_path / "saved" / "__0_1.distcp"))
    assert os.listdir(tmp_path / "saved") == []


def test_one_process_writes_all_files(tmp_path: Path) -> None:
    """``is_multiproc_io``, an option of other writers, changes nothing."""
    options: dict[str, Any] = {"thread_count": 4, "is_multiproc_io": True}
    split_save(tmp_path / "saved", odd_state(), open_file=open_and_sign, **options)
    signed = [path.read_text() for path in (tmp_path / "saved").glob("*.opened-by")]
    assert signed == [str(default_engine().writer().pid)] * 4


def twins() -> dict[str, Any]:
    """Two tensors that make two equal files."""
    return {name: torch.ones(50_000) for name in ("one", "other")}


def intervals(report: RankReport) -> list[tuple[float, float]]:
    """When each file was begun and finished; the clock is the same for all processes."""
    assert isinstance(report, RankWritten)
    return sorted((receipt.started_s, receipt.finished_s) for receipt in report.receipts)


def test_files_are_written_at_the_same_time(tmp_path: Path) -> None:
    """Two files on slow storage are both under way before either is finished."""
    nostall.configure(EngineOptions(io_threads=2))
    options: dict[str, Any] = {"thread_count": 2}
    split_save(tmp_path / "starts the process", twins(), **options)
    # Each file stands still until the other one has been seen standing still.
    with Hold("chunk") as one, Hold("chunk") as other:
        faults = (
            Fault({**one.fault.plain, "file": "__0_0"}),
            Fault({**other.fault.plain, "file": "__0_1"}),
        )
        with inject(*faults):
            finish = report_of(tmp_path / "saved", twins(), **options)
        for hold in (one, other):
            meet = threading.Thread(target=hold.wait_reached, daemon=True)
            meet.start()
            meet.join(DEADLINE_S)
            assert not meet.is_alive()
        one.release()
        other.release()
        (first, second) = intervals(finish())
    assert second[0] < first[1]


def test_one_thread_writes_one_file_after_the_other(tmp_path: Path) -> None:
    """The opposite case, which shows that receipts tell the difference."""
    nostall.configure(EngineOptions(io_threads=1))
    first, second = intervals(report_of(tmp_path / "saved", twins(), thread_count=2)())
    assert second[0] >= first[1]


# --- given up -------------------------------------------------------------------------------------


def test_a_save_that_is_cancelled_in_mid_write_leaves_no_file(tmp_path: Path) -> None:
    """Between two chunks a cancelled job stops, reports that, and removes its files."""
    nbytes = 5 * PAGE
    memory = mmap.mmap(-1, nbytes)
    no_seals = SealTable(templates=(), blob_offsets=(), template_of_slot=())
    names = ("first.distcp", "second.distcp")
    with Hold("chunk") as hold:
        job = WriteJob(
            job="save/0/0",
            rank=3,
            directory=str(tmp_path),
            files=tuple(
                FileImage(name=name, nbytes=nbytes, block=0, block_offset=0, seals=no_seals)
                for name in names
            ),
            sync_files=True,
            io_threads=1,
            chunk_nbytes=PAGE,
            direct=True,
            faults=pickle.dumps((Planned({**hold.fault.plain, "after": 7}),)),
        )
        cancelled = threading.Event()
        reports: list[RankReport] = []
        images = {name: WholeImage(memoryview(memory)) for name in names}
        thread = threading.Thread(
            target=lambda: reports.append(perform(job, images, (), cancelled))
        )
        thread.start()
        hold.wait_reached()
        assert sorted(os.listdir(tmp_path)) == list(names)
        assert (tmp_path / "first.distcp").stat().st_size == nbytes
        cancelled.set()
        hold.release()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()
    (report,) = reports
    assert isinstance(report, RankFailed)
    assert (report.rank, report.failure.kind) == (3, "SaveAbortedError")
    assert report.failure.path == str(tmp_path / "second.distcp")
    assert os.listdir(tmp_path) == []


def test_aborting_the_queue_in_mid_write_leaves_no_file(tmp_path: Path) -> None:
    """``close(abort=True)`` returns in seconds, with the files released, even if writing hangs."""
    with Hold("fsync") as hold:
        queue = AsyncCallsQueue()
        with inject(hold.fault):
            schedule(queue, tmp_path / "saved", odd_state())
        hold.wait_reached()
        assert os.listdir(tmp_path / "saved") == ["__0_0.distcp"]
        queue.close(abort=True)
        assert os.listdir(tmp_path / "saved") == []
    split_save(tmp_path / "saved", odd_state())
    assert blobs(tmp_path / "saved") == stock(tmp_path / "stock", odd_state())


class RefusingToClose:
    """Storage that has no room for a file, and says so when it is closed; ``os`` to what writes."""

    def __init__(self, name: str, *, times: int) -> None:
        self._name = name
        self._times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def close(self, fd: int) -> None:
        is_meant = self._name in os.readlink(f"/proc/self/fd/{fd}")
        os.close(fd)
        if is_meant and self._times:
            self._times -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_close_that_fails_does_not_keep_a_file_from_being_written_again(tmp_path: Path) -> None:
    """An error in closing the file of a failed attempt does not fail the retry."""
    with (
        patch.object(posix, "os", RefusingToClose("__0_1", times=1)),
        inject(Fault.errno("chunk", errno.EIO, file="__0_1", times=1)),
    ):
        save(tmp_path / "saved", odd_state(), thread_count=4)
    assert nostall.verify(tmp_path / "saved").ok


def test_a_close_that_fails_does_not_hide_the_cause_or_keep_files_open(tmp_path: Path) -> None:
    """A full disk stays a full disk, and the other files of the job are closed."""
    with (
        patch.object(posix, "os", RefusingToClose(".distcp", times=1000)),
        inject(Fault.errno("fsync", errno.ENOSPC)),
        pytest.raises(CheckpointException) as caught,
    ):
        save(tmp_path / "saved", odd_state(), thread_count=4)
    failure = caught.value.failures[0][0]
    assert isinstance(failure, WriteError)
    assert (failure.errno, failure.phase) == (errno.ENOSPC, "fsync")
    opened = [each.path for each in psutil.Process().open_files()]
    assert not [each for each in opened if each.startswith(str(tmp_path))]
