"""Ranks that load one checkpoint together, and count what each of them reads."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import nostall
from nostall import _torch
from nostall._read import sharing
from nostall.errors import NostallError, OptionError
from support import reads
from support.reads import counted, empty_like, same, save
from support.states import read_metadata, small_state

Facts = dict[str, Any]
GROUP_TIMEOUT_S = 40
"""After which ranks that wait for each other give up: later than any test allows."""
in_small_rounds = partial(sharing.share_reads, round_nbytes=3 << 20)
"""So that a few megabytes take several rounds."""
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)


def everything(out: Path) -> Facts:
    """All of the following, in directories of their own."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    assert group is not None
    scenarios: list[Callable[[Path, dist.ProcessGroup], Any]] = [
        *(replicated, pairs, by_columns, own_and_common, every_second, resharded),
        *(unreadable, failing_planners, flipped, wrong_use),
    ]
    found = {}
    for scenario in scenarios:
        directory = out / scenario.__name__
        directory.mkdir(exist_ok=True)
        dist.barrier()
        with patch.object(sharing, "share_reads", in_small_rounds):
            found[scenario.__name__] = scenario(directory, group)
    return found


def load(
    state: Facts, path: Path, group: dist.ProcessGroup | None, planner: Any = None, **options: Any
) -> None:
    reader = nostall.FileSystemReader(path, process_group=group, **options)
    dcp.load(state, storage_reader=reader, process_group=group, planner=planner)


def facts_of(way: Callable[[Facts], object], expected: Facts) -> Facts:
    """Load a state; how many bytes this rank has read, and whether it has what was expected."""
    loaded = empty_like(expected)
    with counted() as counts:
        way(loaded)
    return {"read": sum(counts), "same": same(loaded, expected)}


def save_once(path: Path, state: Facts) -> int:
    """Rank 0 saves alone; the length of all shard files."""
    if dist.get_rank() == 0:
        save(path, state)
    dist.barrier()
    return shard_nbytes(path)


def shard_nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


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
    cached = nostall.CachedMetadataFileSystemReader(out, process_group=group)
    ways: dict[str, Callable[[Facts], object]] = {
        "plain": lambda loaded: load(loaded, out, group),
        "crc": lambda loaded: load(loaded, out, group, verify="crc"),
        "thread": lambda loaded: load(loaded, out, group, threads=1),
        "alone": lambda loaded: load(loaded, out, None),
        # With the default group, of the same ranks.
        "cached": lambda loaded: dcp.load(loaded, storage_reader=cached),
        "nostall.load": lambda loaded: nostall.load(
            loaded, out, process_group=group, read_once=True
        ),
    }
    return found | {name: facts_of(way, state) for name, way in ways.items()}


def pairs(out: Path, group: dist.ProcessGroup) -> Facts:
    """HSDP: shards over two ranks, each on half of the ranks; saved by all of them."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    wholes = [torch.arange(at, at + 400_000).reshape(400, 1000) for at in range(0, 40, 10)]
    state = {
        f"x{number}": distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
        for number, whole in enumerate(wholes)
    }
    dcp.save(state, storage_writer=nostall.FileSystemWriterAsync(out, sync_files=False))
    found = facts_of(lambda loaded: load(loaded, out, group), state)
    return {"stored": shard_nbytes(out), **found}


def by_columns(out: Path, group: dist.ProcessGroup) -> Facts:
    """Each rank gets other columns of what is stored as a whole; and once other rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(1_600_000).reshape(400, 4000)
    stored = save_once(out, {"x": whole})
    rows, columns = (
        facts_of(
            lambda loaded: load(loaded, out, group),
            {"x": distribute_tensor(whole, mesh, [Shard(dimension)])},
        )
        for dimension in (0, 1)
    )
    return {"stored": stored, **columns, "rows": rows}


def own_and_common(out: Path, group: dist.ProcessGroup) -> Facts:
    """Something of each rank beside what all have, and on rank 0 a subset of it."""
    rank = dist.get_rank()
    common = {f"common {number}": torch.arange(300_000 + number) for number in range(3)}
    own = {f"of {each}": torch.full((300_000,), each) for each in range(dist.get_world_size())}
    stored = save_once(out, {**common, **own, "object": "x" * 1000})
    mine: Facts = {**common, f"of {rank}": own[f"of {rank}"]}
    if rank == 0:
        del mine["common 1"]
    return {"stored": stored, **facts_of(lambda loaded: load(loaded, out, group), mine)}


def every_second(out: Path, group: dist.ProcessGroup) -> Facts:
    """Small tensors with others between them that nobody wants."""
    state = {f"x{number:04}": torch.full((2000,), number) for number in range(500)}
    save_once(out, state)
    mine = dict(list(state.items())[::2])
    places = read_metadata(out).storage_data
    wanted = sum(place.length for index, place in places.items() if index.fqn in mine)
    return {"stored": wanted, **facts_of(lambda loaded: load(loaded, out, group), mine)}


def resharded(out: Path, group: dist.ProcessGroup) -> list[str]:
    """DTensors that are loaded in another placement, in every way; what was wrong."""
    count = dist.get_world_size()
    line = init_device_mesh("cpu", (count,))
    square = init_device_mesh("cpu", (2, count // 2))
    placements: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "both": (square, [Shard(0), Shard(1)]),
        "replicated": (square, [Replicate(), Shard(0)]),
    }
    wholes: Facts = {
        "small": torch.arange(35.0).reshape(7, 5),
        "few rows": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "one row": torch.arange(9).reshape(1, 9),
        "large": torch.arange(301 * 703.0).reshape(301, 703),
    }
    states: dict[str, Facts] = {
        name: {key: distribute_tensor(whole, *where) for key, whole in wholes.items()}
        for name, where in placements.items()
    }
    states["whole"] = wholes
    names, wrong = list(states), []
    for saved, wanted in zip(names, [*names[1:], names[0]], strict=True):
        path = out / saved
        writer = nostall.FileSystemWriterAsync(path, sync_files=False)
        dcp.save(states[saved], storage_writer=writer)
        ways: dict[str, Callable[[Facts], object]] = {
            "alone": partial(load, path=path, group=None, verify="crc"),
            "shared": partial(load, path=path, group=group),
            "nostall.load": partial(nostall.load, path=path),
            "together": partial(nostall.load, path=path, process_group=group, read_once=True),
        }
        for name, way in ways.items():
            if not facts_of(way, states[wanted])["same"]:
                wrong.append(f"{saved} to {wanted}, {name}")
        if not facts_of(ways["nostall.load"], wholes)["same"]:
            wrong.append(f"{saved} to plain tensors")
    return wrong


def error_of(call: Callable[[], object]) -> Facts:
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
    def __init__(self, name: str, error_of: Callable[[str], BaseException]) -> None:
        super().__init__()
        self._name, self._error_of = name, error_of

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if read_item.storage_index.fqn == self._name:
            raise self._error_of(self._name)


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
    for name, values in (("large", state["large"][300_000:300_002]), ("small", state["small"][:2])):
        at = whole.index(values.numpy().tobytes())
        dist.barrier()
        with reads.flipped(file, at) if dist.get_rank() == 0 else nullcontext():
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

    found = {
        "not on rank 0": with_reader(group if rank else None),
        "only on rank 0": with_reader(None if rank else group),
        "smaller": with_reader(dist.new_subgroups(1)[0]),
        "no_dist": with_reader(group, no_dist=True),
    }
    other = dist.new_group([0])
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
    planner = Failing("x0", lambda _: os._exit(0)) if is_last else None
    with patch.object(sharing, "share_reads", in_small_rounds):
        return error_of(partial(load, empty_like(state), out, group, planner=planner))
