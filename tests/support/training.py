"""A small training job whose whole state a manager saves."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from nostall._manager.contents import rng_states


class Loader:
    """A data loader: its state has integers as keys, an empty dictionary, and a tensor."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.drawn = 0
        self.generator = torch.Generator().manual_seed(rank)

    def draw(self) -> torch.Tensor:
        self.drawn += 1
        return torch.rand(8, 4, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {
            "drawn": {self.rank: self.drawn},
            "workers": {},
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["workers"] == {}
        self.drawn = state["drawn"][self.rank]
        self.generator.set_state(state["generator"])


class Job:
    """Model, optimizer, schedule and data; every step draws from all generators."""

    def __init__(self, rank: int = 0, *, wraps: Any = lambda loader: loader) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3, 50])
        self.loader = Loader(rank)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": wraps(self.loader),
            "epoch": 0,
        }

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            noise = random.random() + float(np.random.random())  # noqa: NPY002  # the global one
            loss: torch.Tensor = (self.model(self.loader.draw()) - noise).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.state["epoch"] += 1
            losses.append(loss.item())
        return losses


def disturb() -> None:
    """Draw from the global generators, as another program would have."""
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002  # the global one
    torch.manual_seed(7)


def facts(job: Job) -> Any:
    objects = ("model", "optimizer", "scheduler", "loader")
    states = {name: job.state[name].state_dict() for name in objects}
    return _plain([states, job.state["epoch"], rng_states()])


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
