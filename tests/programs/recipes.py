"""Ranks that save with the code of docs/recipes.md and load with the framework's own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from support.pages import code_blocks
from support.states import all_equal, local_values

Facts = dict[str, Any]


def torchtune(out: Path) -> Facts:
    """Two asynchronous saves by torchtune's client; torchtune's checkpointer loads the second."""
    from omegaconf import OmegaConf
    from torchtune.training import DistributedCheckpointer
    from torchtune.training.checkpointing._checkpoint_client import TrainingProgress

    base = out / "base"
    base.mkdir(exist_ok=True)
    (base / "model.pt").touch()
    checkpointer = {
        "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpoint_dir": str(base),
        "checkpoint_files": ["model.pt"],
        "output_dir": str(out),
        "model_type": "LLAMA2",
    }
    asked = {"device": "cpu", "enable_async_checkpointing": True, "checkpointer": checkpointer}
    client = _recipe("torchtune")["NostallClient"](OmegaConf.create(asked))
    model, optimizer = _trained()
    for epoch in (0, 1):
        progress = TrainingProgress(0, epoch, 3, 5)
        client.save_checkpoint(model, optimizer, progress, epoch=epoch)
    saved = local_values(model.parameters())
    _clear(model)
    client._get_dcp_checkpointer()._checkpoint_future.result()
    loaded = {"model": model.state_dict(), "epochs_run": 0}
    DistributedCheckpointer(str(base), str(out)).load_checkpoint(loaded)
    same = all_equal(local_values(model.parameters()), saved)
    return {"same": same, "epoch": loaded["epochs_run"], "committed": _committed(out)}


def nemo_automodel(out: Path) -> Facts:
    """An asynchronous save of model and optimizer; Automodel's own checkpointer loads it.

    Automodel makes a stager, which needs an accelerator and is not used: here another object.
    """
    from nemo_automodel.components.checkpoint import checkpointing
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig

    options: Facts = {"model_save_format": "torch_save", "save_consolidated": False}
    step = str(out / "step_1")
    model, optimizer = _trained()
    with patch.object(checkpointing, "DefaultStager", ExitStack):
        ours = _recipe("NeMo Automodel")["NostallCheckpointer"](
            CheckpointingConfig(is_async=True, **options), dist.get_rank(), 0, 0
        )
    ours.save_model(model, step)
    ours.save_optimizer(optimizer, model, step)
    ours.maybe_wait_for_staging()
    saved, moments = local_values(model.parameters()), _moments(optimizer)
    _clear(model)
    ours.async_wait()
    ours.close()
    theirs = checkpointing.Checkpointer(CheckpointingConfig(**options), dist.get_rank(), 0, 0)
    theirs.load_model(model, f"{step}/model")
    other = torch.optim.AdamW(model.parameters())
    theirs.load_optimizer(other, model, step)
    theirs.close()
    found = local_values(model.parameters()) + _moments(other)
    same = all_equal(found, saved + moments)
    return {"same": same, "committed": _committed(out)}


def _recipe(heading: str) -> Facts:
    """The names that a recipe defines."""
    namespace: Facts = {"__name__": "recipe"}
    (code,) = code_blocks("recipes.md", heading)
    exec(code, namespace)
    return namespace


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A sharded model and its optimizer after one step."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return local_values(state["exp_avg"] for state in optimizer.state.values())


def _clear(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()


def _committed(out: Path) -> list[str]:
    dist.barrier()
    return sorted(str(path.parent.relative_to(out)) for path in out.rglob(".metadata"))
