"""A save holds what the state held when changes were allowed; no later change shows.

A thread changes the state whenever that is allowed, while saves go on. Whatever a save still refers
to of the trainer's would show, as values, as an item too many, or as memory that is gone.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.multiprocessing.reductions import StorageWeakRef

import nostall
from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import StagingMode
from nostall.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from programs.entry_points import leaves, loaded_wrong
from programs.faults import kill_and_wait
from support.faults import Hold, inject, writer_pids
from support.states import blobs, blobs_by_stock, read_metadata, schedule, small_state
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("one_thread_computes")
State = dict[str, Any]
SAVES = 12
HELD = 3
"""In every third save the writer stands still while everything is changed."""
OPTIONS: dict[str, Any] = {"thread_count": 2, "sync_files": False}
DEADLINE_S = 60.0
MUCH = 1_200_000
"""Elements of a tensor that overlapped staging copies behind the call."""


# --- everything that a state may hold, and what may be done to it ---------------------------------


class Everything:
    """A state of some megabytes, and a round of changes that leaves no value in it as it was."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.round = 0
        self.model = nn.Sequential(nn.Linear(64, 700), nn.ReLU(), nn.Linear(700, 8, bias=False))
        self.begin_optimizer()
        base, tied = torch.randn(40), torch.randn(9, 4)
        self.own: State = {
            "large": torch.randn(MUCH),
            "base": base,
            "view": base[8:24].view(4, 4),
            "tied": tied,
            "tied again": tied,
            "transposed": torch.randn(60, 80).t(),
            "every other": torch.randn(50, 80)[:, ::2],
            "scalar": torch.tensor(0.5),
            "integers": torch.arange(1000),
            "half": torch.randn(3000).to(torch.bfloat16),
            "shared": torch.randn(3000).share_memory_(),
            "gathered": torch.randn(20_000),
            "object": SimpleNamespace(best=torch.tensor([0.25])),
            "list": [torch.full((3,), 3.0), -1, {"epoch": -1}],
            "objects": {"set": {-1}, "bytes": bytearray(b"-1"), "nested": {"text": "-1"}},
        }

    @property
    def state(self) -> State:
        return {
            "model": dict(self.model.named_parameters()),
            "optimizer": self.optimizer.state_dict()["state"],
            **self.own,
        }

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for _, leaf in leaves(self.state) if isinstance(leaf, torch.Tensor)]

    def change(self) -> None:
        """One round: values, containers, objects, keys, and the memory that tensors lie in."""
        self.round += 1
        with torch.no_grad():
            for tensor in self.tensors:
                tensor.fill_(self.round)
        self.replace_parameters()
        self.step()
        # As FSDP does with what it has gathered: for a moment the memory is not there.
        storage = self.own["gathered"].untyped_storage()
        storage.resize_(0)
        storage.resize_(4 * 20_000)
        self.own["gathered"].fill_(self.round)
        self.own["object"].best.fill_(self.round)
        self.own["list"][1] = self.own["list"][2]["epoch"] = self.round
        objects = self.own["objects"]
        objects["set"].add(self.round)
        objects["bytes"][:] = b"%d" % self.round
        objects["nested"]["text"] = f"{self.round}"
        self.own.pop(f"added {self.round - 1}", None)
        self.own[f"added {self.round}"] = torch.full((5,), float(self.round))

    def replace_parameters(self) -> None:
        for parameter in self.model.parameters():
            parameter.data = torch.full_like(parameter, self.round + 0.5)

    def begin_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()

    def swap_storages(self) -> None:
        moments = self.optimizer.state_dict()["state"][0]
        first, second = moments["exp_avg"], moments["exp_avg_sq"]
        first.data, second.data = second.data, first.data

    def step(self) -> None:
        self.model(torch.ones(2, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def differences(path: Path, expected: State) -> list[str]:
    """Names of what is not in a checkpoint as it is in a state; and whether there is too much."""
    wrong = loaded_wrong(path, expected, copy.deepcopy(expected), no_dist=True)
    surplus = len(read_metadata(path).state_dict_metadata) - len(dict(leaves(expected)))
    return wrong + ["an item too many"] * surplus


class Changing(threading.Thread):
    """Changes everything, round after round, whenever it is let."""

    def __init__(self, change: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._change = change
        self._is_let = threading.Lock()
        self._is_let.acquire()
        self._turn = threading.Lock()
        """Whoever stops it has this, so that it cannot begin another round first."""
        self._is_over = False
        self._rounds = 0
        self._failures: list[BaseException] = []
        self.let = self._is_let.release

    def run(self) -> None:
        try:
            while not self._is_over:
                with self._turn:
                    pass
                with self._is_let:
                    self._change()
                    self._rounds += 1
        except BaseException as error:
            self._failures.append(error)

    def stop(self) -> None:
        """Until it is let again; returns when it has stopped."""
        with self._turn:
            assert self._is_let.acquire(timeout=DEADLINE_S)
        assert self._failures == []

    def wait_for_rounds(self, count: int) -> None:
        """Return when it has begun and finished so many more."""
        wanted = self._rounds + count + 1  # the one in progress may have begun before
        wait_until(lambda: self._rounds >= wanted or bool(self._failures))

    def end(self) -> None:
        self._is_over = True
        if self._is_let.locked():
            self.let()
        self.join(DEADLINE_S)


# --- ways to save: start one and return when changes are allowed; finish all ----------------------


class Split:
    """The split functions and a queue; the next save is scheduled during the one before."""

    def __init__(self, staging: StagingMode) -> None:
        self._staging = staging
        self._queue = AsyncCallsQueue()
        self._cache = CheckpointMetadataCache()

    def start(self, path: Path, state: State) -> None:
        schedule(self._queue, path, state, cache=self._cache, **OPTIONS, staging=self._staging)
        nostall.wait_staged(DEADLINE_S)

    def finish(self) -> None:
        self._queue.close()


class InDcp:
    """``dcp.async_save``, which has one save in progress at a time."""

    def __init__(self, staging: StagingMode) -> None:
        self._staging = staging
        self._uploads: list[Any] = []

    def start(self, path: Path, state: State) -> None:
        writer = FileSystemWriterAsync(path, **OPTIONS, staging=self._staging)
        response: Any = dcp.async_save(state, storage_writer=writer, no_dist=True)
        if self._staging == "overlapped":
            response.staging_completion.result(DEADLINE_S)
            response = response.upload_completion
        self._uploads.append(response)

    def finish(self) -> None:
        while self._uploads:
            self._uploads.pop().result(DEADLINE_S)


in_each_way = pytest.mark.parametrize("way", [Split, InDcp])
with_each_staging = pytest.mark.parametrize("staging", ["blocking", "overlapped"])


@contextmanager
def maybe_held(changing: Changing, *, held: bool) -> Iterator[None]:
    """Let everything be changed after the block; if asked, often while the writer stands still."""
    if not held:
        yield
        changing.let()
        return
    with Hold() as hold:
        with inject(hold.fault):
            yield
            changing.let()
            hold.wait_reached(DEADLINE_S)
        changing.wait_for_rounds(2)
        hold.release()


@with_each_staging
@in_each_way
def test_checkpoints_hold_what_was_there_when_changes_were_allowed(
    tmp_path: Path, way: type[Split | InDcp], staging: StagingMode
) -> None:
    """Time and again, with values, objects, keys and storages changing until the next call."""
    everything, saving = Everything(), way(staging)
    expected: list[State] = []
    changing = Changing(everything.change)
    changing.start()
    try:
        for number in range(SAVES):
            if way is InDcp:
                saving.finish()
            if number:
                changing.stop()
            expected.append(copy.deepcopy(everything.state))
            with maybe_held(changing, held=number % HELD == 0):
                saving.start(tmp_path / f"{number}", everything.state)
        changing.wait_for_rounds(1)
        saving.finish()
        changing.stop()
    finally:
        changing.end()
    wrong = {n: differences(tmp_path / f"{n}", each) for n, each in enumerate(expected)}
    assert {number: names for number, names in wrong.items() if names} == {}


def test_a_round_of_changes_leaves_nothing_as_it_was(tmp_path: Path) -> None:
    """A checkpoint with any value late would be found: the test above can fail, for each name."""
    everything = Everything()
    before = copy.deepcopy(everything.state)
    saving = Split("blocking")
    saving.start(tmp_path, everything.state)
    saving.finish()
    assert differences(tmp_path, before) == []
    everything.change()
    now = everything.state
    late = set(differences(tmp_path, {name: now[name] for name in before}))
    assert late == dict(leaves(before)).keys()


@with_each_staging
@in_each_way
def test_saving_leaves_the_trainers_tensors_where_they_are(
    tmp_path: Path, way: type[Split | InDcp], staging: StagingMode
) -> None:
    """No tensor is moved to other memory, made shared, or given another version by a save."""
    everything, saving = Everything(), way(staging)
    tensors = everything.tensors
    before = [(t.data_ptr(), t.is_shared(), t._version) for t in tensors]
    saving.start(tmp_path, everything.state)
    saving.finish()
    assert [(t.data_ptr(), t.is_shared(), t._version) for t in tensors] == before


# --- caches hold structure, not tensors -----------------------------------------------------------

CHANGES: list[Callable[[Everything], None]] = [
    Everything.replace_parameters,
    Everything.begin_optimizer,
    Everything.swap_storages,
    Everything.step,
    Everything.step,
]


@pytest.mark.parametrize("killed", [False, True], ids=["same writer", "writer killed between"])
def test_five_saves_with_one_cache_each_hold_the_state_of_their_time(
    tmp_path: Path,
    killed: bool,  # noqa: FBT001  # a parameter of the test
) -> None:
    """Although plan, layout and memory are those of the save before, and the writer may be new."""
    everything = Everything()
    cache = CheckpointMetadataCache()
    pids = []
    with AsyncCallsQueue() as queue:
        for number, change in enumerate(CHANGES):
            expected = blobs_by_stock(tmp_path / f"expected {number}", everything.state)
            schedule(queue, tmp_path / f"saved {number}", everything.state, cache=cache)
            change(everything)
            queue.wait()
            assert blobs(tmp_path / f"saved {number}") == expected
            pids += writer_pids()
            if killed:
                kill_and_wait(pids[-1])
    assert len(set(pids)) == (5 if killed else 1)
    assert cache.get_metadata_caching_status() == (True, False)
    states = [blobs(tmp_path / f"saved {number}") for number in range(5)]
    assert all(one != other for one, other in pairwise(states))


# --- nothing is kept ------------------------------------------------------------------------------


def still_there(storages: dict[str, StorageWeakRef]) -> list[str]:
    return [name for name, storage in storages.items() if not storage.expired()]


def a_state_and_its_storages() -> tuple[State, dict[str, StorageWeakRef]]:
    """A state, and weak references to what its tensors lie in."""
    state = {**small_state(4), "large": torch.randn(MUCH)}
    storages = {
        name: StorageWeakRef(leaf.untyped_storage())
        for name, leaf in leaves(state)
        if isinstance(leaf, torch.Tensor) and leaf.numel()
    }
    assert still_there(storages) == list(storages)
    return state, storages


@with_each_staging
@in_each_way
def test_source_tensors_are_free_once_the_save_call_has_returned(
    tmp_path: Path, way: type[Split | InDcp], staging: StagingMode
) -> None:
    """A trainer that drops its tensors after the call gets their memory back during the write."""
    saving = way(staging)
    for number in range(3):  # the last one into memory and places of the first
        state, storages = a_state_and_its_storages()
        expected = blobs_by_stock(tmp_path / f"expected {number}", state)
        with Hold() as hold, inject(hold.fault):
            saving.start(tmp_path / f"saved {number}", state)
            hold.wait_reached()
            del state
            gc.collect()
            assert still_there(storages) == []
            hold.release()
        saving.finish()
        assert blobs(tmp_path / f"saved {number}") == expected


def test_a_synchronous_save_keeps_nothing_either(tmp_path: Path) -> None:
    """After ``dcp.save`` neither the writer nor the engine holds a tensor of the state."""
    state, storages = a_state_and_its_storages()
    writer = FileSystemWriterAsync(tmp_path / "saved")
    dcp.save(state, storage_writer=writer)
    del state
    gc.collect()
    assert still_there(storages) == []
    assert writer.path == tmp_path / "saved"


# --- metadata -------------------------------------------------------------------------------------


def test_metadata_of_another_checkpoint_is_not_touched_by_a_save(tmp_path: Path) -> None:
    """A resumed run has lent it to the cache; later saves plan from it."""
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "first", small_state(0), cache=CheckpointMetadataCache())
    loaded = read_metadata(tmp_path / "first")
    before = pickle.dumps(loaded)
    resumed = CheckpointMetadataCache()
    resumed.set_cached_global_metadata(loaded)
    with AsyncCallsQueue() as queue:
        for number in (1, 2, 3):
            path = tmp_path / f"save {number}"
            schedule(queue, path, small_state(number), cache=resumed, thread_count=2)
    assert pickle.dumps(loaded) == before
    places = read_metadata(tmp_path / "save 3").storage_data.values()
    assert {info.relative_path for info in places} == {"__0_0.distcp", "__0_1.distcp"}


def test_every_save_has_metadata_of_its_own(tmp_path: Path) -> None:
    """Emptying one save's metadata object changes neither the next save's nor the cache's."""
    cache = CheckpointMetadataCache()
    for number in range(4):
        writer = FileSystemWriterAsync(tmp_path / f"{number}")
        planned = save_state_dict_async_plan(
            small_state(number), writer, enable_cache=True, metadata_cache=cache
        )
        save_fn, preload_fn, args = writer.get_save_function_and_args()
        save_fn(args[0], preload_fn(), *args[2:])
        save_state_dict_async_finalize(*planned)
        metadata = planned[1]
        assert metadata is not None
        metadata.storage_data = {}
        metadata.storage_meta = None
        assert blobs(tmp_path / f"{number}").keys() == blobs(tmp_path / "0").keys()


# --- what the planner hands out -------------------------------------------------------------------


class ReusingPlanner(DefaultSavePlanner):
    """Hands out one buffer for all objects."""

    buffer = io.BytesIO()

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # DCP's name
        self.buffer.seek(0)
        self.buffer.truncate()
        self.buffer.write(super().transform_object(write_item, object).getvalue())
        return self.buffer


def test_a_buffer_that_the_planner_uses_again_is_not_a_part_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    """Serialised objects are copied when resolved, so a planner may use one buffer for all."""
    state = {f"object {number}": {"number": number} for number in range(4)}
    expected = blobs_by_stock(tmp_path / "expected", state)
    planner = ReusingPlanner()
    with Hold() as hold, inject(hold.fault), AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "saved", state, planner=planner)
        planner.buffer.seek(0)
        planner.buffer.write(b"spoiled")
        hold.release()
    assert blobs(tmp_path / "saved") == expected
