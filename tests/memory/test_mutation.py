"""A stress: one thread changes the state whenever that is allowed, while saves go on.

Each checkpoint has to hold, bit by bit, what a deep copy held that was made just before the save
call. Whatever a save still refers to of the trainer's would show, as values, as an item too many,
or as memory that is gone.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import Self

import nostall
from nostall.core import AsyncCallsQueue
from nostall.errors import StagingError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import StagingMode
from nostall.state_dict_saver import CheckpointMetadataCache
from support.faults import Hold, inject
from support.states import read_metadata, schedule

State = dict[str, Any]
Leaves = dict[str, Any]
SAVES = 12
HELD = 3
"""In every third save the writer stands still while everything is changed."""
OPTIONS: dict[str, Any] = {"thread_count": 2, "sync_files": False}
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def one_thread_computes() -> Iterator[None]:
    """Else the threads of changes and of saves compete for each other's processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- everything that a state may hold, and what may be done to it ---------------------------------


class Everything:
    """A state of some megabytes, and a round of changes that leaves no value in it as it was."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.round = 0
        self.model = nn.Sequential(nn.Linear(64, 700), nn.ReLU(), nn.Linear(700, 8, bias=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self._step()
        base, tied = torch.randn(40), torch.randn(9, 4)
        self.own: State = {
            "large": torch.randn(1_200_000),  # which overlapped staging copies behind the call
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

    def change(self) -> None:
        """One round: values, containers, objects, keys, and the memory that tensors lie in."""
        self.change_values()
        for parameter in self.model.parameters():
            parameter.data = torch.full_like(parameter, self.round)
        self._step()
        # As FSDP does with what it has gathered: for a moment the memory is not there.
        storage = self.own["gathered"].untyped_storage()
        storage.resize_(0)
        storage.resize_(4 * 20_000)
        self.own["gathered"].fill_(self.round)
        self.own["list"][1] = self.own["list"][2]["epoch"] = self.round
        objects = self.own["objects"]
        objects["set"].add(self.round)
        objects["bytes"][:] = b"%d" % self.round
        objects["nested"]["text"] = f"{self.round}"
        self.own.pop(f"added {self.round - 1}", None)
        self.own[f"added {self.round}"] = torch.full((5,), float(self.round))

    def change_values(self) -> None:
        """Only those of tensors, in place."""
        self.round += 1
        with torch.no_grad():
            for leaf in leaves(self.state).values():
                if isinstance(leaf, torch.Tensor):
                    leaf.fill_(self.round)

    def _step(self) -> None:
        self.model(torch.ones(2, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def leaves(value: Any, name: str = "") -> Leaves:
    """The values in a state, by the names that DCP gives them."""
    if isinstance(value, Mapping) and value:
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    else:
        return {name: value}
    found: Leaves = {}
    for key, element in pairs:
        found |= leaves(element, f"{name}.{key}" if name else str(key))
    return found


def same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    as_bytes = [each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*as_bytes)


def differences(path: Path, expected: State) -> list[str]:
    """Names of what is not in a checkpoint as it is in a state, or is there and should not be."""
    wanted = leaves(expected)
    template = {
        name: torch.empty_like(leaf).fill_(-7) if isinstance(leaf, torch.Tensor) else None
        for name, leaf in wanted.items()
    }
    dcp.load(template, storage_reader=FileSystemReader(path), no_dist=True)
    wrong = [name for name, leaf in wanted.items() if not same_bits(leaf, template[name])]
    return wrong + sorted(read_metadata(path).state_dict_metadata.keys() ^ wanted.keys())


class Changing:
    """A thread that changes everything, round after round, whenever it is let."""

    def __init__(self, change: Callable[[], None]) -> None:
        self._change = change
        self._is_let = self._is_over = self._is_busy = False
        self._rounds = 0
        self._moved = threading.Condition()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="changes everything")

    def _run(self) -> None:
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._is_let or self._is_over)
                if self._is_over:
                    return
                self._is_busy = True
            try:
                self._change()
            except BaseException as error:
                self._failures.append(error)
            with self._moved:
                self._is_busy = False
                self._is_over |= bool(self._failures)
                self._rounds += 1
                self._moved.notify_all()

    def let(self) -> None:
        """From now on."""
        with self._moved:
            self._is_let = True
            self._moved.notify_all()

    def stop(self) -> None:
        """Until it is let again; returns when it has stopped."""
        with self._moved:
            self._is_let = False
            assert self._moved.wait_for(lambda: not self._is_busy, DEADLINE_S)
        assert self._failures == []

    def wait_for_rounds(self, count: int) -> None:
        """Return when it has begun and finished so many more."""
        with self._moved:
            wanted = self._rounds + count + 1  # the one under way may have begun before
            assert self._moved.wait_for(lambda: self._rounds >= wanted, DEADLINE_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._moved:
            self._is_over = True
            self._moved.notify_all()
        self._thread.join(DEADLINE_S)


# --- ways to save: start one and return when changes are allowed; finish all ----------------------


class Split:
    """The split functions and a queue; the next save is scheduled during the one before."""

    def __init__(self, staging: str) -> None:
        self._staging = staging
        self._queue = AsyncCallsQueue()
        self._cache = CheckpointMetadataCache()

    def start(self, path: Path, state: State) -> None:
        options: dict[str, Any] = {**OPTIONS, "staging": self._staging}
        schedule(self._queue, path, state, cache=self._cache, **options)
        nostall.wait_staged(DEADLINE_S)

    def make_room(self) -> None:
        """Do nothing: any number of saves that memory has room for may be in flight."""

    def finish(self) -> None:
        self._queue.close()


class InDcp:
    """``dcp.async_save``, which has one save under way at a time."""

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

    def make_room(self) -> None:
        self.finish()

    def finish(self) -> None:
        while self._uploads:
            self._uploads.pop().result(DEADLINE_S)


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


@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
@pytest.mark.parametrize("way", [Split, InDcp])
def test_checkpoints_hold_what_was_there_when_changes_were_allowed(
    tmp_path: Path, way: type[Split | InDcp], staging: StagingMode
) -> None:
    """Time and again, with values, objects, keys and storages changing until the next call."""
    everything, saving = Everything(), way(staging)
    expected: list[State] = []
    with Changing(everything.change) as changing:
        for number in range(SAVES):
            saving.make_room()
            changing.stop()
            expected.append(copy.deepcopy(everything.state))
            with maybe_held(changing, held=number % HELD == 0):
                saving.start(tmp_path / f"{number}", everything.state)
        changing.wait_for_rounds(1)
        saving.finish()
        changing.stop()
    wrong = {n: differences(tmp_path / f"{n}", each) for n, each in enumerate(expected)}
    assert {number: names for number, names in wrong.items() if names} == {}


def test_changes_that_do_not_wait_for_the_snapshot_are_an_error(tmp_path: Path) -> None:
    """With changes right after an overlapped call each save fails, with the error that says so."""
    everything, queue = Everything(), AsyncCallsQueue()
    with Changing(everything.change_values) as changing:  # an optimizer's step would wait
        for number in range(5):
            with Hold("stage") as hold:
                with inject(hold.fault):
                    schedule(queue, tmp_path / f"{number}", everything.state, staging="overlapped")
                    changing.let()
                    changing.wait_for_rounds(2)
                    changing.stop()
                hold.release()
                with pytest.raises(CheckpointException, match="changed while the") as caught:
                    queue.wait()
            assert isinstance(caught.value.failures[0][0], StagingError)
            assert not (tmp_path / f"{number}" / ".metadata").exists()
    queue.close()


def test_a_round_of_changes_leaves_nothing_as_it_was(tmp_path: Path) -> None:
    """A checkpoint with any value late would be found: the test above can fail, for each name."""
    everything = Everything()
    before = copy.deepcopy(everything.state)
    queue = AsyncCallsQueue()
    schedule(queue, tmp_path, everything.state)
    queue.close()
    assert differences(tmp_path, before) == []
    everything.change()
    now = everything.state
    late = set(differences(tmp_path, {name: now[name] for name in before}))
    assert late == leaves(before).keys()
