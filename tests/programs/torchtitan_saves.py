"""torchtitan's checkpoint manager and ours, on ranks."""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer.dcp import CheckpointManager

from nostall.integrations.torchtitan import NostallCheckpointManager
from nostall.integrity import is_complete
from support.blocked import Blocked
from support.faults import Hold
from support.pages import code_blocks
from support.states import all_equal, local_values
from support.training_thread import Periods


class _Plain:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {"step": torch.tensor(0)}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values.update(values)


def _model(seed: int, width: int = 16, depth: int = 2) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _manager(kind: Any, out: Path, model: torch.nn.Module, state: _Plain, **options: Any) -> Any:
    config = kind.Config(**{"enable": True, "interval": 1, "keep_latest_k": 2, **options})
    return _build(config, out, model, state)


def _build(config: Any, out: Path, model: torch.nn.Module, state: _Plain) -> Any:
    return config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=_Plain(),
        lr_schedulers=_Plain(),
        states={"train_state": state},
        sd_adapter=None,
        base_folder=str(out),
    )


def saved_and_loaded(out: Path, mode: str) -> dict[str, Any]:
    """Saves in a mode; torchtitan's manager and ours load what was saved at each call."""
    model, state = _model(0), _Plain()
    ours = _manager(NostallCheckpointManager, out, model, state, async_mode=mode)
    at_save: list[list[torch.Tensor]] = []
    for step in (1, 2, 3):
        state.values["step"].fill_(step)
        at_save.append(local_values(model.parameters()))
        ours.save(step)
        ours.maybe_wait_for_staging()
        with torch.no_grad():
            for value in model.parameters():
                value.add_(1)
    ours.close()
    same = {}
    for kind in (CheckpointManager, NostallCheckpointManager):
        other, loaded = _model(1), _Plain()
        manager = _manager(kind, out, other, loaded, async_mode="disabled")
        assert manager.load()
        same[kind.__name__] = int(loaded.values["step"]) == 3 and all_equal(
            local_values(other.parameters()), at_save[-1]
        )
        manager.close()
    dist.barrier()
    return {"built": type(ours).__name__, "same": same, "names": _steps(out)}


def leftover(out: Path) -> dict[str, Any]:
    """A directory that a crash left incomplete does not cost the newest committed checkpoint."""
    ours = _manager(NostallCheckpointManager, out, _model(0), _Plain(), async_mode="async")
    ours.save(10)
    ours.maybe_wait_for_saving()
    (out / "checkpoint" / "step-20").mkdir(exist_ok=True)
    hold = Hold("chunk")
    hold.stop(ours.save, 15)
    complete = is_complete(out / "checkpoint" / "step-10")
    hold.release()
    ours.close()
    dist.barrier()
    return {"complete": complete, "names": _steps(out)}


def steady(out: Path) -> list[dict[str, int]]:
    """Work of this thread for the first saves, and for those after the third."""
    ours = _manager(NostallCheckpointManager, out, _model(0), _Plain(), async_mode="async")
    periods = Periods(1, 4)
    for step in range(1, 7):
        periods.reach(step)
        ours.save(step)
        ours.maybe_wait_for_saving()
    ours.close()
    return periods.close()


def documented(out: Path) -> dict[str, Any]:
    """The configuration that docs/frameworks.md shows."""
    namespace: dict[str, Any] = {}
    exec(code_blocks("frameworks.md")[2], namespace)
    manager = _build(namespace["checkpoint"], out, _model(0), _Plain())
    manager.save(500)  # the default interval
    manager.close()
    dist.barrier()
    return {"built": type(manager).__name__, "names": _steps(out)}


def _steps(out: Path) -> list[str]:
    return sorted(path.parent.name for path in out.glob("checkpoint/*/.metadata"))


# --- how long saves block -------------------------------------------------------------------------

_EVERY = 3
_SAVES = 10


def measure(out: Path) -> dict[str, list[float]]:
    """torchtitan's manager and ours, in the modes that need no accelerator."""
    faulthandler.cancel_dump_traceback_later()  # this takes longer than a test may
    kinds = ((CheckpointManager, ("disabled", "async")), (NostallCheckpointManager, _MODES))
    return {
        f"{kind.__name__} {mode}": _time(kind, out / f"{kind.__name__}-{mode}", mode)
        for kind, modes in kinds
        for mode in modes
    }


_MODES = ("disabled", "async", "async_with_pinned_mem")


def _time(kind: Any, out: Path, mode: str) -> list[float]:
    model = _model(0, 1024, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    manager = _manager(kind, out, model, _Plain(), interval=_EVERY, async_mode=mode)
    blocked = Blocked(every=_EVERY)
    for step in range(1, _EVERY * (_SAVES + 1)):
        blocked.step_begins()
        model(torch.ones(4, 1024)).square().mean().backward()
        manager.maybe_wait_for_staging()
        optimizer.step()
        optimizer.zero_grad()
        blocked.step_ends()
        manager.save(step)
    manager.close()
    return blocked.milliseconds()
