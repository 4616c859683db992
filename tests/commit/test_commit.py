"""Commit: a checkpoint exists from one instant on, and foreign metadata runs nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from nostall._commit.commit import commit
from nostall._commit.metadata import load_metadata
from nostall._commit.publication import complete_metadata, publication_of
from nostall._model.names import is_draft
from nostall._save import publish as publishing
from nostall._save.publish import files_of
from nostall._storage import posix
from nostall._storage.posix import PosixStorage
from nostall.core import AsyncCallsQueue
from nostall.errors import (
    CheckpointExistsError,
    IncompleteSaveError,
    NotDurableError,
    SaveError,
    UntrustedMetadataError,
    WriteError,
)
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.integrity import verify
from support.crashes import RecordingOs
from support.faults import Fault, inject
from support.states import blobs, read_metadata, schedule, small_state

# --- the commit itself ----------------------------------------------------------------------------


def publish(directory: Path, content: bytes = b"new", **options: Any) -> None:
    storage = PosixStorage(str(directory), sync=options.pop("sync", True))
    arguments: dict[str, Any] = {"metadata_name": ".metadata", "replaced_files": ()}
    replaced = commit(storage, [content], **{**arguments, **options})
    storage.remove(replaced)


@pytest.mark.parametrize("sync", [True, False], ids=["durable", "not synced"])
def test_metadata_is_published_whole_under_its_name(tmp_path: Path, *, sync: bool) -> None:
    """The old file is replaced, no temporary file stays, and replaced shard files are deleted."""
    (tmp_path / ".metadata").write_bytes(b"old")
    for name in ("old.distcp", "new.distcp"):
        (tmp_path / name).write_bytes(b"shard")
    publish(tmp_path, replaced_files=["old.distcp", "was never there"], sync=sync)
    assert (tmp_path / ".metadata").read_bytes() == b"new"
    assert names_in(tmp_path) == {".metadata", "new.distcp"}


@pytest.mark.parametrize("sizes", [[], [0], [3, 5], [3, 70_000, 4, 5, 100_000, 65_536], [70_000]])
def test_a_file_written_in_pieces_holds_all_of_them(tmp_path: Path, sizes: list[int]) -> None:
    """In order, whatever their sizes."""
    pieces = [bytes([number]) * size for number, size in enumerate(sizes)]
    os.close(posix.write_draft(str(tmp_path / "file"), pieces, sync=True))
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


def test_a_commit_into_no_directory_is_an_error_with_path_and_errno(tmp_path: Path) -> None:
    """The caller learns what could not be written and why, as an ``OSError`` of our own."""
    with pytest.raises(WriteError) as caught:
        publish(tmp_path / "absent")
    assert caught.value.errno == errno.ENOENT
    assert caught.value.path == str(tmp_path / "absent" / ".metadata")
    assert caught.value.phase == "commit"
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_commit_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """Neither a temporary file nor a missing old one; nothing is removed before the commit."""
    blocked = tmp_path / ".metadata"
    (blocked / "something in it").mkdir(parents=True)
    (tmp_path / "old.distcp").write_bytes(b"shard")
    with pytest.raises(WriteError) as caught:
        publish(tmp_path, replaced_files=["old.distcp"])
    assert caught.value.errno in {errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST}
    assert caught.value.path == str(blocked)
    assert names_in(tmp_path) == {".metadata", "old.distcp"}


class DenyingOs(RecordingOs):
    """A system that makes files and says that it has not."""

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        fd = super().open(path, flags, mode)
        if flags & os.O_CREAT:
            self.close(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return fd


def test_a_temporary_file_that_was_made_and_denied_goes(tmp_path: Path) -> None:
    """A commit that fails leaves none behind, although it never got hold of it."""
    with patch.object(posix, "os", DenyingOs()), pytest.raises(WriteError):
        publish(tmp_path)
    assert names_in(tmp_path) == set()


class RefusingOs(RecordingOs):
    """A system that refuses to make names in one directory durable and, if wished, to write."""

    def __init__(
        self, directory: Path, *, writes: bool = True, error: Exception | None = None
    ) -> None:
        super().__init__()
        self._directory = directory
        self._writes = writes
        self._error = error or OSError(errno.EIO, os.strerror(errno.EIO))

    def fsync(self, fd: int) -> None:
        if self._writes and os.path.samefile(f"/proc/self/fd/{fd}", self._directory):
            raise self._error
        super().fsync(fd)

    def pwrite(self, fd: int, content: Any, offset: int) -> int:
        return super().pwrite(fd, content, offset) if self._writes else 0


def test_a_commit_that_may_not_last_says_so_by_its_type(tmp_path: Path) -> None:
    """If the device refuses to make the name durable, both checkpoints' files stay."""
    (tmp_path / "old.distcp").write_bytes(b"shard")
    with patch.object(posix, "os", RefusingOs(tmp_path)), pytest.raises(NotDurableError) as caught:
        publish(tmp_path, replaced_files=["old.distcp"])
    assert caught.value.errno == errno.EIO
    assert names_in(tmp_path) == {".metadata", "old.distcp"}


def test_a_checkpoint_that_is_published_keeps_its_files_without_memory(tmp_path: Path) -> None:
    """Whatever fails after the rename, the error does not say that nothing was published."""
    refusing = RefusingOs(tmp_path, error=MemoryError())
    with patch.object(posix, "os", refusing), pytest.raises(NotDurableError) as caught:
        publish(tmp_path)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert not publishing.is_unpublished(caught.value)
    assert (tmp_path / ".metadata").read_bytes() == b"new"


class ForgetfulOs(RecordingOs):
    """A system that renames and then reports an error, as NFS may when an answer is lost."""

    def replace(self, source: str, target: str) -> None:
        super().replace(source, target)
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))


def test_a_rename_that_was_done_is_done_whatever_the_system_says(tmp_path: Path) -> None:
    """The checkpoint is there, so it counts as committed: otherwise its files would be removed."""
    with patch.object(posix, "os", ForgetfulOs()):
        publish(tmp_path)
    assert (tmp_path / ".metadata").read_bytes() == b"new"


class RefusedRename(RecordingOs):
    """A system that refuses renames and, if asked, then does not know what is there either."""

    def __init__(self, code: int, *, knows: bool) -> None:
        super().__init__()
        self._code, self._knows, self._refused = code, knows, False

    def replace(self, source: str, target: str) -> None:
        self._refused = True
        raise OSError(self._code, os.strerror(self._code))

    def stat(self, path: str) -> os.stat_result:
        if self._refused and not self._knows:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return os.stat(path)


def test_a_refused_rename_is_reported_with_its_own_reason(tmp_path: Path) -> None:
    """Not with that of the look at what it has led to."""
    with (
        patch.object(posix, "os", RefusedRename(errno.ENOSPC, knows=True)),
        pytest.raises(WriteError) as caught,
    ):
        publish(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert not isinstance(caught.value, NotDurableError)
    assert names_in(tmp_path) == set()


class CopyingRename(RecordingOs):
    """A system that renames by copying, as some do, and then may not remove the source."""

    def __init__(self, *, removes: bool) -> None:
        super().__init__()
        self._removes = removes

    def replace(self, source: str, target: str) -> None:
        content = Path(source).read_bytes()
        Path(target).write_bytes(content)
        if not self._removes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.unlink(source)


@pytest.mark.parametrize("removes", [True, False])
def test_a_rename_that_copies_is_one(tmp_path: Path, *, removes: bool) -> None:
    """The metadata is there, whatever number its file has, and even where the answer was no."""
    (tmp_path / ".metadata").write_bytes(b"old")
    (tmp_path / "old.distcp").write_bytes(b"shard")
    with patch.object(posix, "os", CopyingRename(removes=removes)):
        publish(tmp_path, replaced_files=["old.distcp"])
    assert (tmp_path / ".metadata").read_bytes() == b"new"
    assert not (tmp_path / "old.distcp").exists()


class KeepingOs(RecordingOs):
    """A system that removes no shard file."""

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        if path.endswith(".distcp"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        super().unlink(path, dir_fd=dir_fd)


def test_a_replaced_file_that_stays_does_not_fail_the_save(tmp_path: Path) -> None:
    """The new checkpoint is there, and complete."""
    dcp.save(small_state(1), storage_writer=FileSystemWriterAsync(tmp_path), no_dist=True)
    before = names_in(tmp_path)
    with patch.object(posix, "os", KeepingOs()):
        dcp.save(small_state(2), storage_writer=FileSystemWriterAsync(tmp_path), no_dist=True)
    assert before < names_in(tmp_path)
    assert verify(tmp_path).ok


def test_a_commit_in_doubt_counts_as_one_that_may_be_there(tmp_path: Path) -> None:
    """So nothing that the metadata may refer to is removed."""
    with (
        patch.object(posix, "os", RefusedRename(errno.EIO, knows=False)),
        pytest.raises(NotDurableError, match="cannot determine whether") as caught,
    ):
        publish(tmp_path)
    assert caught.value.errno == errno.EIO


def test_a_system_that_writes_nothing_is_not_asked_for_ever(tmp_path: Path) -> None:
    """A write of no bytes without a reason is an error, and nothing is published."""
    with (
        patch.object(posix, "os", RefusingOs(tmp_path, writes=False)),
        pytest.raises(WriteError, match="wrote nothing") as caught,
    ):
        publish(tmp_path)
    assert caught.value.errno == errno.EIO
    assert names_in(tmp_path) == set()


def names_in(directory: Path) -> set[str]:
    return set(os.listdir(directory))


# --- what an observer of the directory sees -------------------------------------------------------

CLOSE_WRITE, MOVED_TO, CREATE, DELETE = 0x8, 0x80, 0x100, 0x200
_EVENT = struct.Struct("iIII")


@contextmanager
def watch(directory: Path) -> Iterator[Callable[[], list[tuple[int, str]]]]:
    """Ask the kernel (inotify) what happens in a directory, in order, whichever process does it."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert fd >= 0
    mask = CLOSE_WRITE | MOVED_TO | CREATE | DELETE
    assert libc.inotify_add_watch(fd, os.fsencode(directory), mask) >= 0

    def events() -> list[tuple[int, str]]:
        seen = []
        raw = os.read(fd, 1 << 20)
        while raw:
            _, kind, _, nbytes = _EVENT.unpack_from(raw)
            name = raw[_EVENT.size : _EVENT.size + nbytes].rstrip(b"\0")
            seen.append((kind, os.fsdecode(name)))
            raw = raw[_EVENT.size + nbytes :]
        return seen

    try:
        yield events
    finally:
        os.close(fd)


def save(path: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=FileSystemWriterAsync(path, **options), no_dist=True)


def save_by_queue(path: Path, state: dict[str, Any], **options: Any) -> None:
    with AsyncCallsQueue() as queue:
        schedule(queue, path, state, **options)
        queue.maybe_finalize_async_calls(blocking=True)


SAVES = pytest.mark.parametrize("save", [save, save_by_queue], ids=["sync", "queue"])


@SAVES
def test_a_failure_after_the_commit_removes_nothing(
    tmp_path: Path, save: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save fails, and the checkpoint that exists by then stays."""
    publish_metadata = publishing.publish

    def publish_and_fail(*args: Any, **options: Any) -> None:
        publish_metadata(*args, **options)
        raise LookupError("after the commit")

    monkeypatch.setattr("nostall._save.commit.publish", publish_and_fail)
    with pytest.raises((CheckpointException, LookupError), match="after the commit"):
        save(tmp_path / "saved", small_state(1))
    assert verify(tmp_path / "saved").ok


@SAVES
def test_the_order_is_files_then_metadata_then_removal(
    tmp_path: Path, save: Callable[..., None]
) -> None:
    """An observer sees each new file complete, then the metadata change, then the old files go."""
    save(tmp_path, small_state(1), thread_count=2)
    old = names_in(tmp_path) - {".metadata"}
    with watch(tmp_path) as events:
        save(tmp_path, small_state(2), thread_count=2)
        seen = events()
    new = names_in(tmp_path) - {".metadata"}
    assert len(old) == len(new) == 2
    assert not old & new
    swap = seen.index((MOVED_TO, ".metadata"))
    (temporary,) = {name for kind, name in seen[:swap] if kind == CLOSE_WRITE} - new
    assert is_draft(temporary)
    last_file = max(seen.index((CLOSE_WRITE, name)) for name in new)
    assert last_file < seen.index((CREATE, temporary))
    assert not [name for kind, name in seen[:swap] if kind == DELETE]
    assert {name for kind, name in seen[swap:] if kind == DELETE} == old
    assert [kind for kind, name in seen if name == ".metadata"] == [MOVED_TO]


# --- overwriting ----------------------------------------------------------------------------------


def files_named_by(path: Path) -> set[str]:
    return {info.relative_path for info in read_metadata(path).storage_data.values()}


def assert_holds(path: Path, state: dict[str, Any], elsewhere: Path) -> None:
    """The checkpoint is exactly that state's, and the directory has nothing else in it."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(elsewhere, sync_files=False), no_dist=True)
    assert blobs(path) == blobs(elsewhere)
    assert names_in(path) == files_named_by(path) | {".metadata"}


@SAVES
@pytest.mark.parametrize(
    "threads", [(1, 1), (4, 1), (1, 4)], ids=["one file", "fewer files", "more files"]
)
def test_a_second_save_replaces_the_first(
    tmp_path: Path, save: Callable[..., None], threads: tuple[int, int]
) -> None:
    """The directory then holds the new checkpoint's files and nothing of the old one's."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    for number, thread_count in enumerate((*threads, threads[0])):
        save(path, small_state(number), thread_count=thread_count)
        assert_holds(path, small_state(number), tmp_path / f"stock {number}")


def held_files(directory: Path) -> list[str]:
    """Files below a directory that this process has descriptors of."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(link))
    return [name for name in found if str(directory) in name]


@SAVES
def test_the_room_of_a_replaced_checkpoint_is_free_when_the_save_is_committed(
    tmp_path: Path, save: Callable[..., None]
) -> None:
    """On a nearly full disk the next save has no other."""
    for seed in range(3):
        save(tmp_path, small_state(seed), thread_count=2)
        assert held_files(tmp_path) == []
        assert len(list(tmp_path.glob("*.distcp"))) == 2


def test_a_checkpoint_of_stock_is_replaced_like_ours(tmp_path: Path) -> None:
    """Whichever library wrote the old checkpoint, its files go when the new one stands."""
    path = tmp_path / "checkpoint"
    stock = dcp.FileSystemWriter(path, thread_count=3)
    dcp.save(small_state(1), storage_writer=stock, no_dist=True)
    save(path, small_state(2))
    assert blobs(path) == _blobs_of(small_state(2), tmp_path / "elsewhere")
    assert files_named_by(path) < names_in(path)  # stock also writes files without an item in them


def _blobs_of(state: dict[str, Any], path: Path) -> dict[Any, bytes]:
    save(path, state)
    return blobs(path)


def test_foreign_files_in_the_directory_stay(tmp_path: Path) -> None:
    """Only files that the replaced checkpoint names are removed."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "__7_0.distcp").write_text("somebody else's")
    for seed in range(3):
        save(tmp_path, small_state(seed))
    assert (tmp_path / "config.json").read_text() == "{}"
    assert (tmp_path / "__7_0.distcp").read_text() == "somebody else's"


FAULTS = {
    "full at the first chunk": Fault.errno("chunk", errno.ENOSPC),
    "full later": Fault.errno("chunk", errno.ENOSPC, after=1),
    "cannot open": Fault.errno("open", errno.EACCES, after=1),
    "fsync fails": Fault.errno("fsync", errno.EIO),
    "fails when all is written": Fault.raising("report", "out of luck"),
}


@SAVES
@pytest.mark.parametrize("kind", FAULTS)
def test_an_overwrite_that_fails_leaves_the_old_checkpoint(
    tmp_path: Path, save: Callable[..., None], kind: str
) -> None:
    """Bit for bit, with not a file more in the directory, and the next save works."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    old = small_state(1)
    save(path, old, thread_count=2)
    before = {name: (path / name).read_bytes() for name in names_in(path)}
    with inject(FAULTS[kind]), pytest.raises(dcp.api.CheckpointException) as caught:
        save(path, small_state(2), thread_count=2)
    assert isinstance(caught.value.failures[0][0], WriteError)
    assert {name: (path / name).read_bytes() for name in names_in(path)} == before
    assert_loads(path, old)
    save(path, small_state(3))
    assert_holds(path, small_state(3), tmp_path / "stock")


def assert_loads(path: Path, state: dict[str, Any]) -> None:
    """Stock loads these values."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    target = {name: torch.zeros_like(value) for name, value in tensors.items()}
    dcp.load(target, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    for name, value in tensors.items():
        assert torch.equal(target[name], value)


def test_metadata_that_cannot_be_published_fails_the_save(tmp_path: Path) -> None:
    """The error reaches the caller as ours, with the file and the errno."""
    (tmp_path / ".metadata" / "in the way").mkdir(parents=True)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(tmp_path, small_state())
    error = caught.value.failures[0][0]
    assert isinstance(error, WriteError)
    assert error.path == str(tmp_path / ".metadata")
    assert error.errno in {errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST}


@SAVES
def test_without_overwrite_a_checkpoint_is_left_alone(
    tmp_path: Path, save: Callable[..., None]
) -> None:
    """``overwrite=False`` is an error that says so, and nothing in the directory changes."""
    save(tmp_path, small_state(1), overwrite=False)
    before = {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(tmp_path, small_state(2), overwrite=False)
    error = caught.value.failures[0][0]
    assert isinstance(error, CheckpointExistsError)
    assert error.path == str(tmp_path)
    said = str(error).removeprefix("Worker failure: ")  # of the queue
    assert said.startswith("Checkpoint already exists and self.overwrite=False")  # as stock
    assert error.hint is not None
    assert {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)} == before


def test_without_overwrite_a_directory_without_a_checkpoint_is_free(tmp_path: Path) -> None:
    """Left-over shard files are no checkpoint; they do not stand in the way."""
    (tmp_path / "__0_0.distcp").write_bytes(b"of a save that was never committed")
    save(tmp_path, small_state(1), overwrite=False)
    assert_loads(tmp_path, small_state(1))


@pytest.mark.parametrize("lost", [0, 3])
def test_a_checkpoint_with_a_missing_item_is_not_published(tmp_path: Path, lost: int) -> None:
    """If any item of the metadata was written by no rank, there is no ``.metadata``."""
    planner = DefaultSavePlanner()
    writer = FileSystemWriterAsync(tmp_path)
    planner.set_up_planner(small_state(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    missing = results.pop(lost)
    with pytest.raises(IncompleteSaveError, match=missing.index.fqn):
        writer.finish(metadata, [results])
    assert names_in(tmp_path) == set()
    with pytest.raises(SaveError, match="were removed"):
        writer.finish(metadata, [[*results, missing]])
    assert names_in(tmp_path) == set()


# --- which files belong to a checkpoint -----------------------------------------------------------


def metadata_naming(*names: Any) -> Metadata:
    storage_data: dict[Any, Any] = {
        MetadataIndex(f"item {number}"): _StorageInfo(name, 0, 1)
        for number, name in enumerate(names)
    }
    state: dict[str, Any] = {index.fqn: BytesStorageMetadata() for index in storage_data}
    return Metadata(state_dict_metadata=state, storage_data=storage_data)


def write_metadata(path: Path, metadata: Any) -> str:
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return str(path / ".metadata")


OUTSIDE = ["../precious", "/precious", "a/../../precious", "..", ".", "", "./.", "a/.."]
NO_SHARDS = [".metadata", "./.metadata", "__1.metadata", "x\0y", 7, None, ["list"]]


def test_only_names_below_the_directory_belong_to_a_checkpoint(tmp_path: Path) -> None:
    """A name that leads out of it, or may through a link, or is no shard's, is never removed."""
    strange = ["sub/b.distcp", "notes.txt", *OUTSIDE, *NO_SHARDS]
    metadata = metadata_naming("a.distcp", "./c.distcp", *strange)
    write_metadata(tmp_path, metadata)
    found = files_of(PosixStorage(str(tmp_path)), ".metadata")
    assert found == {"a.distcp", "c.distcp"}


def test_metadata_that_cannot_be_read_names_no_files(tmp_path: Path) -> None:
    """Absent, broken, of another kind or hostile: nothing is removed, and the save goes on."""
    path, files = tmp_path / ".metadata", PosixStorage(str(tmp_path))
    assert files_of(files, ".metadata") == set()
    odd = metadata_naming("a.distcp")
    odd.storage_data = ["a.distcp"]
    hostile = Hostile(os.system, f"touch {tmp_path / 'ran'}")
    for content in (b"", b"garbage", pickle.dumps({}), pickle.dumps(odd), pickle.dumps(hostile)):
        path.write_bytes(content)
        assert files_of(files, ".metadata") == set()
    assert not (tmp_path / "ran").exists()
    save(tmp_path, small_state())
    assert_loads(tmp_path, small_state())


def test_overwriting_removes_nothing_outside_of_the_directory(tmp_path: Path) -> None:
    """Whatever the replaced metadata names, other files stay, and so does the new metadata."""
    path = tmp_path / "checkpoint"
    (path / "a").mkdir(parents=True)
    (tmp_path / "precious").write_text("kept")
    absolute = str(tmp_path / "precious")
    write_metadata(path, metadata_naming(absolute, "__0_0.distcp", *OUTSIDE, *NO_SHARDS))
    save(path, small_state())
    assert (tmp_path / "precious").read_text() == "kept"
    assert names_in(path) == files_named_by(path) | {".metadata", "a"}
    assert_loads(path, small_state())


# --- the allow-list -------------------------------------------------------------------------------


class Hostile:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def hostile_pickles(target: Path) -> dict[str, bytes]:
    """Pickles that make a file if they are read without a limit."""
    code = f"__import__('os').mknod({str(target)!r})"
    inside = metadata_naming("a.distcp")
    inside.planner_data = {"x": Hostile(os.mknod, str(target))}
    return {
        "command": pickle.dumps(Hostile(os.system, f"touch {target}")),
        "eval": pickle.dumps(Hostile(eval, code)),
        "exec, oldest protocol": pickle.dumps(Hostile(exec, code), protocol=0),
        "within metadata": pickle.dumps(inside),
        "method of an allowed class": pickle.dumps(Hostile(Path.touch, target), protocol=4),
        "function of torch": pickle.dumps(Hostile(torch.save, 1, str(target))),
    }


def test_a_hostile_pickle_is_refused_without_running_it(tmp_path: Path) -> None:
    """The error names what was asked for and the file, and nothing of it has happened."""
    target = tmp_path / "ran"
    for kind, content in hostile_pickles(target).items():
        with pytest.raises(UntrustedMetadataError) as caught:
            load_metadata(content, path="/ckpt/.metadata")
        assert caught.value.path == "/ckpt/.metadata", kind
        assert caught.value.phase == "read", kind
        assert not target.exists(), kind
    with pytest.raises(UntrustedMetadataError, match="system"):
        load_metadata(hostile_pickles(target)["command"], path="p")


def test_hostile_pickles_are_real(tmp_path: Path) -> None:
    """Read without a limit, each hostile pickle does run its code, so the test above can fail."""
    target = tmp_path / "ran"
    for content in hostile_pickles(target).values():
        pickle.loads(content)
        target.unlink()


def test_what_is_no_metadata_is_refused() -> None:
    """Another object, half a pickle, no pickle: one typed error, never a wrong kind of object."""
    whole = pickle.dumps(metadata_naming("a.distcp"))
    contents = [b"", b"garbage", whole[:-5], whole[: len(whole) // 2], b"\x80\x05N."]
    others: list[Any] = [{}, [], 3, MetadataIndex("x"), torch.float32, Hostile(bytearray, 1 << 60)]
    others += [Hostile(getattr, 3, "real"), Hostile(torch.load, "/dev/null"), _StorageInfo, print]
    contents += [pickle.dumps(value) for value in others]
    for content in contents:
        with pytest.raises(UntrustedMetadataError) as caught:
            load_metadata(content, path="p")
        assert caught.value.path == "p"


def test_metadata_of_stock_is_read_as_stock_reads_it(tmp_path: Path) -> None:
    """Every dtype, memory format, entry, planner's data and storage data: nothing is refused."""
    state: dict[str, Any] = {
        str(dtype): torch.zeros(2, 3).to(dtype)
        for dtype in (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.bool,
            torch.complex64,
            torch.complex128,
        )
    }
    image, volume = torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5, 6)
    state |= {
        "channels last": image.to(memory_format=torch.channels_last),
        "channels last 3d": volume.to(memory_format=torch.channels_last_3d),
        "requires grad": torch.nn.Parameter(torch.zeros(3)),
        "nested": {"list": [torch.zeros(2), {"deep": (1, "two", None)}], "n": 3},
        "empty": torch.empty(0, 3),
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    expected = read_metadata(tmp_path)
    assert load_metadata((tmp_path / ".metadata").read_bytes(), path="p") == expected
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        got = load_metadata(pickle.dumps(expected, protocol=protocol), path="p")
        assert got == expected
        assert type(got) is Metadata


def test_metadata_of_a_text_path_or_with_transforms_is_read(tmp_path: Path) -> None:
    """A checkpoint id that is a string, and descriptors of stream transforms, are ordinary."""
    metadata = metadata_naming("a.distcp")
    metadata.storage_data[MetadataIndex("item 0")].transform_descriptors = ["zstd"]
    metadata.storage_meta = dcp.FileSystemWriter(str(tmp_path)).storage_meta()
    assert load_metadata(pickle.dumps(metadata), path="p") == metadata


def test_local_plans_survive_in_metadata_and_cost_readers_nothing() -> None:
    """They come back where frameworks keep them; stock sees its dictionary and one more entry."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(small_state(), is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    planner_data = dict(metadata.planner_data)
    metadata.all_local_plans = plans  # type: ignore[attr-defined]  # as frameworks do
    pieces = publication_of(complete_metadata(metadata, [])).content(metadata.storage_meta)
    content = b"".join(pieces)
    assert metadata.planner_data == planner_data
    loaded = load_metadata(content, path="p")
    assert loaded.all_local_plans == plans  # type: ignore[attr-defined]  # see _metadata
    assert loaded.planner_data == planner_data
    read_by_stock = pickle.loads(content)
    assert planner_data.items() <= read_by_stock.planner_data.items()
    assert read_by_stock.state_dict_metadata == metadata.state_dict_metadata


def test_a_removal_that_fails_does_not_deny_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new checkpoint is committed by then; files of the old one that stay cost room only."""

    def refuse(self: PosixStorage, names: object) -> None:
        raise MemoryError

    for seed in (1, 2):
        dcp.save(
            {"t": torch.full((9,), seed)},
            storage_writer=FileSystemWriterAsync(tmp_path / "save"),
            no_dist=True,
        )
        monkeypatch.setattr(PosixStorage, "remove", refuse)
    assert verify(tmp_path / "save").ok
