"""Save with the installed torch, by both writers, into a directory of its version.

The directories beside this file were made with it, each in an environment of ``nox -s tests_min``
or ``nox -s tests_next``. It makes what is missing::

    .nox/tests_next/bin/python tests/checkpoints/make.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from nostall import FileSystemWriterAsync

HERE = Path(__file__).parent
WRITERS: dict[str, Any] = {"stock": dcp.FileSystemWriter, "nostall": FileSystemWriterAsync}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
RANKS = 2


def state() -> dict[str, Any]:
    """Two tensors and an object."""
    return {
        "model": {"weight": torch.arange(12.0).reshape(3, 4).t()},
        "optimizer": {"step": torch.tensor(7.0), "lr": 0.5},
    }


def wholes() -> dict[str, torch.Tensor]:
    """Whole tensors, by the names of :data:`PLACEMENTS`; two ranks get uneven parts of them."""
    return {
        name: torch.arange(35.0).reshape(7, 5) + 100 * number
        for number, name in enumerate(PLACEMENTS)
    }


def save_sharded(rank: int, made: Path, rendezvous: str) -> None:
    """Save, as one of two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    parts = {
        name: distribute_tensor(whole, mesh, [PLACEMENTS[name]]) for name, whole in wholes().items()
    }
    for name, writer in WRITERS.items():
        dcp.save(parts, storage_writer=writer(made / name))
    dist.destroy_process_group()


def main() -> None:
    """Make the checkpoints."""
    made = HERE / f"torch-{torch.__version__.partition('+')[0]}"
    for name, writer in WRITERS.items():
        if not (made / name).exists():
            dcp.save(state(), storage_writer=writer(made / name))
    if not (made / "sharded").exists():
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(save_sharded, (made / "sharded", f"{directory}/rendezvous"), nprocs=RANKS)


if __name__ == "__main__":
    main()
