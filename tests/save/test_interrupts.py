"""After Ctrl-C anywhere, or another exception from outside, the next save is whole."""

from __future__ import annotations

import random
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp

import nostall
from nostall._engine import Engine, default_engine
from nostall.core import AsyncCallsQueue
from nostall.options import EngineOptions
from nostall.state_dict_saver import CheckpointMetadataCache
from support.faults import Hold, inject
from support.ranks import run_script
from support.states import blobs, schedule


@pytest.fixture(autouse=True)
def one_block() -> None:
    """Every snapshot is taken to the same memory."""
    nostall.configure(EngineOptions(max_in_flight=1))


def structure(name: str, count: int, numel: int) -> dict[str, Any]:
    return {f"{name}{number}": torch.randn(numel) for number in range(count)}


class Saves:
    """Two structures that take turns in the same memory, each with a cache of its own."""

    def __init__(self, root: Path, queue: AsyncCallsQueue) -> None:
        self.root, self.queue = root, queue
        self.states = {"a": structure("a", 60, 20_003), "b": structure("b", 100, 9001)}
        self.by_stock = {}
        for name, state in self.states.items():
            dcp.save(state, checkpoint_id=root / f"{name} by stock", no_dist=True)
            self.by_stock[name] = blobs(root / f"{name} by stock")
        self.caches = {name: CheckpointMetadataCache() for name in self.states}
        for number in range(4):
            for name in self.states:
                self.save(name, f"{name} {number}")

    def start(self, name: str, path: str) -> Path:
        schedule(self.queue, self.root / path, self.states[name], cache=self.caches[name])
        return self.root / path

    def save(self, name: str, path: str) -> Path:
        started = self.start(name, path)
        self.queue.maybe_finalize_async_calls(blocking=True)
        return started

    def require_as_stock(self, name: str, path: Path) -> None:
        assert blobs(path) == self.by_stock[name]
        assert nostall.verify(path).ok


@pytest.fixture
def saves(tmp_path: Path, queue: AsyncCallsQueue) -> Saves:
    return Saves(tmp_path, queue)


def interrupted(target: Any, name: str, *, before: bool) -> Any:
    """An interrupt, once, in place of a function's beginning or end."""
    real, left = getattr(target, name), [True]

    def function(*args: Any, **options: Any) -> Any:
        if before and left and left.pop():
            raise KeyboardInterrupt
        result = real(*args, **options)
        if left and left.pop():
            raise KeyboardInterrupt
        return result

    return patch.object(target, name, function)


PLACES = [
    "nostall._memory.snapshot:_lay_down_containers",
    "nostall._memory.snapshot:_places",
    "nostall._save.stage_and_write:job_of",
    "nostall._engine:when_done",
    "nostall._writer.trainer_side:WriterProcess.submit",
    "nostall._engine:Engine.submit",
]


@pytest.mark.usefixtures("given_up_soon")
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_save_spoils_none_that_follows(
    saves: Saves, place: str, *, before: bool
) -> None:
    """None of its structure, which finds memory as it was left, or of another; nothing is left."""
    module, _, qualified = place.partition(":")
    *owner, name = qualified.split(".")
    target: Any = import_module(module)
    for part in owner:
        target = getattr(target, part)
    for number in range(3):
        # So that it has to be made ready for the other structure, which is then interrupted.
        saves.save("a", f"before {number}")
        with (
            interrupted(target, name, before=before),
            pytest.raises(KeyboardInterrupt),
        ):
            saves.start("b", f"interrupted {number}")
        assert list((saves.root / f"interrupted {number}").iterdir()) == []
        assert nostall.status() == ()
        for name_of_next in ("a", "b"):
            path = saves.save(name_of_next, f"{name_of_next} after {number}")
            saves.require_as_stock(name_of_next, path)


def test_memory_that_is_being_written_is_not_shared(saves: Saves) -> None:
    """A snapshot may be lost, or given up by its maker, once its job was handed over."""
    arena = default_engine().arena
    leased = []
    submit = Engine.submit

    def given_up(self: Engine, job: Any, lease: Any, progress: Any, **options: Any) -> Any:
        answer = submit(self, job, lease, progress, **options)
        lease.release()
        leased.append(len(arena._leased))
        return answer

    with Hold("start") as hold, inject(hold.fault), patch.object(Engine, "submit", given_up):
        path = saves.start("a", "given up")
        hold.release()
        saves.queue.maybe_finalize_async_calls(blocking=True)
    assert leased == [1]
    saves.require_as_stock("a", path)


@pytest.mark.slow
@pytest.mark.parametrize("happens", ["lock", "call"])
@pytest.mark.parametrize("kind", ["sync", "split", "waves", "overlapped", "tier"])
def test_a_save_after_an_interrupted_one_is_committed(
    tmp_path: Path, kind: str, happens: str
) -> None:
    """Wherever the main thread was, and at every second place if Ctrl-C was pressed twice."""
    # The offset of the places is another in each order of the tests, and the same in the same one.
    arguments = kind, happens, str(tmp_path / "save"), str(random.random())
    done = run_script("programs/interrupted_saves.py", *arguments, cwd=tmp_path, timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
