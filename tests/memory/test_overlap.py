"""Overlapped staging: the call returns at once, optimizers wait, early changes fail the save."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook

import nostall
from nostall._engine import default_engine
from nostall._memory.copying import Copies, copied_at_once
from nostall._memory.overlap import SnapshotFence
from nostall.core import AsyncCallsQueue
from nostall.errors import OptionError, SaveTimeoutError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from support import loaded
from support.faults import Fault, Hold, inject
from support.interrupts import interrupt_the_wait, interrupted
from support.processes import ended
from support.ranks import TESTS, run_ranks
from support.states import blobs, blobs_by_stock, planned, save_now, schedule, small_state
from support.waiting import is_inside

DEADLINE_S = 60.0

MUCH = 1_200_000
"""Elements of a tensor in float32 that is too large to be copied inside the call."""


@contextmanager
def staging_held_up(queue: AsyncCallsQueue, path: Path) -> Iterator[Hold]:
    """All snapshot memory is in use until the block is left or the hold is released."""
    nostall.configure(EngineOptions(max_in_flight=1))
    with Hold() as hold:
        with inject(hold.fault):
            schedule(queue, path, small_state(9))
            hold.wait_reached()
        yield hold


def test_the_call_returns_before_the_snapshot_is_taken(tmp_path: Path) -> None:
    """And what is saved is what was there, objects as they were when it was called."""
    state = small_state(1)
    with AsyncCallsQueue() as queue, staging_held_up(queue, tmp_path / "first") as hold:
        schedule(queue, tmp_path / "save", state, staging="overlapped")
        state["nested"]["list"][1]["epoch"] = -1
        with pytest.raises(SaveTimeoutError, match="still being taken"):
            nostall.wait_staged(0.01)
        hold.release()
        nostall.wait_staged(60)
        state["weight"].zero_()
        queue.wait()
    assert blobs(tmp_path / "save") == blobs_by_stock(tmp_path / "stock", small_state(1))


@pytest.mark.parametrize("name", ["weight", "view", "nested.list.0"])
def test_a_tensor_that_is_changed_too_early_fails_the_save(tmp_path: Path, name: str) -> None:
    """An error that names the tensor and the remedy, no checkpoint; and the next save works."""
    base = torch.zeros(2, MUCH)
    state: dict[str, Any] = {"weight": torch.zeros(MUCH), "view": base[0], "small": small_state()}
    state["nested"] = {"list": [base[1]]}
    tensor: Any = state
    for key in name.split("."):
        tensor = tensor[int(key) if key.isdigit() else key]
    queue = AsyncCallsQueue()
    with staging_held_up(queue, tmp_path / "first") as hold:
        schedule(queue, tmp_path / "save", state, staging="overlapped")
        tensor.add_(1)
        hold.release()
        with pytest.raises(CheckpointException, match=name) as caught:
            queue.wait()
    (error,) = (error for error, _ in caught.value.failures.values())
    assert "wait_staged()" in str(error)
    assert not (tmp_path / "save" / ".metadata").exists()
    schedule(queue, tmp_path / "next", state, staging="overlapped")
    queue.close()
    assert blobs(tmp_path / "next") == blobs_by_stock(tmp_path / "stock", state)


def test_one_rank_that_forgets_to_wait_fails_the_save_on_all(tmp_path: Path) -> None:
    """In split saves, and in ``dcp.async_save``, where none waits for a plan that never comes."""
    for facts in run_ranks(
        2, "overlap:one_rank_that_forgets_to_wait_fails_the_save_on_all", tmp_path
    ):
        assert facts == {
            "split": [1],
            "async": [1],
            "said": [1, 1],  # one place and one next step
            "committed": ["before", "next"],
            "wrong": [],
        }


def test_small_tensors_may_be_changed_when_the_call_has_returned(tmp_path: Path) -> None:
    """Uncounted changes, as of running statistics, are allowed; so are tensors without counters."""
    state = small_state(1)
    with torch.inference_mode():
        state["uncounted"] = torch.ones(MUCH)
    expected = blobs_by_stock(tmp_path / "stock", state)
    with AsyncCallsQueue() as queue, staging_held_up(queue, tmp_path / "first") as hold:
        schedule(queue, tmp_path / "save", state, staging="overlapped")
        for name in ("weight", "view", "transposed", "step"):
            state[name].numpy()[...] = -1
        state["nested"]["list"][0].data.zero_()
        with torch.inference_mode():
            state["uncounted"].zero_()
        hold.release()
        queue.wait()
    assert blobs(tmp_path / "save") == expected


@given(st.lists(st.sampled_from([0, 4, 32 << 10, 33 << 10, 1 << 20, 2 << 20]), max_size=900))
def test_what_is_copied_inside_the_call_is_bounded(sizes: list[int]) -> None:
    """The smallest of up to 1 MiB; 4 MiB in all, or 8 MiB of those of up to 32 KiB."""
    chosen = copied_at_once(sizes)
    small = [at for at in chosen if sizes[at] <= 32 << 10]
    assert sum(sizes[at] for at in small) <= 8 << 20
    assert len(small) == len(chosen) or sum(sizes[at] for at in chosen) <= 4 << 20
    left = [size for at, size in enumerate(sizes) if at not in chosen]
    assert max((sizes[at] for at in chosen), default=0) <= min(left, default=1 << 20)
    total, next_one = sum(sizes[at] for at in chosen), min(left, default=2 << 20)
    assert next_one > 1 << 20 or total + next_one > (8 << 20 if next_one <= 32 << 10 else 4 << 20)


def sgd(*parameters: torch.Tensor) -> torch.optim.Optimizer:
    """An optimizer whose changes no counter tells of."""
    for each in parameters:
        each.grad = torch.ones_like(each)
    return torch.optim.SGD(parameters, lr=1.0, fused=True)


def test_an_optimizers_step_waits_for_all_snapshots(tmp_path: Path) -> None:
    """A step waits for every pending snapshot of the process; each holds the values at its call."""
    parameter = torch.nn.Parameter(torch.zeros(MUCH))
    optimizer = sgd(parameter)
    with AsyncCallsQueue() as queue, ThreadPoolExecutor(1) as pool, Hold("stage") as hold:
        with inject(hold.fault):
            schedule(queue, tmp_path / "one", {"p": parameter}, staging="overlapped")
        hold.wait_reached()
        schedule(queue, tmp_path / "two", {"p": parameter}, staging="overlapped")
        stepping = pool.submit(optimizer.step)
        with pytest.raises(FutureTimeoutError):  # another one before Python 3.11
            stepping.result(0.05)
        hold.release()
        stepping.result(60)
        assert parameter[0] == -1
    for name in ("one", "two"):
        assert torch.equal(values_at(tmp_path / name, "p", MUCH), torch.zeros(MUCH))


def test_a_snapshot_that_fails_is_not_waited_for(tmp_path: Path) -> None:
    """Training goes on, and the save says why there is no checkpoint."""
    parameter = torch.nn.Parameter(torch.zeros(MUCH))
    queue = AsyncCallsQueue()
    with inject(Fault.raising("stage", "the copy failed")):
        schedule(queue, tmp_path, {"p": parameter}, staging="overlapped")
    sgd(parameter).step()
    with pytest.raises(CheckpointException, match="the copy failed"):
        queue.close()


def test_a_step_waits_no_longer_than_a_save_may_take(tmp_path: Path) -> None:
    """The save fails, on time or later, with the reason; no checkpoint, and the next is made."""
    nostall.configure(EngineOptions(save_timeout_s=1.0))
    parameter = torch.nn.Parameter(torch.zeros(MUCH))
    queue = AsyncCallsQueue()
    with Hold("stage") as hold:
        with inject(hold.fault):
            schedule(queue, tmp_path / "late", {"p": parameter}, staging="overlapped")
        sgd(parameter).step()
        hold.release()
        with pytest.raises(CheckpointException, match="an optimizer's step waited 1 s"):
            queue.wait()
    assert not list((tmp_path / "late").iterdir())
    schedule(queue, tmp_path / "next", {"p": parameter}, staging="overlapped")
    sgd(parameter).step()
    queue.close()
    assert torch.equal(values_at(tmp_path / "next", "p", MUCH), -torch.ones(MUCH))


def test_steps_of_other_threads_are_not_disturbed_by_saves(tmp_path: Path) -> None:
    """Snapshots begin and end while optimizers run their hooks: no step fails or is lost."""
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizers = [sgd(each) for each in parameters]
    stop = threading.Event()
    # Another library's, behind nostall's: torch iterates over all of them while it calls them.
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "first", small_state(), staging="overlapped")
    others = register_optimizer_step_pre_hook(lambda *_: None)

    def train(optimizer: torch.optim.Optimizer) -> int:
        steps = 0
        while not stop.is_set():
            optimizer.step()
            steps += 1
        return steps

    with ThreadPoolExecutor(2) as pool:
        training = [pool.submit(train, each) for each in optimizers]
        with AsyncCallsQueue() as queue:
            for number in range(10):
                schedule(queue, tmp_path / f"{number}", small_state(number), staging="overlapped")
                queue.wait()
        stop.set()
        steps = [each.result(60) for each in training]
    others.remove()
    assert [-int(each[0]) for each in parameters] == steps


def test_a_hook_of_ones_own_waits_too(tmp_path: Path) -> None:
    """For what is no optimizer of torch's, and only has its way of registering hooks."""
    parameter = torch.nn.Parameter(torch.zeros(MUCH))
    optimizer = sgd(parameter)
    handle = nostall.wait_staged_before_step(optimizer)
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path, {"p": parameter}, staging="overlapped")
        (hook,) = optimizer._optimizer_step_pre_hooks.values()
        hook(optimizer, (), {})
        with torch.no_grad():
            parameter.fill_(1)
    assert torch.equal(values_at(tmp_path, "p", MUCH), torch.zeros(MUCH))
    handle.remove()
    assert not optimizer._optimizer_step_pre_hooks


def test_a_change_that_is_counted_late_is_noticed(tmp_path: Path) -> None:
    """torch counts an operation when it is over, perhaps after the copy that it has spoiled."""
    state = {"weight": torch.zeros(MUCH)}
    with AsyncCallsQueue() as queue, Hold("chunk") as hold:
        with inject(hold.fault):
            schedule(queue, tmp_path / "saved", state, staging="overlapped")
        hold.wait_reached()  # the snapshot is complete, and the trainer does not know
        state["weight"].fill_(1)
        hold.release()
        with pytest.raises(CheckpointException, match="or without waiting for it"):
            queue.wait()
    assert not list((tmp_path / "saved").iterdir())


@pytest.mark.parametrize("wait", ["of the save", "of all"])
def test_waiting_counts_also_when_there_was_nothing_to_wait_for_any_more(
    tmp_path: Path, wait: str
) -> None:
    """A snapshot that is complete before the wait begins is as safe as one waited for."""
    state = {"weight": torch.zeros(MUCH)}
    writer, request = planned(tmp_path / "saved", state, staging="overlapped")
    with AsyncCallsQueue() as queue, Hold("chunk") as hold:
        with inject(hold.fault):
            queue.schedule_async_request(request)
        hold.wait_reached()
        {"of the save": writer.wait_staged, "of all": nostall.wait_staged}[wait]()
        state["weight"].fill_(1)
        hold.release()
    assert torch.equal(values_at(tmp_path / "saved", "weight", MUCH), torch.zeros(MUCH))


def values_at(path: Path, name: str, length: int) -> torch.Tensor:
    state = {name: torch.full((length,), -1.0)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state[name]


def test_an_abort_while_the_snapshot_is_taken_writes_nothing(tmp_path: Path) -> None:
    """Not even when the memory it waited for becomes free."""
    queue = AsyncCallsQueue()
    with staging_held_up(queue, tmp_path / "first") as hold:
        schedule(queue, tmp_path / "save", small_state(1), staging="overlapped")
        hold.release()
        queue.close(abort=True)
    assert not list((tmp_path / "save").glob("*"))
    schedule(queue, tmp_path / "next", small_state(2), staging="overlapped")
    queue.close()
    assert blobs(tmp_path / "next") == blobs_by_stock(tmp_path / "stock", small_state(2))


def test_waves_of_a_save_that_fails_are_given_up_before_its_names_are_free(tmp_path: Path) -> None:
    """Earlier waves of a spoiled snapshot are on their way to the writer; none gets to a file."""
    nostall.configure(EngineOptions(max_staging_bytes=4 << 20, max_in_flight=2))
    state = {f"t{n}": torch.full((256 << 10,), float(n)) for n in range(12)}
    queue = AsyncCallsQueue()
    with Hold() as hold:
        with inject(hold.fault):
            schedule(queue, tmp_path / "save", state, staging="overlapped")
            hold.wait_reached()
        state["t11"].add_(1)
        hold.release()
        with pytest.raises(CheckpointException, match="t11"):
            queue.wait()
    assert not list((tmp_path / "save").glob("*"))
    assert not default_engine().is_writing
    save_now(tmp_path / "save", state)
    assert blobs(tmp_path / "save") == blobs_by_stock(tmp_path / "stock", state)


def test_data_that_is_replaced_during_staging_is_not_what_is_saved(tmp_path: Path) -> None:
    """The copy has the parameter as it was at the call, however large the new one is."""
    parameter = torch.nn.Parameter(torch.ones(MUCH))
    cache = CheckpointMetadataCache()
    queue = AsyncCallsQueue()
    for number in range(4):  # the last ones as a known structure
        schedule(queue, tmp_path / f"before {number}", {"p": parameter}, cache=cache)
        queue.wait()
    with staging_held_up(queue, tmp_path / "first") as hold:
        schedule(queue, tmp_path / "save", {"p": parameter}, cache=cache, staging="overlapped")
        parameter.data = torch.zeros(3)
        hold.release()
        queue.close()
    assert blobs(tmp_path / "save") == blobs(tmp_path / "before 3")


def planner_lets_go() -> bool:
    """Whether stock's planner lets go of a state dict; older torch leaves it to the collector."""
    tensor = torch.ones(1)
    storage = StorageWeakRef(tensor.untyped_storage())
    flatten_state_dict({"t": tensor})
    del tensor
    return bool(storage.expired())


def test_nothing_of_the_trainers_is_kept_once_the_snapshot_is_taken(tmp_path: Path) -> None:
    """Neither the tensors nor an accelerator's memory, and without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        tensor = torch.ones(MUCH)
        storage = StorageWeakRef(tensor.untyped_storage())
        queue = AsyncCallsQueue()
        schedule(queue, tmp_path / "save", {"t": tensor}, staging="overlapped")
        nostall.wait_staged(60)
        queue.wait()
        del tensor
        if not planner_lets_go():
            gc.collect()
        assert storage.expired()
    finally:
        gc.enable()


ENDS_WHILE_STAGING = """
import atexit, threading, sys, time

def look():  # runs last of what runs at exit, as it is registered first
    print([each.name for each in threading.enumerate() if each.name == "nostall-staging"])

atexit.register(look)
import torch
import nostall
from nostall.state_dict_saver import save_state_dict_async_plan
sys.path.insert(0, sys.argv[2])
from support.faults import Fault, inject

def end_slowly(frame, event, _):  # as a profiler does
    if event == "return" and frame.f_code.co_name == "run":
        time.sleep(0.2)

writer = nostall.FileSystemWriterAsync(sys.argv[1], staging="overlapped")
save_state_dict_async_plan({"weight": torch.ones(1 << 16)}, writer)
_, preload, _ = writer.get_save_function_and_args()
threading.setprofile(end_slowly)
with inject(Fault.delay("stage", 0.5)):
    staging = preload()
"""


def test_an_interpreter_that_ends_lets_a_snapshot_be_completed(tmp_path: Path) -> None:
    """A thread that came back from torch later would abort the process with a core dump."""
    program = *loaded.python(), "-c", ENDS_WHILE_STAGING, str(tmp_path), str(TESTS)
    done = ended(*program, timeout_s=60, check=False)
    assert (done.returncode, done.stdout, loaded.errors_of(done)) == (0, "[]\n", "")


def test_ctrl_c_ends_a_wait_at_once(python_handles_ctrl_c: None) -> None:
    """Whatever the copy takes; a later wait succeeds."""
    fence, interrupting = SnapshotFence(), interrupt_the_wait(1)
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fence.wait(2 * DEADLINE_S)
    assert time.monotonic() - began_s < DEADLINE_S
    interrupting.join()
    fence.open(Copies())
    fence.wait(0)
    assert fence.close(lambda: ["weight"]) == []


def test_an_interrupted_wait_does_not_count(python_handles_ctrl_c: None) -> None:
    """Nor does one that timed out: a tensor that is changed nevertheless is noticed."""
    at, events = 0, [0]
    while events[0] >= at:
        at += 1
        fence = SnapshotFence()
        with (
            suppress(KeyboardInterrupt, SaveTimeoutError),
            interrupted(at, lambda frame, _: is_inside(frame, SnapshotFence.wait)) as events,
        ):
            fence.wait(0)
        assert fence.close(lambda: ["weight"]) == ["weight"]
    assert at > 50


def test_a_forked_child_does_not_wait_for_its_parents_snapshot(tmp_path: Path) -> None:
    """It does not have that thread. In the parent, options cannot be changed meanwhile."""
    writer = FileSystemWriterAsync(tmp_path, staging="overlapped")
    save_state_dict_async_plan(small_state(1), writer)
    _, preload, _ = writer.get_save_function_and_args()
    waits = partial(nostall.wait_staged, 0.0), partial(writer.wait_staged, 0.0)
    with Hold("stage") as hold:
        with inject(hold.fault):
            snapshot = preload()
        hold.wait_reached()
        for wait in waits:
            with pytest.raises(SaveTimeoutError, match="still being taken"):
                wait()
        with pytest.raises(OptionError, match="while saves are being written"):
            nostall.configure(EngineOptions())
        child = os.fork()
        if child == 0:
            try:
                os._exit(any(wait() for wait in waits))
            except BaseException:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        hold.release()
        writer.wait_staged()
    del snapshot


def test_writing_by_hand_waits_for_a_snapshot_no_longer_than_allowed(tmp_path: Path) -> None:
    """The error says in which phase it was, on all ranks; the late snapshot is let go."""
    nostall.configure(EngineOptions(max_in_flight=1))
    engine = default_engine()
    patient = engine.options
    writer = FileSystemWriterAsync(tmp_path / "late", staging="overlapped")
    arguments = save_state_dict_async_plan(small_state(1), writer)
    save, preload, args = writer.get_save_function_and_args()
    with Hold("stage") as hold:
        with inject(hold.fault):
            args[1] = preload()
        engine.options = replace(patient, save_timeout_s=0.1)
        with pytest.raises(SaveTimeoutError, match="phase=stage") as late:
            save(*args)
        engine.options = patient
        assert late.value.rank == 0
        with pytest.raises(CheckpointException, match="the snapshot was not taken within"):
            save_state_dict_async_finalize(*arguments)
        hold.release()
    with AsyncCallsQueue() as queue:  # there is memory for one snapshot only
        schedule(queue, tmp_path / "next", small_state(2))
    assert not list(tmp_path.glob("late/*"))
    assert blobs(tmp_path / "next")


def test_a_snapshot_that_cannot_begin_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the next step nor by configure()."""

    def refuse(*_: object) -> None:
        raise RuntimeError("the device is gone")

    writer = FileSystemWriterAsync(tmp_path, staging="overlapped")
    save_state_dict_async_plan(small_state(1), writer)
    _, preload, _ = writer.get_save_function_and_args()
    with monkeypatch.context() as patched:
        patched.setattr("nostall._memory.devices.stream_marks", refuse)
        with pytest.raises(RuntimeError):
            preload()
    nostall.wait_staged(0.0)
    nostall.configure(EngineOptions())
