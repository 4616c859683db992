"""Save a small state, or end by SIGKILL at a point: ``save_once.py PATH SEED [POINT]``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint as dcp

from nostall.filesystem_async import FileSystemWriterAsync
from support.ending import end
from support.faults import Hold, inject


def state_of(seed: int) -> dict[str, Any]:
    """Some parts of an upload, a small tensor and an object."""
    torch.manual_seed(seed)
    tensors = {f"w{n}": torch.randn(5 << 18) for n in range(2)}
    return {"model": {**tensors, "bias": torch.randn(17)}, "step": seed}


def save(path: str, seed: int, **options: Any) -> None:
    dcp.save(state_of(seed), storage_writer=FileSystemWriterAsync(path, **options), no_dist=True)


def save_in_background(path: str | Path, seed: int) -> Any:
    """Begin to save; returns the future."""
    writer = FileSystemWriterAsync(path)
    return dcp.async_save(state_of(seed), storage_writer=writer, no_dist=True)


if __name__ == "__main__":
    where, number, *points = sys.argv[1:]
    if not points:
        save(where, int(number))
        end()
    else:
        with Hold(points[0]) as hold, inject(hold.fault):
            save_in_background(where, int(number))
            hold.wait_reached()
            for child in psutil.Process().children():
                child.kill()
            os.kill(os.getpid(), signal.SIGKILL)
