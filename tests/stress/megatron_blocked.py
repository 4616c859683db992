"""How long Megatron-core's saves block training: its own asynchronous save, and nostall's.

Started with torchrun by ``nox -s megatron -- measure``. Both save the same state in turns; the time
of a save is that of ``dist_checkpointing.save(..., async_sharded_save=True)``, of scheduling its
request and of finalising it once it is done, as the slowest rank has it.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from programs.megatron_saves import Megatron

WARM_UP, SAVES = 2, 12
TENSORS, TENSOR_NFLOATS = 64, 1 << 20


class Contender:
    """One of Megatron's strategies, with a queue of its own."""

    def __init__(self, found: Megatron, name: str) -> None:
        self._found, self.name = found, name
        self._modules = found.strategies.get_async_strategy(name)[1]
        self._queue = self._modules["AsyncCallsQueue"](persistent=False)
        self._strategy = found.strategy()
        self.blocked_ms: list[float] = []

    def save(self, path: Path, state: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            path.mkdir()
        dist.barrier()
        began = time.perf_counter()
        request = self._found.checkpointing.save(
            state, str(path), self._strategy, async_sharded_save=True, async_strategy=self.name
        )
        self._queue.schedule_async_request(request)
        took = time.perf_counter() - began
        while self._queue.get_num_unfinalized_calls():
            time.sleep(0.01)  # a training step; a poll that finds nothing is not counted
            began = time.perf_counter()
            if self._queue.maybe_finalize_async_calls():
                took += time.perf_counter() - began
        slowest = torch.tensor(took * 1000)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.blocked_ms.append(float(slowest))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = Megatron("alias")
    sharded = found.checkpointing.mapping.ShardedTensor.from_rank_offsets
    tensors = [torch.rand(TENSOR_NFLOATS) for _ in range(TENSORS)]
    root = [tempfile.mkdtemp(prefix="megatron-", dir=sys.argv[1]) if rank == 0 else ""]
    dist.broadcast_object_list(root)
    contenders = [Contender(found, name) for name in ("mcore", "nvrx")]
    # Megatron's own code calls these without a look whether there is such a device.
    with patch("torch.cuda.synchronize"), patch("torch.cuda.current_device", lambda: "cpu"):
        for number in range(WARM_UP + SAVES):
            for contender in contenders:
                state = {
                    str(each): sharded(f"tensor {each}", tensor, (0, rank, world_size))
                    for each, tensor in enumerate(tensors)
                }
                path = Path(root[0]) / f"{number} {contender.name}"
                contender.save(path, state)
                if rank == 0:
                    shutil.rmtree(path)
                dist.barrier()
    if rank == 0:
        shutil.rmtree(root[0])
        nbytes = world_size * TENSORS * TENSOR_NFLOATS * 4
        print(f"{world_size} ranks, {nbytes >> 20} MiB, blocked ms, median of {SAVES} (min, max)")
        for contender in contenders:
            times = contender.blocked_ms[WARM_UP:]
            name = {"mcore": "Megatron's own", "nvrx": "nostall"}[contender.name]
            print(f"{name:15} {statistics.median(times):8.1f} ({min(times):.1f}, {max(times):.1f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
