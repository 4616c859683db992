"""Metadata that lists an item and does not say where it is."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall.errors import DamagedCheckpointError
from support.states import read_metadata, save_stock_way


def test_an_item_without_a_file_is_named(tmp_path: Path) -> None:
    """A typed error with the item and the file of the metadata, from both ways to load."""
    save_stock_way(tmp_path, {"x": torch.ones(3), "y": torch.ones(3)})
    metadata = read_metadata(tmp_path)
    metadata.storage_data = {i: at for i, at in metadata.storage_data.items() if i.fqn != "x"}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    state = {"x": torch.zeros(3), "y": torch.zeros(3)}
    with pytest.raises(DamagedCheckpointError, match="names no file for x") as raised:
        nostall.load(state, tmp_path)
    assert raised.value.path == str(tmp_path / ".metadata")
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=nostall.FileSystemReader(tmp_path), no_dist=True)
    assert isinstance(caught.value.failures[0][0], DamagedCheckpointError)
