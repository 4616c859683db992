"""Ranks that save and restore with a manager."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import nostall
from nostall import CheckpointManager, KeepLatest, PerRank, _torch
from nostall import manager as manager_module
from nostall._manager import steps
from nostall._read import sharing
from nostall._storage import posix
from nostall.errors import NostallError
from nostall.options import EngineOptions
from nostall.removal import remove_checkpoint
from support.faults import Fault, inject
from support.training import Job, disturb
from support.waiting import HangingOs, stands_in, wait_until

Facts = dict[str, Any]


def resumed(out: Path) -> Facts:
    """Data and generators differ between the ranks; a resumed job continues with those."""
    rank = dist.get_rank()
    job = Job(rank, wraps=PerRank)
    random.seed(rank)
    torch.manual_seed(rank)
    with CheckpointManager(out) as manager:
        job.train(2)
        manager.save(2, job.state, extra=f"of rank {rank}")
    disturb()
    again = Job(rank, wraps=PerRank)
    restored = CheckpointManager(out).restore(again.state)
    assert restored is not None
    return {
        "extra": restored.extra,
        "drawn": again.loader.drawn,
        "random": random.random(),
        "torch": torch.rand(1).item(),
        "loader": again.loader.draw().sum().item(),
    }


# --- sharded --------------------------------------------------------------------------------------


class App:
    """Model and optimizer by parameter names, as torch's documentation recommends it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> Facts:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: Facts) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def _job(
    seed: int, make: Callable[[Any], torch.optim.Optimizer], *, is_sharded: bool = True
) -> Facts:
    """A model, and the optimizer that is made for its parameters."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {"model": model, "optimizer": make(model.parameters())}


def _train(job: Facts, steps: int) -> list[float]:
    def closure() -> torch.Tensor:
        job["optimizer"].zero_grad()
        loss: torch.Tensor = job["model"](torch.ones(2, 6)).square().sum()
        loss.backward()
        return loss

    return [float(job["optimizer"].step(closure)) for _ in range(steps)]


def sharded(out: Path) -> Facts:
    """Objects as they are, and by names: a new job with other weights continues equally."""
    found = {}
    adam = partial(torch.optim.AdamW, lr=0.1)
    for name in ("objects", "names"):
        job, other = _job(0, adam), _job(1, adam)
        states = [each if name == "objects" else {"app": App(**each)} for each in (job, other)]
        _train(job, 2)
        with CheckpointManager(out / name) as manager:
            manager.save(2, states[0])
            expected = _train(job, 3)
            manager.restore(states[1])
        found[name] = [_train(other, 3), expected]
    return found


def below_a_root(out: Path, root: str) -> tuple[int, bool, bool]:
    """Three steps below a given root: which one is restored, with its values, and read once."""
    del out
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group = dist.group.WORLD
    whole = torch.arange(9_000.0)
    state = {"x": distribute_tensor(torch.arange(1000.0), mesh, [Shard(0)]), "whole": whole}
    reads = patch.object(sharing, "read_shared", wraps=sharing.read_shared)
    with (
        reads as shared,
        CheckpointManager(root, keep=KeepLatest(2), process_group=group) as manager,
    ):
        for step in range(3):
            manager.save(step, state)
            state["x"].add_(1)
        manager.wait()
        placed = distribute_tensor(torch.zeros(1000), mesh, [Shard(0)])
        found: Facts = {"x": placed, "whole": torch.zeros(9_000)}
        restored = manager.restore(found)
    assert restored is not None
    is_right = torch.equal(found["x"].full_tensor(), torch.arange(1000.0) + 1 + 1)
    return restored.step, is_right and torch.equal(found["whole"], whole), shared.called


# --- failures -------------------------------------------------------------------------------------


class _Broken:
    def state_dict(self) -> Facts:
        raise ZeroDivisionError("broken")

    def load_state_dict(self, state: Facts) -> None:
        raise ZeroDivisionError("broken")


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (CheckpointException, NostallError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def failing(out: Path, how: Any) -> Facts:
    """Rank 1 fails on several occasions, and both save on; then later steps are discarded."""
    rank = dist.get_rank()
    state: Facts = {f"of {rank}": torch.full((9,), float(rank))}
    broken: Facts = {**state, "object": _Broken()} if rank == 1 else state
    loss: Any = "n/a" if rank == 1 else 0.5
    commits: list[tuple[int, bool]] = []

    def note(path: str, step: int) -> None:
        commits.append((step, (Path(path) / ".metadata").exists()))
        raise ZeroDivisionError  # no reason to fail

    manager = CheckpointManager(out, save_every=1, on_error=how, on_commit=note)

    def save(step: int) -> None:
        dist.barrier()
        assert manager.should_save(step)
        manager.save(step, state)

    def told(*calls: Callable[[], Any]) -> list[str]:
        return [error for call in calls if (error := _error_of(call)) != "none"]

    found: Facts = {"how": how, "first": told(lambda: manager.save(0, broken))}
    with inject(*([Fault.errno("chunk", 28)] if rank == 1 else [])):
        handle = manager.save(1, state)
        wait_until(manager._queue._caller._calls[0].outcome.done)
    found["write"] = told(*(partial(save, step) for step in range(2, 6)))
    found["later"] = told(lambda: manager.save(6, broken), manager.wait)
    found["metrics"] = told(lambda: manager.save(6, state, {"loss": loss}), manager.wait)
    found["steps"] = manager.all_steps()
    found["restore"] = told(lambda: manager.restore(broken, 3))
    manager.restore(state, 3)
    manager.discard_after(3)
    manager.save(4, state)
    found["pending"] = not manager.all_committed()
    while not manager.all_committed():  # as a loop that trains meanwhile
        dist.barrier()
    found["commits"] = sorted(commits)
    manager.close()
    return {**found, "handle": told(handle.result), "discarded": manager.all_steps()}


def unreadable(out: Path) -> Facts:
    """Rank 0 looks, and its errors are those of all ranks."""
    manager = CheckpointManager(out)
    found = {
        "none": manager.restore({}) is None,
        "named": _error_of(lambda: manager.restore({}, 7)),
    }
    manager.save(1, {"weight": torch.ones(3)}).result()
    # Rank 1 cannot list the directory.
    blind = patch.object(steps.StepDirectories, "listed", side_effect=AssertionError)
    with blind if dist.get_rank() == 1 else nullcontext():
        restored = manager.restore({"weight": torch.zeros(3)})
    assert restored is not None
    manager.close()
    return {**found, "step": restored.step}


def stuck(out: Path) -> Facts:
    """Storage does not answer rank 0 for a while."""
    state: Facts = {f"of {dist.get_rank()}": torch.ones(9)}
    with CheckpointManager(out) as manager:
        manager.save(1, state)
    nostall.configure(EngineOptions(save_timeout_s=1.0))
    manager = CheckpointManager(out)
    storage = HangingOs("listdir", str(out))
    with patch.object(posix, "os", storage) if dist.get_rank() == 0 else nullcontext():
        found = {
            "restore": _error_of(lambda: manager.restore(state)),
            "save": _error_of(lambda: manager.save(2, state)),
        }
        storage.answer()
    nostall.configure(EngineOptions())
    manager.save(2, state)
    manager.close()
    manager.close()
    return {**found, "steps": manager.all_steps()}


def saved_again(out: Path) -> Facts:
    """A step that rank 0 is removing is saved again: the removal comes first."""
    state: Facts = {f"of {dist.get_rank()}": torch.full((9,), float(dist.get_rank()))}
    for step in (1, 2, 3):
        with CheckpointManager(out) as keeping:
            keeping.save(step, state)
    manager = CheckpointManager(out, keep=KeepLatest(1))
    for step in (4, 1, 5, 2, 6):
        manager.save(step, state)
        manager.wait()
    manager.close()
    restored = manager.restore(state)
    assert restored is not None
    return {"steps": manager.all_steps(), "restored": restored.step}


def closed(out: Path) -> Facts:
    """Rank 0 removes a step only when the other rank waits for it, or does not wait at all."""
    state: Facts = {f"of {dist.get_rank()}": torch.ones(9)}
    manager, main = CheckpointManager(out, keep=KeepLatest(1)), threading.main_thread()
    manager.save(1, state).result()
    has_looked = threading.Event()

    def allow() -> None:
        wait_until(lambda: has_looked.is_set() or stands_in(main, manager_module.agreed))
        (out / "may remove").touch()

    def remove(path: str) -> None:
        wait_until((out / "may remove").exists)
        remove_checkpoint(path)

    manager.save(2, state)
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            stack.enter_context(patch.object(steps, "remove_checkpoint", remove))
        else:
            allowing = threading.Thread(target=allow)
            allowing.start()
            stack.callback(allowing.join)
            stack.callback(has_looked.set)
        manager.close()
        return {"steps": manager.all_steps()}


def own_keys(out: Path) -> Facts:
    """Each rank has an optimizer under a name of its own, as with pipeline parallelism."""
    rank = dist.get_rank()
    momenta = []
    for restores in (False, True):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], momentum=0.9)
        with CheckpointManager(out) as manager:
            if restores:
                manager.restore({f"optimizer {rank}": optimizer})
            else:
                parameter.grad = torch.full((3,), rank + 1.0)
                optimizer.step()
                manager.save(1, {f"optimizer {rank}": optimizer}).result()
        momenta.append(optimizer.state[parameter]["momentum_buffer"].tolist())
    return {"momenta": momenta}


def on_more_ranks(out: Path) -> Facts:
    """Restore on both ranks a checkpoint that rank 0 has saved alone."""
    rank = dist.get_rank()
    alone = dist.new_group([0])
    if rank == 0:
        with CheckpointManager(out, process_group=alone) as manager:
            manager.save(2, Job(rank, wraps=PerRank).state, extra="of rank 0")
    dist.barrier()
    job = Job(rank, wraps=PerRank)
    random.seed(rank)
    before = random.getstate()
    found = {"loader": _error_of(lambda: CheckpointManager(out).restore(job.state))}
    del job.state["loader"]
    restored = CheckpointManager(out).restore(job.state)
    assert restored is not None
    kept = random.getstate() == before
    return {**found, "extra": restored.extra, "keeps its generators": kept}


# --- what does not fit ---------------------------------------------------------------------------


def unfit(out: Path) -> Facts:
    """The model of rank 1 alone is larger than the saved one."""
    with CheckpointManager(out) as manager:
        manager.save(1, {"weight": torch.ones(3)})
        state = {"weight": torch.zeros(3 + dist.get_rank())}
        found = {"error": _error_of(lambda: manager.restore(state))}
    return {**found, "unchanged": not state["weight"].any().item()}


class Holding:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> Facts:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: Facts) -> None:
        self.tensor = state["tensor"]


def other_shapes(out: Path) -> Facts:
    """Ranks have tensors of one name and other shapes: from the first save on, and later."""
    rank = dist.get_rank()
    own = Holding(torch.full((4 + rank,), float(rank)))
    with CheckpointManager(out / "first") as manager:
        found = {"first": _error_of(lambda: manager.save(1, {"x": own}))}
    with CheckpointManager(out / "later") as manager:
        for step in (1, 2, 3):  # so that plans are known, and ranks plan alone
            manager.save(step, {"x": torch.ones(4)}).result()
        found["later"] = _error_of(lambda: manager.save(4, {"x": torch.ones(4 + rank)}).result())
        manager.save(5, {"x": torch.ones(5)}).result()
    with CheckpointManager(out / "per rank") as manager:
        manager.save(1, {"x": PerRank(own)})
        own.tensor = torch.zeros(1)
        manager.restore({"x": PerRank(own)})
    return {**found, "per rank": str(own.tensor.tolist())}


class Factored(torch.optim.Optimizer):
    """Has means of rows, which are sharded as the parameter is, and of columns, which are not."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            for each in group["params"]:
                gradient, state = each.grad, self.state[each]
                if gradient.dim() < 2:
                    continue
                rows, columns = gradient.square().mean(1), gradient.square().mean(0)
                if isinstance(columns, DTensor):
                    columns = columns.redistribute(placements=[Replicate()])
                if not state:
                    state["rows"], state["columns"] = rows, columns
                state["rows"].lerp_(rows, 0.5)
                state["columns"].lerp_(columns, 0.5)
                each.data.add_(state["rows"].unsqueeze(1) * state["columns"], alpha=-group["lr"])
        return loss


def factored(out: Path) -> Facts:
    """Optimizers whose state has other shapes than parameters, into new ones, under FSDP2."""
    made: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "factored": Factored,
        "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
    }

    def placements(job: Facts) -> list[str]:
        flat, _ = _torch.flatten_state_dict(dict(job["optimizer"].state_dict()["state"]))
        return [f"{name} {getattr(each, 'placements', None)}" for name, each in flat.items()]

    found: Facts = {}
    for name, make in made.items():
        job, other = _job(0, make), _job(1, make)
        plain = _job(1, make, is_sharded=False)
        with CheckpointManager(out / name) as manager:
            manager.save(0, {"optimizer": job["optimizer"]})  # without state before its first step
            _train(job, 2)
            manager.save(2, job).result()
            manager.restore(other)
            manager.restore(plain)
        found[name] = {
            "placements": [placements(other), placements(job)],
            "losses": [_train(other, 3), _train(job, 3)],
            "plain": placements(plain),
            "plain loss": _train(plain, 1),
        }
    with CheckpointManager(out / "unknown") as manager:
        plain, job = _job(0, Factored, is_sharded=False), _job(0, Factored)
        _train(plain, 1)
        manager.save(1, {"optimizer": plain["optimizer"]}).result()
        optimizer = {"optimizer": job["optimizer"]}
        found["unknown"] = _error_of(lambda: manager.restore(optimizer))
        _train(job, 1)
        found["after one step"] = _error_of(lambda: manager.restore(optimizer))
        _train(job, 1)
    return found


def without_numpy(out: Path) -> Facts:
    """torch has no NumPy, on all ranks or on one."""

    def unavailable(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("Numpy is not available")

    state = {"weight": torch.ones(3)}
    manager = CheckpointManager(out)
    manager.save(1, state).result()
    found: Facts = {}
    for where, is_here in (("everywhere", True), ("on rank 1", dist.get_rank() == 1)):
        with patch.object(torch.Tensor, "numpy", unavailable) if is_here else nullcontext():
            found[where] = [
                _error_of(partial(manager.restore, state)),
                _error_of(partial(manager.save, 2, state)),
            ]
    manager.close()
    return {**found, "steps": manager.all_steps()}


def alone(out: Path) -> str:
    """Rank 0 saves, as many programs have their rank 0 do it; the other rank ends meanwhile."""
    if dist.get_rank() > 0:
        os._exit(0)
    manager = CheckpointManager(out / "root")
    return _error_of(lambda: manager.save(1, {"weight": torch.ones(3)}))
