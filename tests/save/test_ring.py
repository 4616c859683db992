"""Synchronous saves of more than a few chunks go through a ring of buffers, not a snapshot."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._engine import default_engine
from nostall._memory.arena import Block
from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from support.faults import Fault, inject
from support.states import blobs, schedule

MIB = 1 << 20
PAGE = 4096


@pytest.fixture(autouse=True)
def options() -> Iterator[None]:
    """Whatever a test configures is undone."""
    yield
    nostall.configure(EngineOptions())


def save(path: Path, state: dict[str, Any], **options: Any) -> FileSystemWriterAsync:
    writer = FileSystemWriterAsync(path, **options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return writer


def by_stock(path: Path, state: dict[str, Any]) -> dict[tuple[str, tuple[int, ...]], bytes]:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return blobs(path)


def shard_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.distcp")}


@pytest.mark.parametrize("limit", [{"io_threads": 4}, {"max_staging_bytes": 6 * MIB}], ids=str)
def test_a_synchronous_save_needs_memory_for_a_few_chunks_only(
    tmp_path: Path, limit: dict[str, int]
) -> None:
    """By its number of threads or a limit on memory; every byte is written as by stock."""
    nostall.configure(EngineOptions(chunk_nbytes=MIB, **limit))
    state = {f"t{n}": torch.randn(3 * MIB) for n in range(4)}
    save(tmp_path / "save", state)
    assert 0 < default_engine().arena.reserved_nbytes <= 6 * MIB
    assert sum(block.nbytes for block in Block._all) <= 6 * MIB
    assert blobs(tmp_path / "save") == by_stock(tmp_path / "stock", state)


def _tensor(kind: str, count: int, seed: int) -> torch.Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "transposed":
            return values[: count // 3 * 3].view(3, -1).t()
        case "with gaps":
            return values[::2]
        case "expanded":
            return values[:1].expand(min(count, 1) * 50, -1)
        case "complex128":
            return torch.complex(values.double(), values.double())
        case "conjugated":
            return torch.complex(values, values).conj()
        case "bytes":
            return (values * 100).to(torch.int8)
        case _:
            return values


tensors = st.builds(
    _tensor,
    st.sampled_from(
        ["plain", "transposed", "with gaps", "expanded", "complex128", "conjugated", "bytes"]
    ),
    st.integers(0, 9000),
    st.integers(0, 9),
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    state=st.dictionaries(
        st.text("abc", min_size=1), tensors | st.binary(max_size=20_000), min_size=1, max_size=8
    ),
    chunk_pages=st.integers(1, 3),
    threads=st.integers(1, 4),
    files=st.integers(1, 3),
    limit=st.none() | st.integers(1, 80_000),
)
def test_the_files_are_those_of_an_asynchronous_save(
    tmp_path_factory: pytest.TempPathFactory,
    state: dict[str, Any],
    chunk_pages: int,
    threads: int,
    files: int,
    limit: int | None,
) -> None:
    """Wherever a chunk ends: in a payload, in what surrounds it, or in an object.

    With any limit on memory, too, for which asynchronous saves go in waves.
    """
    out = tmp_path_factory.mktemp("ways")
    chunks: dict[str, Any] = {"chunk_nbytes": chunk_pages * PAGE, "io_threads": threads}
    nostall.configure(EngineOptions(max_staging_bytes=limit, **chunks))
    save(out / "sync", state, thread_count=files)
    with AsyncCallsQueue() as queue:
        for staging in ("blocking", "overlapped"):
            schedule(queue, out / staging, state, thread_count=files, staging=staging)
            queue.wait()
            assert shard_files(out / staging) == shard_files(out / "sync")
    assert blobs(out / "sync") == by_stock(out / "stock", state)


@pytest.mark.parametrize("point", ["open", "chunk", "fsync"])
def test_a_failure_leaves_no_file_and_no_memory_in_use(tmp_path: Path, point: str) -> None:
    """And the next save is right."""
    nostall.configure(EngineOptions(chunk_nbytes=PAGE, io_threads=3, max_in_flight=1))
    state = {f"t{n}": torch.randn(20_000) for n in range(5)}
    with (
        inject(Fault.errno(point, errno.ENOSPC)),
        pytest.raises(CheckpointException, match="No space left"),
    ):
        save(tmp_path / "save", state)
    assert not list((tmp_path / "save").glob("*"))
    save(tmp_path / "next", state)
    assert blobs(tmp_path / "next") == by_stock(tmp_path / "stock", state)


def test_snapshots_after_a_ring_are_right(tmp_path: Path) -> None:
    """Both use the same memory, in which a snapshot expects what surrounds the payloads."""
    nostall.configure(EngineOptions(chunk_nbytes=PAGE, io_threads=2, max_in_flight=1))
    with AsyncCallsQueue() as queue:
        for number in range(3):
            state = {f"t{n}": torch.randn(20_000) for n in range(5)}
            schedule(queue, tmp_path / f"async {number}", state)
            queue.wait()
            save(tmp_path / f"sync {number}", state)
            expected = by_stock(tmp_path / f"stock {number}", state)
            assert blobs(tmp_path / f"async {number}") == expected
            assert blobs(tmp_path / f"sync {number}") == expected
