"""Commit: a checkpoint exists from one instant on, and foreign metadata runs nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from nostall._commit.commit import commit
from nostall._commit.metadata import load_metadata
from nostall._model.names import is_draft
from nostall._save import publish as publishing
from nostall._save.publish import files_of
from nostall._storage import posix
from nostall._storage.posix import PosixStorage
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
from programs.entry_points import holds
from support.faults import Fault, inject
from support.states import blobs, read_metadata, save_now, save_split, small_state

# --- the commit itself ----------------------------------------------------------------------------


def publish(directory: Path, *, replaced_files: Sequence[str] = ()) -> None:
    storage = PosixStorage(str(directory), sync=True)
    storage.remove(
        commit(storage, [b"new"], metadata_name=".metadata", replaced_files=replaced_files)
    )


def system(**calls: Callable[..., Any]) -> Any:
    """A system that answers some calls in another way."""
    return patch.object(posix, "os", SimpleNamespace(**{**vars(os), **calls}))


def fails(code: int = errno.EIO) -> OSError:
    return OSError(code, os.strerror(code))


def makes_and_denies(path: str, flags: int, mode: int = 0o777) -> int:
    fd = os.open(path, flags, mode)
    if flags & os.O_CREAT:
        os.close(fd)
        raise fails()
    return fd


def renames_and_denies(source: str, target: str) -> None:
    os.replace(source, target)
    raise fails(errno.ENOENT)


def copies(source: str, target: str) -> None:
    Path(target).write_bytes(Path(source).read_bytes())
    os.unlink(source)


def copies_and_keeps(source: str, target: str) -> None:
    Path(target).write_bytes(Path(source).read_bytes())
    raise fails()


@pytest.mark.parametrize(
    ("calls", "code"),
    [
        ({"open": makes_and_denies}, errno.EIO),
        ({"pwrite": Mock(return_value=0)}, errno.EIO),
        ({"replace": Mock(side_effect=fails(errno.ENOSPC))}, errno.ENOSPC),
    ],
)
def test_a_commit_that_fails_leaves_no_temporary_file(
    tmp_path: Path, calls: dict[str, Any], code: int
) -> None:
    """Also one that it never got hold of; the error has the system's own reason."""
    with system(**calls), pytest.raises(WriteError) as caught:
        publish(tmp_path)
    assert caught.value.errno == code
    assert not isinstance(caught.value, NotDurableError)
    assert names_in(tmp_path) == set()


def test_a_commit_in_doubt_counts_as_one_that_may_be_there(tmp_path: Path) -> None:
    """If storage does not tell whether it has renamed, nothing the metadata may name is removed."""
    refused: list[str] = []

    def replace(source: str, target: str) -> None:
        refused.append(target)
        raise fails()

    def stat(path: str) -> os.stat_result:
        if refused:
            raise fails(errno.ESTALE)
        return os.stat(path)

    with system(replace=replace, stat=stat), pytest.raises(NotDurableError) as caught:
        publish(tmp_path)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("error", [fails(), MemoryError()])
def test_a_commit_that_may_not_last_says_so_by_its_type(tmp_path: Path, error: Exception) -> None:
    """If the name is not made durable, both checkpoints' files stay: something was published."""
    (tmp_path / "old.distcp").write_bytes(b"shard")

    def fsync(fd: int) -> None:
        if os.path.samefile(f"/proc/self/fd/{fd}", tmp_path):
            raise error

    with system(fsync=fsync), pytest.raises(NotDurableError) as caught:
        publish(tmp_path, replaced_files=["old.distcp"])
    assert type(caught.value.__cause__) is type(error)
    assert not publishing.is_unpublished(caught.value)
    assert (tmp_path / ".metadata").read_bytes() == b"new"
    assert names_in(tmp_path) == {".metadata", "old.distcp"}


@pytest.mark.parametrize("replace", [renames_and_denies, copies, copies_and_keeps])
def test_a_rename_that_was_done_is_done_whatever_the_system_says(
    tmp_path: Path, replace: Callable[[str, str], None]
) -> None:
    """The metadata is there, whatever number its file has, and even where the answer was no."""
    (tmp_path / ".metadata").write_bytes(b"old")
    (tmp_path / "old.distcp").write_bytes(b"shard")
    with system(replace=replace):
        publish(tmp_path, replaced_files=["old.distcp", "was never there"])
    assert (tmp_path / ".metadata").read_bytes() == b"new"
    assert not (tmp_path / "old.distcp").exists()


@pytest.mark.parametrize("error", [fails(errno.EACCES), MemoryError()])
def test_a_replaced_file_that_stays_does_not_fail_the_save(
    tmp_path: Path, error: Exception
) -> None:
    """The new checkpoint is there, and complete; files of the old one that stay cost room only."""
    save_now(tmp_path, small_state(1))
    before = names_in(tmp_path)

    def unlink(path: str, *, dir_fd: int | None = None) -> None:
        if path.endswith(".distcp"):
            raise error
        os.unlink(path, dir_fd=dir_fd)

    with system(unlink=unlink):
        save_now(tmp_path, small_state(2))
    assert before < names_in(tmp_path)
    assert verify(tmp_path).ok


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


SAVES = pytest.mark.parametrize("save", [save_now, save_split], ids=["sync", "queue"])


@SAVES
def test_a_failure_after_the_commit_removes_nothing(
    tmp_path: Path, save: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save fails, and the checkpoint that exists by then stays."""
    publish_metadata = publishing.publish

    def publish_and_fail(*args: Any, **options: Any) -> None:
        publish_metadata(*args, **options)
        raise LookupError("after the commit")

    monkeypatch.setattr("nostall._save.decide.publish", publish_and_fail)
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
    """The directory then holds the new checkpoint's files; no descriptor keeps the old one's."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    for number, thread_count in enumerate((*threads, threads[0])):
        save(path, small_state(number), thread_count=thread_count)
        assert_holds(path, small_state(number), tmp_path / f"stock {number}")
        held = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        assert not [name for name in held if str(path) in name]


def test_foreign_files_in_the_directory_stay(tmp_path: Path) -> None:
    """Only files that the replaced checkpoint names are removed."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "__7_0.distcp").write_text("somebody else's")
    for seed in range(3):
        save_now(tmp_path, small_state(seed))
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
    save(path, small_state(1), thread_count=2)
    before = {name: (path / name).read_bytes() for name in names_in(path)}
    with inject(FAULTS[kind]), pytest.raises(CheckpointException) as caught:
        save(path, small_state(2), thread_count=2)
    assert isinstance(caught.value.failures[0][0], WriteError)
    assert {name: (path / name).read_bytes() for name in names_in(path)} == before
    assert holds(path, 1)
    save(path, small_state(3))
    assert_holds(path, small_state(3), tmp_path / "stock")


def test_metadata_that_cannot_be_published_fails_the_save(tmp_path: Path) -> None:
    """The error reaches the caller as ours, with the file and the errno, and no draft is left."""
    (tmp_path / ".metadata" / "in the way").mkdir(parents=True)
    with pytest.raises(CheckpointException) as caught:
        save_now(tmp_path, small_state())
    error = caught.value.failures[0][0]
    assert isinstance(error, WriteError)
    assert error.path == str(tmp_path / ".metadata")
    assert error.errno in {errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST}
    assert error.phase == "commit"
    assert isinstance(error.__cause__, OSError)
    assert not any(map(is_draft, names_in(tmp_path)))


@SAVES
def test_without_overwrite_a_checkpoint_is_left_alone(
    tmp_path: Path, save: Callable[..., None]
) -> None:
    """``overwrite=False`` is an error and changes nothing; left-over files are no checkpoint."""
    (tmp_path / "__0_0.distcp").write_bytes(b"of a save that was never committed")
    save(tmp_path, small_state(1), overwrite=False)
    assert holds(tmp_path, 1)
    before = {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)}
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, small_state(2), overwrite=False)
    error = caught.value.failures[0][0]
    assert isinstance(error, CheckpointExistsError)
    assert error.path == str(tmp_path)
    said = str(error).removeprefix("Worker failure: ")  # of the queue
    assert said.startswith("Checkpoint already exists and self.overwrite=False")  # as stock
    assert error.hint is not None
    assert {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)} == before


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


OUTSIDE = ["../precious", "/precious", "a/../../precious", "..", ".", "", "./.", "a/.."]
NO_SHARDS = [".metadata", "./.metadata", "__1.metadata", "x\0y", 7, None, ["list"]]


def test_only_names_below_the_directory_belong_to_a_checkpoint(tmp_path: Path) -> None:
    """A name that leads out of it, or may through a link, or is no shard's, is never removed."""
    strange = ["sub/b.distcp", "notes.txt", *OUTSIDE, *NO_SHARDS]
    metadata = metadata_naming("a.distcp", "./c.distcp", *strange)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
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
    save_now(tmp_path, small_state())
    assert holds(tmp_path, 0)


def test_overwriting_removes_nothing_outside_of_the_directory(tmp_path: Path) -> None:
    """Whatever the replaced metadata names, other files stay, and so does the new metadata."""
    path = tmp_path / "checkpoint"
    (path / "a").mkdir(parents=True)
    (tmp_path / "precious").write_text("kept")
    absolute = str(tmp_path / "precious")
    metadata = metadata_naming(absolute, "__0_0.distcp", *OUTSIDE, *NO_SHARDS)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    save_now(path, small_state())
    assert (tmp_path / "precious").read_text() == "kept"
    assert names_in(path) == files_named_by(path) | {".metadata", "a"}
    assert holds(path, 0)


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
    """Every memory format, entry, planner's data, place and transform; also with a text as path."""
    image, volume = torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5, 6)
    state: dict[str, Any] = {
        "channels last": image.to(memory_format=torch.channels_last),
        "channels last 3d": volume.to(memory_format=torch.channels_last_3d),
        "requires grad": torch.nn.Parameter(torch.zeros(3)),
        "nested": {"list": [torch.zeros(2), {"deep": (1, "two", None)}], "n": 3},
        "empty": torch.empty(0, 3),
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(tmp_path)), no_dist=True)
    expected = read_metadata(tmp_path)
    assert load_metadata((tmp_path / ".metadata").read_bytes(), path="p") == expected
    next(iter(expected.storage_data.values())).transform_descriptors = ["zstd"]
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        got = load_metadata(pickle.dumps(expected, protocol=protocol), path="p")
        assert got == expected
        assert type(got) is Metadata
