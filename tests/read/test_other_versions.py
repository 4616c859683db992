"""Checkpoints that other versions of torch have written, by stock and by nostall, in every way.

``tests/checkpoints`` has them; that they are verified and loaded by the caching reader is tested in
``tests/public/test_versions.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import nostall
from checkpoints import make
from nostall.filesystem_reader import Verify

MADE = sorted(path.parent for path in make.HERE.glob("torch-*/*/.metadata"))
SHARDED = sorted(path.parent for path in make.HERE.glob("torch-*/sharded/*/.metadata"))
each_checkpoint = pytest.mark.parametrize(
    "path", MADE, ids=lambda path: f"{path.parent.name}, {path.name}"
)


def blank(*, transposed: bool = False) -> dict[str, Any]:
    weight = torch.zeros(3, 4).t() if transposed else torch.zeros(4, 3)
    return {"model": {"weight": weight}, "optimizer": {"step": torch.zeros(()), "lr": 0}}


def require_loaded(state: dict[str, Any]) -> None:
    for part, expected in make.state().items():
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(state[part][name]), torch.as_tensor(value))


@each_checkpoint
@pytest.mark.parametrize("verify", ["none", "crc"])
def test_all_of_it_is_loaded(path: Path, verify: Verify) -> None:
    """By ``dcp.load`` and ``nostall.load``, also into a transposed tensor."""
    for transposed in (False, True):
        state = blank(transposed=transposed)
        reader = nostall.FileSystemReader(path, verify=verify)
        dcp.load(state, storage_reader=reader, no_dist=True)
        require_loaded(state)
        state = blank(transposed=transposed)
        assert nostall.load(state, path, verify=verify).items == 3
        require_loaded(state)


class _Into(dcp.DefaultLoadPlanner):
    """Loads everything into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._target


@each_checkpoint
def test_slices_are_loaded(path: Path) -> None:
    """Every slice of the matrix, as a rank of another sharding would want it."""
    reader = nostall.FileSystemReader(path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    entry = metadata.state_dict_metadata["model.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    whole = make.state()["model"]["weight"]
    assert (entry.size, len(entry.chunks)) == (whole.size(), 1)
    for row in range(4):
        for column in range(3):
            expected = whole[row:, column:]
            target = torch.zeros(expected.size())
            item = ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex("model.weight", torch.Size((row, column))),
                dest_offsets=torch.Size((0, 0)),
                storage_index=MetadataIndex("model.weight", torch.Size((0, 0)), 0),
                storage_offsets=torch.Size((row, column)),
                lengths=expected.size(),
            )
            reader.read_data(LoadPlan([item]), _Into(target)).wait()
            assert torch.equal(target, expected)


@pytest.mark.parametrize("verify", ["none", "crc"])
@pytest.mark.parametrize("path", SHARDED, ids=lambda path: f"{path.parents[1].name}, {path.name}")
def test_parts_of_two_ranks_are_put_together(path: Path, verify: Verify) -> None:
    """By rows, by columns, and replicated; also into tensors whose rows are not contiguous."""
    expected = make.wholes()
    for transposed in (False, True):
        state: dict[str, Any] = {
            name: torch.zeros(5, 7).t() if transposed else torch.zeros(7, 5) for name in expected
        }
        reader = nostall.FileSystemReader(path, verify=verify)
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert all(torch.equal(state[name], whole) for name, whole in expected.items())
        state = {name: torch.zeros_like(each) for name, each in state.items()}
        nostall.load(state, path, verify=verify)
        assert all(torch.equal(state[name], whole) for name, whole in expected.items())


def test_checkpoints_of_three_versions_were_looked_at() -> None:
    """Of two writers each; a directory that is not found would be no test."""
    assert len(MADE) == len(SHARDED) == 6
