"""Ranks that load one checkpoint together, and count what each of them reads."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import nostall
from nostall import _torch, filesystem_reader
from nostall._read.sharing import share
from nostall._storage.posix import PosixStorage
from nostall.errors import NostallError, OptionError
from support.reads import CountedSource
from support.states import read_metadata, small_state

Facts = dict[str, Any]
GROUP_TIMEOUT_S = 40
"""After which ranks that wait for each other give up: later than any test allows."""
in_small_rounds = partial(share, round_nbytes=3 << 20)
"""So that a few megabytes take several rounds."""
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)


def everything(out: Path) -> Facts:
    """All of the following, in directories of their own."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    assert group is not None
    scenarios: list[Callable[[Path, dist.ProcessGroup], Any]] = [
        replicated,
        pairs,
        by_columns,
        own_and_common,
        every_second,
        unreadable,
        failing_planners,
        flipped,
        wrong_use,
    ]
    found = {}
    for scenario in scenarios:
        directory = out / scenario.__name__
        directory.mkdir(exist_ok=True)
        dist.barrier()
        with patch.object(filesystem_reader, "share", in_small_rounds):
            found[scenario.__name__] = scenario(directory, group)
    return found


# --- what ranks read ------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[list[int]]:
    """The lengths of all reads of shard files in the block."""
    counts: list[int] = []

    class Counting(PosixStorage):
        def open(self, name: str) -> Any:
            source = super().open(name)
            return CountedSource(source, counts) if name.endswith(".distcp") else source

    with patch.multiple(filesystem_reader, PosixStorage=Counting, UncachedFiles=Counting):
        yield counts


def load(
    state: Facts,
    path: Path,
    group: dist.ProcessGroup | None,
    *,
    planner: Any = None,
    **options: Any,
) -> int:
    """Load with a reader that shares in the group; how many bytes this rank has read."""
    reader = nostall.FileSystemReader(path, process_group=group, **options)
    with counted() as counts:
        dcp.load(state, storage_reader=reader, process_group=group, planner=planner)
    return sum(counts)


def save_once(path: Path, state: Facts) -> int:
    """Rank 0 saves alone; the length of all shard files."""
    if dist.get_rank() == 0:
        writer = nostall.FileSystemWriterAsync(path, sync_files=False)
        dcp.save(state, storage_writer=writer, no_dist=True)
    dist.barrier()
    return shard_nbytes(path)


def shard_nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


def empty_like(value: Any) -> Any:
    """A state of the same structure, with other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: empty_like(each) for key, each in value.items()}
    return [empty_like(each) for each in value] if isinstance(value, list) else None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, DTensor):
        return same(one.to_local(), other.to_local())
    if isinstance(one, torch.Tensor):
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def some_state() -> Facts:
    """Small and large tensors of several dtypes, one larger than a round, and objects."""
    state: Facts = small_state()
    for number, dtype in enumerate(DTYPES):
        state[f"small {dtype}"] = (torch.arange(15) % 2).to(dtype)
        state[f"large {dtype}"] = (torch.arange(300_000 + number) % 2).to(dtype).reshape(-1, 1)
    state["larger than a round"] = torch.arange(1 << 20)
    state["large object"] = "x" * 400_000
    return state


def replicated(out: Path, group: dist.ProcessGroup) -> Facts:
    """One state on all ranks, with and without a group, and with all options."""
    state = some_state()
    found: Facts = {"stored": save_once(out, state)}
    for name, options in (("plain", {}), ("crc", {"verify": "crc"}), ("thread", {"threads": 1})):
        loaded = empty_like(state)
        found[name] = {"read": load(loaded, out, group, **options), "same": same(loaded, state)}
    loaded = empty_like(state)
    found["alone"] = {"read": load(loaded, out, None), "same": same(loaded, state)}
    reader = nostall.CachedMetadataFileSystemReader(out, process_group=group)
    loaded = empty_like(state)
    with counted() as counts:
        dcp.load(loaded, storage_reader=reader)  # with the default group, of the same ranks
    found["cached"] = {"read": sum(counts), "same": same(loaded, state)}
    loaded = empty_like(state)
    with counted() as counts:
        nostall.load(loaded, out, process_group=group, read_once=True)
    found["nostall.load"] = {"read": sum(counts), "same": same(loaded, state)}
    return found


def pairs(out: Path, group: dist.ProcessGroup) -> Facts:
    """HSDP: shards over two ranks, each on half of the ranks; saved by all of them."""
    half = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("replicate", "shard"))
    state = {
        f"x{number}": distribute_tensor(
            torch.arange(number * 10, number * 10 + 400_000).reshape(400, 1000),
            mesh,
            [Replicate(), Shard(0)],
        )
        for number in range(4)
    }
    writer = nostall.FileSystemWriterAsync(out, sync_files=False)
    dcp.save(state, storage_writer=writer)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    read = load(loaded, out, group)
    return {"stored": shard_nbytes(out), "read": read, "same": same(loaded, state)}


def by_columns(out: Path, group: dist.ProcessGroup) -> Facts:
    """Each rank gets other columns of what is stored as a whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(1_600_000).reshape(400, 4000)
    stored = save_once(out, {"x": whole})
    loaded = {"x": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)])}
    read = load(loaded, out, group)
    is_same = same(loaded, {"x": distribute_tensor(whole, mesh, [Shard(1)])})
    loaded = {"x": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)])}
    alone = load(loaded, out, group)
    return {"stored": stored, "read": read, "same": is_same, "rows": alone}


def own_and_common(out: Path, group: dist.ProcessGroup) -> Facts:
    """Something of each rank beside what all have, and on rank 0 a subset of it."""
    rank = dist.get_rank()
    common = {f"common {number}": torch.arange(300_000 + number) for number in range(3)}
    own = {f"of {each}": torch.full((300_000,), each) for each in range(dist.get_world_size())}
    stored = save_once(out, {**common, **own, "object": "x" * 1000})
    mine: Facts = {**common, f"of {rank}": own[f"of {rank}"]}
    if rank == 0:
        del mine["common 1"]
    loaded = empty_like(mine)
    return {"stored": stored, "read": load(loaded, out, group), "same": same(loaded, mine)}


def every_second(out: Path, group: dist.ProcessGroup) -> Facts:
    """Small tensors with others between them that nobody wants."""
    state = {f"x{number:04}": torch.full((2000,), number) for number in range(500)}
    save_once(out, state)
    mine = dict(list(state.items())[::2])
    loaded = empty_like(mine)
    read = load(loaded, out, group)
    places = read_metadata(out).storage_data
    wanted = sum(place.length for index, place in places.items() if index.fqn in mine)
    return {"stored": wanted, "read": read, "same": same(loaded, mine)}


# --- failures -------------------------------------------------------------------------------------


def error_of(call: Callable[[], Any]) -> Facts:
    """A call's failures by rank, and its duration in seconds."""
    began_s = time.monotonic()
    failures: Facts = {}
    try:
        call()
    except CheckpointException as error:
        failures = {
            str(rank): f"{type(each).__name__}: {each}"
            for rank, (each, _) in error.failures.items()
        }
    except (NostallError, RuntimeError) as error:
        failures = {"here": f"{type(error).__name__}: {error}"}
    return {"failures": failures, "took_s": time.monotonic() - began_s}


def unreadable(out: Path, group: dist.ProcessGroup) -> Facts:
    """The last rank sees a shorter file than the others, or none; then it is there again."""
    state = {f"x{number}": torch.arange(400_000) for number in range(4)}
    save_once(out / "whole", state)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if is_last:
        for name in ("short", "none"):
            shutil.copytree(out / "whole", out / name)
        os.truncate(out / "short" / "__0_0.distcp", 9 << 20)
        (out / "none" / "__0_0.distcp").unlink()
    dist.barrier()
    found = {}
    for name in ("short", "none", "whole"):
        path = out / (name if is_last else "whole")
        loaded = empty_like(state)
        found[name] = error_of(partial(load, loaded, path, group))
        found[name]["same"] = same(loaded, state)
    return found


class Failing(DefaultLoadPlanner):
    """Raises for one item; its other calls are counted."""

    def __init__(self, name: str, error: type[BaseException]) -> None:
        super().__init__()
        self._name, self._error = name, error

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if read_item.storage_index.fqn == self._name:
            raise self._error(self._name)


def failing_planners(out: Path, group: dist.ProcessGroup) -> Facts:
    """On rank 1 alone: in the first round, in the last one, and by Ctrl-C."""
    state = {f"x{number}": torch.arange(400_000 + number) for number in range(4)}
    save_once(out, state)
    found = {}
    for name, item, kind in (
        ("first", "x0", ZeroDivisionError),
        ("last", "x3", ZeroDivisionError),
        ("interrupt", "x1", KeyboardInterrupt),
    ):
        planner = Failing(item, kind) if dist.get_rank() == 1 else None
        found[name] = error_of(partial(load, empty_like(state), out, group, planner=planner))
    return found


def flipped(out: Path, group: dist.ProcessGroup) -> Facts:
    """A bit of a large tensor, and one of a small tensor."""
    state = {"large": torch.arange(400_000), "small": torch.full((9,), 0x0123456789)}
    save_once(out, state)
    file = out / "__0_0.distcp"
    whole = file.read_bytes()
    found = {}
    dist.barrier()
    for name, values in (("large", state["large"][300_000:300_002]), ("small", state["small"][:2])):
        if dist.get_rank() == 0:
            damaged = bytearray(whole)
            damaged[whole.index(values.numpy().tobytes())] ^= 1
            file.write_bytes(damaged)
        dist.barrier()
        found[name] = error_of(partial(load, empty_like(state), out, group, verify="crc"))
        dist.barrier()
    return found


def wrong_use(out: Path, group: dist.ProcessGroup) -> Facts:
    """A reader without the group on one rank, with a smaller group, and under ``no_dist``."""
    rank = dist.get_rank()
    state = {"x": torch.arange(400_000)}
    save_once(out, state)

    def with_reader(own: dist.ProcessGroup | None, *, no_dist: bool = False) -> Facts:
        loaded = empty_like(state)
        with counted() as counts:

            def call() -> None:
                reader = nostall.FileSystemReader(out, process_group=own)
                where = None if no_dist else group
                dcp.load(loaded, storage_reader=reader, process_group=where, no_dist=no_dist)

            found = error_of(call)
        return {**found, "read": sum(counts), "same": same(loaded, state)}

    alone = dist.new_subgroups(1)[0]
    other = dist.new_group([0])
    found = {
        "not on rank 0": with_reader(group if rank else None),
        "only on rank 0": with_reader(None if rank else group),
        "smaller": with_reader(alone),
        "no_dist": with_reader(group, no_dist=True),
    }
    try:
        nostall.FileSystemReader(out, process_group=other)
    except OptionError as error:
        found["not in it"] = {"error": str(error)}
    on_accelerator = torch.device("cuda", 0)
    with patch.object(_torch, "device_for_collectives", lambda _: on_accelerator):
        found["no CPU"] = error_of(partial(nostall.FileSystemReader, out, process_group=group))
    return found


def lost(out: Path) -> Facts:
    """The last rank ends in the middle of a load."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    state = {f"x{number}": torch.arange(400_000 + number) for number in range(4)}
    save_once(out, state)
    is_last = dist.get_rank() == dist.get_world_size() - 1

    class Ending(DefaultLoadPlanner):
        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            if is_last:
                os._exit(0)

    with patch.object(filesystem_reader, "share", in_small_rounds):
        return error_of(partial(load, empty_like(state), out, group, planner=Ending()))
