"""A save holds what the state held when the call returned; no later change shows."""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.multiprocessing.reductions import StorageWeakRef

from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from programs.faults import kill_and_wait
from support.faults import Hold, inject, writer_pids
from support.states import blobs, read_metadata, schedule, small_state

State = dict[str, Any]
Storages = dict[str, StorageWeakRef]
DEADLINE_S = 60.0


# --- a state with everything in it, and what a training step may do to it -------------------------


class Progress:
    """An object of the user's own, with a tensor and a list in it."""

    def __init__(self) -> None:
        self.losses = [0.5, 0.25]
        self.best = torch.tensor([0.25])


class Training:
    """A model and its optimizer after one step, tensors of every kind, and objects."""

    def __init__(self, *, shared: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 5, bias=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()
        weight = torch.randn(9, 4)
        base = torch.randn(40)
        self.own: State = {
            "tied": weight,
            "tied again": weight,
            "view": base[8:24].view(4, 4),
            "other view": base[20:],
            "transposed": torch.randn(6, 8).t(),
            "every other": torch.randn(5, 8)[:, ::2],
            "scalar": torch.tensor(float(seed)),
            "list": [torch.full((3,), 3.0), 4, {"epoch": 5}],
            "dict": {"a": torch.ones(2), "b": {"c": "text", "d": {1, 2, 3}}},
            "object": Progress(),
            "bytes": bytearray(b"as it was"),
        }
        if shared:
            for tensor in self.tensors():
                tensor.share_memory_()

    def step(self) -> None:
        self.model(torch.ones(3, 13)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> State:
        optimizer = self.optimizer.state_dict()
        return {"model": self.model.state_dict(), "optimizer": optimizer, **self.own}

    def tensors(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        _collect_tensors(self.state, found)
        return found

    def spoil(self) -> None:
        """Change values, containers and objects in every way that training could."""
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(77)
        self.step()
        progress = self.own["object"]
        progress.losses.append(99.0)
        progress.best.fill_(99)
        progress.added = "later"
        self.own["list"][2]["epoch"] = 99
        self.own["list"].append("later")
        self.own["dict"]["b"]["d"].add(99)
        self.own["dict"]["later"] = torch.ones(1)
        self.own["bytes"][:] = b"spoiled!!"
        self.own["later"] = torch.ones(1)
        del self.own["tied again"]

    def free(self) -> None:
        """Take the parameters' memory away under them, as FSDP does with what it has gathered."""
        for parameter in self.model.parameters():
            old = parameter.untyped_storage()
            parameter.data = torch.full_like(parameter, 55)
            if old.resizable():
                old.resize_(0)


def _collect_tensors(value: Any, into: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        into.append(value)
    elif isinstance(value, Mapping):
        for element in value.values():
            _collect_tensors(element, into)
    elif isinstance(value, list):
        for element in value:
            _collect_tensors(element, into)
    elif isinstance(value, Progress):
        into.append(value.best)


def saved_by_stock(path: Path, state: State) -> dict[Any, bytes]:
    """The items that a synchronous save by stock DCP stores for the state's present values."""
    dcp.save(state, storage_writer=FileSystemWriter(path))
    return blobs(path)


# --- ways to save, each ended by what it returns --------------------------------------------------


def split_save(path: Path, state: State) -> Callable[[], None]:
    queue = AsyncCallsQueue()
    schedule(queue, path, state)
    return queue.close


def split_save_over_several_files(path: Path, state: State) -> Callable[[], None]:
    queue = AsyncCallsQueue()
    schedule(queue, path, state, thread_count=4, separation_hint="model")
    return queue.close


def async_save(path: Path, state: State) -> Callable[[], None]:
    future = dcp.async_save(state, storage_writer=FileSystemWriterAsync(path))
    assert isinstance(future, Future)

    def wait() -> None:
        future.result(DEADLINE_S)

    return wait


WAYS = {
    "split save": split_save,
    "split save over several files": split_save_over_several_files,
    "async_save": async_save,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("shared", [False, True], ids=["private memory", "shared memory"])
@pytest.mark.parametrize("earlier_saves", [0, 2], ids=["first save", "third save"])
def test_nothing_done_after_the_save_call_shows_in_the_checkpoint(
    tmp_path: Path,
    way: Callable[[Path, State], Callable[[], None]],
    shared: bool,  # noqa: FBT001  # a parameter of the test
    earlier_saves: int,
) -> None:
    """Nothing that is changed while the writer stands still is in the file.

    Every value, container, object and storage of the state is changed; the same where memory and
    places from earlier saves are used again.
    """
    for number in range(earlier_saves):
        way(tmp_path / f"earlier {number}", Training(shared=shared, seed=9 + number).state)()
    training = Training(shared=shared)
    expected = saved_by_stock(tmp_path / "expected", training.state)
    with Hold() as hold, inject(hold.fault):
        finish = way(tmp_path / "saved", training.state)
        training.spoil()
        hold.wait_reached()
        training.free()
        hold.release()
        finish()
    assert blobs(tmp_path / "saved") == expected
    assert saved_by_stock(tmp_path / "later", training.state) != expected


@pytest.mark.parametrize("shared", [False, True], ids=["private memory", "shared memory"])
def test_saving_leaves_the_trainers_tensors_where_they_are(
    tmp_path: Path,
    shared: bool,  # noqa: FBT001  # a parameter of the test
) -> None:
    """No tensor is moved to other memory, made shared, or given another version by a save."""
    training = Training(shared=shared)
    tensors = training.tensors()
    before = [(t.data_ptr(), t.is_shared(), t._version) for t in tensors]
    split_save(tmp_path / "split", training.state)()
    async_save(tmp_path / "async", training.state)()
    assert [(t.data_ptr(), t.is_shared(), t._version) for t in tensors] == before


# --- caches hold structure, not tensors -----------------------------------------------------------


def _replace_parameters(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.data = torch.randn_like(parameter)


def _recreate_optimizer(training: Training) -> None:
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.2)
    training.step()


def _swap_storages(training: Training) -> None:
    moments = training.optimizer.state_dict()["state"][0]
    first, second = moments["exp_avg"], moments["exp_avg_sq"]
    first.data, second.data = second.data, first.data


def _step_twice(training: Training) -> None:
    training.step()
    training.step()


CHANGES: list[Callable[[Training], None]] = [
    _replace_parameters,
    _recreate_optimizer,
    _swap_storages,
    _step_twice,
    Training.step,
]


@pytest.mark.parametrize("killed", [False, True], ids=["same writer", "writer killed between"])
def test_five_saves_with_one_cache_each_hold_the_state_of_their_time(
    tmp_path: Path,
    killed: bool,  # noqa: FBT001  # a parameter of the test
) -> None:
    """Parameters with new data, a new optimizer and swapped storages are saved as they are.

    Although plan, layout and memory come from the save before, and although the writer process is a
    new one.
    """
    training = Training()
    cache = CheckpointMetadataCache()
    pids = []
    with AsyncCallsQueue() as queue:
        for number, change in enumerate(CHANGES):
            expected = saved_by_stock(tmp_path / f"expected {number}", training.state)
            schedule(queue, tmp_path / f"saved {number}", training.state, cache=cache)
            change(training)
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


def storages_of(state: State) -> Storages:
    """Weak references to what the tensors of a state lie in."""
    tensors: list[torch.Tensor] = []
    _collect_tensors(state, tensors)
    return {
        f"{number}: {tuple(tensor.shape)}": StorageWeakRef(tensor.untyped_storage())
        for number, tensor in enumerate(tensors)
        if tensor.numel()
    }


def still_there(storages: Storages) -> list[str]:
    return [name for name, storage in storages.items() if not storage.expired()]


def a_state_and_its_storages() -> tuple[State, Storages]:
    state = small_state(4)
    storages = storages_of(state)
    assert still_there(storages) == list(storages)
    return state, storages


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("earlier_saves", [0, 2], ids=["first save", "third save"])
def test_source_tensors_are_free_once_the_save_call_has_returned(
    tmp_path: Path, way: Callable[[Path, State], Callable[[], None]], earlier_saves: int
) -> None:
    """A trainer that drops its tensors after the call gets their memory back during the write."""
    for number in range(earlier_saves):
        way(tmp_path / f"earlier {number}", small_state(number))()
    state, storages = a_state_and_its_storages()
    expected = saved_by_stock(tmp_path / "expected", state)
    with Hold() as hold, inject(hold.fault):
        finish = way(tmp_path / "saved", state)
        hold.wait_reached()
        del state
        gc.collect()
        assert still_there(storages) == []
        hold.release()
        finish()
    assert blobs(tmp_path / "saved") == expected


def test_what_a_framework_keeps_of_a_save_holds_no_tensors(tmp_path: Path) -> None:
    """Nothing that a framework keeps of a save keeps a tensor alive once the snapshot is taken.

    Writer, wrapper, metadata, snapshot and request of a save that is driven by hand.
    """
    state, storages = a_state_and_its_storages()
    writer = FileSystemWriterAsync(tmp_path / "saved")
    planned = save_state_dict_async_plan(state, writer, planner=DefaultSavePlanner())
    save_fn, preload_fn, args = writer.get_save_function_and_args()
    request = AsyncRequest(
        save_fn, args, [lambda: save_state_dict_async_finalize(*planned)], {}, preload_fn
    )
    snapshot = preload_fn()
    del state
    gc.collect()
    assert still_there(storages) == []
    save_fn(args[0], snapshot, *args[2:])
    request.execute_finalize_fns(validate_matching_call_idx=False)
    assert sorted({fqn for fqn, _ in blobs(tmp_path / "saved")}) == sorted(
        {index.fqn for index in read_metadata(tmp_path / "saved").storage_data}
    )


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
    """Metadata that a resumed run has lent to the cache still describes its own checkpoint.

    Also after later saves, although they plan from it.
    """
    cache = CheckpointMetadataCache()
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "first", small_state(0), cache=cache)
    loaded = read_metadata(tmp_path / "first")
    before = pickle.dumps(loaded)
    resumed = CheckpointMetadataCache()
    resumed.set_cached_global_metadata(loaded)
    with AsyncCallsQueue() as queue:
        for number in (1, 2, 3):
            schedule(
                queue,
                tmp_path / f"save {number}",
                small_state(number),
                cache=resumed,
                thread_count=2,
            )
    assert pickle.dumps(loaded) == before
    files = {
        info.relative_path for info in read_metadata(tmp_path / "save 3").storage_data.values()
    }
    assert files == {"__0_0.distcp", "__0_1.distcp"}


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
    """Hands out one buffer again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = io.BytesIO()

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # DCP's name
        made = super().transform_object(write_item, object)
        if isinstance(made, io.BytesIO):
            self.buffer.seek(0)
            self.buffer.truncate()
            self.buffer.write(made.getvalue())
            return self.buffer
        return made


def test_a_buffer_that_the_planner_uses_again_is_not_a_part_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    """Serialised objects are copied when resolved, so a planner may use one buffer for all."""
    state = {f"object {number}": {"number": number} for number in range(4)}
    expected = saved_by_stock(tmp_path / "expected", state)
    planner = ReusingPlanner()
    with Hold() as hold, inject(hold.fault), AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "saved", state, planner=planner)
        planner.buffer.seek(0)
        planner.buffer.write(b"spoiled")
        hold.release()
    assert blobs(tmp_path / "saved") == expected
