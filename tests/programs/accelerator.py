"""Checks of saves off an accelerator and loads onto it, as functions that need no test runner.

Each takes an empty directory and a device, and fails with an ``AssertionError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import nostall
from nostall._engine import default_engine
from nostall._memory.devices import pin
from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.filesystem_reader import Verify
from nostall.state_dict_saver import CheckpointMetadataCache
from programs.entry_points import differing, same_bits
from support.faults import writer_pids
from support.states import begin_async, blobs, schedule

Check = Callable[[Path, str], None]
_ELEMENTS = {"cuda": 16 << 20, "cpu": 1 << 12}
"""Enough to keep a device busy for milliseconds when a save is asked for."""


def state_on(device: str, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    large = torch.randn(_ELEMENTS[device], generator=generator)
    return {
        "large": large.to(device),
        "transposed": torch.randn(30, 40, generator=generator).to(device).t(),
        "half": torch.randn(1000, generator=generator).to(device, torch.bfloat16),
        "step": torch.tensor(float(seed), device=device),
        "on the host": torch.randn(300_000, generator=generator),
    }


def by_stock(path: Path, state: dict[str, Any]) -> dict[tuple[str, tuple[int, ...]], bytes]:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return blobs(path)


def grown(state: dict[str, Any]) -> dict[str, Any]:
    """The state after many kernels, most of which are still to run when this returns."""
    for _ in range(200):
        state["large"].mul_(1.001)
    return state


def on_each_stream(device: str) -> Iterator[AbstractContextManager[Any]]:
    """The current stream, and one of the user's own where there are streams."""
    module = torch.get_device_module(device)
    yield nullcontext()
    module.synchronize()
    if device != "cpu":
        yield module.stream(module.Stream())
        module.synchronize()


def a_save_comes_between_the_kernels_before_it_and_those_after(out: Path, device: str) -> None:
    """In first saves and known ones, with either staging, on whichever stream is current."""
    for number, stream in enumerate(on_each_stream(device)):
        for staging in ("blocking", "overlapped"):
            cache, saved = CheckpointMetadataCache(), out / f"{number} {staging}"
            for seed in range(4):
                with AsyncCallsQueue() as queue, stream:
                    state = grown(state_on(device, seed))
                    schedule(queue, saved / f"{seed}", state, cache=cache, staging=staging)
                    nostall.wait_staged()
                    state["large"].zero_()
                stock = by_stock(saved / f"stock {seed}", grown(state_on(device, seed)))
                assert blobs(saved / f"{seed}") == stock


def stocks_calls_save_what_stock_saves(out: Path, device: str) -> None:
    """``dcp.save`` and ``dcp.async_save``, and stock loads it back onto the device bit by bit."""
    stock = by_stock(out / "stock", state_on(device, 7))
    dcp.save(state_on(device, 7), storage_writer=FileSystemWriterAsync(out / "save"), no_dist=True)
    state = state_on(device, 7)
    saved = begin_async(FileSystemWriterAsync(out / "async"), state, no_dist=True)
    state["large"].zero_()
    saved.result()
    for name in ("save", "async"):
        assert blobs(out / name) == stock
        loaded = state_on(device, 8)
        dcp.load(loaded, checkpoint_id=out / name, no_dist=True)
        assert differing(loaded, state_on(device, 7)) == []


def optimizers_wait_for_the_copy(out: Path, device: str) -> None:
    """Steps, fused ones, too, and forward passes come after the overlapped copy by themselves."""
    torch.manual_seed(0)
    width = 4096 if device == "cuda" else 512
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    kept: list[dict[str, Any]] = []
    with AsyncCallsQueue() as queue:
        for number in range(12):
            if number % 3 == 0:
                state = {"model": model.state_dict()}
                kept.append(deepcopy(state))
                schedule(queue, out / f"{number}", state, staging="overlapped")
            model(torch.randn(8, width, device=device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for position, before in enumerate(kept):
        loaded = {"model": {name: torch.zeros_like(each) for name, each in before["model"].items()}}
        dcp.load(loaded, checkpoint_id=out / f"{3 * position}", no_dist=True)
        assert differing(loaded, before) == []


def _by_reader(path: Path, state: dict[str, Any], verify: Verify) -> None:
    reader = nostall.FileSystemReader(path, verify=verify)
    dcp.load(state, storage_reader=reader, no_dist=True)


def _by_load(path: Path, state: dict[str, Any], verify: Verify) -> None:
    nostall.load(state, path, verify=verify)


LOADS = (_by_reader, _by_load)


def _with_small_ones(device: str, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    small = {f"small {n}": torch.randn(n, 7, generator=generator) for n in range(1, 100)}
    flags = {"flags": torch.randn(99, generator=generator) > 0, "count": torch.tensor(seed)}
    on_device = {name: each.to(device) for name, each in (small | flags).items()}
    return state_on(device, seed) | on_device


def loads_fill_tensors_of_the_device(out: Path, device: str) -> None:
    """Bit by bit, after kernels that are still to write to them, on whichever stream is current."""
    saved = _with_small_ones(device, 7)
    by_stock(out, saved)
    verifications: tuple[Verify, ...] = ("none", "crc")
    for load, verify in product(LOADS, verifications):
        for stream in on_each_stream(device):
            with stream:
                state = grown(_with_small_ones(device, 8))
                load(out, state, verify)
                assert differing(state, saved) == []


def loads_convert_to_the_form_of_their_targets(out: Path, device: str) -> None:
    """Other dtypes and layouts, of large tensors and of small ones."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"large": (700, 900), "small": (7, 9)}
    saved = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    by_stock(out, {name: each.to(device) for name, each in saved.items()})
    for load, dtype, name in product(LOADS, (torch.float32, torch.bfloat16), shapes):
        rows, columns = shapes[name]
        targets = [
            torch.zeros(rows, columns, dtype=dtype, device=device),
            torch.zeros(columns, rows, dtype=dtype, device=device).t(),
            torch.zeros(rows, 2 * columns, dtype=dtype, device=device)[:, ::2],
        ]
        for target in targets:
            load(out, {name: target}, "none")
            assert same_bits(target.cpu(), saved[name].to(dtype))


def loads_of_shards_take_their_slices(out: Path, device: str) -> None:
    """One of four ranks loads its rows or columns of a matrix, also into another dtype."""
    generator = torch.Generator().manual_seed(2)
    saved = torch.randn(640, 1200, generator=generator)
    by_stock(out, {"matrix": saved.to(device)})
    rank, count = 1, 4
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        mesh = init_device_mesh(device, (count,))
        for load, dimension, dtype in product(LOADS, (0, 1), (torch.float32, torch.bfloat16)):
            expected = saved.chunk(count, dimension)[rank].to(dtype)
            local = torch.zeros(expected.shape, dtype=dtype, device=device)
            form: dict[str, Any] = {"shape": saved.shape, "stride": saved.stride()}
            sharded = DTensor.from_local(local, mesh, [Shard(dimension)], run_check=False, **form)
            load(out, {"matrix": sharded}, "none")
            assert same_bits(sharded.to_local().cpu(), expected)
    finally:
        dist.destroy_process_group()


def loads_keep_no_device_memory(out: Path, device: str) -> None:
    """After a load that converts, the device holds what it held before."""
    state = state_on(device)
    by_stock(out, state)
    target = {"large": torch.zeros(_ELEMENTS[device], dtype=torch.float64, device=device)}
    before = torch.cuda.memory_allocated()
    nostall.load(target, out)
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(target["large"], state["large"].double())


def no_device_memory_is_kept(out: Path, device: str) -> None:
    """After the save the device holds what it held before; the writer has loaded no driver."""
    state = state_on(device)
    before = torch.cuda.memory_allocated()
    with AsyncCallsQueue() as queue:
        schedule(queue, out / "save", state, staging="overlapped")
        nostall.wait_staged()
        queue.wait()
    assert torch.cuda.memory_allocated() == before
    for pid in writer_pids():
        assert "libcuda" not in Path(f"/proc/{pid}/maps").read_text()


def snapshot_memory_is_pinned(out: Path, device: str) -> None:
    """Copies off the device go at the speed of its copy engines."""
    with AsyncCallsQueue() as queue:
        schedule(queue, out / "save", state_on(device))
    lease = default_engine().lease(1)
    memory = torch.frombuffer(lease.block.memory, dtype=torch.uint8, count=64)
    assert memory.is_pinned()
    lease.release()


def memory_that_cannot_be_pinned_is_no_kernels_fault(out: Path, device: str) -> None:
    """CUDA's refusal to pin memory does not surface when the next kernel is launched."""
    torch.ones(3, device=device)  # CUDA is in use, or nothing is pinned
    with suppress(RuntimeError):
        pin(4096, 4096)  # nothing is mapped there
        raise AssertionError("it was not refused")
    assert torch.ones(3, device=device).add_(1).sum().item() == 6


ANYWHERE: tuple[Check, ...] = (
    a_save_comes_between_the_kernels_before_it_and_those_after,
    stocks_calls_save_what_stock_saves,
    optimizers_wait_for_the_copy,
    loads_fill_tensors_of_the_device,
    loads_convert_to_the_form_of_their_targets,
    loads_of_shards_take_their_slices,
)
"""These hold without an accelerator, too, where they say less."""
WITH_CUDA: tuple[Check, ...] = (
    no_device_memory_is_kept,
    snapshot_memory_is_pinned,
    memory_that_cannot_be_pinned_is_no_kernels_fault,
    loads_keep_no_device_memory,
)
