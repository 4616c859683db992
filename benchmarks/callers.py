"""The cost of a save for the training thread, by the caller's planner and finalize function.

Every caller saves the same tensors by the split functions, with a cache, on one rank; the figures
are processor times of the steady state. Megatron's row is its own package, found by
``PYTHONPATH``: ``nox -s megatron -- callers``.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import nostall
from benchmarks.group import Group
from benchmarks.report import Column, Report, Row, Sample, WrongData, attempt, in_rounds
from nostall import state_dict_saver
from nostall.core import AsyncRequest

COLUMNS = (
    Column("planning ms", "plan_s", 1e3),
    Column("commit ms", "commit_s", 1e3),
    Column("poll ms", "poll_s", 1e3),
)
LEGEND = """\
Processor time of the training thread per save, median [quartiles]. planning: of
save_state_dict_async_plan; poll: of the poll that finalises; commit: of
save_state_dict_async_finalize in it. Megatron's poll also writes its metadata.json."""
_WARM = 4
"""Saves of each caller before the first that counts: from the fourth on, nothing is planned."""
_NFLOATS = 256


class OwnPlanner(DefaultSavePlanner):
    """A planner of one's own, of which nothing is known."""


class Caller:
    """Saves by the split functions, with the planner and the finalize function of its name."""

    def __init__(
        self,
        name: str,
        planner: Callable[[], DefaultSavePlanner],
        committing: Callable[[Any], Callable[[], None]],
    ) -> None:
        self.name = name
        self._planner, self._committing = planner, committing
        self._cache = state_dict_saver.CheckpointMetadataCache()

    def available(self) -> str | None:
        return None

    def request(self, path: Path, tensors: dict[str, torch.Tensor]) -> AsyncRequest:
        """Plan a save."""
        writer = nostall.FileSystemWriterAsync(path)
        planned = state_dict_saver.save_state_dict_async_plan(
            dict(tensors), writer, None, 0, self._planner(), True, self._cache
        )
        save_fn, preload_fn, arguments = writer.get_save_function_and_args()
        return AsyncRequest(save_fn, arguments, [self._committing(planned)], {}, preload_fn)


class Megatron(Caller):
    """Megatron-core's own saves, with its planner and its closure."""

    def __init__(self) -> None:
        self.name = "Megatron-core"
        self._strategy: Any = None

    def available(self) -> str | None:
        return None if find_spec("megatron") else "megatron-core is not installed"

    def request(self, path: Path, tensors: dict[str, torch.Tensor]) -> Any:
        from nostall.integrations import megatron

        megatron.install()
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        self._strategy = self._strategy or TorchDistSaveShardedStrategy(
            "torch_dist", 1, cached_metadata=True
        )
        path.mkdir()
        sharded = dist_checkpointing.mapping.ShardedTensor.from_rank_offsets
        state = {name: sharded(name, tensor, (0, 0, 1)) for name, tensor in tensors.items()}
        # Megatron's own code calls these without a look whether there is such a device.
        with (
            nullcontext()
            if torch.cuda.is_available()
            else patch.multiple(torch.cuda, synchronize=dict, current_device=lambda: "cpu")
        ):
            return dist_checkpointing.save(
                state, str(path), self._strategy, async_sharded_save=True
            )


def callers() -> list[Caller]:
    """All of them; the first is the one to compare with."""
    commit = state_dict_saver.save_state_dict_async_finalize

    def by_partial(planned: Any) -> Callable[[], None]:
        return partial(commit, *planned)

    def by_closure(planned: Any) -> Callable[[], None]:
        return lambda: commit(*planned)

    own = partial(OwnPlanner, flatten_state_dict=False)
    return [
        Caller("DCP's planner, partial", DefaultSavePlanner, by_partial),
        Caller("DCP's planner, closure", DefaultSavePlanner, by_closure),
        Caller("planner of one's own, closure", own, by_closure),
        Megatron(),
    ]


@contextmanager
def _timed(function: str, sample: Sample, figure: str) -> Iterator[None]:
    """Add the processor time of the calls of a function of ``state_dict_saver``."""
    original = getattr(state_dict_saver, function)

    def timed(*arguments: Any) -> Any:
        began_s = time.thread_time()
        try:
            return original(*arguments)
        finally:
            sample[figure] = sample.get(figure, 0.0) + time.thread_time() - began_s

    with patch.object(state_dict_saver, function, timed):
        yield


def measure_callers(
    tensors: int, directory: Path, chosen: Sequence[Caller], *, rounds: int
) -> Report:
    """Let the callers save in turns, each to new directories that are removed again."""
    group = Group()
    state = {f"tensor {number}": torch.rand(_NFLOATS) for number in range(tensors)}
    if not dist.is_initialized():  # Megatron asks for its rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = [Row.of(caller, group) for caller in chosen]
    with nostall.AsyncCallsQueue() as queue:

        def save(caller: Caller) -> Sample:
            path, sample = directory / uuid4().hex, Sample(commit_s=0.0)
            with _timed("plan_save", sample, "plan_s"):
                queue.schedule_async_request(caller.request(path, state))
            while not queue._caller._calls[0].outcome.done():
                time.sleep(0.001)  # a training step
            with _timed("_commit_save", sample, "commit_s"):
                while queue.pending:
                    time.sleep(0.01)
                    began_s = time.thread_time()
                    queue.poll()
                    sample["poll_s"] = time.thread_time() - began_s
            loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
            nostall.load(loaded, path)
            if not all(torch.equal(loaded[name], tensor) for name, tensor in state.items()):
                raise WrongData(f"{caller.name} has not saved what it was given")
            shutil.rmtree(path)
            return sample

        for row, caller in zip(rows, chosen, strict=True):
            warm = Row(name=row.name, status=row.status)
            for _ in range(_WARM):
                attempt(warm, partial(save, caller), group)
            row.status, row.why = warm.status, row.why or warm.why
        turns = [
            partial(attempt, row, partial(save, caller), group)
            for row, caller in zip(rows, chosen, strict=True)
        ]
        in_rounds(turns, rounds)
    dist.destroy_process_group()
    return Report(contenders=rows)
