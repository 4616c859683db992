"""``nostall.status()``: which saves and loads are in progress, and how far they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan

import nostall
from nostall import LoadStatus, SaveStatus
from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.torch_ckpt import TorchAsyncCheckpoint
from support.faults import Fault, Hold, inject
from support.states import schedule

DEADLINE_S = 60.0
CHUNK_NBYTES = 64 << 10
STATE = {f"t{n}": torch.full((100_000,), float(n)) for n in range(4)}
NBYTES = 4 * 400_000


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    """So that a save can stand still between two of them."""
    nostall.configure(EngineOptions(chunk_nbytes=CHUNK_NBYTES, io_threads=1))
    yield
    nostall.configure(EngineOptions())


def reached(condition: Callable[[SaveStatus], bool]) -> SaveStatus:
    """The status of the only save, once it is like that."""
    end_s = time.monotonic() + DEADLINE_S
    status = only_save()
    while not condition(status):
        assert time.monotonic() < end_s, str(status)
        status = only_save()
    return status


def only_save() -> SaveStatus:
    """The status of the only save, while nothing is loaded."""
    (status,) = nostall.status()
    assert isinstance(status, SaveStatus)
    return status


def is_writing(status: SaveStatus) -> bool:
    """Whether the writer process has reported that it began to write."""
    return status.state == "writing"


@contextmanager
def held(path: Path, point: str, after: int = 0, **options: Any) -> Iterator[AsyncCallsQueue]:
    """A split save that stands still at a point, passed so many times, until the block ends."""
    with Hold(point) as hold, AsyncCallsQueue() as queue:
        # For longer than the writer is silent between two reports.
        faults = [Fault.delay(point, 0.3)] if after else []
        with inject(*faults, Fault({**hold.fault.plain, "after": after})):
            schedule(queue, path, STATE, **options)
        hold.wait_reached()
        yield queue
        hold.release()


def test_overlapped_staging_is_seen_as_such(tmp_path: Path) -> None:
    """While tensors are being copied the state is that."""
    with held(tmp_path / "saved", "stage", staging="overlapped"):
        assert only_save().state == "staging"


def test_a_save_is_followed_from_its_snapshot_to_its_end(tmp_path: Path) -> None:
    """Its place, its size and its state are shown until it is finalised."""
    assert nostall.status() == ()
    with AsyncCallsQueue() as queue:
        with Hold("start") as hold:
            with inject(hold.fault):
                schedule(queue, tmp_path / "saved", STATE)
            hold.wait_reached()
            status = reached(is_writing)
            assert (status.path, status.written_nbytes) == (str(tmp_path / "saved"), 0)
            assert NBYTES < status.nbytes < 1.1 * NBYTES
            hold.release()
        assert reached(lambda status: status.state == "written").nbytes == status.nbytes
        queue.wait()
        assert nostall.status() == ()


def test_a_save_that_stands_still_shows_how_far_it_came(tmp_path: Path) -> None:
    """After so many chunks, which is what storage has taken; a deadline's message says it, too."""
    written = 3 * CHUNK_NBYTES
    with held(tmp_path / "saved", "chunk", after=3) as queue:
        status = reached(lambda status: status.written_nbytes == written)
        assert status.state == "writing"
        assert "writing, 0.2 of 1.6 MB" in str(status)
        with pytest.raises(TimeoutError, match=f"save to {tmp_path}/saved: writing, 0.2 of 1.6 MB"):
            queue.wait(timeout=0.1)


def test_saves_of_one_process_are_distinguished(tmp_path: Path) -> None:
    """One is being written, the other one waits for its turn; the older one comes first."""
    with held(tmp_path / "one", "chunk") as queue:
        reached(is_writing)
        schedule(queue, tmp_path / "two", STATE)
        one, two = nostall.status()
        assert (one.path, two.path) == (str(tmp_path / "one"), str(tmp_path / "two"))
        assert (one.state, two.state) == ("writing", "staged")
        assert one.seconds > two.seconds


def test_a_synchronous_save_can_be_looked_at_from_another_thread(tmp_path: Path) -> None:
    """And is over when the call returns."""
    writer = FileSystemWriterAsync(tmp_path / "saved")
    with ThreadPoolExecutor(1) as pool, Hold("fsync") as hold:
        with inject(hold.fault):
            saving = pool.submit(dcp.save, STATE, storage_writer=writer)
            hold.wait_reached()
        status = only_save()
        assert (status.state, status.written_nbytes) == ("writing", status.nbytes)
        hold.release()
        saving.result(DEADLINE_S)
        assert nostall.status() == ()


def test_a_save_that_cannot_be_planned_is_over(tmp_path: Path) -> None:
    """Although a caller still holds its future."""
    writer = FileSystemWriterAsync(tmp_path)
    saving: Any = dcp.async_save({"f": lambda: 0}, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException):
        saving.result(60)
    assert nostall.status() == ()


@pytest.mark.parametrize("abort", [False, True])
def test_a_save_that_fails_or_is_given_up_is_over(tmp_path: Path, *, abort: bool) -> None:
    """Nothing of it is shown any more, even while a caller keeps its exception."""
    queue = AsyncCallsQueue()
    with inject(Fault.errno("chunk", 28)):
        schedule(queue, tmp_path / "saved", STATE)
    if abort:
        queue.close(abort=True)
    else:
        with pytest.raises(CheckpointException):
            queue.wait()
    assert nostall.status() == ()
    queue.close()


def test_a_torch_save_is_shown_with_its_file(tmp_path: Path) -> None:
    """It has no directory of its own."""
    with Hold("chunk") as hold:
        checkpoint = TorchAsyncCheckpoint()
        with inject(hold.fault):
            checkpoint.async_save(STATE, tmp_path / "one.pt")
        hold.wait_reached()
        assert reached(is_writing).path == str(tmp_path / "one.pt")
        hold.release()
        checkpoint.finalize_async_save(blocking=True)
        assert nostall.status() == ()
        checkpoint.close()


# --- loads ----------------------------------------------------------------------------------------


class Held:
    """Holds the first thread that reports progress until it is released."""

    def __init__(self) -> None:
        self.reported: list[tuple[int, int]] = []
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, nbytes: int, total: int) -> None:
        self.reported.append((nbytes, total))
        self.reached.set()
        assert self.released.wait(DEADLINE_S)


def loads(path: Path, held: Held) -> list[Callable[[dict[str, Any]], object]]:
    """Ways to load a checkpoint."""
    reader = nostall.FileSystemReader(path, progress=held)
    return [
        lambda state: nostall.load(state, path, progress=held),
        lambda state: dcp.load(state, storage_reader=reader, no_dist=True),
    ]


@pytest.mark.parametrize("way", [0, 1], ids=["nostall.load", "dcp.load"])
def test_a_load_is_followed_from_its_first_read_to_its_end(tmp_path: Path, way: int) -> None:
    """``status`` shows it while it reads; the callback has every step, and all bytes at last."""
    dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    held, state = Held(), {name: torch.zeros_like(each) for name, each in STATE.items()}
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(loads(tmp_path, held)[way], state)
        assert held.reached.wait(DEADLINE_S)
        (status,) = nostall.status()
        held.released.set()
        load.result(DEADLINE_S)
    assert isinstance(status, LoadStatus)
    assert (status.path, status.rank, status.state) == (str(tmp_path), 0, "reading")
    assert 0 < status.read_nbytes < status.nbytes
    assert NBYTES < status.nbytes < 1.1 * NBYTES
    assert f"load from {tmp_path}" in str(status)
    assert held.reported == sorted(held.reported)
    assert held.reported[-1] == (status.nbytes, status.nbytes)
    assert nostall.status() == ()
    assert all(torch.equal(state[name], each) for name, each in STATE.items())


class InSlices(dcp.DefaultLoadPlanner):
    """Plans to load some rows, each by itself."""

    def __init__(self, rows: range) -> None:
        super().__init__()
        self._rows = rows

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(
            [
                replace(
                    item,
                    dest_offsets=torch.Size((row, 0)),
                    storage_offsets=torch.Size((row, 0)),
                    lengths=torch.Size((1, item.lengths[1])),
                )
                for item in super().create_local_plan().items
                for row in self._rows
            ]
        )


@pytest.mark.parametrize("rows", [range(500, 510), range(1000)], ids=["some", "all"])
def test_the_bytes_that_are_needed_count_and_count_once(tmp_path: Path, rows: range) -> None:
    """The total is what this load needs of the file, and its progress ends there."""
    dcp.save({"t": torch.ones(1000, 1000)}, checkpoint_id=tmp_path, no_dist=True)
    reported: list[tuple[int, int]] = []
    reader = nostall.FileSystemReader(tmp_path, progress=lambda *each: reported.append(each))
    target = torch.zeros(1000, 1000)
    dcp.load({"t": target}, storage_reader=reader, planner=InSlices(rows), no_dist=True)
    assert bool((target[rows.start : rows.stop] == 1).all())
    assert target.sum() == len(rows) * 1000
    (total,) = {total for _, total in reported}
    assert reported[-1] == (total, total)
    assert 4000 * len(rows) <= total < 4000 * len(rows) + 5000


def test_an_error_of_the_callback_ends_the_load(tmp_path: Path) -> None:
    """It is the caller's own way to stop; nothing is listed afterwards."""
    dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    state = {name: torch.zeros_like(each) for name, each in STATE.items()}

    def stop(*_: int) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        nostall.load(state, tmp_path, progress=stop)
    assert nostall.status() == ()
