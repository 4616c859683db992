"""Ranks that schedule requests of an installed NVRx's local checkpoints beside nostall's saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from nostall import nvrx_alias

nvrx_alias.install(force=True)

from nvidia_resiliency_ext.checkpointing.async_ckpt import core  # noqa: E402  # after the alias
from nvidia_resiliency_ext.checkpointing.local import base_state_dict  # noqa: E402  # as above
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import (  # noqa: E402  # as above
    local_manager,
)

from support.states import schedule  # noqa: E402  # as above


class HostState(base_state_dict.TensorAwareStateDict):  # type: ignore[misc]  # without types
    """One tensor in host memory; those of NVRx itself need an accelerator."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    is_hollow = False
    tensors: Any = ()

    def pop_tensors(self) -> list[torch.Tensor]:
        return []

    def _do_nothing(self, *_: Any, **__: Any) -> None: ...

    insert_tensors = init_tensors = copy_tensors_to_cpu = restore_tensor_device = _do_nothing

    def to_state_dict(self) -> Any:
        return self.tensor


def beside(out: Path) -> dict[str, Any]:
    """Local and global saves through one queue, twice; with both kinds of callers."""
    facts: dict[str, Any] = {"core": core.__name__}
    rank = dist.get_rank()
    for persistent in (True, False):
        manager = local_manager.LocalCheckpointManager(out / f"local {persistent}")
        found = []
        with core.AsyncCallsQueue(persistent=persistent) as queue:
            for step in (1, 2):
                schedule(queue, out / f"global {persistent} {step}", {"a": torch.ones(3)})
                with patch("torch.cuda.synchronize"):  # there is no such device
                    local = manager.save(HostState(torch.full((2,), step)), step, is_async=True)
                queue.schedule_async_request(local)
                queue.wait()
                found.append(manager.find_latest())
        loaded, name = manager.load()
        facts[f"persistent {persistent}"] = {
            "latest": found,
            "loaded": loaded.tensor.tolist(),
            "is mine": name[1] == rank,
            "complete": sorted(
                path.parent.name for path in out.glob(f"global {persistent} */.metadata")
            ),
        }
    return facts
