"""Training goes on after an overlapped call without calling nostall: no checkpoint tears."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.utils import parametrizations

from nostall._memory.copying import copied_at_once
from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from support.faults import Fault, inject
from support.states import schedule

pytestmark = pytest.mark.usefixtures("one_thread_computes")
STEPS, EVERY = 200, 5
WIDTH = 350
UNTIL_THE_COPY_S = 0.005
"""Forward, backward and step of these models are over sooner, if nothing waits."""
FILLING = [torch.zeros(110_000) for _ in range(9)]
"""Tensors, each smaller than any weight, that use up the bytes which are copied inside the call."""

Optimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


class Averaging(nn.Module):
    """A layer with vectors and averages that forward changes, by counted operations and others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("products", torch.zeros(320, 320))
        self.mean: torch.Tensor
        self.products: torch.Tensor

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Pass a batch through, and note what it was like."""
        out: torch.Tensor = self.inner(batch)
        with torch.no_grad():
            self.mean.lerp_(out.mean(0), 0.1)
            some = out[:, :320]
            self.products.data.mul_(0.9).add_(some.T @ some)
        return out


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.ReLU(), linear())


def adamw(**options: Any) -> Optimizer:
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, **options)


def sgd(**options: Any) -> Optimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **options)


def adagrad(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, fused=True)


class Saves:
    """One save in progress at a time, in two ways by turns, each with what it should hold."""

    def __init__(self, out: Path, queue: AsyncCallsQueue) -> None:
        self._out, self._queue = out, queue
        self._expected: dict[str, Any] = {}
        self._wait: Callable[[], object] = queue.wait
        self.count = 0
        self.wrong: list[str] = []

    def start(self, state: dict[str, Any]) -> None:
        """Ask for a save, and return without having waited for it."""
        if self.count:
            self.finish()
        self._expected = copy.deepcopy(state)
        whole = {**state, "filling": FILLING}
        options: dict[str, Any] = {"staging": "overlapped", "sync_files": False}
        if self.count % 2:
            schedule(self._queue, self._out, whole, **options)
            self._wait = self._queue.wait
        else:
            writer = FileSystemWriterAsync(self._out, **options)
            response: Any = dcp.async_save(whole, storage_writer=writer, no_dist=True)
            self._wait = response.upload_completion.result
        self.count += 1

    def finish(self) -> None:
        """Wait for the last save, and compare the checkpoint with the state at its call."""
        self._wait()
        found = {name: torch.full_like(each, -7) for name, each in self._expected.items()}
        dcp.load(found, checkpoint_id=self._out, no_dist=True)
        for name, each in self._expected.items():
            if not torch.equal(each, found[name]):
                self.wrong.append(f"{name} of save {self.count}")
        shutil.rmtree(self._out)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    moments = {
        f"{number}.{name}": value
        for number, each in optimizer.state_dict()["state"].items()
        for name, value in each.items()
        if isinstance(value, torch.Tensor)
    }
    return {**model.state_dict(), **moments}


def require_copied_behind(state: dict[str, Any]) -> None:
    """Else the test would show nothing of what waits."""
    tensors = [*FILLING, *state.values()]
    at_once = copied_at_once([each.nbytes for each in tensors])
    assert not [each for at, each in enumerate(tensors) if at in at_once and each.nbytes > 450_000]


@pytest.mark.parametrize(
    ("make", "optimizer_of", "backwards_per_step"),
    [
        pytest.param(linear, adamw(foreach=True), 1, id="AdamW, foreach"),
        pytest.param(linear, adamw(fused=True), 1, id="AdamW, fused"),
        pytest.param(linear, sgd(foreach=False), 1, id="SGD, one by one"),
        pytest.param(linear, adagrad, 1, id="Adagrad, fused"),
        pytest.param(with_batch_norm, sgd(), 1, id="batch norm"),
        pytest.param(Averaging, adamw(), 1, id="spectral norm and averages"),
        pytest.param(with_batch_norm, sgd(fused=True), 4, id="gradient accumulation"),
    ],
)
def test_every_checkpoint_holds_the_state_of_its_call(
    tmp_path: Path,
    make: Callable[[], nn.Module],
    optimizer_of: Optimizer,
    backwards_per_step: int,
) -> None:
    """200 steps with a save every 5, none waited for: bit by bit, and none of them fails."""
    torch.manual_seed(0)
    model = make()
    optimizer = optimizer_of(model.parameters())
    batch = torch.randn(8, WIDTH)
    with AsyncCallsQueue() as queue, inject(Fault.delay("stage", UNTIL_THE_COPY_S)):
        saves = Saves(tmp_path / "saved", queue)
        for step in range(STEPS):
            if step % EVERY == 0:
                state = state_of(model, optimizer)
                require_copied_behind(state)
                saves.start(state)
            for _ in range(backwards_per_step):
                (model(batch).square().mean() / backwards_per_step).backward()
            optimizer.step()
            optimizer.zero_grad()
            queue.poll()
        saves.finish()
    assert saves.wrong == []
    assert saves.count == STEPS // EVERY
