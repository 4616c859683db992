"""Metadata written ahead makes the commit short, and no failure of it shows in a checkpoint."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

import nostall
from nostall._commit import ahead as _ahead
from nostall._commit.ahead import WrittenAhead
from nostall._commit.publication import Publication, complete_metadata, publication_of
from nostall._engine import Engine
from nostall._model import threads
from nostall._model.interrupts import is_done
from nostall._model.shared_bytes import Piece, PlacedPiece, SharedBytes
from nostall._storage import posix
from nostall._storage.places import storage_at
from nostall._writer.handle import WriterProcess
from nostall.core import AsyncCallsQueue
from nostall.state_dict_saver import CheckpointMetadataCache
from nostall.testing import Fault, Hold, inject, writer_pids
from support.crashes import RecordingOs
from support.indexes import small
from support.long_metadata import treat_metadata_as_long
from support.ranks import run_ranks
from support.states import schedule
from support.waiting import HangingOs, wait_until

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def worth_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the metadata of these few tensors were long, and shared with the writer process."""
    treat_metadata_as_long(monkeypatch.setattr)


class Saves:
    """Saves of one structure, whose metadata is known."""

    def __init__(self, root: Path, queue: AsyncCallsQueue) -> None:
        self.root = root
        self._queue = queue
        self._cache = CheckpointMetadataCache()
        self.state: dict[str, Any] = {f"layer {n}": torch.zeros(300) for n in range(9)}
        for number in range(4):
            self.start(f"known {number}", number)
            queue.maybe_finalize_async_calls(blocking=True)

    def start(self, name: str, value: int, **options: Any) -> Path:
        for tensor in self.state.values():
            tensor.fill_(value)
        schedule(self._queue, self.root / name, self.state, cache=self._cache, **options)
        return self.root / name

    def require(self, path: Path, value: int) -> None:
        """A whole checkpoint with this value, and nothing beside it."""
        found = {name: torch.empty(300) for name in self.state}
        torch.distributed.checkpoint.load(found, checkpoint_id=path, no_dist=True)
        assert all(torch.equal(each, torch.full((300,), value)) for each in found.values())
        assert nostall.is_complete(path, deep=True)
        assert temporary(path) == []


@pytest.fixture
def saves(tmp_path: Path, queue: AsyncCallsQueue) -> Saves:
    return Saves(tmp_path, queue)


def temporary(path: Path) -> list[Path]:
    return sorted(path.glob("*.tmp"))


def is_written(path: Path) -> bool:
    """Whether something is written ahead, or was."""
    for ahead in [each for each in gc.get_objects() if isinstance(each, WrittenAhead)]:
        assert is_done(ahead.settled, DEADLINE_S)
    return bool(temporary(path)) and temporary(path)[0].stat().st_size > 0


@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
def test_what_is_published_was_written_while_the_files_were(
    saves: Saves, queue: AsyncCallsQueue, staging: str
) -> None:
    """The commit gives the file its name and adds little to it."""
    with Hold("fsync") as hold, inject(hold.fault):
        path = saves.start("new", 5, staging=staging)
        hold.wait_reached()
        assert is_written(path)
        (ahead,) = temporary(path)
        before, inode = ahead.stat().st_size, ahead.stat().st_ino
        assert not (path / ".metadata").exists()
        hold.release()
        queue.maybe_finalize_async_calls(blocking=True)
    published = (path / ".metadata").stat()
    assert published.st_ino == inode
    assert before > (published.st_size - before)
    saves.require(path, 5)


def test_what_gains_nothing_is_left_to_the_commit(
    saves: Saves, queue: AsyncCallsQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short metadata is written fast."""
    monkeypatch.setattr(_ahead, "WORTH_IT_NBYTES", 1 << 20)
    with Hold("fsync") as hold, inject(hold.fault):
        path = saves.start("new", 5)
        hold.wait_reached()
        assert not is_written(path)
        hold.release()
        queue.maybe_finalize_async_calls(blocking=True)
    saves.require(path, 5)


def test_a_structure_that_has_changed_is_published_as_it_is_now(
    saves: Saves, queue: AsyncCallsQueue
) -> None:
    """What was expected is written over."""
    saves.state["layer 3"] = torch.zeros(300, dtype=torch.float64)
    path = saves.start("new", 5)
    queue.maybe_finalize_async_calls(blocking=True)
    saves.require(path, 5)
    metadata = nostall.CachedMetadataFileSystemReader(path).read_metadata()
    entry = metadata.state_dict_metadata["layer 3"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.properties.dtype is torch.float64


@pytest.mark.parametrize(
    "fault", [Fault.errno("chunk", errno.ENOSPC), Fault.exit("fsync", 17)], ids=["full", "died"]
)
def test_a_save_that_fails_leaves_nothing(
    saves: Saves, queue: AsyncCallsQueue, fault: Fault
) -> None:
    """Whatever fails; and the next save to the directory works."""
    with inject(fault):
        path = saves.start("new", 5)
        with pytest.raises(CheckpointException):
            queue.maybe_finalize_async_calls(blocking=True)
    assert not is_written(path)
    assert list(path.iterdir()) == []
    saves.start("new", 6)
    queue.maybe_finalize_async_calls(blocking=True)
    saves.require(path, 6)


def test_a_failure_is_reported_after_the_file_is_gone(saves: Saves, queue: AsyncCallsQueue) -> None:
    """The thread that gets the report removes it; until then a poll sees the save under way."""
    reached, go_on = threading.Event(), threading.Event()

    remove_files = posix.remove_files

    def remove(paths: list[str]) -> None:
        if ".tmp" in paths[0]:
            reached.set()
            assert go_on.wait(DEADLINE_S)
        remove_files(paths)

    with Hold("fsync") as hold, inject(hold.fault, Fault.errno("fsync", errno.ENOSPC)):
        path = saves.start("new", 5)
        hold.wait_reached()
        assert is_written(path)
        with patch.object(posix, "remove_files", remove):
            hold.release()
            assert reached.wait(DEADLINE_S)
            assert queue.poll() == []
            go_on.set()
            with pytest.raises(CheckpointException, match="No space left"):
                queue.maybe_finalize_async_calls(blocking=True)
    assert list(path.iterdir()) == []


@pytest.mark.parametrize("point", ["commit", "publish"])
def test_a_commit_that_fails_leaves_nothing(
    saves: Saves, queue: AsyncCallsQueue, point: str
) -> None:
    """The file is the commit's then."""
    path = saves.start("new", 5)
    with (
        inject(Fault.errno(point, errno.EIO)),
        pytest.raises(CheckpointException, match="could not be published"),
    ):
        queue.maybe_finalize_async_calls(blocking=True)
    assert temporary(path) == []
    assert not (path / ".metadata").exists()
    saves.start("new", 6)
    queue.maybe_finalize_async_calls(blocking=True)
    saves.require(path, 6)


class _ReadOnlyOs(RecordingOs):
    """A system that removes nothing from a directory that was made read-only."""

    def unlink(self, path: str) -> None:
        raise OSError(errno.EACCES, "read-only", path)


def test_what_could_not_be_removed_is_removed_by_the_next_commit(
    saves: Saves, queue: AsyncCallsQueue
) -> None:
    """Although the failed save is still known to this process."""
    with patch.object(posix, "os", _ReadOnlyOs()), inject(Fault.errno("commit", errno.EACCES)):
        path = saves.start("new", 5)
        with pytest.raises(CheckpointException) as caught:
            queue.maybe_finalize_async_calls(blocking=True)
    assert len(temporary(path)) == 1
    saves.start("new", 6)
    queue.maybe_finalize_async_calls(blocking=True)
    saves.require(path, 6)
    assert caught.value.failures  # the error still holds what it came from


def test_a_save_that_is_aborted_leaves_nothing(saves: Saves, queue: AsyncCallsQueue) -> None:
    """Although it is never finalised."""
    with Hold("fsync") as hold, inject(hold.fault):
        path = saves.start("new", 5)
        hold.wait_reached()
        assert is_written(path)
        queue.close(abort=True)
    assert temporary(path) == []


def tidied(ahead: Path) -> None:
    ahead.unlink()


def replaced(ahead: Path) -> None:
    content = ahead.read_bytes()
    ahead.unlink()
    ahead.write_bytes(content[:7])


@pytest.mark.parametrize("happens", [tidied, replaced])
def test_a_file_that_was_removed_is_written_anew(
    saves: Saves, queue: AsyncCallsQueue, happens: Callable[[Path], None]
) -> None:
    """By a script that removes temporary files; what it puts in its place is never published."""
    with Hold("fsync") as hold, inject(hold.fault):
        path = saves.start("new", 5)
        hold.wait_reached()
        assert is_written(path)
        (ahead,) = temporary(path)
        happens(ahead)
        hold.release()
        queue.maybe_finalize_async_calls(blocking=True)
    ahead.unlink(missing_ok=True)
    saves.require(path, 5)


class _Refusing(RecordingOs):
    """Storage that takes nothing ahead, and refuses again at the close, as network storage does."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0

    def pwrite(self, fd: int, content: Any, offset: int) -> int:
        if threading.current_thread().name == "nostall-ahead":
            self.refused += 1
            raise OSError(errno.ENOSPC, "no room for that")
        return super().pwrite(fd, content, offset)

    def close(self, fd: int) -> None:
        super().close(fd)
        if threading.current_thread().name == "nostall-ahead":
            raise OSError(errno.ENOSPC, "no room for that, still")


def test_storage_that_refuses_it_is_asked_again_by_the_commit(
    saves: Saves, queue: AsyncCallsQueue
) -> None:
    """Which tells of it if that fails, too."""
    storage = _Refusing()
    with patch.object(posix, "os", storage):
        path = saves.start("new", 5)
        queue.maybe_finalize_async_calls(blocking=True)
    assert storage.refused
    saves.require(path, 5)


class _RefusingToClose(RecordingOs):
    """Storage that finds out late that it has no room for a temporary file."""

    def close(self, fd: int) -> None:
        path = self._paths[fd]
        super().close(fd)
        if path.endswith(".tmp"):
            raise OSError(errno.EDQUOT, "over quota")


def test_a_failed_save_is_reported_whatever_closing_does(
    saves: Saves, queue: AsyncCallsQueue
) -> None:
    """At once, and with the reason for which it has failed."""
    with (
        patch.object(posix, "os", _RefusingToClose()),
        Hold("fsync") as hold,
        inject(hold.fault, Fault.errno("fsync", errno.ENOSPC)),
    ):
        path = saves.start("new", 5)
        hold.wait_reached()
        assert is_written(path)
        hold.release()
        with pytest.raises(CheckpointException, match="No space left"):
            queue.maybe_finalize_async_calls(blocking=True)
    assert list(path.iterdir()) == []


def test_a_structure_that_was_learned_beside_a_checkpoint_is_written_ahead_in_new_directories(
    saves: Saves, queue: AsyncCallsQueue
) -> None:
    """From the second of them on: names without a mark have to have been seen once."""
    for value in range(3):
        saves.start("known 3", value)
        queue.maybe_finalize_async_calls(blocking=True)
        saves.require(saves.root / "known 3", value)
    seen = []
    for number in range(3):
        with Hold("fsync") as hold, inject(hold.fault):
            path = saves.start(f"new {number}", 7 + number)
            hold.wait_reached()
            seen.append(is_written(path))
            hold.release()
            queue.maybe_finalize_async_calls(blocking=True)
        saves.require(path, 7 + number)
    assert seen == [False, True, True]


def test_a_forked_child_keeps_nothing_of_it(saves: Saves, queue: AsyncCallsQueue) -> None:
    """Not the descriptor, which would keep a removed checkpoint's blocks; by its exit status."""
    with Hold("fsync") as hold, inject(hold.fault):
        path = saves.start("new", 5)
        hold.wait_reached()
        assert is_written(path)
        child = os.fork()
        if not child:
            links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
            kept = [os.readlink(link) for link in links if os.path.lexists(link)]
            os._exit(sum(name.endswith(".metadata.tmp") for name in kept))
        _, status = os.waitpid(child, 0)
        hold.release()
        queue.maybe_finalize_async_calls(blocking=True)
    assert status == 0
    saves.require(path, 5)


# --- in the writer process ------------------------------------------------------------------------


class CountingOs(RecordingOs):
    """Counts what this process writes to unpublished metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def pwrite(self, fd: int, content: Any, offset: int) -> int:
        if self._paths[fd].endswith(".metadata.tmp"):
            self.nbytes += len(content)
        return super().pwrite(fd, content, offset)


@pytest.mark.parametrize("is_beside", [False, True], ids=["new directory", "beside a checkpoint"])
def test_this_process_writes_as_much_for_many_items_as_for_few(
    tmp_path: Path, queue: AsyncCallsQueue, *, is_beside: bool
) -> None:
    """The rest is what a writer process has in shared memory; it does not know the names."""
    written = {}
    for count in (100, 2000):
        saves = Saves(tmp_path / str(count), queue)
        saves.state = {f"layer {n}": torch.zeros(300) for n in range(count)}
        for value in range(6):
            saves.start("place" if is_beside else f"place {value}", value)
            queue.maybe_finalize_async_calls(blocking=True)
        storage = CountingOs()
        with patch.object(posix, "os", storage):
            path = saves.start("place", 4)
            queue.maybe_finalize_async_calls(blocking=True)
        saves.require(path, 4)
        written[count] = storage.nbytes, (path / ".metadata").stat().st_size
    (few_nbytes, short), (many_nbytes, long) = written[100], written[2000]
    assert long > 15 * short
    assert few_nbytes <= many_nbytes < few_nbytes + 100
    assert many_nbytes < long / 50


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def test_a_writer_process_writes_to_a_file_of_the_trainer(tmp_path: Path, engine: Engine) -> None:
    """Only what is shared with it, wherever it belongs; without a process nothing is done."""
    shared = SharedBytes((b"a" * 1000, b"b" * 500))
    pieces: list[PlacedPiece] = [
        (2, shared.piece(0, 1000)),
        (0, b"xy"),
        (2000, shared.piece(900, 1500)),
    ]
    with open(tmp_path / "file", "w+b") as file:
        assert engine.write_shared(shared, file.fileno(), pieces, sync=True) == pieces
        engine.writers(1)
        assert engine.write_shared(shared, file.fileno(), pieces, sync=True) == [(0, b"xy")]
        assert engine.write_shared(shared, file.fileno(), [(0, b"xy")], sync=True) == [(0, b"xy")]
    written = (tmp_path / "file").read_bytes()
    assert written == b"\0\0" + 1000 * b"a" + 998 * b"\0" + 100 * b"a" + 500 * b"b"


def kill_when_asked(writer: WriterProcess) -> None:
    wait_until(lambda: bool(writer._waiting))
    writer.kill("by a test")


@pytest.mark.parametrize("how", ["refused", "killed", "stopped"])
def test_a_writer_process_that_does_not_is_an_error(
    tmp_path: Path, engine: Engine, how: str
) -> None:
    """Then nothing more is written to that file: the process may still do it."""
    shared = SharedBytes((b"a" * 1000,))
    (writer,) = engine.writers(1)
    assert writer.wait_ready(DEADLINE_S)
    (tmp_path / "file").touch()
    with open(tmp_path / "file", "rb" if how == "refused" else "wb") as file:
        if how != "refused":
            os.kill(writer.pid, signal.SIGSTOP)
        if how == "killed":
            threading.Thread(target=kill_when_asked, args=(writer,)).start()
        if how == "stopped":
            engine.options = replace(engine.options, save_timeout_s=0.1)
        expected = {"refused": "Bad file", "killed": "by a test", "stopped": "does not answer"}
        with pytest.raises(OSError, match=expected[how]):
            engine.write_shared(shared, file.fileno(), [(0, shared.piece(0, 1000))], sync=False)
    writer.kill("the test is over")


def test_a_save_is_committed_without_a_file_that_a_writer_process_has_not_written(
    saves: Saves, queue: AsyncCallsQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit writes another file."""

    def refuse(*_: object, **__: object) -> list[PlacedPiece]:
        raise OSError(errno.EIO, "by a test")

    monkeypatch.setattr(Engine, "write_shared", refuse)
    with Hold("fsync") as hold, inject(hold.fault):
        path = saves.start("new", 5)
        hold.wait_reached()
        assert not is_written(path)
        assert temporary(path) == []
        hold.release()
        queue.maybe_finalize_async_calls(blocking=True)
    saves.require(path, 5)


class Elsewhere:
    """What another process does, as far as a test lets it."""

    def __init__(self) -> None:
        self.is_asked, self.may_write, self.is_done = (threading.Event() for _ in range(3))

    def __call__(self, fd: int, pieces: list[PlacedPiece]) -> list[PlacedPiece]:
        self.is_asked.set()
        assert self.may_write.wait(DEADLINE_S)
        for at, piece in pieces:
            os.pwrite(fd, piece, at)
        self.is_done.set()
        return []


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    elsewhere = Elsewhere()
    yield elsewhere
    elsewhere.may_write.set()
    assert elsewhere.is_done.wait(DEADLINE_S)


def test_a_failed_save_does_not_wait_for_another_process(
    tmp_path: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may be the one that receives the answer. The file is gone nevertheless."""
    monkeypatch.setattr(_ahead, "_REMOVAL_TIMEOUT_S", 10 * DEADLINE_S)
    ahead = WrittenAhead(str(tmp_path), ".metadata", [b"content"], elsewhere, sync=True)
    ahead.start()
    assert elsewhere.is_asked.wait(DEADLINE_S)
    dropping = threading.Thread(target=ahead.drop, daemon=True)
    dropping.start()
    dropping.join(DEADLINE_S)
    assert not dropping.is_alive()
    assert temporary(tmp_path) == []
    assert not elsewhere.is_done.is_set()


def test_what_another_process_writes_too_late_is_in_no_checkpoint(
    tmp_path: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit waits for it a while, however long a save may take, and writes another file."""
    monkeypatch.setattr(_ahead, "_PATIENCE_S", 0.01)
    ahead = WrittenAhead(str(tmp_path), ".metadata", [b"expected"], elsewhere, sync=True)
    ahead.start()
    assert elsewhere.is_asked.wait(DEADLINE_S)
    draft = ahead.take(10 * DEADLINE_S)
    assert draft is None
    storage_at(str(tmp_path)).publish(".metadata", [b"what was published"], draft=draft)
    elsewhere.may_write.set()
    assert is_done(ahead.settled, DEADLINE_S)
    assert (tmp_path / ".metadata").read_bytes() == b"what was published"
    assert os.listdir(tmp_path) == [".metadata"]


def test_writer_processes_keep_nothing_of_it(saves: Saves, queue: AsyncCallsQueue) -> None:
    """Neither descriptors nor memory."""
    (pid,) = writer_pids()
    before = os.listdir(f"/proc/{pid}/fd")
    for value in range(6):
        saves.start(f"again {value}", value)
        queue.maybe_finalize_async_calls(blocking=True)
    assert os.listdir(f"/proc/{pid}/fd") == before
    assert "constant-nostall" not in Path(f"/proc/{pid}/maps").read_text()


def test_metadata_that_cannot_be_shared_stay_in_this_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which writes them, then."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    publication = publication_of(small())
    assert publication.to_share().shared is not None
    monkeypatch.setattr(os, "memfd_create", refuse)
    with caplog.at_level("DEBUG", logger="nostall"):
        assert publication.to_share() is publication
    assert "too many open files" in caplog.text


def test_a_plan_cache_can_be_copied(saves: Saves) -> None:
    """With the metadata that it shares; a save with the copy is like any other."""
    for copied in (copy.deepcopy(saves._cache), pickle.loads(pickle.dumps(saves._cache))):
        with AsyncCallsQueue() as queue:
            schedule(queue, saves.root / "copied", saves.state, cache=copied)
        saves.require(saves.root / "copied", 3)


# --- by itself ------------------------------------------------------------------------------------


def a_publication() -> Publication:
    return publication_of(complete_metadata(Metadata({}), []))


def written_ahead(path: Path, publication: Publication) -> WrittenAhead:
    content = publication.content_before_files(None)
    return WrittenAhead(str(path), ".metadata", content, sync=True)


def test_one_that_was_not_started_is_not_waited_for(tmp_path: Path) -> None:
    """A save may be finalised that nothing was scheduled for."""
    ahead = written_ahead(tmp_path, a_publication())
    assert ahead.take(1e9) is None


def test_one_that_is_over_is_not_started_any_more(tmp_path: Path) -> None:
    """An abort may come before the snapshot is taken."""
    ahead = written_ahead(tmp_path, a_publication())
    ahead.drop()
    ahead.start()
    assert not is_written(tmp_path)
    assert ahead.take(1e9) is None  # and not waited for
    assert temporary(tmp_path) == []


def test_one_that_is_dropped_before_its_file_is_made_leaves_nothing(tmp_path: Path) -> None:
    """An aborted save returns when the thread can make no file any more."""
    ahead = written_ahead(tmp_path, a_publication())
    begins, write = threading.Event(), ahead._draft.write

    def late(content: Sequence[Piece], **options: Any) -> None:
        begins.set()
        wait_until(lambda: ahead._state is _ahead._State.OVER)
        write(content, **options)

    with patch.object(ahead._draft, "write", late):
        ahead.start()
        assert begins.wait(DEADLINE_S)
        ahead.drop()
        assert temporary(tmp_path) == []
        assert is_done(ahead.settled, DEADLINE_S)
    assert temporary(tmp_path) == []


@pytest.mark.parametrize(
    "published",
    [
        pytest.param(lambda expected: expected.content(None), id="as expected"),
        pytest.param(
            lambda expected: expected.content(StorageMeta(save_id="another")), id="another identity"
        ),
        pytest.param(lambda _: (b"something", b" else"), id="something shorter"),
        pytest.param(lambda _: publication_of(small()).content(None), id="something longer"),
    ],
)
def test_what_is_published_is_what_the_commit_says(
    tmp_path: Path, published: Callable[[Publication], Sequence[Piece]]
) -> None:
    """Whatever was expected; in the file that was begun."""
    expected = a_publication()
    ahead = written_ahead(tmp_path, expected)
    ahead.start()
    assert is_written(tmp_path)
    inode = temporary(tmp_path)[0].stat().st_ino
    content = published(expected)
    storage_at(str(tmp_path)).publish(".metadata", content, draft=ahead.take(DEADLINE_S))
    assert (tmp_path / ".metadata").read_bytes() == b"".join(content)
    assert (tmp_path / ".metadata").stat().st_ino == inode
    assert temporary(tmp_path) == []


def test_the_index_is_written_ahead_up_to_its_tables(tmp_path: Path) -> None:
    """Only the tables have the names of files."""
    publication = publication_of(small())
    assert publication.index is not None
    ahead = written_ahead(tmp_path, publication)
    ahead.start()
    assert is_written(tmp_path)
    (draft,) = temporary(tmp_path)
    written = b"".join(publication.content(None)) + publication.index.body
    assert draft.read_bytes() == written
    taken = ahead.take(DEADLINE_S)
    assert taken is not None
    taken.remove()
    taken.close()


class _Hanging(RecordingOs):
    """Storage that hangs when something is written, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.stands, self.go = threading.Event(), threading.Event()

    def pwrite(self, fd: int, content: Any, offset: int) -> int:
        self.stands.set()
        self.go.wait(DEADLINE_S)
        return os.pwrite(fd, content, offset)


def test_storage_that_hangs_is_waited_for_up_to_a_deadline(tmp_path: Path) -> None:
    """What it lets go of later is removed, and no descriptor is left."""
    ahead = written_ahead(tmp_path, a_publication())
    gc.collect()
    before = os.listdir("/proc/self/fd")
    storage = _Hanging()
    with patch.object(posix, "os", storage):
        ahead.start()
        assert storage.stands.wait(DEADLINE_S)
        assert len(temporary(tmp_path)) == 1
        assert ahead.take(0.01) is None
        assert temporary(tmp_path) == []  # already: the process may end before storage lets go
        storage.go.set()
        assert is_done(ahead.settled, DEADLINE_S)
    assert temporary(tmp_path) == []
    assert os.listdir("/proc/self/fd") == before


def test_a_system_without_a_thread_to_give_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit writes everything then."""
    monkeypatch.setattr(threads, "_kept", deque())

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ahead = written_ahead(tmp_path, a_publication())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    ahead.start()
    assert ahead.take(DEADLINE_S) is None


# --- two ranks ------------------------------------------------------------------------------------


def test_a_coordinator_writes_ahead_for_all_ranks(tmp_path: Path) -> None:
    """What both have written is in it; if another rank fails, the file goes, and all raise."""
    first, second = run_ranks(2, "ahead:a_coordinator_writes_ahead_for_all_ranks", tmp_path / "out")
    assert {4, 10, 11} <= set(first["taken"])
    assert not second["taken"]
    for rank in (first, second):
        assert rank["broken"] == [5]
        assert "(RANK 1)" in rank["failure"]
        assert rank["left"] == []


def test_storage_that_does_not_remove_what_was_written_ahead_does_not_hold_up_others(
    saves: Saves, queue: AsyncCallsQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """The failed save raises, and the next one reports; the file goes when storage lets go."""
    storage = HangingOs("unlink", ".tmp")
    with (
        AsyncCallsQueue() as other,
        Hold("fsync") as hold,
        patch.object(posix, "os", storage),
    ):
        with inject(hold.fault, Fault.errno("report", errno.EIO)):
            path = saves.start("failed", 5)
        hold.wait_reached()
        assert is_written(path)
        schedule(other, saves.root / "other", {"x": torch.ones(9)})
        hold.release()
        assert storage.is_reached.wait(DEADLINE_S)
        try:
            assert other.wait(timeout=10) == [0]
            with pytest.raises(CheckpointException, match="Input/output error"):
                queue.wait(timeout=10)
        finally:
            storage.answer()
        wait_until(lambda: temporary(path) == [])
    assert "has not removed 1 files within 1 s" in caplog.text


class _NoMemoryOs(RecordingOs):
    """A system that has no memory to remove a temporary file with."""

    def unlink(self, path: str) -> None:
        if path.endswith(".tmp"):
            raise MemoryError
        super().unlink(path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_is_reported_even_without_memory_to_clean_up(
    saves: Saves, queue: AsyncCallsQueue
) -> None:
    """At once and not at the save's deadline; the file stays."""
    with patch.object(posix, "os", _NoMemoryOs()):
        with Hold("fsync") as hold, inject(hold.fault, Fault.errno("report", errno.EIO)):
            path = saves.start("failed", 5)
            hold.wait_reached()
            assert is_written(path)
            hold.release()
        with pytest.raises(CheckpointException, match="Input/output error"):
            queue.wait(timeout=10)
    for left in temporary(path):
        left.unlink()
