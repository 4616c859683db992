"""Checkpoints that other versions of torch have written, by stock and by nostall, in every way.

``tests/checkpoints`` has them; that they are verified and loaded by the caching reader is tested in
``tests/public/test_versions.py``.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import metadata as of_sharded_tensors
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    TensorProperties,
    TensorStorageMetadata,
)

import nostall
from checkpoints import make
from nostall import CachedMetadataFileSystemReader, FileSystemReader
from nostall.filesystem_reader import Verify
from nostall.integrity import State

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
    """Six directories are found, of two writers each; without them nothing would be tested."""
    assert len(MADE) == len(SHARDED) == 6


READERS = [FileSystemReader, CachedMetadataFileSystemReader]
FSSPEC = "torch.distributed.checkpoint._fsspec_filesystem"


@pytest.fixture(params=["torch.distributed.checkpoint.filesystem", FSSPEC])
def of_torch_2_2(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A checkpoint as torch 2.0 to 2.2 wrote it; each of its two writers had a class for places."""
    path = tmp_path / "old"
    dcp.save(make.state(), storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            like = torch.empty(0, dtype=entry.properties.dtype)
            properties: Any = of_sharded_tensors.TensorProperties.create_from_tensor(like)
            entry.properties = properties
    for name in vars(metadata).keys() - {"state_dict_metadata", "planner_data", "storage_data"}:
        delattr(metadata, name)
    monkeypatch.setattr(filesystem._StorageInfo, "__module__", request.param)
    monkeypatch.setitem(sys.modules, FSSPEC, filesystem)
    content = pickle.dumps(metadata, protocol=4)
    monkeypatch.undo()
    assert b"torch.distributed._shard.sharded_tensor.metadata" in content
    assert request.param.encode() in content
    (path / ".metadata").write_bytes(content)
    return path


@pytest.mark.parametrize("reader", READERS)
def test_a_checkpoint_of_torch_2_2_is_read(
    of_torch_2_2: Path, reader: type[FileSystemReader]
) -> None:
    """Tensors had properties of sharded ones until then; they become today's. It is complete."""
    state, by_load = blank(), blank()
    dcp.load(state, storage_reader=reader(of_torch_2_2), no_dist=True)
    nostall.load(by_load, of_torch_2_2)
    require_loaded(state)
    require_loaded(by_load)
    entry = reader(of_torch_2_2).read_metadata().state_dict_metadata["model.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    assert type(entry.properties) is TensorProperties
    assert entry.properties.dtype == torch.float32
    assert entry.properties.memory_format == torch.contiguous_format
    assert nostall.is_complete(of_torch_2_2)
    assert nostall.is_complete(of_torch_2_2, deep=True)
    assert nostall.verify(of_torch_2_2).state is State.WHOLE
