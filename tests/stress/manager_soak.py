"""Kill trainers and writers that save with a manager, and look at what is left each time.

Two gloo ranks save each step twice, the second time over the first, while policies remove steps. At
a random moment one of the trainers or of their writer processes is killed with SIGKILL; both start
anew, and restore. After every kill:

* each step that a policy keeps, of all that were ever committed, is there;
* each committed step verifies, checksum by checksum, and holds one save of both ranks, bit by bit;
* what a save had reported as committed is there, or a later save of the same step;
* the trainers have restored the highest step: tensors, optimizer, data and generators of each rank;
* no directory of an unfinished step outlives the first save of the next life.

    python tests/stress/manager_soak.py --kills 1000
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall import CheckpointManager, KeepBest, KeepEvery, KeepLatest, PerRank
from nostall._manager.policies import StepRecord, steps_to_keep
from nostall._manager.steps import StepDirectories
from stress.soak import PATIENCE_S, RANKS, Campaign, Violation, begin, main
from support.faults import writer_pids

LENGTH = 50_000
EVERY = 16
POLICIES = (KeepLatest(2), KeepBest(2, "loss"), KeepEvery(steps=EVERY))


def loss_of(step: int) -> float:
    """The metric of a step, the same whenever it is saved."""
    return (step * 7919 % 101) / 101


class Data:
    """Per rank: what a data loader would know."""

    def __init__(self, rank: int) -> None:
        self.rank, self.save = rank, -1

    def state_dict(self) -> dict[str, Any]:
        return {"of": {self.rank: self.save}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.save = state["of"][self.rank]


class Trainer:
    """The state of one rank; everything in it follows from the number of the last save."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.data = Data(rank)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": PerRank(self.data),
            f"large{rank}": torch.zeros(LENGTH),
            "save": -1,
        }

    def become(self, save: int) -> None:
        """Take the state that save has."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float(save))
                momentum = torch.full_like(parameter, save + 0.5)
                self.optimizer.state[parameter]["momentum_buffer"] = momentum
        self.optimizer.param_groups[0]["lr"] = float(save)
        self.data.save = save
        self.state[f"large{self.rank}"] = torch.full((LENGTH,), float(save * RANKS + self.rank))
        self.state["save"] = save
        random.seed(save * RANKS + self.rank)
        torch.manual_seed(save * RANKS + self.rank)

    def differences(self, save: int) -> list[str]:
        """Names of the parts that differ from the state at that save."""
        drawn = random.random(), torch.rand(1).item()
        other = Trainer(self.rank)
        other.become(save)
        wanted = {
            "generators": drawn == (random.random(), torch.rand(1).item()),
            "data": self.data.save == save,
            "save": self.state["save"] == save,
            "lr": self.optimizer.param_groups[0]["lr"] == float(save),
            "large": torch.equal(*(each.state[f"large{self.rank}"] for each in (self, other))),
        }
        for mine, its in zip(self.model.parameters(), other.model.parameters(), strict=True):
            wanted["parameters"] = torch.equal(mine, its)
            momenta = self.optimizer.state[mine], other.optimizer.state[its]
            wanted["momentum"] = torch.equal(*(each["momentum_buffer"] for each in momenta))
        return [name for name, is_right in wanted.items() if not is_right]


def train(rank: int, root: Path, store: Path, first: int, tell: int) -> None:
    """Restore step ``first``, then save for ever; tell of writers, and how each save ended."""
    say = begin(rank, store, tell, chunk_nbytes=64 << 10)
    manager = CheckpointManager(root, keep=POLICIES)
    trainer = Trainer(rank)
    restored = manager.restore(trainer.state)
    save = 0
    if (-1 if restored is None else restored.step) != first:
        raise Violation(f"rank {rank} restored {restored}, and the highest step is {first}")
    if restored is not None:
        wrong = trainer.differences(restored.extra)
        if wrong or restored.extra // 2 != restored.step:
            raise Violation(f"rank {rank} restored step {restored.step} with other {wrong}")
        save = restored.extra + 1
    while True:
        say(writers=writer_pids())
        trainer.become(save)
        try:
            handle = manager.save(
                save // 2, trainer.state, metrics={"loss": loss_of(save // 2)}, extra=save
            )
            if save % 3:  # otherwise the next call commits it, while the next save begins
                handle.result(PATIENCE_S)
        except CheckpointException as error:
            say(failed=save, why=str(error)[-300:])
        else:
            if handle.done:
                say(committed=save)
        save += 1


# --- the driver -----------------------------------------------------------------------------------


def found_in(steps: StepDirectories) -> dict[int, int]:
    """The save that each committed step holds; every one is examined."""
    found = {}
    for step in steps.committed():
        path = steps.path(step)
        verified = nostall.verify(path)
        if not verified.ok:
            raise Violation(f"{path} is damaged: {[str(each) for each in verified.damages]}")
        state: dict[str, Any] = {"save": -1, "model": {"weight": torch.zeros(64, 64)}}
        state |= {f"large{rank}": torch.zeros(LENGTH) for rank in range(RANKS)}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        save = state["save"]
        whole = [
            torch.equal(state[f"large{rank}"], torch.full((LENGTH,), float(save * RANKS + rank)))
            for rank in range(RANKS)
        ]
        is_model = torch.equal(state["model"]["weight"], torch.full((64, 64), float(save)))
        if not (all(whole) and is_model and save // 2 == step):
            raise Violation(f"{path} is a mixture, or of another step: {whole}, save {save}")
        found[step] = save
    return found


def promised(ever: Iterable[int]) -> set[int]:
    """The steps that policies keep, of all that were ever committed."""
    records = [
        StepRecord(step=step, committed_at_s=0.0, metrics={"loss": loss_of(step)})
        for step in sorted(set(ever))
    ]
    return steps_to_keep(records, POLICIES)


def check(steps: StepDirectories, committed: set[int], ever: set[int]) -> int:
    """Look at all that is there; the number of committed steps."""
    found = found_in(steps)
    ever |= found.keys() | {save // 2 for save in committed}
    missing = promised(ever) - found.keys()
    if missing:
        raise Violation(f"steps {sorted(missing)} are promised and gone; {sorted(found)} are there")
    for save in committed:
        if save // 2 in found and found[save // 2] < save:
            raise Violation(f"save {save} was committed, and {found[save // 2]} is there")
    return len(found)


def soak(kills: int, seed: int, root: Path) -> dict[str, Any]:
    steps, ever = StepDirectories(str(root)), set[int]()
    found = Campaign(kills, seed, root, train)
    for life in found.lives(
        *("trainer", "trainer", "writer"),
        every_s=0.06,
        first=lambda: max(steps.committed(), default=-1),
        begun=lambda: _require_tidy(steps),
    ):
        found.totals["steps checked"] += check(steps, life.committed, ever)
        found.totals["highest step"] = max(steps.committed(), default=0)
    return {**found.totals, "steps left": len(steps.committed())}


def _require_tidy(steps: StepDirectories) -> None:
    """At most the steps in progress are unfinished: what crashes have left is gone."""
    listed = steps.listed()
    unfinished = [step for step in listed if steps.committed_at_s(step) is None]
    under_way = {step for step in unfinished if step >= max(listed) - 2}
    removing = len(unfinished) - len(under_way)
    if removing > 1:
        raise Violation(f"steps {unfinished} of earlier lives are unfinished and still there")


if __name__ == "__main__":
    sys.exit(main(soak, __doc__ or ""))
