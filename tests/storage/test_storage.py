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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, StorageReader
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall import _torch
from nostall._model.jobs import FileImage, RankFailed, RankWritten, SealTable, WriteJob
from nostall._model.names import is_draft
from nostall._save.split_save import SplitSave
from nostall._storage import posix
from nostall._writer.files import perform
from nostall._writer.seals import WholeImage
from nostall.core import AsyncCallsQueue
from nostall.errors import WriteError
from nostall.options import EngineOptions
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
from support.states import (
    PLAIN_WAYS,
    blobs,
    blobs_by_stock,
    planned,
    read_metadata,
    save_in_background,
    save_now,
    save_split,
    save_stock_way,
    schedule,
    shard_files,
    small_state,
)
from support.waiting import AwayOs, is_direct, refusing

DEADLINE_S = 60.0
PAGE = 4096


def odd_state(seed: int = 0) -> dict[str, Any]:
    """A few hundred kilobytes that end nowhere near a page."""
    state = small_state(seed)
    state["large"] = torch.arange(70_001, dtype=torch.float32)
    return state


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
    tmp_path: Path, *, direct: bool
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


def _sets_direct(_: int, command: int, flags: int = 0) -> bool:
    return command == fcntl.F_SETFL and bool(flags & os.O_DIRECT)


@pytest.mark.usefixtures("takes_direct_io")
@pytest.mark.parametrize(
    ("module", "name", "is_refused"),
    [(fcntl, "fcntl", _sets_direct), (os, "pwrite", is_direct)],
    ids=["flag", "write"],
)
@pytest.mark.parametrize("chunk_nbytes", [PAGE, 8 << 20], ids=["many chunks", "one chunk"])
def test_a_file_system_that_refuses_direct_io_gets_the_same_files(
    tmp_path: Path, module: Any, name: str, is_refused: Callable[..., bool], chunk_nbytes: int
) -> None:
    """Refused with EINVAL: the flag, or a write, by one thread or several at once."""
    nostall.configure(EngineOptions(chunk_nbytes=chunk_nbytes))
    save_now(tmp_path / "direct", odd_state(), thread_count=2)
    with refusing(module, name, is_refused) as refused:
        save_now(tmp_path / "refused", odd_state(), thread_count=2)
    for file in ("__0_0.distcp", "__0_1.distcp"):
        assert str(tmp_path / "refused" / file) in refused
        written = (tmp_path / "refused" / file).read_bytes()
        assert written == (tmp_path / "direct" / file).read_bytes()


def test_what_goes_through_the_page_cache_is_written_from_front_to_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One write of a file at a time, in order, as file systems in user space or networks prefer."""
    nostall.configure(EngineOptions(direct_io=False, chunk_nbytes=PAGE, io_threads=12))
    real, written = os.pwrite, defaultdict[str, list[tuple[int, int]]](list)

    def record(fd: int, piece: Any, offset: int) -> int:
        written[os.readlink(f"/proc/self/fd/{fd}")].append((offset, len(piece)))
        return real(fd, piece, offset)

    monkeypatch.setattr(os, "pwrite", record)
    state = {f"{number}": torch.full((100_000,), float(number)) for number in range(6)}
    save_now(tmp_path / "saved", state, thread_count=3)
    shards = [writes for path, writes in written.items() if path.endswith(".distcp")]
    assert len(shards) == 3
    for writes in shards:
        assert len(writes) > 100
        ends = [offset + nbytes for offset, nbytes in writes]
        assert [offset for offset, _ in writes] == [0, *ends[:-1]]


@pytest.fixture(params=["disk", "tmpfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on disk, or on tmpfs, where every Linux has one."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as in_memory:
        yield tmp_path if request.param == "disk" else Path(in_memory)


@pytest.mark.parametrize("way", PLAIN_WAYS.values(), ids=PLAIN_WAYS)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("chunk_nbytes", [PAGE, 8 << 20], ids=["many chunks", "one chunk"])
def test_files_end_where_their_last_item_does(
    place: Path, way: Callable[..., None], *, direct: bool, chunk_nbytes: int
) -> None:
    """A length that is no multiple of the page size is exact, and the file is stock's."""
    nostall.configure(EngineOptions(direct_io=direct, chunk_nbytes=chunk_nbytes))
    way(place / "saved", odd_state())
    save_stock_way(place / "stock", odd_state())
    content = (place / "saved" / "__0_0.distcp").read_bytes()
    assert content == (place / "stock" / "__0_0.distcp").read_bytes()
    assert len(content) % PAGE
    infos = read_metadata(place / "saved").storage_data.values()
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
    save_now(tmp_path / "saved", odd_state(), thread_count=2)
    assert sorted(synced[:2]) == ["__0_0.distcp", "__0_1.distcp"]
    assert synced[2] == synced[-1] == "saved"
    temporary, parent = sorted(synced[3:-1])
    assert is_draft(temporary)
    assert parent == tmp_path.name


def test_nothing_is_synced_with_sync_files_off(tmp_path: Path, synced: list[str]) -> None:
    """``sync_files=False`` waits for no device, neither for shard files nor for the metadata."""
    save_now(tmp_path / "saved", odd_state(), sync_files=False, thread_count=2)
    save_now(tmp_path / "streamed", odd_state(), sync_files=False, open_file=as_a_closure(Upload))
    assert synced == []
    assert blobs(tmp_path / "saved") == blobs(tmp_path / "streamed")


@pytest.mark.parametrize("sync_files", [True, False])
def test_receipts_tell_what_the_writer_process_did(tmp_path: Path, *, sync_files: bool) -> None:
    """It gets ``sync_files``, and one thread writes one file after the other."""
    nostall.configure(EngineOptions(io_threads=1))
    options: dict[str, Any] = {"sync_files": sync_files, "thread_count": 2}
    _, request = planned(tmp_path / "saved", odd_state(), **options)
    assert isinstance(request.async_fn, SplitSave)
    assert request.preload_fn is not None
    report = request.async_fn.start(request.preload_fn()).result(DEADLINE_S)
    request.finalize_fns[0]()
    assert isinstance(report, RankWritten)
    first, second = sorted(report.receipts, key=lambda receipt: receipt.started_s)
    assert first.fsynced is second.fsynced is sync_files
    assert second.started_s >= first.finished_s


@pytest.fixture
def umask() -> Iterator[None]:
    """An unusual umask; set before any writer process starts, which inherits it."""
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("way", PLAIN_WAYS.values(), ids=PLAIN_WAYS)
@pytest.mark.parametrize("options", [{}, {"open_file": Upload}], ids=["images", "streams"])
def test_files_get_the_permissions_that_the_umask_leaves(
    tmp_path: Path, way: Callable[..., None], options: dict[str, Any]
) -> None:
    """In every way; a stream that can be written, flushed and closed is enough."""
    way(tmp_path / "saved", odd_state(), **options)
    modes = {
        file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "saved").iterdir()
    }
    assert modes == {".metadata": 0o640, "__0_0.distcp": 0o640}
    assert blobs(tmp_path / "saved") == blobs_by_stock(tmp_path / "stock", odd_state())


# --- the user's own callables ---------------------------------------------------------------------


@pytest.mark.parametrize("way", PLAIN_WAYS.values(), ids=PLAIN_WAYS)
def test_a_users_own_open_is_called_for_every_shard_file(
    tmp_path: Path, way: Callable[..., None]
) -> None:
    """In one process, ``is_multiproc_io`` or not: the writer's, unless the save is synchronous."""
    options: dict[str, Any] = {"thread_count": 3, "is_multiproc_io": True}
    way(tmp_path / "saved", odd_state(), open_file=open_and_sign, **options)
    assert blobs(tmp_path / "saved") == blobs_by_stock(tmp_path / "stock", odd_state())
    signed = {path.name: int(path.read_text()) for path in (tmp_path / "saved").glob("*.opened-by")}
    assert sorted(signed) == [f"__0_{number}.distcp.opened-by" for number in range(3)]
    assert set(signed.values()) == ({os.getpid()} if way is save_now else set(writer_pids()))


@pytest.mark.parametrize("way", PLAIN_WAYS.values(), ids=PLAIN_WAYS)
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
    assert blobs(tmp_path / "saved") == blobs_by_stock(tmp_path / "stock", odd_state())


def test_a_save_through_a_closure_does_not_stall_the_trainer(tmp_path: Path) -> None:
    """While the closure stands still the call has returned, and later changes do not show."""
    begun, go_on = threading.Event(), threading.Event()

    def slow_open(path: str, mode: str) -> IO[Any]:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return open(path, mode)

    state = odd_state()
    expected = blobs_by_stock(tmp_path / "stock", state)
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "saved", state, open_file=slow_open)
        assert begun.wait(DEADLINE_S)
        state["large"].fill_(99)
        go_on.set()
    assert blobs(tmp_path / "saved") == expected


@pytest.mark.parametrize("way", PLAIN_WAYS.values(), ids=PLAIN_WAYS)
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
    assert blobs(tmp_path / "saved") == blobs_by_stock(tmp_path / "stock", odd_state())


@pytest.mark.parametrize(
    ("way", "extension"),
    [
        (save_now, Zlib()),
        (save_in_background, Zlib()),
        (save_now, _torch.compression()),
        (save_split, _torch.compression()),
    ],
)
def test_stream_extensions_are_undone_by_readers_that_know_them(
    tmp_path: Path, way: Callable[..., None], extension: StreamTransformExtension
) -> None:
    """By stock's, as the metadata says how; by nostall's if stock has the extension itself."""
    path, state, registry = tmp_path / "saved", odd_state(3), ExtensionRegistry()
    way(path, state, thread_count=3, _extensions=[extension])
    infos = read_metadata(path).storage_data.values()
    assert {tuple(info.transform_descriptors) for info in infos} == {(extension.get_descriptor(),)}
    stored = [len(content) for content in shard_files(path).values()]
    assert len(stored) == 3
    assert sum(info.length for info in infos) == sum(stored)
    assert sum(stored) < sum(map(len, blobs_by_stock(tmp_path / "stock", state).values()))
    registry.register(Zlib)
    readers: list[StorageReader] = [FileSystemReader(path, _extension_registry=registry)]
    if not isinstance(extension, Zlib):
        readers.append(nostall.FileSystemReader(path))
    for number, reader in enumerate(readers):
        loaded = odd_state(4)
        loaded["large"].fill_(-1)
        dcp.load(loaded, storage_reader=reader)
        assert blobs_by_stock(tmp_path / f"again {number}", loaded) == blobs(tmp_path / "stock")


# --- in parallel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [save_split, save_in_background])
def test_streams_are_written_several_at_a_time(tmp_path: Path, way: Callable[..., None]) -> None:
    """``io_threads`` streams are written at a time, each by one thread with its own extensions."""
    nostall.configure(EngineOptions(io_threads=2))
    options = {"open_file": open_pairs, "_extensions": [OfOneThread()]}
    way(tmp_path / "saved", odd_state(), thread_count=4, **options)
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 4
    assert blobs(tmp_path / "saved") == blobs_by_stock(tmp_path / "stock", odd_state())


def test_a_stream_that_fails_fails_the_save(tmp_path: Path) -> None:
    """Also while another one is written: its error is the save's, and no file is left."""
    nostall.configure(EngineOptions(io_threads=2, chunk_nbytes=PAGE))
    with pytest.raises(CheckpointException) as caught:
        save_split(tmp_path / "saved", odd_state(), thread_count=2, open_file=open_but_one)
    error = failure_of(caught)
    assert (error.errno, error.path) == (errno.EACCES, str(tmp_path / "saved" / "__0_1.distcp"))
    assert os.listdir(tmp_path / "saved") == []


def test_files_are_written_at_the_same_time(tmp_path: Path) -> None:
    """Two files on slow storage are both in progress before either is finished."""
    nostall.configure(EngineOptions(io_threads=2))
    state = {name: torch.ones(50_000) for name in ("one", "other")}
    with Hold("chunk") as one, Hold("chunk") as other, AsyncCallsQueue() as queue:
        faults = (
            Fault({**one.fault.plain, "file": "__0_0"}),
            Fault({**other.fault.plain, "file": "__0_1"}),
        )
        with inject(*faults):
            schedule(queue, tmp_path / "saved", state, thread_count=2)
        for hold in (one, other):
            hold.wait_reached()
        one.release()
        other.release()


# --- given up -------------------------------------------------------------------------------------


def test_a_save_that_is_cancelled_in_mid_write_leaves_no_file(tmp_path: Path) -> None:
    """Between two chunks a cancelled job stops, reports that, and removes its files."""
    nbytes, cancelled = 5 * PAGE, threading.Event()
    seals = SealTable(templates=(), blob_offsets=(), template_of_slot=())
    image = FileImage(name="first.distcp", nbytes=nbytes, block=0, block_offset=0, seals=seals)
    files = (image, image._replace(name="second.distcp"))
    memory = WholeImage(memoryview(mmap.mmap(-1, nbytes)))
    with Hold("chunk") as hold, ThreadPoolExecutor(1) as pool:
        job = WriteJob(
            job="save/0/0",
            rank=3,
            directory=str(tmp_path),
            files=files,
            sync_files=True,
            io_threads=1,
            chunk_nbytes=PAGE,
            direct=True,
            faults=pickle.dumps((Planned({**hold.fault.plain, "after": 7}),)),
        )
        images, told = {each.name: memory for each in files}, list[object]()
        performing = pool.submit(
            perform,
            job,
            images,
            cancelled=cancelled,
            on_progress=told.append,
            on_created=told.append,
        )
        hold.wait_reached()
        assert sorted(os.listdir(tmp_path)) == ["first.distcp", "second.distcp"]
        assert (tmp_path / "first.distcp").stat().st_size == nbytes
        cancelled.set()
        hold.release()
        report = performing.result(DEADLINE_S)
    assert isinstance(report, RankFailed)
    assert (report.rank, report.failure.kind) == (3, "SaveAbortedError")
    assert report.failure.path == str(tmp_path / "second.distcp")
    assert os.listdir(tmp_path) == []


def test_a_close_that_fails_does_not_keep_a_file_from_being_written_again(tmp_path: Path) -> None:
    """An error in closing the file of a failed attempt does not fail the retry."""
    with (
        patch.object(posix, "os", AwayOs("close", "__0_1", times=1, is_done=True)),
        inject(Fault.errno("chunk", errno.EIO, file="__0_1", times=1)),
    ):
        save_now(tmp_path / "saved", odd_state(), thread_count=4)
    assert nostall.verify(tmp_path / "saved").ok


def test_a_close_that_fails_does_not_hide_the_cause_or_keep_files_open(tmp_path: Path) -> None:
    """A full disk stays a full disk, and the other files of the job are closed."""
    with (
        patch.object(posix, "os", AwayOs("close", ".distcp", is_done=True)),
        inject(Fault.errno("fsync", errno.ENOSPC)),
        pytest.raises(CheckpointException) as caught,
    ):
        save_now(tmp_path / "saved", odd_state(), thread_count=4)
    failure = failure_of(caught)
    assert (failure.errno, failure.phase) == (errno.ENOSPC, "fsync")
    opened = [each.path for each in psutil.Process().open_files()]
    assert not [each for each in opened if each.startswith(str(tmp_path))]
