"""Loads into tensors of an accelerator: the values are there when the planner is called.

The accelerator is a fake, which does its work as late as streams and events allow.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

import nostall
from nostall.errors import DamagedCheckpointError
from nostall.filesystem_reader import Verify
from support import reads
from support.fake_accelerator import FakeAccelerator

LARGE = 300 << 10
"""Elements of a tensor that is read alone, in one part."""


def save(path: Path) -> dict[str, torch.Tensor]:
    seeded = torch.Generator().manual_seed(0)
    state = {
        "large": torch.randn(LARGE, generator=seeded),
        "in parts": torch.randn(5, 1 << 21, generator=seeded),
        "matrix": torch.randn(600, 500, generator=seeded).to(torch.bfloat16),
        "count": torch.tensor(3, dtype=torch.int64),
        "flags": torch.rand(77, generator=seeded) > 0.5,
        **{f"small {n}": torch.randn(n, 9, generator=seeded) for n in range(1, 40)},
    }
    reads.save(path, state)
    return state


def blank(fake: FakeAccelerator, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors on the device that kernels, which are still queued, write to."""
    return {
        name: torch.empty(each.shape, dtype=each.dtype, device=fake.device).fill_(0)
        for name, each in state.items()
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether tensors, wherever they are, have these values."""
    return reads.same({name: each.cpu() for name, each in found.items()}, expected)


class Watching(DefaultLoadPlanner):
    """Looks at each tensor when it is committed, as a kernel of the current stream would."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, torch.Tensor] = {}

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.seen[read_item.dest_index.fqn] = tensor.cpu()


@pytest.mark.parametrize("verify", ["none", "crc"])
def test_the_planner_gets_the_values(tmp_path: Path, fake: FakeAccelerator, verify: Verify) -> None:
    """Work that a planner enqueues on a commit sees the values, and so does all later work."""
    state, planner = save(tmp_path), Watching()
    targets = blank(fake, state)
    reads.load(targets, tmp_path, planner, verify=verify)
    assert same(planner.seen, state)
    assert same(targets, state)
    gc.collect()
    assert (fake.faults, fake.pinned_nbytes) == ([], 0)
    assert fake.most_pinned_nbytes <= 128 << 20


@pytest.mark.parametrize("mode", [torch.inference_mode, nullcontext])
def test_load_fills_tensors_of_the_device(
    tmp_path: Path, fake: FakeAccelerator, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    """In inference mode, too; small tensors of a dtype go there together, not one by one."""
    state = save(tmp_path)
    with mode():
        targets = blank(fake, state)
        nostall.load(targets, tmp_path)
        assert same(targets, state)
    large_copies = 1 + 3 + 1
    small_dtypes = 3
    assert len(fake.copies) == large_copies + small_dtypes


FORMS: dict[str, tuple[torch.dtype, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "wider dtype": (torch.float64, (600, 500), lambda empty: empty),
    "transposed": (torch.bfloat16, (500, 600), lambda empty: empty.t()),
    "with gaps": (torch.bfloat16, (600, 1000), lambda empty: empty[:, ::2]),
}


@pytest.mark.parametrize("form", FORMS)
def test_targets_of_other_forms_are_converted_on_the_device(
    tmp_path: Path, fake: FakeAccelerator, form: str
) -> None:
    """The stored bytes are sent as they are."""
    matrix, (dtype, shape, view) = save(tmp_path)["matrix"], FORMS[form]
    target, planner = view(torch.empty(shape, dtype=dtype, device=fake.device).fill_(0)), Watching()
    reads.load({"matrix": target}, tmp_path, planner)
    assert torch.equal(planner.seen["matrix"], matrix.to(dtype))
    assert torch.equal(target.cpu(), matrix.to(dtype))
    assert fake.copies == [matrix.nbytes]


def test_values_are_converted_on_the_cpu_if_the_device_is_full(tmp_path: Path) -> None:
    """A load needs no device memory beside its targets."""
    state = save(tmp_path)
    with FakeAccelerator() as fake:
        target = torch.empty((600, 500), dtype=torch.float64, device=fake.device)
        fake.free_nbytes = 1 << 10
        nostall.load({"matrix": target}, tmp_path)
        assert torch.equal(target.cpu(), state["matrix"].double())
        assert fake.most_pinned_nbytes == 0


def test_devices_without_a_module_are_copied_to(tmp_path: Path) -> None:
    """A device type without a torch module is filled by plain copies, without pinned memory."""
    state = save(tmp_path)
    with FakeAccelerator(has_module=False) as fake:
        targets = blank(fake, state)
        nostall.load(targets, tmp_path)
        assert same(targets, state)
        assert fake.most_pinned_nbytes == 0


def test_a_load_that_fails_waits_for_its_copies(tmp_path: Path, fake: FakeAccelerator) -> None:
    """Then its pinned memory is released, and the targets are the caller's again."""
    state = save(tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    at = file.read_bytes().index(bytes(state["in parts"].view(torch.uint8)[-1, -64:].tolist()))
    targets = blank(fake, state)
    with reads.flipped(file, at), pytest.raises(DamagedCheckpointError, match="in parts"):
        nostall.load(targets, tmp_path, verify="crc")
    for target in targets.values():
        target.zero_()
    gc.collect()
    assert (fake.faults, fake.pinned_nbytes) == ([], 0)
    assert all(not target.cpu().any() for target in targets.values())


class OneBuffer(Watching):
    """Has all tensors of one length loaded into the same memory, one after the other."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self._buffer = buffer

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._buffer


@pytest.mark.parametrize("count", [100, LARGE])
def test_planners_may_use_one_buffer_of_the_device(
    tmp_path: Path, fake: FakeAccelerator, count: int
) -> None:
    """No upload writes to it before the planner has seen what was there before."""
    state = {f"{number}": torch.full((count,), float(number)) for number in range(6)}
    reads.save(tmp_path, state)
    planner = OneBuffer(torch.empty((count,), dtype=torch.float32, device=fake.device))
    reads.load({name: torch.zeros(count) for name in state}, tmp_path, planner)
    assert same(planner.seen, state)
