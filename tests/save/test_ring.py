"""Bounded memory: synchronous saves go through a ring of buffers, what does not fit in waves."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import nostall
from nostall._engine import default_engine
from nostall._memory import snapshot
from nostall._memory.arena import Block
from nostall._model.values import Layout
from nostall.core import AsyncCallsQueue
from nostall.errors import ReservationError
from nostall.options import EngineOptions
from nostall.state_dict_saver import CheckpointMetadataCache
from support.faults import Fault, inject, writer_pids
from support.states import (
    blobs,
    blobs_by_stock,
    save_in_background,
    save_now,
    save_split,
    schedule,
    shard_files,
)

MIB = 1 << 20
PAGE = 4096


@pytest.mark.parametrize("limit", [{"io_threads": 4}, {"max_staging_bytes": 6 * MIB}], ids=str)
def test_a_synchronous_save_needs_memory_for_a_few_chunks_only(
    tmp_path: Path, limit: dict[str, Any]
) -> None:
    """By its number of threads or a limit on memory; every byte is written as by stock."""
    nostall.configure(EngineOptions(chunk_nbytes=MIB, **limit))
    state = {f"t{n}": torch.randn(3 * MIB) for n in range(4)}
    save_now(tmp_path / "save", state)
    assert 0 < default_engine().arena.reserved_nbytes <= 6 * MIB
    assert sum(block.nbytes for block in Block._all) <= 6 * MIB
    assert blobs(tmp_path / "save") == blobs_by_stock(tmp_path / "stock", state)


KINDS = ["plain", "transposed", "with gaps", "expanded", "complex", "conjugated", "bytes", "half"]


def _tensor(kind: str, count: int, seed: int) -> torch.Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "transposed":
            return values[: count // 3 * 3].view(3, -1).t()
        case "with gaps":
            return values[::2]
        case "expanded":
            return values[:1].expand(min(count, 1) * 50, -1)
        case "complex":
            return torch.complex(values.double(), values.double())
        case "conjugated":
            return torch.complex(values, values).conj()
        case "bytes":
            return (values * 100).to(torch.int8)
        case "half":
            return values.to(torch.bfloat16)
        case _:
            return values


tensors = st.builds(
    _tensor,
    st.sampled_from(KINDS),
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
        st.text("abc", min_size=1), tensors | st.binary(max_size=20_000), max_size=8
    ),
    chunk_pages=st.integers(1, 3),
    threads=st.integers(1, 4),
    files=st.integers(1, 3),
    limit=st.none() | st.integers(1, 80_000),
)
def test_every_way_of_staging_writes_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    state: dict[str, Any],
    chunk_pages: int,
    threads: int,
    files: int,
    limit: int | None,
) -> None:
    """Wherever a chunk ends, first and repeated, with any limit on memory, by waves: stock's."""
    out = tmp_path_factory.mktemp("ways")
    chunks: dict[str, Any] = {"chunk_nbytes": chunk_pages * PAGE, "io_threads": threads}
    nostall.configure(EngineOptions(max_staging_bytes=limit, **chunks))
    save_now(out / "sync", state, thread_count=files)
    expected = shard_files(out / "sync")
    caches = {staging: CheckpointMetadataCache() for staging in ("blocking", "overlapped")}
    with AsyncCallsQueue() as queue:
        for number, (staging, cache) in itertools.product(range(4), caches.items()):
            path = out / f"{staging} {number}"
            schedule(queue, path, state, cache=cache, thread_count=files, staging=staging)
            queue.wait()
            assert shard_files(path) == expected
    assert blobs(out / "sync") == blobs_by_stock(out / "stock", state)


@pytest.mark.parametrize("point", ["open", "chunk", "fsync"])
def test_a_failure_leaves_no_file_and_no_memory_in_use(tmp_path: Path, point: str) -> None:
    """And the next save is right."""
    nostall.configure(EngineOptions(chunk_nbytes=PAGE, io_threads=3, max_in_flight=1))
    state = {f"t{n}": torch.randn(20_000) for n in range(5)}
    with (
        inject(Fault.errno(point, errno.ENOSPC)),
        pytest.raises(CheckpointException, match="No space left"),
    ):
        save_now(tmp_path / "save", state)
    assert not list((tmp_path / "save").glob("*"))
    save_now(tmp_path / "next", state)
    assert blobs(tmp_path / "next") == blobs_by_stock(tmp_path / "stock", state)


@pytest.mark.parametrize(("blocks", "preparations"), [(1, 3), (2, 1)])
def test_snapshots_after_a_ring_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, preparations: int
) -> None:
    """Though a snapshot expects what surrounds payloads; with room, a ring leaves its block."""
    prepared: list[object] = []

    def lay_down_containers(layout: Layout, block: Block) -> None:
        prepared.append(block)
        original(layout, block)

    original = snapshot._lay_down_containers
    monkeypatch.setattr(snapshot, "_lay_down_containers", lay_down_containers)
    nostall.configure(EngineOptions(chunk_nbytes=PAGE, io_threads=2, max_in_flight=blocks))
    with AsyncCallsQueue() as queue:
        for number in range(3):
            state = {f"t{n}": torch.randn(20_000) for n in range(5)}
            schedule(queue, tmp_path / f"async {number}", state)
            queue.wait()
            save_now(tmp_path / f"sync {number}", state)
            expected = blobs_by_stock(tmp_path / f"stock {number}", state)
            assert blobs(tmp_path / f"async {number}") == expected
            assert blobs(tmp_path / f"sync {number}") == expected
    assert len(prepared) == preparations


def test_a_ring_does_with_memory_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the host has no more, the block of the last snapshot serves a synchronous save."""
    nostall.configure(EngineOptions(chunk_nbytes=PAGE, io_threads=2))
    state = {f"t{n}": torch.randn(20_000) for n in range(5)}
    save_split(tmp_path / "async", state)

    def refuse(_: object, nbytes: int) -> None:
        raise ReservationError("no more", nbytes=nbytes)

    monkeypatch.setattr(Block, "__init__", refuse)
    save_now(tmp_path / "sync", state)
    assert shard_files(tmp_path / "sync") == shard_files(tmp_path / "async")


# --- in waves -------------------------------------------------------------------------------------


@pytest.fixture
def bounded() -> int:
    """At most 8 MiB of snapshot memory, in two blocks."""
    limit = 8 * MIB
    nostall.configure(EngineOptions(max_staging_bytes=limit))
    return limit


def large_state(seed: int = 0) -> dict[str, Any]:
    """24 MiB in tensors of 1.5 MiB, and something small."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{n}": torch.randn(384 << 10, generator=generator) for n in range(16)}
    return {**tensors, "transposed": torch.randn(9, 7, generator=generator).t(), "epoch": seed}


def nbytes_of(state: dict[str, Any]) -> int:
    return sum(each.nbytes for each in state.values() if isinstance(each, torch.Tensor))


@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
def test_memory_stays_below_the_limit(tmp_path: Path, bounded: int, staging: str) -> None:
    """For three saves of three times the limit; each is what stock writes."""
    cache = CheckpointMetadataCache()
    with AsyncCallsQueue() as queue:
        for number in range(4):
            path = tmp_path / f"{number}"
            schedule(queue, path, large_state(number), cache=cache, staging=staging)
            nostall.wait_staged()
            assert 0 < default_engine().arena.reserved_nbytes <= bounded
            assert sum(block.nbytes for block in Block._all) <= bounded
            queue.wait()
            assert blobs(path) == blobs_by_stock(tmp_path / f"stock {number}", large_state(number))
            assert len(list(path.glob("*.distcp"))) > 3


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Fault.errno("chunk", errno.ENOSPC, file="__0_0.distcp"), "No space left"),
        (Fault.errno("chunk", errno.ENOSPC, file="__0_3.distcp"), "No space left"),
        (Fault({"point": "fsync", "do": "exit", "code": 17, "file": "__0_3.distcp"}), "code 17"),
    ],
    ids=["the first", "another", "the writer dies"],
)
def test_a_wave_that_fails_fails_the_save_and_leaves_no_file(
    tmp_path: Path, fault: Fault, why: str
) -> None:
    """Also where the next wave would start a new writer; and the next save is right."""
    queue = AsyncCallsQueue()
    before = writer_pids()
    with inject(fault):
        schedule(queue, tmp_path / "save", large_state())
        with pytest.raises(CheckpointException, match=why):
            queue.wait()
    assert not list((tmp_path / "save").glob("*"))
    schedule(queue, tmp_path / "save", large_state(1))
    queue.close()
    assert (writer_pids() != before) is (why == "code 17")
    assert blobs(tmp_path / "save") == blobs_by_stock(tmp_path / "stock", large_state(1))


@pytest.mark.usefixtures("bounded")
def test_waves_through_a_callable_that_cannot_travel_end(tmp_path: Path) -> None:
    """They are written in threads of the trainer, several at the same time."""
    opened = []

    def open_file(path: str, mode: str) -> Any:
        opened.append(path)
        return open(path, mode)

    with AsyncCallsQueue() as queue:
        for number in range(3):
            schedule(queue, tmp_path / f"{number}", large_state(number), open_file=open_file)
            queue.wait(60)
            assert blobs(tmp_path / f"{number}") == blobs_by_stock(
                tmp_path / f"stock {number}", large_state(number)
            )
    assert len(opened) > 9


@pytest.mark.parametrize(
    "options",
    [{}, {"staging": "overlapped"}, {"thread_count": 4}, {"single_file_per_rank": False}],
    ids=str,
)
def test_the_first_dcp_async_save_needs_memory_for_one_copy(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """A checkpoint of half of the host's memory can be saved; the bytes are stock's."""
    state = large_state()
    nostall.configure(EngineOptions())  # without the memory of other tests
    save_in_background(tmp_path / "saved", state, **options)
    assert default_engine().arena.reserved_nbytes <= 1.05 * nbytes_of(state) + 2 * MIB  # one block
    assert blobs(tmp_path / "saved") == blobs_by_stock(tmp_path / "stock", state)


class Renaming(DefaultSavePlanner):
    """Saves every item under another name, as a planner of a user's own may."""

    def set_up_planner(
        self,
        state_dict: Any,
        storage_meta: Any = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # DCP's signature
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {f"module.{name}": value for name, value in self.state_dict.items()}


def test_a_planner_of_other_names_needs_memory_for_one_copy(tmp_path: Path) -> None:
    """Places in an image that no tensor fits are not reserved."""
    state = large_state()
    nostall.configure(EngineOptions())
    for number in range(3):
        save_in_background(tmp_path / f"{number}", state, planner=Renaming())
    assert default_engine().arena.reserved_nbytes <= 1.05 * nbytes_of(state) + 2 * MIB


def test_writers_with_other_options_keep_places_of_their_own(tmp_path: Path) -> None:
    """Their tensors go to other files, so to other places in the image."""
    state = large_state()
    nostall.configure(EngineOptions())
    process = psutil.Process(writer_pids()[0])
    for number in range(4):
        before = process.io_counters().write_chars
        save_in_background(tmp_path / f"{number}", state, thread_count=1 + number % 2)
        written = process.io_counters().write_chars - before
        assert written >= nbytes_of(state)  # not written by the trainer
