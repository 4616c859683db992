"""Resharding: tensors saved in parts load in other parts, bit by bit, by whichever reader.

Ranks are played one after the other: each has a planner whose tensors are some blocks of the whole,
as DTensor and FSDP have them, and one writer or reader of its own. The program
``programs/resharding.py`` does it with DTensor on real ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

import nostall
from nostall._read import plan, reading
from nostall.filesystem_reader import Verify
from support.ranks import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2]
WRITERS: dict[str, Any] = {"nostall": nostall.FileSystemWriterAsync, "stock": dcp.FileSystemWriter}

Block = ChunkStorageMetadata
Sharding = list[list[Block]]
"""The blocks of each rank; together they are all of a tensor, replicas left out or not."""


# --- shardings ------------------------------------------------------------------------------------


def block(begins: Sequence[int], ends: Sequence[int]) -> Block:
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return Block(offsets=torch.Size(begins), sizes=torch.Size(sizes))


@st.composite
def cuts(draw: st.DrawFn, length: int, parts: int) -> list[int]:
    """Where a dimension is cut: evenly, as torch does it, or anywhere; parts may be empty."""
    if draw(st.booleans()):
        step = -(-length // parts)
        return [min(part * step, length) for part in range(parts + 1)]
    inner = draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1))
    return [0, *sorted(inner), length]


@st.composite
def shardings(draw: st.DrawFn, shape: Sequence[int], ranks: int) -> Sharding:
    """By rows or by columns, by both, replicated, or all on one rank."""
    kind = draw(st.sampled_from(["one dimension", "mesh", "mesh", "replicated", "one rank"]))
    whole = block([0] * len(shape), shape)
    if kind == "replicated" or not shape:
        return [[whole] for _ in range(ranks)]
    if kind == "one rank":
        owner = draw(st.integers(0, ranks - 1))
        return [[whole] if rank == owner else [] for rank in range(ranks)]
    mesh = [ranks] if kind == "one dimension" or ranks < 4 else [2, 2]
    dimensions = [draw(st.integers(0, len(shape) - 1)) for _ in mesh]
    if len(set(dimensions)) < len(mesh):  # of a mesh, one dimension replicates then
        mesh, dimensions = mesh[:1], dimensions[:1]
    borders = [draw(cuts(shape[d], n)) for d, n in zip(dimensions, mesh, strict=True)]
    sharding: Sharding = []
    for rank in range(ranks):
        begins, ends, place = [0] * len(shape), list(shape), rank
        for dimension, parts, at in zip(dimensions, mesh, borders, strict=True):
            place, part = divmod(place, parts)
            begins[dimension], ends[dimension] = at[part], at[part + 1]
        mine = block(begins, ends)
        sharding.append([mine] if mine.sizes.numel() else [])
    return sharding


def part_of(whole: torch.Tensor, mine: Block) -> torch.Tensor:
    for dimension, (begin, length) in enumerate(zip(mine.offsets, mine.sizes, strict=True)):
        whole = whole.narrow(dimension, begin, length)
    return whole


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """A view with the dimensions in reverse order."""
    return tensor.permute(tuple(reversed(range(tensor.ndim))))


# --- one rank -------------------------------------------------------------------------------------


class Saving(DefaultSavePlanner):
    """The blocks of one rank."""

    def __init__(self, whole: dict[str, torch.Tensor], blocks: dict[str, list[Block]]) -> None:
        super().__init__()
        self._whole, self._blocks = whole, blocks

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, mine.offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=mine,
                        properties=TensorProperties.create_from_tensor(self._whole[name]),
                        size=self._whole[name].size(),
                    ),
                )
                for name, blocks in self._blocks.items()
                for mine in blocks
            ],
            planner_data={},
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        assert write_item.tensor_data is not None
        return part_of(self._whole[write_item.index.fqn], write_item.tensor_data.chunk).detach()


def save(
    path: Path, who: str, whole: dict[str, torch.Tensor], of_ranks: list[dict[str, list[Block]]]
) -> None:
    """Plan, write and finish as ``dcp.save`` does on as many ranks."""
    planners = [Saving(whole, blocks) for blocks in of_ranks]
    writers = [WRITERS[who](path, sync_files=False) for _ in planners]
    plans = []
    for rank, (planner, writer) in enumerate(zip(planners, writers, strict=True)):
        planner.set_up_planner(whole, writer.storage_meta(), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for planner, writer, plan in zip(planners, writers, plans, strict=True)
    ]
    writers[0].finish(metadata=metadata, results=results)


class Loading(DefaultLoadPlanner):
    """Loads the blocks of one rank into tensors of their own."""

    def __init__(self, blocks: dict[str, list[Block]], *, transposed: bool) -> None:
        super().__init__()
        self._blocks, self._transposed = blocks, transposed
        self.loaded: dict[tuple[str, torch.Size], torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        assert isinstance(self.metadata, Metadata)
        items: list[ReadItem] = []
        for name, blocks in self._blocks.items():
            entry = self.metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            for mine in blocks:
                target = turned(torch.zeros(mine.sizes[::-1], dtype=entry.properties.dtype))
                self.loaded[name, mine.offsets] = (
                    target if self._transposed else target.contiguous()
                )
                items += common_parts(name, mine, entry.chunks)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        target = self.loaded[index.fqn, index.offset]
        return part_of(target, Block(read_item.dest_offsets, read_item.lengths))


def common_parts(name: str, mine: Block, stored: Sequence[Block]) -> list[ReadItem]:
    """Read items for the overlaps of a block with the stored ones."""
    items = []
    for number, chunk in enumerate(stored):
        begins = list(map(max, mine.offsets, chunk.offsets))
        ends = [
            min(a + b, c + d)
            for a, b, c, d in zip(mine.offsets, mine.sizes, chunk.offsets, chunk.sizes, strict=True)
        ]
        if all(begin < end for begin, end in zip(begins, ends, strict=True)):
            common = block(begins, ends)
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(name, mine.offsets),
                    dest_offsets=block(mine.offsets, begins).sizes,
                    storage_index=MetadataIndex(name, chunk.offsets, number),
                    storage_offsets=block(chunk.offsets, begins).sizes,
                    lengths=common.sizes,
                )
            )
    return items


def load(reader: dcp.FileSystemReader, planner: Loading) -> None:
    """Plan and read as ``dcp.load`` does on one of several ranks."""
    metadata = reader.read_metadata()
    planner.set_up_planner({}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan([plan])
    reader.read_data(plan, planner).wait()


def bits(tensor: torch.Tensor) -> bytes:
    whole = tensor.clone(memory_format=torch.contiguous_format)  # also the strides of one element
    return bytes(whole.reshape(-1).view(torch.uint8).tolist())


# --- what is loaded -------------------------------------------------------------------------------


def lists_of(elements: st.SearchStrategy[int], length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(elements, min_size=length, max_size=length)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors of up to three dimensions, contiguous or not, of distinct elements if possible."""
    found = {}
    for number in range(draw(st.integers(1, 3))):
        # Hypothesis prefers short lists and small numbers, of which there is little to cut.
        lengths = st.sampled_from([1, 2, 3, 5, 8, 9])
        shape = draw(st.sampled_from([0, 1, 2, 2, 3, 3]).flatmap(partial(lists_of, lengths)))
        dtype = draw(st.sampled_from(DTYPES))
        length = torch.Size(shape).numel()
        values = (torch.arange(length) % (2 if dtype is torch.bool else 251)).to(dtype)
        whole = turned(values.reshape(shape[::-1]))
        found[f"x{number}"] = whole if draw(st.booleans()) else whole.contiguous()
    return found


@contextmanager
def ways_to_read(small_nbytes: int, piece_nbytes: int) -> Iterator[None]:
    """Other limits than those for tensors of real sizes, which would take too long here."""
    with (
        patch.object(plan, "SMALL_NBYTES", small_nbytes),
        patch.object(reading, "SMALL_NBYTES", small_nbytes),
        patch.object(reading, "PIECE_NBYTES", piece_nbytes),
    ):
        yield


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    whole=tensors(),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    who=st.sampled_from(sorted(WRITERS)),
    verify=st.sampled_from(["none", "crc"]),
    transposed=st.booleans(),
    limits=st.sampled_from([(256 << 10, 4 << 20), (0, 4 << 20), (0, 500), (1700, 33)]),
)
def test_any_sharding_is_loaded_in_any_other(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    whole: dict[str, torch.Tensor],
    ranks: tuple[int, int],
    who: str,
    verify: Verify,
    transposed: bool,  # noqa: FBT001  # hypothesis passes it by name
    limits: tuple[int, int],
) -> None:
    """From one to four ranks to one to four: what each rank gets is its part of the whole tensor.

    ``nostall.load`` and stock's planner, which see whole tensors only, get the whole. Small tensors
    are read as such, or as large ones, in one piece or many.
    """
    path = tmp_path_factory.mktemp("sharded")
    (saving, loading) = (
        {name: data.draw(shardings(each.shape, count)) for name, each in whole.items()}
        for count in ranks
    )
    save(path, who, whole, [{n: of[r] for n, of in saving.items()} for r in range(ranks[0])])
    for rank in range(ranks[1]):
        planner = Loading({n: of[rank] for n, of in loading.items()}, transposed=transposed)
        with ways_to_read(*limits):
            load(nostall.FileSystemReader(path, verify=verify), planner)
        for (name, offsets), tensor in planner.loaded.items():
            part = part_of(whole[name], Block(offsets, tensor.shape))
            assert bits(tensor) == bits(part), (name, offsets)
    by_ours, by_stock = (
        {name: torch.zeros_like(each) for name, each in whole.items()} for _ in range(2)
    )
    reader = nostall.FileSystemReader(path, verify=verify)
    with ways_to_read(*limits):
        nostall.load(by_ours, path, verify=verify)
        dcp.load(by_stock, storage_reader=reader, no_dist=True)
    for name, each in whole.items():
        assert bits(by_ours[name]) == bits(by_stock[name]) == bits(each)
    shutil.rmtree(path)


@pytest.mark.parametrize("verify", ["none", "crc"])
@pytest.mark.parametrize("dimension", [0, 1])
def test_parts_of_a_large_tensor_are_loaded(tmp_path: Path, dimension: int, verify: Verify) -> None:
    """Four ranks load their rows or columns of a large tensor that one rank saved."""
    whole = torch.arange(1200 * 500.0).reshape(1200, 500)
    save(tmp_path, "stock", {"x": whole}, [{"x": [block([0, 0], whole.shape)]}])
    step = whole.shape[dimension] // 4
    for rank in range(4):
        begins, ends = [0, 0], list(whole.shape)
        begins[dimension], ends[dimension] = rank * step, (rank + 1) * step
        planner = Loading({"x": [block(begins, ends)]}, transposed=False)
        load(nostall.FileSystemReader(tmp_path, verify=verify), planner)
        (tensor,) = planner.loaded.values()
        assert torch.equal(tensor, whole[begins[0] : ends[0], begins[1] : ends[1]])


def test_ranks_load_what_more_or_fewer_ranks_have_saved(tmp_path: Path) -> None:
    """DTensors of one and two mesh dimensions: from four ranks to two, two to four, three to one.

    Alone, together, with and without checksums, and into plain tensors.
    """
    found = run_ranks(4, "resharding:everything", tmp_path)
    assert [len(each) for each in found] == [3, 2, 1, 1]
    assert not [wrong for each in found for case in each.values() for wrong in case]
