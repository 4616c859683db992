"""``nostall.load(..., blocking=False)``: reads beside training, and hands over in ``result``."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import nostall
from nostall._storage.uncached import UncachedFiles, UncachedSource
from nostall.errors import DamagedCheckpointError, OptionError, ReadError, SaveTimeoutError
from nostall.loading import Loading
from support.ranks import run_python
from support.reads import empty_like, same, save
from support.waiting import error_of


class Recorder:
    """An object with a state, which counts how often it got one."""

    def __init__(self, value: float) -> None:
        self.weight = torch.full((300_000,), value)
        self.calls: list[threading.Thread] = []

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "value": self.weight[0].item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(threading.current_thread())
        assert state["value"] == state["weight"][0].item()


def state_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(200_000, generator=generator),
        "half": torch.randn(100, 7, generator=generator).half(),
        "inner": {"list": [seed, torch.full((3,), seed)], "text": f"{seed}"},
    }


@contextmanager
def held(where: type = UncachedSource, name: str = "read_into") -> Iterator[threading.Event]:
    """Threads of a load wait in a method, until the event is set."""
    go_on, really = threading.Event(), getattr(where, name)

    def wait(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return really(*arguments)

    with patch.object(where, name, wait):
        yield go_on


def begun(path: Path, state: dict[str, Any]) -> Loading:
    loading = nostall.load(state, path, blocking=False)
    assert not loading.done
    return loading


def test_a_hundred_loads_beside_training_are_right(tmp_path: Path) -> None:
    """All bits, while steps change other tensors; nothing but tensors changes before the end."""
    for seed in range(3):
        save(tmp_path / str(seed), {**state_of(seed), "object": Recorder(seed).state_dict()})
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(100):
        seed = number % 3
        recorder = Recorder(-1.0)
        state = {**empty_like(state_of(seed)), "object": recorder}
        loading = nostall.load(state, tmp_path / str(seed), blocking=False)
        while True:
            is_done = loading.done
            assert state["inner"]["text"] != f"{seed}"
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            if is_done:
                break
        stats = loading.result()
        assert loading.result() is stats
        assert recorder.calls == [threading.current_thread()]
        assert state.pop("object") is recorder
        assert torch.equal(recorder.weight, torch.full((300_000,), float(seed)))
        assert same(state, state_of(seed))
        assert loading.progress[0] == loading.progress[1] > 1_000_000


def test_a_load_that_takes_long_can_be_waited_for_again(tmp_path: Path) -> None:
    """The error says how far it is; the result is whole."""
    save(tmp_path, state_of(1))
    state = empty_like(state_of(1))
    with held() as go_on:
        loading = begun(tmp_path, state)
        with pytest.raises(SaveTimeoutError, match=r"bytes are read after 0\.01 s"):
            loading.result(0.01)
        go_on.set()
        loading.result(60)
    assert same(state, state_of(1))


def test_a_cancelled_load_is_no_load(tmp_path: Path) -> None:
    """Its result is an error, each time, and objects get nothing."""
    recorder = Recorder(1.0)
    save(tmp_path, {"object": recorder.state_dict()})
    with held() as go_on:
        loading = begun(tmp_path, {"object": recorder})
        loading.cancel()
        go_on.set()
        for _ in range(2):
            with pytest.raises(ReadError, match="cancelled"):
                loading.result(60)
    assert recorder.calls == []


@pytest.mark.parametrize("how", ["truncated", "removed"])
def test_a_checkpoint_that_is_damaged_meanwhile_is_an_error(tmp_path: Path, how: str) -> None:
    """Or removed by another process: half of it is never presented as loaded."""
    recorder, path = Recorder(1.0), tmp_path / "step"
    save(path, {"object": recorder.state_dict(), "more": torch.ones(9_000_000)})
    with held(UncachedFiles, "open") as go_on:
        loading = begun(path, {"object": recorder, "more": torch.zeros(9_000_000)})
        if how == "removed":
            shutil.rmtree(path)
        for file in path.glob("*.distcp"):
            os.truncate(file, 1000)
        go_on.set()
        with pytest.raises(DamagedCheckpointError):
            loading.result(60)
    assert recorder.calls == []


def test_errors_of_planning_are_raised_at_once(tmp_path: Path) -> None:
    """Such as that of a state that does not fit."""
    save(tmp_path, state_of(1))
    with pytest.raises(OptionError, match="Size mismatch"):
        nostall.load({"large": torch.zeros(3)}, tmp_path, blocking=False)


def test_an_object_that_refuses_its_state_does_so_each_time(tmp_path: Path) -> None:
    """None is loaded twice, from several threads either."""
    first, second = Recorder(1.0), Recorder(1.0)
    save(tmp_path, {"first": first.state_dict(), "second": second.state_dict()})
    second.load_state_dict = lambda _: 1 / 0  # type: ignore[method-assign, assignment]  # of this one
    loading = nostall.load({"first": first, "second": second}, tmp_path, blocking=False)
    errors: list[BaseException | None] = []
    threads = [
        threading.Thread(target=lambda: errors.append(error_of(loading.result))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [type(each) for each in errors] == [ZeroDivisionError] * 4
    assert len(first.calls) == 1


def test_tensors_of_inference_mode_are_loaded(tmp_path: Path) -> None:
    """Into another dtype, which changes them by torch's means."""
    save(tmp_path, {"w": torch.full((9, 9), 3.0)})
    with torch.inference_mode():
        state = {"w": torch.zeros(9, 9).half()}
        nostall.load(state, tmp_path, blocking=False).result(60)
    assert state["w"].eq(3).all()


def test_the_end_of_the_program_waits_for_no_load(tmp_path: Path) -> None:
    """Nobody could use it."""
    save(tmp_path, {"w": torch.ones(9_000_000)})
    program = """
import atexit, sys, time, torch, nostall
from nostall._storage.uncached import UncachedSource
really, calls = UncachedSource.read_into, []
atexit.register(lambda: print(len(calls)))
def slowly(*arguments):
    calls.append(None)
    time.sleep(0.2)
    return really(*arguments)
UncachedSource.read_into = slowly
loading = nostall.load({"w": torch.zeros(9_000_000)}, sys.argv[1], threads=1, blocking=False)
"""
    ended = run_python("-c", program, tmp_path, timeout_s=60)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 6  # of nine
