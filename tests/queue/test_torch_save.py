"""``torch.save`` in the background: a file appears whole, under its name, in its turn, or not."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from nostall._model.threads import is_done
from nostall._storage import posix
from nostall.core import AsyncCallsQueue, abort_all
from nostall.errors import (
    NotDurableError,
    OptionError,
    SaveAbortedError,
    StagingError,
    WriteError,
)
from nostall.torch_ckpt import TorchAsyncCheckpoint
from programs.entry_points import differing, spoil
from support.crashes import RecordingOs
from support.faults import Fault, Hold, inject
from support.states import blobs, names, schedule, small_state
from support.waiting import AwayOs, HangingOs, stands_in, wait_until


def archive(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


@pytest.fixture
def checkpoint() -> Iterator[TorchAsyncCheckpoint]:
    made = TorchAsyncCheckpoint()
    yield made
    made.close()


def save_file(path: Path, **options: Any) -> None:
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save(small_state(1), path, **options)
    checkpoint.close()


@pytest.mark.parametrize(
    ("options", "name"),
    [({}, "ä" * 127), ({"pickle_protocol": 4}, "state.pt")],
    ids=["defaults and the longest name", "protocol 4"],
)
def test_a_file_holds_what_torch_save_writes(
    options: dict[str, Any], name: str, checkpoint: TorchAsyncCheckpoint, tmp_path: Path
) -> None:
    """Byte for byte, with ``torch.save``'s arguments, and as things were when the call returned."""
    state = small_state(1)
    expected = archive(small_state(1), **options)
    checkpoint.async_save(state, tmp_path / name, **options)
    spoil(state)
    state["nested"]["list"].append("late")
    checkpoint.finalize_async_save(blocking=True)
    assert (tmp_path / name).read_bytes() == expected
    assert names(tmp_path) == [name]


class Held:
    """An object whose pickling waits."""

    begun = threading.Event()
    goes_on = threading.Event()

    def __reduce__(self) -> tuple[Any, ...]:
        self.begun.set()
        assert self.goes_on.wait(60)
        return Held, ()


def test_a_save_that_was_aborted_replaces_no_file(
    checkpoint: TorchAsyncCheckpoint, tmp_path: Path
) -> None:
    """Also one whose state was still being copied, on another thread."""
    path = tmp_path / "state.pt"
    path.write_bytes(b"earlier")
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(checkpoint.async_save, {"held": Held()}, path)
        assert Held.begun.wait(60)
        abort_all()
        Held.goes_on.set()
        assert isinstance(saving.exception(), SaveAbortedError)
    checkpoint.async_save(small_state(1), tmp_path / "later.pt")  # jobs are done in turn
    checkpoint.close()
    for thread in placing():
        thread.join()
    assert path.read_bytes() == b"earlier"
    assert names(tmp_path) == ["later.pt", "state.pt"]


def test_a_file_keeps_the_mode_and_owner_of_the_one_it_replaces(tmp_path: Path) -> None:
    """A checkpoint that only its owner may read stays so, as with ``torch.save``."""
    path = tmp_path / "state.pt"
    path.write_bytes(b"earlier")
    path.chmod(0o2600)
    if os.geteuid() == 0:
        os.chown(path, 12345, 23456)
    kept = attrgetter("st_mode", "st_uid", "st_gid")
    before = kept(path.stat())
    save_file(path)
    assert path.read_bytes() == archive(small_state(1))
    assert kept(path.stat()) == before


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    """A device, a FIFO or a socket is an error that names it, and stays what it is."""
    path = tmp_path / "special"
    os.mkfifo(path)
    before = path.stat()
    with pytest.raises(CheckpointException, match="a device, a FIFO or a socket") as raised:
        save_file(path)
    error = raised.value.failures[0][0]
    assert isinstance(error, WriteError)
    assert error.path == str(path)
    assert "regular file" in str(error.hint)
    assert path.stat() == before
    assert names(tmp_path) == ["special"]


def test_a_file_can_have_the_old_format(tmp_path: Path) -> None:
    """Formats that ``torch.save`` cannot measure without writing them are saved as well."""
    path = tmp_path / "state.pt"
    save_file(path, _use_new_zipfile_serialization=False)
    assert differing(torch.load(path), small_state(1)) == []
    assert path.read_bytes()[:2] == b"\x80\x02"  # a pickle, not an archive


def test_a_file_that_got_its_name_is_saved_whatever_storage_answers(tmp_path: Path) -> None:
    """An error after the rename, as if its answer were lost, is no failed save."""
    with patch.object(posix, "os", AwayOs("replace", code=errno.EIO, is_done=True)):
        save_file(tmp_path / "state.pt")
    assert (tmp_path / "state.pt").read_bytes() == archive(small_state(1))
    assert names(tmp_path) == ["state.pt"]


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    """While it is written its name shows the earlier file, if any; afterwards the new one."""
    path = tmp_path / "state.pt"
    checkpoint = TorchAsyncCheckpoint(persistent_queue=False)
    for earlier, number in ((None, 1), (archive(small_state(1)), 2)):
        with Hold("fsync") as hold:
            hold.stop(checkpoint.async_save, small_state(number), f=str(path))
            checkpoint.finalize_async_save()
            assert (path.read_bytes() if path.exists() else None) == earlier
            hold.release()
            checkpoint.finalize_async_save(blocking=True)
        assert path.read_bytes() == archive(small_state(number))
        assert names(tmp_path) == ["state.pt"]
    checkpoint.close()


def test_a_failed_file_leaves_the_earlier_one(
    checkpoint: TorchAsyncCheckpoint, tmp_path: Path
) -> None:
    """A full device is an error that names the file; the next save works."""
    path = tmp_path / "state.pt"
    checkpoint.async_save(small_state(1), path)
    checkpoint.finalize_async_save(blocking=True)
    with inject(Fault.errno("chunk", errno.ENOSPC)):
        checkpoint.async_save(small_state(2), path)
    with pytest.raises(CheckpointException, match=r"No space left on device.*state\.pt"):
        checkpoint.finalize_async_save(blocking=True)
    assert path.read_bytes() == archive(small_state(1))
    assert names(tmp_path) == ["state.pt"]
    checkpoint.async_save(small_state(3), path)
    checkpoint.finalize_async_save(blocking=True, terminate=True)
    assert path.read_bytes() == archive(small_state(3))


def test_what_cannot_be_pickled_fails_with_the_files_name(
    checkpoint: TorchAsyncCheckpoint, tmp_path: Path
) -> None:
    """When the save is finalised, as other ranks may wait; an impossible path fails at once."""
    path = tmp_path / "state.pt"
    with pytest.raises(OptionError, match="null character"):
        checkpoint.async_save({}, f"{path}\0")
    checkpoint.async_save({"x": lambda: 0}, path)
    with pytest.raises(CheckpointException, match=r"phase=stage.*state\.pt"):
        checkpoint.finalize_async_save(blocking=True)
    assert names(tmp_path) == []


def test_an_aborted_file_does_not_appear(checkpoint: TorchAsyncCheckpoint, tmp_path: Path) -> None:
    """``close(abort=True)`` gives up what is in progress, ``close()`` waits; both may repeat."""
    with AsyncCallsQueue() as busy, Hold() as hold:
        with inject(hold.fault):
            schedule(busy, tmp_path / "busy", small_state(1))
        checkpoint.async_save(small_state(2), tmp_path / "aborted.pt")
        checkpoint.close(abort=True)
        hold.release()
    checkpoint.async_save(small_state(3), tmp_path / "kept.pt")
    checkpoint.close()
    checkpoint.close()
    assert names(tmp_path) == ["busy", "kept.pt"]


class _Countdown:
    """Is pickled in another way every time."""

    def __init__(self, number: int, by: int) -> None:
        self.number = number
        self._by = by

    def __reduce__(self) -> Any:
        self.number -= self._by
        return bytes, (b"x" * self.number,)


def test_a_file_ends_where_its_archive_ends(
    checkpoint: TorchAsyncCheckpoint, tmp_path: Path
) -> None:
    """No older bytes of file or memory are in it; what does not fit is an error that says why."""
    path = tmp_path / "state.pt"
    checkpoint.async_save({"x": b"earlier" * 10_000}, path)
    checkpoint.async_save({"x": _Countdown(30_000, by=10_000)}, path)
    checkpoint.finalize_async_save(blocking=True)
    assert path.read_bytes() == archive({"x": _Countdown(20_000, by=10_000)})
    checkpoint.async_save({"x": _Countdown(30_000, by=-10_000)}, path)
    with pytest.raises(CheckpointException, match=r"pickled differently each time") as raised:
        checkpoint.finalize_async_save(blocking=True)
    assert isinstance(raised.value.failures[0][0], StagingError)
    assert path.read_bytes() == archive({"x": _Countdown(20_000, by=10_000)})


def test_a_file_in_new_directories_is_durable_with_their_names(tmp_path: Path) -> None:
    """The names of directories made for it are on the device before the file has its own."""
    with patch.object(posix, "os", RecordingOs()) as recorded:
        save_file(tmp_path / "new" / "deep" / "state.pt")
    done = [(each.name, Path(each.path).name) for each in recorded.operations]
    assert done == [("fsync", "new"), ("rename", done[1][1]), ("fsync", "deep")]


def test_a_file_whose_name_does_not_get_to_the_device_does_not_hold_up_others(
    checkpoint: TorchAsyncCheckpoint,
    tmp_path: Path,
) -> None:
    """While storage does not answer for one directory, saves to others are finalised."""
    storage = HangingOs("fsync", "/stuck")
    (tmp_path / "stuck").mkdir()
    with patch.object(posix, "os", storage), AsyncCallsQueue() as queue:
        checkpoint.async_save(small_state(1), tmp_path / "stuck" / "state.pt")
        assert storage.is_reached.wait(60)
        schedule(queue, tmp_path / "other", small_state(2))
        try:
            assert queue.wait(timeout=10) == [0]
            checkpoint.finalize_async_save()
            assert checkpoint._queue.pending == 1
        finally:
            storage.answer()
        checkpoint.close()
    assert (tmp_path / "stuck" / "state.pt").read_bytes() == archive(small_state(1))


def test_saves_to_one_file_are_put_in_place_in_order(
    checkpoint: TorchAsyncCheckpoint, tmp_path: Path
) -> None:
    """An earlier one that storage holds up does not replace a later one."""
    path = tmp_path / "directory" / "state.pt"
    path.parent.mkdir()
    storage = HangingOs("fsync", f"/{tmp_path.name}")
    try:
        with patch.object(posix, "os", storage):
            checkpoint.async_save(small_state(1), path)
            assert storage.is_reached.wait(60)
        checkpoint.async_save(small_state(2), path)
        wait_until(lambda: path.exists() or any(stands_in(t, is_done) for t in placing()))
        assert not path.exists()
    finally:
        storage.answer()
    checkpoint.close()
    assert path.read_bytes() == archive(small_state(2))


def placing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nostall-placing"]


def test_a_file_that_may_not_last_says_so_by_its_type(
    checkpoint: TorchAsyncCheckpoint, tmp_path: Path
) -> None:
    """Where the device refuses to make its name durable, the new file is there."""
    with patch.object(posix, "os", AwayOs("fsync", tmp_path.name, code=errno.EIO)):
        checkpoint.async_save(small_state(1), tmp_path / "state.pt")
        with pytest.raises(CheckpointException, match="may not survive") as raised:
            checkpoint.finalize_async_save(blocking=True)
    assert isinstance(raised.value.failures[0][0], NotDurableError)
    assert names(tmp_path) == ["state.pt"]


def test_files_and_checkpoints_take_turns_in_the_same_memory(tmp_path: Path) -> None:
    """A ``torch.save`` between two saves of one structure does not show in the second one."""
    state = {"a": torch.arange(4.0)}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "stock"))
    with AsyncCallsQueue() as queue:
        for number in range(3):
            schedule(queue, tmp_path / str(number), state)
            queue.wait()
            save_file(tmp_path / "x.pt")
    for number in range(3):
        assert blobs(tmp_path / str(number)) == blobs(tmp_path / "stock")
