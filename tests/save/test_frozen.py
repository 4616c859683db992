"""Frozen items: a file whose tensors are unchanged is linked, not copied and written again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._engine import Engine
from nostall.core import AsyncCallsQueue
from nostall.errors import OptionError, ReservationError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import CheckpointMetadataCache
from nostall.testing import Fault, inject
from support.ranks import run_ranks
from support.states import schedule

FROZEN = ("model.base.",)
State = dict[str, Any]


def lora_state() -> State:
    """A base model, an adapter, and objects in both."""
    base = {"w": torch.randn(300, 1000), "b": torch.randn(1000), "name": "base"}
    return {"model": {"base": base, "adapter": {"a": torch.randn(8, 1000)}}, "step": 0}


def train(state: State) -> None:
    """One step: the adapter changes."""
    state["model"]["adapter"]["a"].add_(1)
    state["step"] += 1


def zeros_like(state: State) -> State:
    """A state to load into."""
    return {
        key: zeros_like(value)
        if isinstance(value, dict)
        else torch.zeros_like(value)
        if isinstance(value, torch.Tensor)
        else type(value)()
        for key, value in state.items()
    }


def assert_holds(path: Path, state: State) -> None:
    """Stock loads it bitwise, and every byte is as it was written."""
    found = zeros_like(state)
    dcp.load(found, checkpoint_id=path, no_dist=True)
    model, wanted = found["model"], state["model"]
    assert torch.equal(model["base"]["w"], wanted["base"]["w"])
    assert torch.equal(model["base"]["b"], wanted["base"]["b"])
    assert torch.equal(model["adapter"]["a"], wanted["adapter"]["a"])
    assert (found["step"], model["base"]["name"]) == (state["step"], wanted["base"]["name"])
    assert nostall.verify(path).ok


def frozen_files(path: Path) -> dict[str, int]:
    """The inode of each frozen file."""
    return {each.name: each.stat().st_ino for each in path.glob("frozen__*")}


class Saver:
    """Saves by one of the ways to save."""

    def __init__(self, **options: Any) -> None:
        self._options = {"frozen": FROZEN, **options}

    def __call__(self, path: Path | str, state: State, **options: Any) -> None:
        writer = FileSystemWriterAsync(path, **self._options, **options)
        dcp.save(state, storage_writer=writer, no_dist=True)


class SplitSaver(Saver):
    """By split functions and a queue, with its cache of plans."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._cache = CheckpointMetadataCache()

    def __call__(self, path: Path | str, state: State, **options: Any) -> None:
        with AsyncCallsQueue() as queue:
            schedule(queue, path, state, cache=self._cache, **self._options, **options)
            nostall.wait_staged()
            queue.maybe_finalize_async_calls(blocking=True)


@pytest.fixture(
    params=[Saver, SplitSaver, lambda: SplitSaver(staging="overlapped")],
    ids=["dcp.save", "split", "overlapped"],
)
def save(request: pytest.FixtureRequest) -> Saver:
    """A way to save."""
    saver: Saver = request.param()
    return saver


def test_a_frozen_file_is_linked_while_it_is_unchanged(tmp_path: Path, save: Saver) -> None:
    """Every directory is complete by itself, also after any other one was removed."""
    state, kept = lora_state(), {}
    for step in range(4):
        save(tmp_path / f"step-{step}", state)
        kept[step] = {**state, "model": {**state["model"], "adapter": {}}}
        kept[step]["model"]["adapter"] = {"a": state["model"]["adapter"]["a"].clone()}
        train(state)
    names = [frozen_files(tmp_path / f"step-{step}") for step in range(4)]
    assert len(names[0]) == 1
    assert names[1:] == names[:1] * 3
    for gone, left in ((0, (1, 2, 3)), (2, (1, 3)), (3, (1,))):
        nostall.remove_checkpoint(tmp_path / f"step-{gone}")
        for step in left:
            assert_holds(tmp_path / f"step-{step}", kept[step])


def test_what_is_linked_is_not_counted_as_written(tmp_path: Path) -> None:
    """By the statistics of the save."""
    state = lora_state()
    Saver()(tmp_path / "first", state)
    writer = FileSystemWriterAsync(tmp_path / "second", frozen=FROZEN)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert writer.stats is not None
    linked = sum(each.stat().st_size for each in (tmp_path / "second").glob("frozen__*"))
    assert linked > 1_200_000
    assert writer.stats.linked_nbytes == linked
    assert writer.stats.nbytes == sum(
        each.stat().st_size for each in (tmp_path / "second").glob("*.distcp")
    )


def _add(state: State) -> None:
    state["model"]["base"]["w"].add_(1)


def _assign(state: State) -> None:
    state["model"]["base"]["b"] = torch.full((1000,), 7.0)


def _recreate(state: State) -> None:
    """The allocator gives the new tensor the memory of the old one, and no change is counted."""
    old = state["model"]["base"]
    address, form = old["w"].data_ptr(), old["w"].shape
    del old["w"]
    new = torch.empty(form)
    old["w"] = new
    if new.data_ptr() == address:  # most often
        assert new._version == 0
    torch.from_numpy(new.numpy()).fill_(3)  # not counted


def _rename(state: State) -> None:
    state["model"]["base"]["name"] = "other"


def _reshape(state: State) -> None:
    state["model"]["base"]["w"] = state["model"]["base"]["w"].view(1000, 300)


@pytest.mark.parametrize("change", [_add, _assign, _recreate, _rename, _reshape])
def test_a_file_with_a_change_is_written_again(
    tmp_path: Path, save: Saver, change: Callable[[State], None]
) -> None:
    """Of a value, a tensor, an object, or a form; and linked again after that."""
    state = lora_state()
    save(tmp_path / "0", state)
    change(state)
    for step in (1, 2):
        save(tmp_path / str(step), state)
        assert_holds(tmp_path / str(step), state)
    first, second, third = (frozen_files(tmp_path / str(step)) for step in range(3))
    assert first != second == third


def test_the_same_directory_can_be_saved_to_again(tmp_path: Path, save: Saver) -> None:
    """The file of the replaced checkpoint gets the new name, and loses the old one."""
    state = lora_state()
    inodes = set()
    for _ in range(3):
        save(tmp_path / "saved", state)
        (inode,) = frozen_files(tmp_path / "saved").values()
        inodes.add(inode)
        assert_holds(tmp_path / "saved", state)
        train(state)
    assert len(inodes) == 1


def test_nothing_is_written_if_all_is_frozen(tmp_path: Path, save: Saver) -> None:
    """But the metadata."""
    state = {"model": {"base": lora_state()["model"]["base"]}}
    for step in range(2):
        save(tmp_path / str(step), state)
    assert frozen_files(tmp_path / "0") == frozen_files(tmp_path / "1")
    assert sorted(os.listdir(tmp_path / "1")) == sorted(os.listdir(tmp_path / "0"))
    assert nostall.verify(tmp_path / "1").ok


@pytest.mark.parametrize("options", [{"thread_count": 4}, {"single_file_per_rank": False}])
def test_other_numbers_of_files_are_linked_too(tmp_path: Path, options: dict[str, Any]) -> None:
    """Each file by itself: of several, those with a change are written."""
    state, save = lora_state(), Saver(**options)
    save(tmp_path / "0", state)
    save(tmp_path / "1", state)
    assert frozen_files(tmp_path / "0") == frozen_files(tmp_path / "1")
    state["model"]["base"]["b"].add_(1)
    save(tmp_path / "2", state)
    before, after = (frozen_files(tmp_path / each) for each in "12")
    assert sum(before[name] == after[name] for name in before) == len(before) - 1 > 0
    assert_holds(tmp_path / "2", state)


def test_a_file_that_is_gone_or_replaced_is_not_linked(tmp_path: Path) -> None:
    """Its items are written."""
    state, save = lora_state(), Saver()
    save(tmp_path / "0", state)
    nostall.remove_checkpoint(tmp_path / "0")
    save(tmp_path / "1", state)
    assert_holds(tmp_path / "1", state)
    (name,) = frozen_files(tmp_path / "1")
    content = bytearray((tmp_path / "1" / name).read_bytes())
    (tmp_path / "1" / name).unlink()
    content[-5000] ^= 1
    (tmp_path / "1" / name).write_bytes(content)
    save(tmp_path / "2", state)
    assert_holds(tmp_path / "2", state)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP])
def test_a_file_system_without_links_is_written_to(tmp_path: Path, code: int) -> None:
    """As before."""
    state, save = lora_state(), Saver()
    save(tmp_path / "0", state)
    with patch("nostall._storage.posix.os.link", side_effect=OSError(code, os.strerror(code))):
        save(tmp_path / "1", state)
    assert frozen_files(tmp_path / "0").values() != frozen_files(tmp_path / "1").values()
    assert_holds(tmp_path / "1", state)


def test_a_file_that_was_not_synced_is_not_linked_by_a_save_that_syncs(tmp_path: Path) -> None:
    """A power failure could take it."""
    state = lora_state()
    Saver(sync_files=False)(tmp_path / "0", state)
    Saver()(tmp_path / "1", state)
    Saver(sync_files=False)(tmp_path / "2", state)
    first, second, third = (frozen_files(tmp_path / each) for each in "012")
    assert first != second == third


def test_a_save_that_fails_removes_its_link_only(tmp_path: Path, save: Saver) -> None:
    """The checkpoint that it was made from stays."""
    state = lora_state()
    save(tmp_path / "0", state)
    with (
        inject(Fault.errno("chunk", errno.ENOSPC, file="__0_0")),
        pytest.raises(CheckpointException),
    ):
        save(tmp_path / "1", state)
    assert list((tmp_path / "1").iterdir()) == []
    assert_holds(tmp_path / "0", state)
    save(tmp_path / "1", state)
    first, again = (frozen_files(tmp_path / each) for each in "01")
    assert sorted(again.values()) == sorted(first.values())
    assert_holds(tmp_path / "1", state)


def test_a_snapshot_that_fails_leaves_no_link(tmp_path: Path) -> None:
    """The next save links again."""
    state, save = lora_state(), SplitSaver()
    save(tmp_path / "0", state)
    no_memory = patch.object(Engine, "lease", side_effect=ReservationError("no memory"))
    with no_memory, pytest.raises((ReservationError, CheckpointException)):
        save(tmp_path / "1", state)
    assert frozen_files(tmp_path / "1") == {}
    save(tmp_path / "1", state)
    first, again = (frozen_files(tmp_path / each) for each in "01")
    assert sorted(again.values()) == sorted(first.values())
    assert_holds(tmp_path / "1", state)


def test_what_is_staged_before_it_is_planned_is_written(tmp_path: Path) -> None:
    """``dcp.async_save`` copies everything first: there is nothing to tell a change by."""
    state = lora_state()
    for step in range(2):
        writer = FileSystemWriterAsync(tmp_path / str(step), frozen=FROZEN)
        future: Any = dcp.async_save(state, storage_writer=writer, no_dist=True)
        future.result()
        assert_holds(tmp_path / str(step), state)
    assert frozen_files(tmp_path / "0").values() != frozen_files(tmp_path / "1").values()


def test_several_ranks_link_their_own_files(tmp_path: Path) -> None:
    """With sharded tensors and a queue; the result is loaded by stock."""
    for bitwise, linked in run_ranks(2, "frozen:save_and_load", tmp_path):
        assert bitwise
        assert linked == [False, True, True]


def test_steps_of_a_manager_are_linked(tmp_path: Path) -> None:
    """With the writer that it is given; a step is restored after the first one was removed."""
    writer = partial(FileSystemWriterAsync, frozen="model.0.")
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 2))
    with nostall.CheckpointManager(tmp_path, writer=writer) as manager:
        for step in range(3):
            with torch.no_grad():
                list(model.parameters())[2].add_(1)
            manager.save(step, {"model": model}).result(60)
        paths = sorted(tmp_path.glob("step-*"))
        assert frozen_files(paths[0]) == frozen_files(paths[2]) != {}
        nostall.remove_checkpoint(paths[0])
        other = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 2))
        manager.restore({"model": other})
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("wrong", [3, [""], [3], b"model", {"model": 1}, None])
def test_frozen_takes_names(tmp_path: Path, wrong: Any) -> None:
    """Or one name; not with a separation hint."""
    with pytest.raises(OptionError, match="frozen"):
        FileSystemWriterAsync(tmp_path, frozen=wrong)
    with pytest.raises(OptionError, match="separation_hint"):
        FileSystemWriterAsync(tmp_path, frozen="a", separation_hint="b", thread_count=2)
    FileSystemWriterAsync(tmp_path, frozen="model.base.")
