"""The cost of a save to the host: memory, descriptors, processes, and waits of the next save."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._engine import default_engine
from nostall._memory.arena import Arena, Block
from nostall._model.threads import is_done
from nostall.core import AsyncCallsQueue
from nostall.errors import SaveTimeoutError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.state_dict_saver import CheckpointMetadataCache
from programs.entry_points import holds
from support.faults import Hold, inject, writer_pids
from support.processes import answer_of, ended, open_files, resident_nbytes
from support.ranks import run_script
from support.states import read_metadata, save_async, schedule, small_state
from support.waiting import stands_in, wait_until

DEADLINE_S = 60.0


# --- memory and descriptors -----------------------------------------------------------------------


def test_five_thousand_tensors_need_few_descriptors(tmp_path: Path) -> None:
    """With a limit of 64 open files 5,000 tensors, changed afterwards, are saved and load right."""
    done = run_script("programs/resources.py", str(tmp_path), cwd=tmp_path, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert len(read_metadata(tmp_path / "checkpoint").storage_data) == 5000


@pytest.mark.parametrize("structures", [(64,), (64, 48, 60)], ids=["same", "alternating"])
def test_memory_and_descriptors_stay_flat_over_many_saves(
    tmp_path: Path, structures: tuple[int, ...]
) -> None:
    """From the third of twenty saves on memory stays within 5 %, and no number changes."""
    call = f"saves_again_and_again(Path({str(tmp_path)!r}), {structures})"
    measured = answer_of("programs.resources", call)
    steady = measured[2:]
    for name in ("proportional", "trainer", "writer", "reserved"):
        sizes = [each[name] for each in steady]
        assert max(sizes) <= 1.05 * min(sizes), (name, sizes)
    for name in ("trainer descriptors", "writer descriptors", "writer threads", "children"):
        assert len({each[name] for each in steady}) == 1, (name, [each[name] for each in steady])
    assert max(each["reserved"] for each in measured) < (2 * 64 + 8) << 20


def test_a_long_text_that_changes_is_not_kept(tmp_path: Path) -> None:
    """A log in the state dict costs memory while it is saved, not for the rest of the process."""
    cache, held = CheckpointMetadataCache(), []
    tracemalloc.start()
    try:
        with AsyncCallsQueue() as queue:
            for number in range(8):
                state = {"weight": torch.ones(8), "log": f"{number}" * (4 << 20)}
                schedule(queue, tmp_path / "save", state, cache=cache)
                queue.wait()
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[-1] - held[3] < 4 << 20


def test_neither_writers_nor_synchronous_saves_start_a_process(tmp_path: Path) -> None:
    """A writer may be made for every checkpoint; ``dcp.save`` leaves no thread when it returns."""
    before = psutil.Process().children(recursive=True), threading.enumerate()
    writers = [FileSystemWriterAsync(tmp_path / f"{n}", thread_count=4) for n in range(3)]
    with AsyncCallsQueue():
        pass
    assert (psutil.Process().children(recursive=True), threading.enumerate()) == before
    dcp.save(small_state(1), storage_writer=writers[0])
    assert (psutil.Process().children(recursive=True), threading.enumerate()) == before


# --- back-pressure --------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [1, 2])
def test_a_save_beyond_max_in_flight_waits_for_the_oldest(tmp_path: Path, allowed: int) -> None:
    """With as many held as may be in flight, the next call waits until one is written."""
    nostall.configure(EngineOptions(max_in_flight=allowed))
    returned = threading.Event()

    def save_later() -> None:
        state = small_state(allowed)
        with AsyncCallsQueue() as queue:
            schedule(queue, tmp_path / f"{allowed}", state)
            returned.set()
            state["weight"].fill_(99)

    with ExitStack() as stack, AsyncCallsQueue() as queue:
        held = [stack.enter_context(Hold()) for _ in range(allowed)]
        for seed, hold in enumerate(held):
            with inject(hold.fault):
                schedule(queue, tmp_path / f"{seed}", small_state(seed))
        held[0].wait_reached()
        assert queue.pending == allowed
        later = threading.Thread(target=save_later)
        later.start()
        waits = (Arena.lease, is_done)
        wait_until(lambda: returned.is_set() or all(stands_in(later, each) for each in waits))
        has_waited = not returned.is_set()
        held[0].release()
        assert returned.wait(DEADLINE_S)
        for hold in held[1:]:
            hold.release()
        later.join(DEADLINE_S)
    assert has_waited
    assert all(holds(tmp_path / f"{seed}", seed) for seed in range(allowed + 1))


def test_configuring_gives_snapshot_memory_back(tmp_path: Path) -> None:
    """Programs without a manager do it after their last save; a later one reserves it again."""
    state = {"weight": torch.ones(16 << 20)}
    for name in ("first", "second"):
        with AsyncCallsQueue() as queue:
            schedule(queue, tmp_path / name, state)
        (pid,) = writer_pids()
        held = resident_nbytes()
        nostall.configure(EngineOptions())
        assert resident_nbytes() < held - state["weight"].nbytes // 2
        assert not psutil.pid_exists(pid)


def test_waiting_for_memory_ends_at_the_deadline(tmp_path: Path) -> None:
    """A save that finds all memory taken is a timeout that says so; those in flight go on."""
    nostall.configure(EngineOptions(max_in_flight=1, save_timeout_s=0.5))
    with Hold() as hold, inject(hold.fault), AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "first", small_state(1))
        hold.wait_reached()
        with AsyncCallsQueue() as other:
            schedule(other, tmp_path / "second", small_state(2))
            with pytest.raises(CheckpointException) as caught:
                other.wait()
        ((error, _),) = caught.value.failures.values()
        assert isinstance(error, SaveTimeoutError)
        assert error.phase == "stage"
        assert "in flight" in str(error)
        with pytest.raises(SaveTimeoutError):
            FileSystemWriterAsync(tmp_path / "third").stage(small_state(3))
        hold.release()
        # So that closing the queue, for which half a second holds as well, finds the first save
        # done.
        default_engine().arena.lease(1, timeout_s=DEADLINE_S).release()
    assert holds(tmp_path / "first", 1)
    assert not (tmp_path / "second" / ".metadata").exists()


# --- the import -----------------------------------------------------------------------------------


def test_importing_nostall_starts_nothing_and_loads_no_torch() -> None:
    """``import nostall`` is cheap: no torch, no thread, no process, no file or socket left open."""
    script = """if True:
        import os, sys, threading
        before = set(os.listdir("/proc/self/fd"))
        import nostall
        assert set(os.listdir("/proc/self/fd")) == before
        import psutil
        assert [name for name in sys.modules if name.split(".")[0] == "torch"] == []
        assert threading.active_count() == 1
        assert psutil.Process().children() == []
        assert sorted(nostall.__all__) == dir(nostall)
    """
    ended(sys.executable, "-W", "ignore", "-c", script)


# --- the writer process ---------------------------------------------------------------------------


@pytest.fixture
def writer(tmp_path: Path) -> psutil.Process:
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "saved", small_state(1), thread_count=4)
    (pid,) = writer_pids()
    return psutil.Process(pid)


def test_the_writer_process_has_no_torch_and_no_accelerator(writer: psutil.Process) -> None:
    """The running process has no torch mapped, no accelerator device open, and is small."""
    maps = Path(f"/proc/{writer.pid}/maps").read_text()
    paths = {line.split()[-1] for line in maps.splitlines() if "/" in line}
    opened = {*open_files(writer.pid)}
    assert not [path for path in paths if "torch" in path or "cuda" in path.lower()]
    assert not [path for path in paths | opened if path.startswith(("/dev/nvidia", "/dev/kfd"))]
    assert "nostall._writer.main" in " ".join(writer.cmdline())
    assert writer.memory_full_info().uss < 40 << 20


def test_the_writer_process_listens_on_no_socket(writer: psutil.Process) -> None:
    """It talks over one inherited Unix socket; there is no port to connect to."""
    name = "net_connections" if hasattr(writer, "net_connections") else "connections"  # psutil 5
    connections = getattr(writer, name)
    assert connections(kind="inet") == []
    assert [each.status for each in connections(kind="all")] == [psutil.CONN_NONE]


IDLE = {"io_priority": psutil.IOPRIO_CLASS_IDLE}


@pytest.mark.parametrize(
    ("configured", "of_queue"),
    [({}, {}), ({"cpu_priority": 15, **IDLE}, {}), ({}, {"cpu_priority": 17, **IDLE})],
    ids=["default", "configured", "of a queue"],
)
def test_priorities_are_those_asked_for(
    tmp_path: Path, configured: dict[str, Any], of_queue: dict[str, Any]
) -> None:
    """``EngineOptions`` decide, or a queue with its own, for a process that runs already, too."""
    default = {"cpu_priority": 10, "io_priority": int(psutil.Process().ionice().ioclass)}
    nostall.configure(EngineOptions(**configured))
    (pid,) = writer_pids()

    def priorities() -> dict[str, int]:
        process = psutil.Process(pid)
        return {"cpu_priority": process.nice(), "io_priority": int(process.ionice().ioclass)}

    save_async(FileSystemWriterAsync(tmp_path / "saved"), small_state(1))
    assert priorities() == {**default, **configured}
    with AsyncCallsQueue(**of_queue) as queue:
        schedule(queue, tmp_path / "saved", small_state(1))
    assert priorities() == {**default, **configured, **of_queue}
    assert writer_pids() == [pid]


def test_warmup_leaves_nothing_to_start_or_reserve(tmp_path: Path) -> None:
    """After ``warmup`` a save of that size starts no process and reserves no memory."""
    before = len(psutil.Process().children())
    nostall.warmup(3 << 20)
    assert len(psutil.Process().children()) == before + 1
    pids, reserved = writer_pids(), default_engine().arena.reserved_nbytes
    assert reserved >= 3 << 20
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "saved", {"weight": torch.ones(500_000)})
    assert (writer_pids(), default_engine().arena.reserved_nbytes) == (pids, reserved)
    nostall.warmup(3 << 20)
    assert (writer_pids(), default_engine().arena.reserved_nbytes) == (pids, reserved)


@pytest.mark.parametrize("save", ["split", "dcp.async_save"])
@pytest.mark.parametrize("wait", [True, False])
def test_warmup_for_a_state_dict_reserves_what_its_first_save_needs(
    tmp_path: Path, save: str, *, wait: bool
) -> None:
    """Objects, containers and tensors of odd strides included; twice as much is not reserved."""
    tensors = {f"t{n}": torch.randn(1000) for n in range(3000)}
    state = {**tensors, "view": torch.randn(2000, 900).t(), "text": "x" * (5 << 20)}
    nostall.configure(EngineOptions())
    nostall.warmup(state, wait=wait)
    pids = writer_pids()
    if save == "split":
        with AsyncCallsQueue() as queue:
            schedule(queue, tmp_path / "saved", state)
    else:
        save_async(FileSystemWriterAsync(tmp_path / "saved"), state)
    reserved = default_engine().arena.reserved_nbytes
    nostall.configure(EngineOptions())
    nostall.warmup(state)
    assert reserved == default_engine().arena.reserved_nbytes  # the save reserved no more
    assert pids != writer_pids()
    assert nostall.verify(tmp_path / "saved").ok


def test_a_warmup_that_fails_in_the_background_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged; a save that needs less memory succeeds."""
    nostall.configure(EngineOptions())
    nostall.warmup(1 << 50, wait=False)
    save_async(FileSystemWriterAsync(tmp_path / "saved"), small_state())
    assert "the warm-up failed: cannot reserve" in caplog.text


def test_a_warmup_that_hangs_delays_the_first_save_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That save waits until the deadline, says so, and reserves memory itself."""
    answered = threading.Event()
    monkeypatch.setattr(Block, "populate", lambda _: answered.wait(DEADLINE_S))
    nostall.configure(EngineOptions(save_timeout_s=3.0))
    nostall.warmup(1 << 20, wait=False)
    try:
        for number in range(2):
            save_async(FileSystemWriterAsync(tmp_path / f"{number}"), small_state(number))
    finally:
        answered.set()
    assert caplog.text.count("the warm-up did not finish within 3 s") == 1
    assert nostall.verify(tmp_path / "0").ok
    assert nostall.verify(tmp_path / "1").ok


def test_no_more_memory_is_reserved_than_a_snapshot_needs(tmp_path: Path) -> None:
    """One save takes the size of the state rounded up to 2 MiB, not a second buffer."""
    with AsyncCallsQueue() as queue:
        for number in range(3):
            schedule(queue, tmp_path / f"{number}", {"weight": torch.ones(1_000_000)})
            queue.wait()
    assert default_engine().arena.reserved_nbytes == 4 << 20
