"""Ranks of torchrun restore the newest step below a root, of which each has prefetched a share."""

from __future__ import annotations

import sys

import nostall
from nostall.prefetching import running

SIZE = 1 << 22


def main(root: str) -> None:
    """The state is the same on all ranks."""
    nostall.prefetch(root)
    import torch
    import torch.distributed as dist

    ((process, _),) = running.values()
    assert process.wait(100) == 0
    dist.init_process_group("gloo")
    dist.barrier()
    state = {name: torch.zeros(SIZE) for name in ("x", "y")}
    with nostall.CheckpointManager(root) as manager:
        manager.restore(state)
    assert all(torch.equal(each, torch.arange(float(SIZE))) for each in state.values())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
