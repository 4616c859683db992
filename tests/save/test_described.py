"""Tensors that say which part of a larger one they hold keep saying so, in copies, too."""

from __future__ import annotations

import pickle
import threading
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nostall.errors import StagingError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.manager import CheckpointManager
from support.described import (
    ATTRIBUTES,
    HAS_ATTRIBUTES,
    PartParameter,
    Plain,
    WholeSizePart,
    filled,
    kinds,
    part,
    whole,
    with_attributes,
)
from support.ranks import run_ranks
from support.states import WAYS, blobs, read_metadata, save_stock_way

SWAPPED = ((4, 0, 4), (0, 4, 4))
"""Global rows 4 to 7 come first."""


def states() -> dict[str, Any]:
    one_part = {f"{kind}, one part": make() for kind, make in kinds(((0, 0, 8),)).items()}
    return {"nested": [{kind: make() for kind, make in kinds(SWAPPED).items()}], **one_part}


@pytest.mark.parametrize("way", WAYS)
def test_parts_are_stored_as_stock_stores_them(tmp_path: Path, way: str) -> None:
    """Sizes, places and bytes are stock's, and a plain load puts rows where they belong."""
    save_stock_way(tmp_path / "stock", states())
    for number in range(2):  # the second one finds places prepared
        ours = tmp_path / f"{number}"
        WAYS[way](ours, states())
        assert blobs(ours) == blobs(tmp_path / "stock")
        entries = read_metadata(ours).state_dict_metadata
        assert entries == read_metadata(tmp_path / "stock").state_dict_metadata
        loaded = {"nested": [{kind: torch.zeros(8, 6) for kind in kinds(SWAPPED)}]}
        with torch.serialization.safe_globals([Plain]):
            dcp.load(loaded, checkpoint_id=ours, no_dist=True)
        for kind, tensor in loaded["nested"][0].items():
            assert torch.equal(tensor, whole()), kind


def test_places_are_those_of_the_moment_of_staging(tmp_path: Path) -> None:
    """A class's own state and attributes in lists may change as soon as they are staged."""
    moved, listed = part(SWAPPED), with_attributes(filled(SWAPPED), SWAPPED)
    listed.global_offsets = [list(each) for each in listed.global_offsets]
    moved.note = []
    staged = FileSystemWriterAsync(tmp_path).stage({"moved": moved, "listed": listed})
    listed.global_offsets[0][0] = 2
    moved.note.append(1)
    moved.rows = ()
    for tensor in (moved, listed):
        tensor.zero_()
    assert staged["moved"].rows == SWAPPED
    assert staged["moved"].note == []
    assert staged["listed"].global_offsets == [[4, 0], [0, 0]]
    for tensor in staged.values():
        assert torch.equal(tensor.as_subclass(torch.Tensor), filled(SWAPPED))


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter, Plain])
def test_a_planner_of_ones_own_finds_the_attributes(tmp_path: Path, kind: Any) -> None:
    """On every torch, also after the copy was sent to stock's checkpoint process, which plans."""
    tensor = filled(SWAPPED)
    tensor = kind(tensor) if kind is torch.nn.Parameter else tensor.as_subclass(kind)
    described = with_attributes(tensor, SWAPPED)
    described.axis, described.gradient = "rows", torch.ones(3)
    staged = FileSystemWriterAsync(tmp_path).stage({"item": described})
    sent = pickle.loads(bytes(ForkingPickler.dumps(staged)))
    for copied in (staged["item"], sent["item"]):
        for name in (*ATTRIBUTES, "axis"):
            assert getattr(copied, name) == getattr(described, name)
        assert not hasattr(copied, "gradient")  # large, and no part of the description
        assert copied.requires_grad == described.requires_grad
    for made in (part(SWAPPED), part(SWAPPED, PartParameter)):  # whose methods it asks
        staged = FileSystemWriterAsync(tmp_path).stage({"item": made})
        copied = pickle.loads(bytes(ForkingPickler.dumps(staged)))["item"]
        assert type(copied) is type(made)
        assert copied.__create_chunk_list__() == made.__create_chunk_list__()
        assert torch.equal(copied.as_subclass(torch.Tensor), filled(SWAPPED))


def test_what_cannot_be_carried_over_is_an_error(tmp_path: Path) -> None:
    """A method of one tensor alone would answer with live values; a lock cannot be copied."""
    alone, locked = filled(SWAPPED), part(SWAPPED)
    alone.__get_tensor_shard__ = lambda index: alone  # type: ignore[attr-defined]
    locked.lock = threading.Lock()
    writer = FileSystemWriterAsync(tmp_path)
    with pytest.raises(StagingError, match=r"'a\.0'.*__get_tensor_shard__ is not a method of its"):
        writer.stage({"a": [alone]})
    with pytest.raises(StagingError, match=r"'locked' cannot be staged: TypeError: .*lock'"):
        writer.stage({"locked": locked})


def test_a_manager_restores_the_part_into_the_part(tmp_path: Path) -> None:
    """In a dictionary, a list and an optimizer, also into new tensors; not the whole tensor."""
    made = [part(SWAPPED, WholeSizePart)]
    blank = [part(SWAPPED, WholeSizePart)]
    if HAS_ATTRIBUTES:
        made.append(with_attributes(filled(SWAPPED, padding=2), SWAPPED))
        blank.append(with_attributes(filled(SWAPPED, padding=2), SWAPPED))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"dict": {"t": made[-1]}, "list": [made[0]]})
    for tensor in blank:
        tensor.zero_()
    state: dict[str, Any] = {"dict": {"t": blank[-1]}, "list": [blank[0]]}
    assert CheckpointManager(tmp_path).restore(state) is not None
    assert state["dict"]["t"] is blank[-1]
    assert state["list"][0] is blank[0]
    for tensor in blank:
        assert torch.equal(tensor.as_subclass(torch.Tensor)[:8], filled(SWAPPED))


@pytest.mark.skipif(not HAS_ATTRIBUTES, reason="torch has these attributes since 2.14")
def test_moments_of_a_described_parameter_are_parts(tmp_path: Path) -> None:
    """A new optimizer gets the rows of its parameter, with the description."""

    def optimizer() -> tuple[Any, torch.optim.Optimizer]:
        rows = ((4, 0, 4),)
        weight = with_attributes(torch.nn.Parameter(filled(rows)), rows)
        return weight, torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    weight, saved = optimizer()
    weight.square().sum().backward()
    saved.step()
    moment = saved.state[weight]["momentum_buffer"]
    with_attributes(moment, ((4, 0, 4),))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"optimizer": saved})
    again, restored = optimizer()
    assert CheckpointManager(tmp_path).restore({"optimizer": restored}) is not None
    assert torch.equal(restored.state[again]["momentum_buffer"], moment)


def test_ranks_with_unequal_parts_save_all_of_them(tmp_path: Path) -> None:
    """Five and three rows, by themselves and as local tensors of DTensors, from every way."""
    for facts in run_ranks(2, "described:unequal_parts", tmp_path):
        assert facts == {"different": [], "wrong": [], "restored": True}
