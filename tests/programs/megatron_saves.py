"""Ranks that save and load with Megatron-core's own functions, through nostall."""

from __future__ import annotations

import errno
import glob
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from nostall import nvrx_alias
from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.integrations import megatron as adapter
from nostall.integrity import is_complete
from programs.planning import collectives, failure
from support.faults import Fault, inject
from support.pages import code_blocks
from support.states import names
from support.waiting import wait_until

Facts = dict[str, Any]
_INSTALL: dict[str, Callable[[], None]] = {
    "adapter": adapter.install,
    "alias": lambda: nvrx_alias.install(force=True),
    "options": lambda: adapter.install(on_error="warn", synchronous=True),
}


class Megatron:
    """The installed Megatron-core, with nostall in it."""

    def __init__(self, how: str) -> None:
        _INSTALL[how]()
        _INSTALL[how]()  # twice is once
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies import torch as strategies

        self.checkpointing = dist_checkpointing
        self.strategies = strategies
        if hasattr(strategies, "get_async_strategy"):  # from 0.17 on
            _, modules = strategies.get_async_strategy("nvrx")
            self.queue, self.writer = modules["AsyncCallsQueue"], modules["FileSystemWriterAsync"]
        else:
            from megatron.core.dist_checkpointing.strategies import async_utils

            self.queue, self.writer = async_utils.AsyncCallsQueue, strategies.FileSystemWriterAsync

    def state(self, seed: int) -> Facts:
        """A sharded state dict: shards, a replica, an object of each rank, and common values."""
        mapping = self.checkpointing.mapping
        rank, world_size = dist.get_rank(), dist.get_world_size()
        sharded = mapping.ShardedTensor.from_rank_offsets
        mine = torch.full((8, 5), float(seed)) + torch.arange(5.0) + rank
        return {
            "weight": sharded("weight", mine, (0, rank, world_size)),
            "shared": sharded("shared", torch.full((7,), float(seed)), replica_id=rank),
            "object": mapping.ShardedObject(
                "object", {"rank": rank, "seed": seed}, (world_size,), (rank,)
            ),
            "step": seed,
        }

    def save(self, path: Path, seed: int, strategy: Any) -> Any:
        """A request to save the state; schedule it."""
        return self._save(path, seed, strategy, async_sharded_save=True)

    def save_now(self, path: Path, seed: int) -> None:
        self._save(path, seed, self.strategy())

    def _save(self, path: Path, seed: int, strategy: Any, **options: Any) -> Any:
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
        dist.barrier()
        return self.checkpointing.save(self.state(seed), str(path), strategy, **options)

    def wrong(self, path: Path, seed: int) -> list[str]:
        """Names whose values, as Megatron loads them, differ from the state of ``seed``."""
        loaded = self.checkpointing.load(self.state(0), str(path))
        expected = self.state(seed)
        return [
            name
            for name, value in (
                ("weight", torch.equal(loaded["weight"], expected["weight"].data)),
                ("shared", torch.equal(loaded["shared"], expected["shared"].data)),
                ("object", loaded["object"] == expected["object"].data),
                ("step", loaded["step"] == seed),
            )
            if not value
        ]

    def metadata(self, path: Path) -> Any:
        """The metadata that Megatron keeps after it has loaded a checkpoint."""
        state = {"shared": self.state(0)["shared"]}
        if not hasattr(self.strategies, "get_async_strategy"):
            reader = self.strategies.TorchDistLoadShardedStrategy()
            reader.load(state, path)
        else:
            reader = self.strategies.TorchDistLoadShardedStrategy(cache_metadata=True)
            reader.load(state, path, async_strategy="nvrx")
        return reader.cached_global_metadata

    def strategy(self) -> Any:
        return self.strategies.TorchDistSaveShardedStrategy(
            "torch_dist", 1, thread_count=2, cached_metadata=True
        )


def constant_structure(found: Megatron, out: Path, *, persistent: bool) -> Facts:
    """Four saves of one structure; then a new strategy, as after a resume, makes one more."""
    queue, strategy = found.queue(persistent=persistent), found.strategy()
    wrong, finalized = [], []
    for seed in range(1, 5):
        queue.schedule_async_request(found.save(out / str(seed), seed, strategy))
        finalized += queue.maybe_finalize_async_calls(blocking=True)
        wrong += found.wrong(out / str(seed), seed)
    again = found.strategy()
    again.cached_global_metadata = found.metadata(out / "4")
    queue.schedule_async_request(found.save(out / "resumed", 5, again))
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return {
        "finalized": finalized,
        "wrong": wrong + found.wrong(out / "resumed", 5),
        "files": names(out / "4"),
        "reused": [_was_reused(each) for each in (strategy, again)],
    }


def steady(found: Megatron, out: Path) -> Facts:
    """A save of a known structure: what is left of it for the training thread."""
    queue, strategy = found.queue(persistent=True), found.strategy()
    for seed in range(1, 4):
        queue.schedule_async_request(found.save(out / str(seed), seed, strategy))
        queue.maybe_finalize_async_calls(blocking=True)
    planner = found.strategies.MCoreSavePlanner
    with patch.object(planner, "create_local_plan", side_effect=AssertionError("planned")):
        request = found.save(out / "4", 4, strategy)
        queue.schedule_async_request(request)
        early = request.async_fn.early
        wait_until(lambda: is_complete(out / "4"))  # nobody polls
        wait_until(lambda: dist.get_rank() != 0 or early.committed > 0)
    dist.barrier()
    with collectives() as seen:
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return {"collectives": sorted(seen), "wrong": found.wrong(out / "4", 4)}


def _was_reused(strategy: Any) -> list[bool]:
    cache = getattr(strategy, "_metadata_cache", None)  # from 0.17 on
    if cache is not None:
        return list(cache.get_metadata_caching_status())
    return [strategy.validated_cache_reuse, strategy.validated_loaded_metadata_reuse]


def worker_killed(found: Megatron, out: Path) -> Facts:
    """The writer process of rank 1 is killed; the next save starts a new one."""
    queue, strategy = found.queue(persistent=True), found.strategy()
    faults = [Fault.kill("chunk", signal.SIGKILL)] if dist.get_rank() == 1 else []
    with inject(*faults):
        queue.schedule_async_request(found.save(out / "killed", 1, strategy))
    failed = failure(lambda: queue.maybe_finalize_async_calls(blocking=True))["ranks"]
    dist.barrier()
    left = names(out / "killed")
    queue.schedule_async_request(found.save(out / "after", 2, strategy))
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return {"failed": failed, "left": left, "wrong": found.wrong(out / "after", 2)}


def options(out: Path) -> Facts:
    """Rank 1 has no space for one save in the background, and for one that blocks training."""
    with redirect_stderr(io.StringIO()) as said:
        facts = _with_options(out)
    return {**facts, "said": said.getvalue()}


def _with_options(out: Path) -> Facts:
    found = Megatron("options")
    full = [Fault.errno("chunk", errno.ENOSPC)] if dist.get_rank() == 1 else []
    queue, strategy = found.queue(), found.strategy()
    with inject(*full):
        queue.schedule_async_request(found.save(out / "full", 1, strategy))
        finalized = queue.maybe_finalize_async_calls(blocking=True)
    facts: Facts = {"failures": queue.failures}
    queue.schedule_async_request(found.save(out / "next", 2, strategy))
    facts["finalized"] = finalized + queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    with inject(*full):
        failed = failure(lambda: found.save_now(out / "full now", 3))["ranks"]
    found.save_now(out / "now", 4)
    dist.barrier()
    wrong = found.wrong(out / "next", 2) + found.wrong(out / "now", 4)
    left = names(out / "full") + names(out / "full now")
    verl = as_verl(found, out / "verl")
    return {**facts, "failed": failed, "left": left, "wrong": wrong, "verl": verl}


def as_verl(found: Megatron, out: Path) -> Facts:
    """verl's calls: one save that blocks, and one by the queue of Megatron 0.16, or its own."""
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )

    bases = sys.modules.get("megatron.core.dist_checkpointing.strategies.base")
    queue = getattr(bases, "async_calls", None) or found.queue()
    noted: list[str] = []
    for seed, name in enumerate(["now", "later"]):
        group = dist.group.WORLD
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy("torch_dist"), group
        )
        asks = {"async_sharded_save": True} if name == "later" else {}
        request = found._save(out / name, seed, strategy, **asks)
        if request is None:
            noted.append(name)
        else:
            request.add_finalize_fn(partial(noted.append, name))
            queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    wrong = [each for seed, name in enumerate(noted) for each in found.wrong(out / name, seed)]
    return {"queue": isinstance(queue, AsyncCallsQueue), "noted": noted, "wrong": wrong}


def documented(out: Path) -> Facts:
    """The code of docs/megatron.md for Megatron-core, after a state dict."""
    adapting, saving, _ = code_blocks("megatron.md")
    os.chdir(out)
    namespace: Facts = {}
    exec(adapting, namespace)
    found = Megatron("adapter")
    namespace["sharded_state_dict"] = lambda: found.state(7)
    exec(saving, namespace)
    state = namespace["state"]
    return {"step": state["step"], "committed": sorted(glob.glob("checkpoints/*/metadata.json"))}


def two_ranks(out: Path, how: str) -> Facts:
    """All scenarios, with nostall installed as ``how`` says."""
    found = Megatron(how)
    return {
        "writer": found.writer is FileSystemWriterAsync,
        "persistent": constant_structure(found, out / "persistent", persistent=True),
        "temporal": constant_structure(found, out / "temporal", persistent=False),
        "steady": steady(found, out / "steady"),
        "killed": worker_killed(found, out / "killed"),
    }
