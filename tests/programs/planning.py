"""Ranks that plan saves with and without a cache, and what they exchanged meanwhile."""

from __future__ import annotations

import dataclasses
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nostall import SavePlanner, _torch
from nostall._commit.metadata import local_plans_in
from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from nostall.core import AsyncCallsQueue
from nostall.errors import OptionError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import (
    CheckpointMetadataCache,
    get_metadata_caching_status,
    init_checkpoint_metadata_cache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
    verify_global_md_reuse,
    vouch_for,
)
from programs.entry_points import State, loaded_wrong
from support.states import names, read_metadata, schedule, shard_files

Facts = dict[str, Any]

_COLLECTIVES = (
    *("all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "scatter"),
    *("scatter_object_list", "send"),
)


@contextmanager
def collectives() -> Iterator[Counter[str]]:
    """Count the calls of ``torch.distributed``'s collectives by name."""
    seen: Counter[str] = Counter()

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return original(*args, **kwargs)

        return call

    with ExitStack() as patched:
        for name in _COLLECTIVES:
            call = counting(name, getattr(dist, name))
            patched.enter_context(patch.object(dist, name, call))
        yield seen


# --- states and their changes ---------------------------------------------------------------------


def make_state(seed: int) -> State:
    """One rank's state: replicated, sharded and private tensors, and objects."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(2 * world_size + 1, 3, generator=generator)
    return {
        "shared": torch.randn(16, generator=generator),
        "also shared": torch.randn(4, generator=generator),
        "sharded": distribute_tensor(whole, init_device_mesh("cpu", (world_size,)), [Shard(0)]),
        f"own {rank}": torch.randn(rank + 3, generator=generator),
        "settings": {"seed": seed, "names": ["a", "b"]},
    }


CHANGES: dict[str, Callable[[State, str], object]] = {
    "added": lambda state, key: state.update({f"{key} more": state[key] + 1}),
    "removed": lambda state, key: state.pop(key),
    "reshaped": lambda state, key: state.update({key: torch.cat([state[key]] * 2)}),
    "made an object": lambda state, key: state.update({key: {"inner": state[key].tolist()}}),
}
WHERE = {"all ranks": (0, 1), "the coordinator": (0,), "another rank": (1,)}


def changed(state: State, kind: str, where: str) -> State:
    """The state after a change on some ranks; what is on all ranks changes only on all."""
    rank = dist.get_rank()
    if rank in WHERE[where]:
        CHANGES[kind](state, f"own {rank}")
        if where == "all ranks":
            CHANGES[kind](state, "shared")
    return state


# --- saving ---------------------------------------------------------------------------------------


def _blank(value: Any) -> Any:
    """Its structure without its objects; tensors are filled when they are loaded."""
    if isinstance(value, dict):
        return {key: _blank(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_blank(each) for each in value]
    return deepcopy(value) if isinstance(value, torch.Tensor) else None


def require_loaded(path: Path, state: State, group: dist.ProcessGroup | None = None) -> None:
    """Stock loads from there what this rank has saved. Collective."""
    wrong = loaded_wrong(path, state, _blank(state), process_group=group)
    assert not wrong, (str(path), wrong)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A save between planning and finalising."""

    arguments: tuple[FileSystemWriterAsync, Metadata | None, Any]
    said: dict[str, int]
    """Collectives while planning, by name."""

    def finish(self, **options: Any) -> Any:
        """Write and finalise, with these options."""
        save_fn, preload_fn, args = self.arguments[0].get_save_function_and_args()
        if save_fn is not None:
            args[1] = preload_fn()
            save_fn(*args)
        return save_state_dict_async_finalize(*self.arguments, **options)


def plan(
    path: Path,
    state: State,
    cache: CheckpointMetadataCache | None = None,
    planner: DefaultSavePlanner | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    coordinator: int = 0,
    default_cache: bool = False,
    reuse_metadata_obj: Metadata | None = None,
    **options: Any,
) -> Planned:
    """Plan a save, by a writer with these options, and count."""
    with collectives() as said:
        arguments = save_state_dict_async_plan(
            state,
            FileSystemWriterAsync(path, **options),
            group,
            coordinator,
            planner=planner,
            enable_cache=default_cache or cache is not None,
            metadata_cache=cache,
            reuse_metadata_obj=reuse_metadata_obj,
        )
    return Planned(arguments, dict(said))


def save(
    path: Path, state: State, *args: Any, is_loaded: bool = True, **options: Any
) -> dict[str, int]:
    """Plan, write, finalise and load; the collectives of planning."""
    planned = plan(path, state, *args, **options)
    planned.finish()
    if is_loaded:
        require_loaded(path, state, options.get("group"))
    return planned.said


def valid_cache(out: Path) -> CheckpointMetadataCache:
    cache = CheckpointMetadataCache()
    for number in (1, 2, 3):
        save(out / f"before-{number}", make_state(number), cache)
    return cache


def content(path: Path) -> tuple[Any, Any, Any]:
    return content_of(read_metadata(path))


def content_of(metadata: Metadata | None) -> tuple[Any, Any, Any]:
    assert metadata is not None
    assert metadata.planner_data is not None
    mappings = {k: v for k, v in metadata.planner_data.items() if not k.startswith("nostall.")}
    return metadata.state_dict_metadata, set(metadata.storage_data), mappings


def failure(do: Callable[[], Any]) -> Facts:
    try:
        do()
    except CheckpointException as error:
        return {"ranks": sorted(error.failures), "text": str(error)}
    return {"ranks": [], "text": ""}


# --- planners of other kinds ----------------------------------------------------------------------


class AlonePlanner(DefaultSavePlanner):
    """Makes this rank's final plan alone: the coordinator writes what both ranks have."""

    can_run_decentralized_global_plan = True

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        if self.is_coordinator:
            return local_plan
        mine = [item for item in local_plan.items if "shared" not in item.index.fqn]
        return dataclasses.replace(local_plan, items=mine)


class VouchedPlanner(AlonePlanner):
    """A planner like that, of which somebody says that its plans follow from the structure."""


class EverythingPlanner(DefaultSavePlanner):
    """Plans alone and drops nothing: what is on both ranks is written twice."""

    can_run_decentralized_global_plan = True

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        return local_plan


class StockCachingPlanner(DefaultSavePlanner):
    """The default planner with torch's own plan cache, which is kept per class name."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


# --- scenarios ------------------------------------------------------------------------------------


def steady_state(out: Path) -> Facts:
    """Seven saves through a queue: what is exchanged, and what the cache says about itself."""
    cache = CheckpointMetadataCache()
    facts: Facts = {"plan": [], "status": []}
    with AsyncCallsQueue() as queue:
        for number in range(1, 8):
            path = out / str(number)
            with collectives() as said:
                schedule(queue, path, make_state(number), cache=cache)
            facts["plan"].append(dict(said))
            facts["status"].append(cache.get_metadata_caching_status())
            with collectives() as said:
                queue.wait()
            facts["poll and finalize"] = dict(said)
            require_loaded(path, make_state(number))
        with collectives() as said:
            queue.poll()
        facts["idle poll"] = dict(said)
    facts["uncached plan"] = save(out / "uncached", make_state(1))
    facts["content"] = content(out / "7") == content(out / "uncached")
    return facts


def structure_changes(out: Path) -> Facts:
    """Every change of structure at the fourth save, when the cache is valid."""
    return {
        f"{kind} on {where}": _one_change(out / kind / where, kind, where)
        for kind in CHANGES
        for where in WHERE
    }


def _one_change(out: Path, kind: str, where: str) -> Facts:
    cache = valid_cache(out)
    facts: Facts = {"plan": [], "status": []}
    for number in range(4, 8):
        state = changed(make_state(number), kind, where)
        facts["plan"].append(save(out / str(number), state, cache))
        facts["status"].append(cache.get_metadata_caching_status()[0])
    save(out / "uncached", changed(make_state(4), kind, where))
    wanted = content(out / "uncached")
    return {**facts, "content": [content(out / str(number)) == wanted for number in (4, 5, 7)]}


def _only(state: State) -> None:
    """The state as it is."""


CHANGED: dict[str, tuple[Callable[[State], object], Callable[[], DefaultSavePlanner]]] = {
    "another dtype": (
        lambda state: state.update(shared=state["shared"].half()),
        DefaultSavePlanner,
    ),
    "other strides": (
        lambda state: state.update(table=state["table"].t().contiguous().t()),
        DefaultSavePlanner,
    ),
    "more on one rank": (lambda each: changed(each, "added", "another rank"), DefaultSavePlanner),
    "a key less": (lambda state: state.pop("also shared"), DefaultSavePlanner),
    "an object": (
        lambda state: state.update(note="x" * int(state["table"].sum().abs() * 10)),
        DefaultSavePlanner,
    ),
    "another class": (_only, AlonePlanner),
    "another class, vouched for": (_only, VouchedPlanner),
    "nostall's": (_only, SavePlanner),
    "a switch of it": (_only, lambda: DefaultSavePlanner(dedup_save_to_lowest_rank=True)),
}
"""Changes of the state or the planner."""
OPTIONS: dict[str, tuple[tuple[int, ...], Facts]] = {
    "none": ((), {}),
    "more files": ((0, 1), {"thread_count": 3}),
    "more files of one rank": ((1,), {"thread_count": 2}),
    "a file per item": ((0, 1), {"single_file_per_rank": False}),
    "safetensors": ((0, 1), {"serialization_format": SerializationFormat.SAFETENSORS}),
    "some apart": ((0, 1), {"separation_hint": "own", "thread_count": 2}),
}
"""Which ranks' writers get which options; state and planner are as they were."""


def matrix(out: Path) -> Facts:
    """Saves with one cache, each way three times in a row; those that differ from uncached ones."""
    vouch_for(VouchedPlanner)
    pick, cache = random.Random(7), CheckpointMetadataCache()
    facts: Facts = {"wrong": [], "said with other options": []}
    for part in range(4):
        kinds = [*(OPTIONS if part % 2 else CHANGED)]
        order = [name for name in pick.sample(kinds, len(kinds)) for _ in range(3)]
        for number, name in enumerate(order):
            change, planner = CHANGED.get(name, (_only, DefaultSavePlanner))
            ranks, options = OPTIONS.get(name, ((), {}))
            state = {key: each for key, each in make_state(number).items() if key != "settings"}
            state["table"] = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
            change(state)
            paths = out / f"{part}-{number}-cached", out / f"{part}-{number}-uncached"
            save_it = partial(save, sync_files=False, is_loaded=name != "safetensors")
            own = options if dist.get_rank() in ranks else {}
            said = save_it(paths[0], dict(state), cache, planner(), **own)
            save_it(paths[1], dict(state), None, planner(), **own)
            dist.barrier()  # the coordinator has committed
            # The first of three may write on one rank what another one wrote.
            compared: Callable[[Path], Any] = _all_of if number % 3 else content
            if compared(paths[0]) != compared(paths[1]):
                facts["wrong"].append(f"{part}, {number}: {name}")
            if name in OPTIONS and number > 2:
                facts["said with other options"].append(said)
    return facts


def _all_of(path: Path) -> tuple[Any, Any, dict[str, bytes]]:
    """Entries and places of a checkpoint, and the bytes of its files."""
    metadata = read_metadata(path)
    return metadata.state_dict_metadata, metadata.storage_data, shard_files(path)


def replicated_on_one_rank_less(out: Path) -> Facts:
    """A rank drops a replicated tensor: the one that was to write it, or another one."""
    facts = {}
    for name, writes_it in (("another wrote it", False), ("it wrote it", True)):
        cache = valid_cache(out / name)
        writer_rank = int(_file_of("shared", out / name / "before-3").split("_")[2])

        def state(number: int, rank: int = writer_rank, wrote: bool = writes_it) -> State:  # noqa: FBT001  # binds the loop's
            made = make_state(number)
            if (dist.get_rank() == rank) is wrote:
                del made["shared"]
            return made

        fourth = plan(out / name / "4", state(4), cache)
        failed = failure(fourth.finish)
        facts[name] = {
            "fourth": {**failed, "plan": fourth.said},
            "committed": (out / name / "4" / ".metadata").exists(),
            "fifth": save(out / name / "5", state(5), cache),
        }
    return facts


def joined(out: Path) -> dict[str, int]:
    """A rank starts to hold what only the other one held."""
    cache = valid_cache(out)
    return save(out / "4", {**make_state(4), "own 0": torch.full((3,), 4.0)}, cache)


def in_flight_over_a_change(out: Path) -> list[dict[str, int]]:
    """The structure changes while saves are on their way, and again before they are finalised."""
    cache = valid_cache(out)
    grown = [changed(make_state(number), "added", "another rank") for number in range(8)]
    twice = [changed(dict(state), "added", "the coordinator") for state in grown]
    fourth, fifth = (plan(out / f"{number}", grown[number], cache) for number in (4, 5))
    fourth.finish()
    sixth = plan(out / "6", twice[6], cache)
    fifth.finish()
    sixth.finish()
    for number, states in ((4, grown), (5, grown), (6, twice)):
        require_loaded(out / f"{number}", states[number])
    return [fourth.said, fifth.said, sixth.said, save(out / "7", twice[7], cache)]


def resumed(out: Path) -> Facts:
    """The first and second save after metadata was loaded, by reader."""
    cache = valid_cache(out)
    save(out / "last", make_state(9), cache)
    stock = FileSystemReader(out / "last")
    readers: dict[str, Callable[[], Metadata | None]] = {
        "caching reader": CachedMetadataFileSystemReader(out / "last").read_metadata,
        "stock reader": stock.read_metadata,
        "rebuilt by a newer torch": lambda: dataclasses.replace(stock.read_metadata()),
        "on one rank only": lambda: stock.read_metadata() if dist.get_rank() == 0 else None,
    }
    facts: Facts = {name: _resume(out / name, read()) for name, read in readers.items()}
    facts["changed since"] = _resume(out / "changed", stock.read_metadata(), changes=True)
    facts["default cache"] = _resume(out / "default", stock.read_metadata(), has_cache=False)
    facts["other world size"] = _resume_from_one_rank(out / "one rank")
    return facts


def _resume(
    out: Path, loaded: Metadata | None, *, changes: bool = False, has_cache: bool = True
) -> Facts:
    def state(number: int) -> State:
        made = make_state(number)
        return changed(made, "reshaped", "another rank") if changes else made

    before = deepcopy(loaded)
    cache = CheckpointMetadataCache() if has_cache else None
    if cache is None:
        init_checkpoint_metadata_cache(loaded)
    else:
        cache.set_cached_global_metadata(loaded)
    first = save(out / "1", state(1), cache, default_cache=True)
    status = cache.get_metadata_caching_status() if cache else get_metadata_caching_status()
    second = save(out / "2", state(2), cache, default_cache=True)
    init_checkpoint_metadata_cache()
    assert get_metadata_caching_status() == (False, False)
    return {
        "plan": [first, second],
        "status": status,
        "untouched": loaded is None or (before is not None and vars(loaded) == vars(before)),
    }


def _resume_from_one_rank(out: Path) -> Facts:
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        save(out / "alone", {"shared": torch.ones(16)}, CheckpointMetadataCache(), group=alone)
    dist.barrier()
    loaded = CachedMetadataFileSystemReader(out / "alone").read_metadata()
    plans = local_plans_in(loaded)
    assert plans is not None
    assert len(plans) == 1
    return _resume(out, loaded)


def dcps_error(text: str) -> BaseException:
    """An error as it comes from a planner that talks to other ranks by DCP's means."""
    return CheckpointException("talk", {1: _torch.wrap_exception(ValueError(text))})


class FailingPlanner(DefaultSavePlanner):
    """Fails on one rank, in one of its methods, with Python's error or DCP's ``BaseException``."""

    def __init__(
        self, rank: int, method: str, error: Callable[[str], BaseException] = ValueError
    ) -> None:
        super().__init__()
        if dist.get_rank() == rank:
            setattr(self, method, Mock(side_effect=error(f"no luck in {method}")))


def planning_failures(out: Path) -> Facts:
    """A rank's planner fails, without a cache, with one not yet valid, and with a valid one."""
    facts = {}
    for name, rank, method, saves_before in (
        ("no cache", 1, "create_local_plan", None),
        ("valid cache", 1, "create_local_plan", 3),
        ("global plan", 0, "create_global_plan", None),
        ("lookup with valid cache", 1, "lookup_object", 3),
        ("valid cache, DCP's error", 0, "create_local_plan", 3),
        ("lookup, DCP's error", 1, "lookup_object", None),
    ):
        error = dcps_error if "DCP" in name else ValueError
        cache = None if saves_before is None else CheckpointMetadataCache()
        for number in range(saves_before or 0):
            # The same class as later, so that the planner's configuration stays what it was.
            save(out / name / str(number), make_state(number), cache, FailingPlanner(-1, ""))
        facts[name] = _fail_once(out / name, cache, FailingPlanner(rank, method, error))
    return facts


def _fail_once(out: Path, cache: CheckpointMetadataCache | None, planner: FailingPlanner) -> Facts:
    planned: list[Planned] = []
    failed = failure(lambda: planned.append(plan(out / "failed", make_state(8), cache, planner)))
    step = "plan"
    if planned:
        step = "finalize"
        failed = failure(planned[0].finish)
    dist.barrier()
    left = names(out / "failed")
    said = save(out / "next", make_state(9), cache, FailingPlanner(-1, ""))
    return {**failed, "raised when": step, "left": left, "next": said}


def other_planners(out: Path) -> Facts:
    """Six saves with other planners; the fifth changes structure."""
    facts: Facts = {}
    vouch_for(VouchedPlanner)
    for name, make in (
        ("alone", AlonePlanner),
        ("alone, vouched for", VouchedPlanner),
        ("alone, everything", EverythingPlanner),
        ("torch's cache", StockCachingPlanner),
    ):
        cache = CheckpointMetadataCache()
        facts[name] = {"plan": []}
        for number in range(1, 7):
            state = make_state(number)
            state = changed(state, "reshaped", "another rank") if number >= 5 else state
            facts[name]["plan"].append(save(out / name / str(number), state, cache, make()))
        facts[name]["shared is in"] = _file_of("shared", out / name / "4")
    return facts


def _file_of(fqn: str, path: Path) -> str:
    stored = read_metadata(path).storage_data[MetadataIndex(fqn, [0])]
    return str(stored.relative_path)


def another_coordinator(out: Path) -> Facts:
    """Rank 1 coordinates: three cached saves, then a failure on rank 0."""
    cache = CheckpointMetadataCache()
    facts: Facts = {"plan": [], "metadata": []}
    for number in (1, 2, 3):
        state = make_state(number)
        planned = plan(out / str(number), state, cache, coordinator=1)
        facts["metadata"].append(planned.arguments[1] is not None)
        facts["plan"].append(planned.said)
        planned.finish()
        require_loaded(out / str(number), state)
    planner = FailingPlanner(0, "create_local_plan")
    facts["failure"] = failure(
        lambda: save(out / "failed", make_state(4), planner=planner, coordinator=1)
    )
    return facts


def impossible_coordinators(out: Path) -> Facts:
    """Errors of a coordinator that is no rank of the group, and of a group without this rank."""
    group = dist.new_group([1])  # on rank 0 not a group
    facts: Facts = {}
    for name, its_group, coordinator in (
        ("beyond", None, 2),
        ("negative", None, -1),
        ("not a number", None, "0"),
        ("global rank", group, 1),
    ):
        try:
            writer = FileSystemWriterAsync(out / name)
            save_state_dict_async_plan(make_state(1), writer, its_group, cast("int", coordinator))
        except OptionError as error:
            facts[name] = str(error)
    save(out / "possible", make_state(1))
    return facts


def verified(out: Path) -> Facts:
    """``verify_global_md_reuse`` for equal plans, a plan that differs on one rank, and no plans."""
    save(out / "1", make_state(1), CheckpointMetadataCache())
    plans = local_plans_in(CachedMetadataFileSystemReader(out / "1").read_metadata())
    assert plans is not None
    rank = dist.get_rank()
    wrapper = plan(out / "2", make_state(1)).arguments[2]
    other = dataclasses.replace(plans[rank], items=plans[rank].items[1:]) if rank else plans[rank]
    facts: Facts = {}
    for name, loaded, local in (
        ("equal", plans, plans[rank]),
        ("one differs", plans, other),
        ("none", None, plans[rank]),
    ):
        with collectives() as said:
            facts[name] = [verify_global_md_reuse(loaded, local, rank, wrapper), dict(said)]
    return facts


def prepared_metadata(out: Path) -> Facts:
    """NVRx's arguments: the metadata is copied, and another run begins with its plans."""
    copy, impossible = out / "new" / "copy", out / "1" / ".metadata" / "copy"
    first = plan(out / "1", make_state(1), CheckpointMetadataCache())
    made = first.finish(create_metadata_path=copy)
    with copy.open("rb") as stream:
        prepared = pickle.load(stream)
    facts: Facts = {"equal": content_of(made) == content_of(prepared) == content(out / "1")}
    cache = CheckpointMetadataCache()
    second = plan(out / "2", make_state(2), cache, reuse_metadata_obj=prepared)
    facts["plan"] = second.said
    facts["returned"] = second.finish(reuse_metadata_obj=prepared)
    third = plan(out / "3", make_state(3), cache)
    facts["failure"] = failure(lambda: third.finish(create_metadata_path=impossible))
    for number in (1, 2, 3):
        require_loaded(out / f"{number}", make_state(number))
    return facts


def two_ranks(out: Path) -> dict[str, Any]:
    return {
        scenario.__name__: scenario(out / scenario.__name__)
        for scenario in (
            *(steady_state, structure_changes, matrix, replicated_on_one_rank_less, joined),
            *(in_flight_over_a_change, resumed, planning_failures, other_planners),
            *(another_coordinator, impossible_coordinators, verified, prepared_metadata),
        )
    }


# --- a group of some of the ranks -----------------------------------------------------------------


def some_of_the_ranks_save_in_a_group_of_their_own(out: Path) -> Facts | None:
    """Ranks 1 and 2 of three save in their own group, whose first rank coordinates."""
    group = dist.new_group([1, 2])
    facts = _save_in_group(out, group) if dist.get_rank() else None
    dist.barrier()
    return facts


def _save_in_group(out: Path, group: dist.ProcessGroup) -> Facts:
    rank = dist.get_rank(group)

    def state(seed: int) -> State:
        return {"shared": torch.arange(9.0) * seed, f"own {rank}": torch.full((rank + 2,), seed)}

    cache = CheckpointMetadataCache()
    facts: Facts = {}
    with AsyncCallsQueue(process_group=group) as queue:
        schedule(queue, out / "queued", state(1), group=group)
        queue.wait()
        require_loaded(out / "queued", state(1), group)
        broken = {**state(5), "sabotage": torch.empty(2, device="meta")} if rank else state(5)
        facts["failure"] = failure(
            lambda: (schedule(queue, out / "failed", broken, group=group), queue.wait())
        )
    facts["plan"] = [save(out / f"{n}", state(n), cache, group=group) for n in range(1, 5)]
    facts["files"] = names(out / "4")
    resumed_cache = CheckpointMetadataCache()
    resumed_cache.set_cached_global_metadata(FileSystemReader(out / "4").read_metadata())
    facts["resumed plan"] = save(out / "resumed", state(7), resumed_cache, group=group)
    return facts
