"""Ways to save together: what the coordinator does in one save, by the code that does it.

Each way calls the planner, the commit and the pickling that a real save calls, in the same order.
Only the ranks are missing: their messages are made here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol
from uuid import uuid4

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as DCPSavePlanner

import nostall
from nostall._bench.simulating.exchange import Exchange
from nostall._bench.simulating.state import ShardedState
from nostall._commit.known_results import KnownResults, Results, ResultsReference
from nostall._commit.local_plans import compact, sharing
from nostall._commit.result_columns import in_columns
from nostall._model.values import RankFiles, SaveId, WrittenFile
from nostall._plan.together import global_plan_of, reusable_metadata, with_local_plans
from nostall._save.by_name.plans import GroupPlans, PlanAnswer, PlanQuestion, SentPlan
from nostall._save.messages import RankMessage
from nostall._save.rank_save import RankSave
from nostall._save.split_commit import commit_split_save
from nostall._save.split_plan import SaveSession
from nostall._save.written import WrittenItems
from nostall.filesystem_async import FileSystemWriterAsync


class Way(Protocol):
    """A way to save together."""

    name: str

    def __init__(self, state: ShardedState) -> None: ...

    def save(self, exchange: Exchange, path: Path) -> None:
        """What the coordinator does in one save; later ones are of the same structure."""


class StockPlanner:
    """``dcp.save`` with stock's writer: everything is exchanged in every save."""

    name = "stock"

    def __init__(self, state: ShardedState) -> None:
        self._state = state

    def save(self, exchange: Exchange, path: Path) -> None:
        state, planner = self._state, self._planner()
        plans = exchange.gather("plan", self._plan_of, state.ranks)
        writer = _stocks_writer(path)
        with exchange.coordinator("plan"):
            finals, metadata = planner.create_global_plan(plans)
            finals = writer.prepare_global_plan(finals)
        exchange.scatter("plan", finals)
        results = exchange.gather("results", state.results, state.ranks)
        with exchange.coordinator("commit"):
            writer.finish(metadata, results)
        exchange.broadcast("commit", metadata, state.ranks)

    def _planner(self) -> DCPSavePlanner:
        planner = dcp.DefaultSavePlanner()
        planner.is_coordinator = True
        return planner

    def _plan_of(self, rank: int) -> SavePlan:
        return self._state.plan(rank)


def _stocks_writer(path: Path) -> dcp.FileSystemWriter:
    writer = dcp.FileSystemWriter(path, sync_files=False)
    writer.set_up_storage_writer(True)
    writer.prepare_local_plan(SavePlan([]))  # makes the directory
    return writer


class StockCachingPlanner(StockPlanner):
    """The same with ``enable_plan_caching``: plans are exchanged once."""

    name = "stock with cached plans"

    def __init__(self, state: ShardedState) -> None:
        super().__init__(state)
        self._saves = 0
        # A class of its own: stock keeps what it caches by the name of the class.
        self._kind = type(f"Caching{uuid4().hex}", (dcp.DefaultSavePlanner,), {})

    def save(self, exchange: Exchange, path: Path) -> None:
        super().save(exchange, path)
        self._saves += 1

    def _planner(self) -> DCPSavePlanner:
        planner: dcp.DefaultSavePlanner = self._kind(enable_plan_caching=True)
        planner.is_coordinator = True
        return planner

    def _plan_of(self, rank: int) -> SavePlan:
        return SavePlan([], usable=False) if self._saves else super()._plan_of(rank)


class GatheredResults(StockPlanner):
    """What NVRx does with its caches on: results and metadata in every save, plans once."""

    name = "results gathered"

    def __init__(self, state: ShardedState) -> None:
        super().__init__(state)
        self._metadata: Metadata | None = None

    def save(self, exchange: Exchange, path: Path) -> None:
        state = self._state
        writer = _stocks_writer(path)
        if self._metadata is None:
            plans = exchange.gather("plan", self._plan_of, state.ranks)
            with exchange.coordinator("plan"):
                finals, self._metadata = self._planner().create_global_plan(plans)
                finals = writer.prepare_global_plan(finals)
            exchange.scatter("plan", finals)
        results = exchange.gather("results", state.results, state.ranks)
        with exchange.coordinator("commit"):
            writer.finish(reusable_metadata(self._metadata), results)


class SplitFunctions:
    """nostall's plan and finalize functions, with the plan cache on."""

    name = "nostall split functions"

    def __init__(self, state: ShardedState) -> None:
        self._state = state
        self._known = KnownResults()
        self._planned: Metadata | None = None
        self._saves = 0

    def save(self, exchange: Exchange, path: Path) -> None:
        state, exchange.is_ours = self._state, True
        writer = FileSystemWriterAsync(path, sync_files=False)
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
        with exchange.coordinator("directory"):
            writer._rank_save.make_ready()
        if self._planned is None:
            plans = exchange.gather("plan", lambda rank: compact(state.plan(rank)), state.ranks)
            with exchange.coordinator("plan"):
                made = global_plan_of(sharing(plans), writer, dcp.DefaultSavePlanner())
                self._planned = with_local_plans(made.metadata, made.local)
            exchange.scatter("plan", made.final)
        planned = reusable_metadata(self._planned)
        save = RankSave(writer._rank_save.settings)
        messages = exchange.gather("results", lambda rank: self._message(rank, path), state.ranks)
        session = SaveSession(None, False, 0)
        with exchange.coordinator("commit"):
            ending = commit_split_save(
                save, messages, planned, session, writer.storage_meta, self._known
            )
        assert not ending.failures, ending.failures
        if self._saves:  # in the steady state, messages and claim go through the store
            exchange.store_operations += 2 + -(-state.ranks // 256)
            exchange.collectives -= 1
            exchange.reduce()
        else:
            exchange.broadcast("commit", ending, state.ranks)
        self._saves += 1

    def _message(self, rank: int, path: Path) -> bytes:
        state = self._state
        token, files = f"{rank:032x}", (self._file(rank),)
        message = RankMessage(
            outcome=ResultsReference(token=token, files=files)
            if self._saves
            else Results(items=in_columns(state.results(rank)), files=files, token=token),
            written=_written(state, self._file(rank), rank, path),
            changed_plan=None,
            save_here=SaveId(1, self._saves),
            counts_alike=True,
            took_s=1.0,
        )
        return message.encoded()

    def _file(self, rank: int) -> str:
        return self._state.file(rank)


class SplitFunctionsInPlace(SplitFunctions):
    """The same, but each save replaces the checkpoint in the directory, under new file names."""

    name = "nostall split functions, in place"

    def save(self, exchange: Exchange, path: Path) -> None:
        super().save(exchange, path.parent / "in place")

    def _file(self, rank: int) -> str:
        name = super()._file(rank)
        return name if not self._saves else name.replace(".", f"-{self._saves:08x}.")


class PlansByName:
    """``dcp.save`` with nostall's writer and planner."""

    name = "nostall SavePlanner"

    def __init__(self, state: ShardedState) -> None:
        self._state = state
        self._plans = GroupPlans()
        self._name = ""

    def save(self, exchange: Exchange, path: Path) -> None:
        state = self._state
        writer = FileSystemWriterAsync(path, sync_files=False)
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
        with exchange.coordinator("directory"):
            writer._rank_save.make_ready()
        planner = nostall.SavePlanner()
        planner._plans, planner.is_coordinator = self._plans, True
        plans = exchange.gather("plan", self._plan_of, state.ranks)
        with exchange.coordinator("plan"):
            finals, metadata = planner.create_global_plan(plans)
            finals = writer.prepare_global_plan(finals)
        first, *_ = exchange.scatter("plan", finals)
        assert isinstance(first, PlanAnswer)
        planner.plan = self._state.plan(0)
        planner.finish_plan(first)
        results = exchange.gather(
            "results", lambda rank: self._results_of(rank, path, first), state.ranks
        )
        writer._rank_save.named_plan = planner.named_plan
        with exchange.coordinator("commit"):
            writer.finish(metadata, [*results])
        exchange.broadcast("commit", metadata, state.ranks)
        self._name = first.name

    def _plan_of(self, rank: int) -> SavePlan:
        if not self._name:
            plan = self._state.plan(rank)
            return SentPlan(**vars(plan), made=plan.items)
        return PlanQuestion([], planner_data={}, ranks={self._name: rank})

    def _results_of(self, rank: int, path: Path, answer: PlanAnswer) -> WrittenItems:
        state = self._state
        written = _written(state, state.file(rank), rank, path)
        items = () if answer.is_known else in_columns(state.results(rank))
        files = (state.file(rank),)
        return WrittenItems(items, written, f"{rank:032x}", files, answer.is_known)


def _written(state: ShardedState, name: str, rank: int, path: Path) -> RankFiles:
    file = WrittenFile(name=name, nbytes=state.nbytes, crc32=rank)
    return RankFiles(directory=str(path), files=(file,))


WAYS = (
    StockPlanner,
    StockCachingPlanner,
    GatheredResults,
    SplitFunctions,
    SplitFunctionsInPlace,
    PlansByName,
)
