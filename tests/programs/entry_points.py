"""Every way to save, each as one function, and states to save; for one process or for ranks."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from nostall import _torch
from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from support.faults import Fault, inject
from support.states import begin_async, blobs, planned, schedule, small_state

State = dict[str, Any]


# --- states ---------------------------------------------------------------------------------------


def group_state(seed: int) -> State:
    """One rank's part of a state in which every kind of distributed tensor occurs. Collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    whole = random(4 * world_size, 3)
    mine = sharded_tensor.Shard.from_tensor_and_offsets(
        whole[4 * rank : 4 * rank + 4].clone(), [4 * rank, 0], rank
    )
    return {
        **small_state(seed),
        "even": distribute_tensor(random(6 * world_size, 5), mesh, [Shard(0)]),
        "uneven": distribute_tensor(random(2 * world_size + 1, 3), mesh, [Shard(0)]),
        "on one rank": distribute_tensor(random(1, 3), mesh, [Shard(0)]),
        "columns": distribute_tensor(random(4, 3 * world_size), mesh, [Shard(1)]),
        "replicated": distribute_tensor(random(7, 2), mesh, [Replicate()]),
        "sharded tensor": sharded_tensor.init_from_local_shards([mine], whole.size()),
        f"of rank {rank}": {"tensor": random(rank + 2), "object": {"rank": rank}},
    }


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Names and local values of everything in a state: mutable tensors, and objects."""
    if isinstance(value, Mapping):
        for key, element in value.items():
            yield from leaves(element, f"{path}/{key}")
    elif isinstance(value, list):
        for position, element in enumerate(value):
            yield from leaves(element, f"{path}/{position}")
    elif isinstance(value, DTensor):
        yield path, value.to_local()
    elif isinstance(value, sharded_tensor.ShardedTensor):
        for position, shard in enumerate(value.local_shards()):
            yield f"{path}/{position}", shard.tensor
    else:
        yield path, value


def spoil(state: State) -> None:
    """Change every tensor in place, as the next training step does."""
    with torch.no_grad():
        for _, leaf in leaves(state):
            if isinstance(leaf, torch.Tensor):
                leaf.fill_(77)


def same_bits(one: Any, other: Any) -> bool:
    """Whether two local values are the same, NaNs and signed zeros included."""
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if not isinstance(other, torch.Tensor):
        return False
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*bits)


def differing(one: State, other: State) -> list[str]:
    """Names under which two states do not hold the same."""
    left, right = dict(leaves(one)), dict(leaves(other))
    missing = left.keys() ^ right.keys()
    return sorted(
        missing | {k for k in left.keys() & right.keys() if not same_bits(left[k], right[k])}
    )


def loaded_wrong(path: Path, expected: State, template: State, **options: Any) -> list[str]:
    """Names that stock ``dcp.load`` loads wrong. Collective; ``template`` is overwritten."""
    spoil(template)
    dcp.load(template, checkpoint_id=path, **options)
    return differing(expected, template)


def holds(path: Path, seed: int) -> bool:
    """Whether stock loads exactly this small state from a checkpoint."""
    return loaded_wrong(path, small_state(seed), small_state(-1)) == []


# --- ways to save ---------------------------------------------------------------------------------


def save(path: Path, state: State) -> None:
    dcp.save(state, storage_writer=FileSystemWriterAsync(path))


def async_save_in_thread(
    path: Path, state: State, kind: AsyncCheckpointerType = AsyncCheckpointerType.THREAD
) -> None:
    """``dcp.async_save`` with the thread executor."""
    future = begin_async(FileSystemWriterAsync(path), state, async_checkpointer_type=kind)
    spoil(state)
    future.result(timeout=60)


def queue_persistent(path: Path, state: State, *, persistent: bool = True) -> None:
    """A split save through a queue that keeps its worker."""
    with AsyncCallsQueue(persistent=persistent) as queue:
        schedule(queue, path, state)
        spoil(state)


def by_hand(path: Path, state: State) -> None:
    """The split functions called one after the other."""
    _, request = planned(path, state, thread_count=2)
    if request.async_fn is not None:
        assert request.preload_fn is not None
        args = [*request.async_fn_args]
        args[1] = request.preload_fn()
        spoil(state)
        request.async_fn(*args)
    request.finalize_fns[0]()


ALONE: dict[str, Callable[[Path, State], None]] = {
    "save": save,
    "async_save_in_thread": async_save_in_thread,
    "queue_persistent": queue_persistent,
    "queue_temporal": partial(queue_persistent, persistent=False),
    "by_hand": by_hand,
    "execute_sync": lambda path, state: planned(path, state, thread_count=2)[1].execute_sync(),
}
"""Ways to save that need no process group."""
ROUTES: dict[str, Callable[[Path, State], None]] = {
    **ALONE,  # the process executor pickles writer and staged state
    "async_save_in_process": partial(async_save_in_thread, kind=AsyncCheckpointerType.PROCESS),
}


# --- a user's planner -----------------------------------------------------------------------------


class OwnPlanner(DefaultSavePlanner):
    """A user's from before ``storage_meta``: looks up in a stash, negates, pickles."""

    def set_up_planner(  # type: ignore[override]  # the signature of earlier torch versions
        self,
        state_dict: State,
        is_coordinator: bool,  # noqa: FBT001  # theirs
    ) -> None:
        super().set_up_planner(state_dict, is_coordinator=is_coordinator)
        self.looked_up: list[str] = []

    def lookup_object(self, index: MetadataIndex) -> Any:
        self.looked_up.append(index.fqn)
        return super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # DCP's name
        if write_item.type == WriteItemType.BYTE_IO:
            return super().transform_object(write_item, ("wrapped", object))
        return -object if object.is_floating_point() else object


def own_planner(out: Path, make_state: Callable[[], State]) -> dict[str, Any]:
    """Save with a user's planner in three ways; what differs from what stock saves with it."""
    for name, writer in (("stock", FileSystemWriter), ("save", FileSystemWriterAsync)):
        dcp.save(make_state(), storage_writer=writer(out / name), planner=OwnPlanner())
    planner = OwnPlanner()
    with AsyncCallsQueue() as queue:
        schedule(queue, out / "split", make_state(), planner=planner)
    stock = blobs(out / "stock")
    return {
        "save": blobs(out / "save") == stock,
        "split": blobs(out / "split") == stock,
        "transformed": stock != blobs(out / "plain"),
        "looked up": sorted(planner.looked_up),
    }


# --- without collectives --------------------------------------------------------------------------


def without_collectives(out: Path, rank: int) -> dict[str, Any]:
    """Save and load a state of this rank's own with ``use_collectives=False``."""
    for kind, writer in (("stock", FileSystemWriter), ("ours", FileSystemWriterAsync)):
        dcp.save(small_state(rank), storage_writer=writer(out / kind), use_collectives=False)
    ours, stock = ((out / kind / f"__{rank}_0.distcp").read_bytes() for kind in ("ours", "stock"))
    return {
        "same": ours == stock,
        "shared metadata": (out / "ours" / ".metadata").exists(),
        "wrong": loaded_wrong(out / "ours", small_state(rank), small_state(rank)),
    }


def the_slowest_rank_is_named(out: Path) -> dict[str, Any]:
    """A save for which rank 1's device takes half a second more, and lines in the log."""
    logger, lines = logging.getLogger("nostall"), io.StringIO()
    logger.addHandler(logging.StreamHandler(lines))
    logger.setLevel(logging.INFO)
    faults = [Fault.delay("fsync", 0.5)] if dist.get_rank() == 1 else []
    with inject(*faults), AsyncCallsQueue() as queue:
        writer, request = planned(out, group_state(3), thread_count=2)
        queue.schedule_async_request(request)
    assert writer.stats is not None
    return {"slowest": writer.stats.slowest_rank, "lines": lines.getvalue().count("\n")}


# --- another torch --------------------------------------------------------------------------------


def a_torch_that_lacks_the_rest_saves_the_same(out: Path) -> dict[str, list[str]]:
    """Differences from stock, by path, after two saves in each of three ways. Collective."""
    _torch._foreach_copy = None
    _torch._get_default_store = None
    _torch.without_modes = nullcontext
    _torch.KNOWS_DTENSORS = False
    wrong = {}
    for seed in (1, 2):
        stock = out / f"stock-{seed}"
        dcp.save(group_state(seed), storage_writer=FileSystemWriter(stock))
        for way in (save, async_save_in_thread, queue_persistent):
            path = out / f"{way.__name__}-{seed}"
            way(path, group_state(seed))
            dist.barrier()
            found = loaded_wrong(path, group_state(seed), group_state(seed))
            found += ["bytes differ"] * (blobs(path) != blobs(stock))
            if found:
                wrong[path.name] = found
    return wrong


# --- the program ----------------------------------------------------------------------------------


def everything(out: Path) -> dict[str, Any]:
    """Save in every way on all ranks of the default group."""

    def make_state() -> State:
        return group_state(seed=3)

    dcp.save(make_state(), storage_writer=FileSystemWriter(out / "stock"))
    stock = blobs(out / "stock")
    routes = {}
    for name, route in ROUTES.items():
        route(out / name, make_state())
        dist.barrier()
        routes[name] = {
            "same as stock": blobs(out / name) == stock,
            "wrong": loaded_wrong(out / name, make_state(), make_state()),
        }
    save(out / "own planner" / "plain", make_state())
    return {
        "routes": routes,
        "items": sorted({fqn for fqn, _ in stock}),
        "own planner": own_planner(out / "own planner", make_state),
        "without collectives": without_collectives(out / "without collectives", dist.get_rank()),
        **the_slowest_rank_is_named(out / "slowest"),
    }
