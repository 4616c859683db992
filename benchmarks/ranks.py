"""Simulated ranks: what a save of thousands of them costs its coordinator, in this process.

Each way calls the planner, the commit and the pickling that a real save calls, in the same order.
Only the ranks are missing: their messages are made here, of real objects of torch. Every rank has a
shard of every tensor. The network is left out.
"""

from __future__ import annotations

import gc
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import psutil
import torch
import torch.distributed.checkpoint as dcp

import nostall
from benchmarks.group import Group
from benchmarks.report import Column, Report, Row, Sample, attempt
from nostall import _torch
from nostall._commit.columns import Results, ResultsReference, compact, in_columns, sharing
from nostall._commit.publication import KnownResults
from nostall._engine import default_engine
from nostall._model.threads import gc_paused
from nostall._model.values import RankFiles, SaveId, WrittenFile
from nostall._plan.agree import global_plan_of, reusable_metadata, with_local_plans
from nostall._save.decide import RankMessage, commit_split_save
from nostall._save.plans_by_name import GroupPlans, PlanAnswer, PlanQuestion, SentPlan
from nostall._save.prepared import WrittenItems
from nostall._save.rank_save import RankSave
from nostall._save.split_plan import SaveSession
from nostall.filesystem_async import FileSystemWriterAsync

T = TypeVar("T")

COLUMNS = (
    Column("collectives", "collectives", digits=0),
    Column("store", "store", digits=0),
    Column("up kB", "up_nbytes", 1e-3, 2),
    Column("down kB", "down_nbytes", 1e-3, 2),
    Column("CPU s", "cpu_s", digits=3),
    Column("us per rank", "rank_s", 1e6),
    Column("writer CPU s", "writer_s", digits=2),
    Column("kept MiB", "kept_nbytes", 2**-20, 0),
)
LEGEND = """\
Of the coordinator, in one save. first: with planning; later: median [quartiles] of the saves after
the second. store: operations in the process group's store; up, down: bytes that it gets from a rank
and sends to one; CPU: its processor time, without the network, and that of its writer process;
kept: memory after the saves."""
_SAVES = ("first", "second", "later")
_ROWS, _COLUMNS = 4, 64
"""Shape of each shard. Exchanges do not depend on it."""
_NBYTES = 4 * _ROWS * _COLUMNS + 512
"""Bytes of an item with its container."""


class Exchange:
    """The coordinator's exchanges in one save, counted, and the time that it spends."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.is_ours = False
        """Whether nostall exchanges, or torch does it for stock's calls."""
        self.collectives = self.store_operations = self.up_nbytes = self.down_nbytes = 0
        self.cpu_s = 0.0

    @contextmanager
    def coordinator(self) -> Iterator[None]:
        """Count the processor time of a block as the coordinator's."""
        began_s = time.process_time()
        try:
            yield
        finally:
            self.cpu_s += time.process_time() - began_s

    def gather(self, message_of: Callable[[int], T]) -> list[T]:
        """Gather one message of each rank; unpickling them is the coordinator's work."""
        self.collectives += 1
        messages = [pickle.dumps(message_of(rank)) for rank in range(self.ranks)]
        self.up_nbytes += sum(map(len, messages))
        with self.coordinator(), gc_paused() if self.is_ours else nullcontext():
            return [pickle.loads(each) for each in messages]

    def scatter(self, values: Sequence[T]) -> list[T]:
        """Scatter one message to each rank; returns what they get."""
        self.collectives += 1
        with self.coordinator(), gc_paused() if self.is_ours else nullcontext():
            messages = [pickle.dumps(each) for each in values]
        self.down_nbytes += sum(map(len, messages))
        return [pickle.loads(each) for each in messages]

    def broadcast(self, message: Any) -> None:
        self.collectives += 1
        with self.coordinator():
            nbytes = len(pickle.dumps(message))
        self.down_nbytes += nbytes * self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedState:
    """A state of which each rank has a shard of every tensor."""

    ranks: int
    items: int
    """Tensors, and so shards of each rank."""

    @property
    def names(self) -> list[str]:
        return [f"model.layers.{number}.weight" for number in range(self.items)]

    def plan(self, rank: int) -> dcp.SavePlan:
        names = self.names  # the same strings in both, as stock's planner has them
        mappings = {name: ("model", name.removeprefix("model.")) for name in names}
        offsets, sizes = (_ROWS * rank, 0), (_ROWS, _COLUMNS)
        # Objects of its own, as stock's planner makes them: pickle shares the same object only.
        items = [
            dcp.WriteItem(
                index=dcp.metadata.MetadataIndex(name, torch.Size(offsets)),
                type=dcp.planner.WriteItemType.SHARD,
                tensor_data=dcp.planner.TensorWriteData(
                    chunk=dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    properties=dcp.metadata.TensorProperties(dtype=torch.float32),
                    size=torch.Size([_ROWS * self.ranks, _COLUMNS]),
                ),
            )
            for name in names
        ]
        return dcp.SavePlan(items, planner_data=mappings)

    def results(self, rank: int) -> list[dcp.storage.WriteResult]:
        return [
            dcp.storage.WriteResult(
                index=dcp.metadata.MetadataIndex(name, torch.Size([_ROWS * rank, 0]), rank),
                size_in_bytes=_NBYTES,
                storage_data=_torch.StorageInfo(file_of(rank), number * _NBYTES, _NBYTES),
            )
            for number, name in enumerate(self.names)
        ]

    def written(self, rank: int, path: Path) -> RankFiles:
        file = WrittenFile(name=file_of(rank), nbytes=self.items * _NBYTES, crc32=rank)
        return RankFiles(directory=str(path), files=(file,))


def file_of(rank: int) -> str:
    return f"__{rank}_{0}.distcp"


class Stock:
    """``dcp.save`` with stock's writer: everything is exchanged in every save."""

    name = "stock"

    def __init__(self, state: ShardedState) -> None:
        self.state = state
        self.metadata: dcp.Metadata | None = None
        """Metadata of all ranks' plans, for contenders that exchange plans only once."""

    def save(self, exchange: Exchange, path: Path) -> None:
        """Do the coordinator's work in one save; later saves have the same structure."""
        exchange.broadcast(self.saved(exchange, path))

    def saved(self, exchange: Exchange, path: Path) -> dcp.Metadata:
        """Plan with all ranks unless that was done, and commit their results."""
        writer = dcp.FileSystemWriter(path, sync_files=False)
        writer.set_up_storage_writer(True)
        writer.prepare_local_plan(dcp.SavePlan([]))  # makes the directory
        metadata = self.metadata
        if metadata is None:
            planner = dcp.DefaultSavePlanner()
            planner.is_coordinator = True
            plans = exchange.gather(self.state.plan)
            with exchange.coordinator():
                finals, metadata = planner.create_global_plan(plans)
                finals = writer.prepare_global_plan(finals)
            exchange.scatter(finals)
        metadata = reusable_metadata(metadata)
        results = exchange.gather(self.state.results)
        with exchange.coordinator():
            writer.finish(metadata, results)
        return metadata


class GatheredResults(Stock):
    """NVRx with its caches on: results and metadata are sent in every save, plans once."""

    name = "results gathered"

    def save(self, exchange: Exchange, path: Path) -> None:
        self.metadata = reusable_metadata(self.saved(exchange, path))


def own_writer(exchange: Exchange, path: Path) -> FileSystemWriterAsync:
    """A writer of nostall's, whose directory is there."""
    writer = FileSystemWriterAsync(path, sync_files=False)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    with exchange.coordinator():
        writer._rank_save.make_ready()
    return writer


class SplitFunctions(Stock):
    """nostall's plan and finalize functions, with the plan cache on."""

    name = "nostall split functions"

    def __init__(self, state: ShardedState) -> None:
        super().__init__(state)
        self._known = KnownResults()
        self._saves = 0

    def save(self, exchange: Exchange, path: Path) -> None:
        exchange.is_ours = True
        writer = own_writer(exchange, path)
        if self.metadata is None:
            plans = exchange.gather(lambda rank: compact(self.state.plan(rank)))
            with exchange.coordinator():
                made = global_plan_of(sharing(plans), writer, dcp.DefaultSavePlanner())
                self.metadata = with_local_plans(made.metadata, made.local)
            exchange.scatter(made.final)
        planned = reusable_metadata(self.metadata)
        save = RankSave(writer._rank_save.settings)
        messages = exchange.gather(lambda rank: self._message(rank, path))
        session = SaveSession(None, False, 0)
        with exchange.coordinator():
            ending = commit_split_save(
                save, messages, planned, session, writer.storage_meta, self._known
            )
        assert not ending.failures, ending.failures
        if self._saves:  # in the steady state, messages and claim go through the store
            exchange.store_operations += 2 + -(-self.state.ranks // 256)
        else:
            exchange.broadcast(ending)
        self._saves += 1

    def _message(self, rank: int, path: Path) -> bytes:
        token, files = f"{rank:032x}", (file_of(rank),)
        known = ResultsReference(token=token, files=files)
        message = RankMessage(
            outcome=known
            if self._saves
            else Results(items=in_columns(self.state.results(rank)), files=files, token=token),
            written=self.state.written(rank, path),
            changed_plan=None,
            save_here=SaveId(1, self._saves),
            counts_alike=True,
            duration_s=1.0,
        )
        return message.encoded()


class PlansByName(Stock):
    """``dcp.save`` with nostall's writer and planner."""

    name = "nostall SavePlanner"

    def __init__(self, state: ShardedState) -> None:
        super().__init__(state)
        self._plans = GroupPlans()
        self._name = ""

    def save(self, exchange: Exchange, path: Path) -> None:
        writer = own_writer(exchange, path)
        planner = nostall.SavePlanner()
        planner._plans, planner.is_coordinator = self._plans, True
        plans = exchange.gather(self._plan_of)
        with exchange.coordinator():
            finals, metadata = planner.create_global_plan(plans)
            finals = writer.prepare_global_plan(finals)
        first, *_ = exchange.scatter(finals)
        assert isinstance(first, PlanAnswer)
        planner.plan = self.state.plan(0)
        planner.finish_plan(first)
        results = exchange.gather(lambda rank: self._results_of(rank, path, first))
        writer._rank_save.named_plan = planner.named_plan
        with exchange.coordinator():
            writer.finish(metadata, [*results])
        exchange.broadcast(metadata)
        self._name = first.name

    def _plan_of(self, rank: int) -> dcp.SavePlan:
        if not self._name:
            plan = self.state.plan(rank)
            return SentPlan(**vars(plan), made=plan.items)
        return PlanQuestion([], planner_data={}, ranks={self._name: rank})

    def _results_of(self, rank: int, path: Path, answer: PlanAnswer) -> WrittenItems:
        written = self.state.written(rank, path)
        token, files = f"{rank:032x}", (file_of(rank),)
        if answer.is_known:
            return WrittenItems((), written, ResultsReference(token=token, files=files))
        items = in_columns(self.state.results(rank))
        return WrittenItems((), written, Results(items=items, files=files, token=token))


WAYS = (Stock, GatheredResults, SplitFunctions, PlansByName)


def measure_ranks(
    state: ShardedState, directory: Path, ways: Sequence[type[Stock]], *, rounds: int
) -> Report:
    """Let the coordinator of each way save a few times: once with planning, twice, then later."""
    rows = []
    for way in ways:
        first, second, later = (Row(name=f"{way.name}, {each}") for each in _SAVES)
        gc.collect()
        before_nbytes = psutil.Process().memory_info().rss
        made = way(state)
        for row in (first, second, *[later] * rounds):
            attempt(row, partial(_saved, made, directory), Group())
        gc.collect()
        later.samples["kept_nbytes"] = [float(psutil.Process().memory_info().rss - before_nbytes)]
        rows += [first, later]
    return Report(contenders=rows)


def _saved(way: Stock, directory: Path) -> Sample:
    """One save, and what it has cost the coordinator."""
    exchange = Exchange(way.state.ranks)
    gc.collect()
    writer_s = _writer_cpu_s()
    path = directory / uuid4().hex
    way.save(exchange, path)
    shutil.rmtree(path, ignore_errors=True)
    return {
        "collectives": exchange.collectives,
        "store": exchange.store_operations,
        "up_nbytes": exchange.up_nbytes / way.state.ranks,
        "down_nbytes": exchange.down_nbytes / way.state.ranks,
        "cpu_s": exchange.cpu_s,
        "rank_s": exchange.cpu_s / way.state.ranks,
        "writer_s": _writer_cpu_s() - writer_s,
    }


def _writer_cpu_s() -> float:
    times = psutil.Process(default_engine().writer().pid).cpu_times()
    return times.user + times.system
