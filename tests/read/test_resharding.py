"""Resharding: tensors saved in parts load in other parts, bit by bit, by whichever reader.

Ranks are played one after the other: each has some blocks of the whole, as DTensor and FSDP have
them, and one writer or reader of its own. ``programs/sharing.py`` loads DTensors on real ranks.
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
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

import nostall
from nostall._read import plan, reading
from nostall.filesystem_reader import Verify

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2]
WRITERS: dict[str, Any] = {"nostall": nostall.FileSystemWriterAsync, "stock": dcp.FileSystemWriter}

Block = ChunkStorageMetadata
Sharding = list[list[Block]]
"""The blocks of each rank; together they are all of a tensor, replicas left out or not."""


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


class Part(torch.Tensor):
    """A rank's block of a larger tensor, which describes itself in the way that DCP asks for."""

    mine: Block
    whole: torch.Size

    def size(self, dim: int | None = None) -> Any:
        return self.whole if dim is None else self.whole[dim]

    def __create_write_items__(self, name: str, value: torch.Tensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(value)
        data = TensorWriteData(chunk=self.mine, properties=properties, size=self.whole)
        index = MetadataIndex(name, self.mine.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[Block]:
        return [self.mine]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def as_part(tensor: torch.Tensor, mine: Block, whole: torch.Size) -> Part:
    part = tensor.as_subclass(Part)
    part.mine, part.whole = mine, whole
    return part


def parts_of(
    wholes: dict[str, torch.Tensor], shardings: dict[str, Sharding], rank: int
) -> dict[str, Part]:
    return {
        name: as_part(part_of(wholes[name], mine), mine, wholes[name].size())
        for name, sharding in shardings.items()
        for mine in sharding[rank]
    }


def blank_like(parts: dict[str, Part], *, transposed: bool) -> dict[str, Part]:
    """Parts to load into, with the dimensions in reverse order in memory or not."""
    blanks = {}
    for name, part in parts.items():
        zeros = turned(torch.zeros(part.mine.sizes[::-1], dtype=part.dtype))
        blanks[name] = as_part(zeros if transposed else zeros.contiguous(), part.mine, part.whole)
    return blanks


def save(path: Path, who: str, states: list[dict[str, Part]]) -> None:
    """Plan, write and finish as ``dcp.save`` does on as many ranks."""
    planners = [DefaultSavePlanner() for _ in states]
    writers = [WRITERS[who](path, sync_files=False) for _ in planners]
    plans = []
    for rank, (planner, writer) in enumerate(zip(planners, writers, strict=True)):
        planner.set_up_planner(states[rank], writer.storage_meta(), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for planner, writer, plan in zip(planners, writers, plans, strict=True)
    ]
    writers[0].finish(metadata=metadata, results=results)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.as_subclass(torch.Tensor)
    whole = plain.clone(memory_format=torch.contiguous_format)  # also the strides of one element
    return bytes(whole.reshape(-1).view(torch.uint8).tolist())


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
    """By one to four ranks, and in plain tensors: as small or large reads, in one piece or many."""
    path = tmp_path_factory.mktemp("sharded")
    (saving, loading) = (
        {name: data.draw(shardings(each.shape, count)) for name, each in whole.items()}
        for count in ranks
    )
    save(path, who, [parts_of(whole, saving, rank) for rank in range(ranks[0])])
    reader = nostall.FileSystemReader(path, verify=verify)
    for rank in range(ranks[1]):
        expected = parts_of(whole, loading, rank)
        by_reader, by_load = (blank_like(expected, transposed=transposed) for _ in range(2))
        with ways_to_read(*limits):
            dcp.load(dict(by_reader), storage_reader=reader, no_dist=True)
            nostall.load(dict(by_load), path, verify=verify)
        for name, part in expected.items():
            assert bits(by_reader[name]) == bits(by_load[name]) == bits(part), (rank, name)
    by_ours, by_stock = (
        {name: torch.zeros_like(each) for name, each in whole.items()} for _ in range(2)
    )
    with ways_to_read(*limits):
        nostall.load(by_ours, path, verify=verify)
        dcp.load(by_stock, storage_reader=reader, no_dist=True)
    for name, each in whole.items():
        assert bits(by_ours[name]) == bits(by_stock[name]) == bits(each)
    shutil.rmtree(path)
