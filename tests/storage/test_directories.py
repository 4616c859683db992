"""Saves that meet in one directory are each committed whole, or leave it as it was."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._engine import reset
from nostall._save.split_save import SplitSave
from nostall._storage import directories, posix
from nostall.core import AsyncCallsQueue
from nostall.errors import NotDurableError, SaveTimeoutError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.integrity import verify
from nostall.options import EngineOptions
from nostall.state_dict_saver import CheckpointMetadataCache
from support.crashes import RecordingOs
from support.faults import Fault, Hold, inject
from support.states import (
    blobs,
    planned,
    read_metadata,
    save_now,
    save_split,
    schedule,
    small_state,
)
from support.waiting import AwayOs, stands_in, wait_until


def holds(path: Path, seed: int, tmp_path: Path) -> bool:
    """Whether a checkpoint is whole and has exactly this state."""
    save_now(tmp_path / "expected", small_state(seed))
    return verify(path).ok and blobs(path) == blobs(tmp_path / "expected")


def written(path: Path, seed: int) -> AsyncCallsQueue:
    """A queue with a save whose files are written, and nothing finalised."""
    queue = AsyncCallsQueue()
    schedule(queue, path, small_state(seed))
    for call in queue._caller._calls:
        call.outcome.result(60)
    return queue


# --- two saves at a time --------------------------------------------------------------------------


def test_two_threads_that_commit_to_one_directory_take_turns(tmp_path: Path) -> None:
    """Both checkpoints are committed, one after the other, and the one that was last is there."""
    path = tmp_path / "save"
    first, second = written(path, 1), written(path, 2)
    with ThreadPoolExecutor(2) as pool, Hold("publish") as hold:
        with inject(hold.fault):
            finalizing = pool.submit(first.wait)
            hold.wait_reached()
        waiting = pool.submit(second.wait)
        turn: Any = directories.committing
        wait_until(lambda: any(stands_in(each, turn.__wrapped__) for each in threading.enumerate()))
        assert not waiting.done()
        hold.release()
        assert finalizing.result(60) == waiting.result(60) == [0]
    assert holds(path, 2, tmp_path)
    assert len(os.listdir(path)) == 2


def test_a_commit_right_after_another_one_leaves_no_file_of_it(tmp_path: Path) -> None:
    """Even if the thread of the first one has not gone on since it published."""
    path = tmp_path / "save"
    first, second = written(path, 1), written(path, 2)
    published, go_on, end = threading.Event(), threading.Event(), SplitSave.end

    def end_late(self: SplitSave, *, committed: bool) -> None:
        published.set()
        assert go_on.wait(60)
        end(self, committed=committed)

    with ThreadPoolExecutor(1) as pool:
        with patch.object(SplitSave, "end", end_late):
            finalizing = pool.submit(first.wait)
            assert published.wait(60)
        second.wait()
        names = os.listdir(path)
        go_on.set()
        finalizing.result(60)
    assert len(names) == 2
    assert holds(path, 2, tmp_path)
    first.close()
    second.close()


def test_a_commit_that_is_stuck_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    """Who waits for it hears of it at the deadline; his own checkpoint was not committed."""
    with directories.committing(str(tmp_path), timeout_s=1):
        (tmp_path / "link").symlink_to(tmp_path)
        with (
            pytest.raises(SaveTimeoutError, match="another save") as caught,
            directories.committing(str(tmp_path / "link"), timeout_s=0.01),
        ):
            pass
    assert (caught.value.phase, caught.value.path) == ("commit", str(tmp_path / "link"))


def test_metadata_of_another_process_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    """Metadata that another process swapped in is published, with an error; no file is removed."""
    path = tmp_path / "save"
    save_now(path, small_state(1))
    before = {name for name in os.listdir(path) if name.endswith(".distcp")}

    class Interfering(RecordingOs):
        def replace(self, by: str, final: str) -> None:
            os.unlink(by)
            Path(by).write_bytes(b"another's")
            super().replace(by, final)

    with AsyncCallsQueue() as queue:
        schedule(queue, path, small_state(2))
        with (
            patch.object(posix, "os", Interfering()),
            pytest.raises(CheckpointException, match="not the metadata of this save") as caught,
        ):
            queue.wait()
    (failure,) = caught.value.failures.values()
    assert isinstance(failure[0], NotDurableError)
    assert before < {name for name in os.listdir(path) if name.endswith(".distcp")}


def test_a_commit_that_fails_leaves_the_file_of_another_process(tmp_path: Path) -> None:
    """A draft that another process has replaced is an error, and that process's file stays."""
    path = tmp_path / ".metadata.tmp"

    class Meeting(RecordingOs):
        def fsync(self, fd: int) -> None:
            super().fsync(fd)
            path.unlink()
            path.write_bytes(b"another's")

    with (
        patch.object(posix, "os", Meeting()),
        pytest.raises(OSError, match="another process has replaced"),
    ):
        posix.write_draft(str(path), [b"ours"], sync=True)
    assert path.read_bytes() == b"another's"


@pytest.mark.parametrize("save", [save_now, save_split])
def test_a_directory_that_is_made_again_meanwhile_gets_no_checkpoint(
    tmp_path: Path, save: Callable[..., None]
) -> None:
    """A directory removed after the writing fails the save: its metadata would name no file."""
    path, removed = tmp_path / "save", tmp_path / "removed"
    with Hold("commit") as hold, inject(hold.fault), ThreadPoolExecutor() as executor:
        saving = executor.submit(save, path, small_state(1))
        hold.wait_reached()
        path.rename(removed)
        path.mkdir()
        hold.release()
        with pytest.raises(CheckpointException, match="files of this save no longer exist"):
            saving.result(60)
    assert os.listdir(path) == []


@pytest.mark.parametrize(
    "meanwhile",
    [lambda: None, lambda: nostall.configure(EngineOptions(io_threads=2)), reset],
    ids=["nothing", "configure", "reset"],
)
def test_saves_that_are_under_way_in_a_directory_share_no_file(
    tmp_path: Path, meanwhile: Callable[[], object]
) -> None:
    """Under whatever name, also if an earlier engine wrote the first; both are committed."""
    path, link = tmp_path / "save", tmp_path / "link"
    link.symlink_to(path)
    path.mkdir()
    first = written(path, 1)
    meanwhile()
    second = written(link, 2)
    assert first.wait() == [0]
    assert holds(path, 1, tmp_path)
    assert second.wait() == [0]
    assert holds(path, 2, tmp_path)


def test_a_save_that_was_finalised_by_hand_cannot_be_aborted(tmp_path: Path) -> None:
    """Its files are a checkpoint's, whatever becomes of the queue that it was scheduled with."""
    path, queue = tmp_path / "save", AsyncCallsQueue()
    _, request = planned(path, small_state(1))
    (finalize,) = request.finalize_fns
    queue.schedule_async_request(request._replace(finalize_fns=[]))
    finalize()
    queue.close(abort=True)
    assert holds(path, 1, tmp_path)


# --- what is there already ------------------------------------------------------------------------


@pytest.mark.parametrize("alone_first", [False, True], ids=["together first", "alone first"])
def test_checkpoints_of_one_rank_and_of_all_share_no_file(
    tmp_path: Path, *, alone_first: bool
) -> None:
    """With ``use_collectives=False`` metadata has its own name; failures do not touch the other."""
    path = tmp_path / "save"

    def save(seed: int, *, alone: bool) -> None:
        writer = FileSystemWriterAsync(path)
        dcp.save(small_state(seed), storage_writer=writer, use_collectives=not alone)

    save(1, alone=alone_first)
    before = {each.name: each.read_bytes() for each in path.iterdir()}
    with (
        inject(Fault.errno("publish", errno.ENOSPC)),
        pytest.raises((CheckpointException, OSError)),
    ):
        save(2, alone=not alone_first)
    after = {each.name: each.read_bytes() for each in path.iterdir()}
    assert {name: after[name] for name in before} == before
    save(3, alone=not alone_first)
    assert {name: (path / name).read_bytes() for name in before} == before


def test_a_checkpoint_that_cannot_be_seen_for_a_moment_is_not_overwritten(tmp_path: Path) -> None:
    """No answer of the storage is no answer that nothing is there."""
    path = tmp_path / "save"
    save_split(path, small_state(1))
    reset()
    with patch.object(posix, "os", AwayOs("stat", ".metadata")):
        queue = written(path, 2)
    assert holds(path, 1, tmp_path)
    queue.close(abort=True)
    assert holds(path, 1, tmp_path)


def test_metadata_of_another_checkpoint_does_not_get_into_a_warm_cache(tmp_path: Path) -> None:
    """The next commit names what that save wrote, whatever metadata was put into the cache."""
    queue, cache = AsyncCallsQueue(), CheckpointMetadataCache()
    schedule(queue, tmp_path / "other", {"a": torch.ones(3), "b": torch.ones(4)})
    state = {name: torch.full((5,), 7.0) for name in ("a", "b", "c")}
    for number in range(4):
        schedule(queue, tmp_path / f"{number}", state, cache=cache)
    queue.wait()
    cache.set_cached_global_metadata(read_metadata(tmp_path / "other"))
    schedule(queue, tmp_path / "after", state, cache=cache)
    queue.wait()
    assert blobs(tmp_path / "after") == blobs(tmp_path / "3")


# --- what else is in the way ----------------------------------------------------------------------


def test_a_failure_before_the_commit_leaves_no_file(tmp_path: Path) -> None:
    """Whatever raises it."""

    class Nameless(FileSystemWriterAsync):
        def storage_meta(self) -> Any:
            if self.stats is not None:
                raise LookupError("no name today")
            return super().storage_meta()

    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "save", small_state(1), kind=Nameless)
        with pytest.raises(CheckpointException, match="no name today"):
            queue.wait()
    assert os.listdir(tmp_path / "save") == []
