"""Saves off an accelerator: what is copied, when, and what is left on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import nostall
from nostall._runtime import default_engine
from nostall.core import AsyncCallsQueue
from nostall.state_dict_saver import CheckpointMetadataCache
from nostall.testing import writer_pids
from states import blobs, schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator here"),
]


def state_on(device: str, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    large = torch.randn(4 << 20, generator=generator)
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


@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
def test_what_is_saved_is_what_the_stream_had_come_to(tmp_path: Path, staging: str) -> None:
    """Kernels told before the call are seen, those told after it is safe are not; first saves and known ones."""
    cache = CheckpointMetadataCache()
    with AsyncCallsQueue() as queue:
        for number in range(5):
            state = state_on("cuda", number)
            for _ in range(20):  # the stream is busy when the save is asked for
                state["large"].mul_(1.01)
            schedule(queue, tmp_path / f"{number}", state, cache=cache, staging=staging)
            nostall.wait_staged()
            state["large"].zero_()
            queue.wait()
            expected = state_on("cuda", number)
            for _ in range(20):
                expected["large"].mul_(1.01)
            assert blobs(tmp_path / f"{number}") == by_stock(tmp_path / f"stock {number}", expected)


def test_no_device_memory_is_kept_and_the_writer_has_no_context(tmp_path: Path) -> None:
    """After the save the device holds what it held before, and the writer process has not loaded the driver."""
    state = state_on("cuda")
    before = torch.cuda.memory_allocated()
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "save", state, staging="overlapped")
        nostall.wait_staged()
        queue.wait()
    assert torch.cuda.memory_allocated() == before
    for pid in writer_pids():
        assert "libcuda" not in Path(f"/proc/{pid}/maps").read_text()


def test_snapshot_memory_is_pinned(tmp_path: Path) -> None:
    """Copies off the device go at the speed of its copy engines."""
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "save", state_on("cuda"))
    lease = default_engine().lease(1)
    memory = torch.frombuffer(lease.block.memory, dtype=torch.uint8, count=64)
    assert memory.is_pinned()
    lease.release()
