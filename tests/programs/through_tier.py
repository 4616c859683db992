"""Save step after step through a local tier, over and over into three directories, until killed.

python tests/programs/through_tier.py TIER DESTINATION FIRST [COUNT [wait]]

Prints the step of each local commit. After COUNT steps, it ends as any program does, or waits.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from nostall.filesystem_async import FileSystemWriterAsync

DIRECTORIES = 3


def state_of(step: int) -> dict[str, Any]:
    """A state that holds one value everywhere."""
    return {"model": {"w": torch.full((3 << 18,), float(step)), "n": torch.tensor(step)}}


def destination_of(root: str, step: int) -> str:
    """Steps take turns: later ones overwrite earlier ones."""
    return f"{root}/turn-{step % DIRECTORIES}"


def save(tier: str, root: str, step: int, **options: Any) -> FileSystemWriterAsync:
    path = destination_of(root, step)
    writer = FileSystemWriterAsync(path, local_staging_dir=tier, thread_count=2, **options)
    dcp.save(state_of(step), storage_writer=writer, no_dist=True)
    return writer


if __name__ == "__main__":
    tier_dir, destination, first, *count = sys.argv[1:]
    waits = "wait" in count
    torch.set_num_threads(1)
    number = int(first)
    while not count or number < int(first) + int(count[0]):
        save(tier_dir, destination, number, local_staging_limit=3)
        print(number, flush=True)
        number += 1
    if waits:
        signal.pause()
