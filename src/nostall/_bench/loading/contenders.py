"""nostall's ways of loading, torch's, and those of other libraries, where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import StorageReader

import nostall
from nostall import _torch
from nostall._bench.contender import why_not_importable
from nostall._bench.loading.contender import LoadContender
from nostall._bench.loading.rows import RowsPlanner
from nostall._bench.workloads import State, tensors_of
from nostall.filesystem_reader import Verify

DCP_FORM = "dcp"


def save_with_nostall(state: State, path: Path) -> None:
    """Write the checkpoint that nostall and stock load: stock's files, with nostall's manifest."""
    dcp.save(state, storage_writer=nostall.FileSystemWriterAsync(path), no_dist=True)


class DcpLoad:
    """``dcp.load`` with some reader, a new one for every load."""

    form = DCP_FORM

    def __init__(
        self,
        name: str,
        description: str,
        reader: Callable[[Path], StorageReader],
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.description = description
        self._reader = reader
        self._forget = forget

    def available(self) -> str | None:
        return None

    def write(self, state: State, path: Path) -> None:
        save_with_nostall(state, path)

    def load(self, path: Path, into: State) -> None:
        dcp.load(into, storage_reader=self._reader(path), no_dist=True)

    def load_rows(self, path: Path, into: dict[str, Tensor], rows: Mapping[str, slice]) -> None:
        whole: State = dict(into)
        planner = RowsPlanner(rows)
        dcp.load(whole, storage_reader=self._reader(path), planner=planner, no_dist=True)

    def forget(self) -> None:
        self._forget()


class NostallLoad:
    """``nostall.load``, which brings a planner of its own."""

    form = DCP_FORM

    def __init__(self, name: str, description: str, *, verify: Verify = "none") -> None:
        self.name = name
        self.description = description
        self._verify: Verify = verify

    def available(self) -> str | None:
        return None

    def write(self, state: State, path: Path) -> None:
        save_with_nostall(state, path)

    def load(self, path: Path, into: State) -> None:
        nostall.load(into, path, verify=self._verify)

    def forget(self) -> None:
        nostall.CachedMetadataFileSystemReader.clear_metadata_cache()


class TorchLoad:
    """``torch.load(mmap=True)`` of one file, then a copy into the targets."""

    name = "torch.load mmap"
    description = "torch.load(mmap=True) of a file of torch.save, copied into the targets"
    form = "torch.save"

    def available(self) -> str | None:
        return None

    def write(self, state: State, path: Path) -> None:
        path.mkdir(parents=True)
        torch.save(state, path / "all.pt")

    def load(self, path: Path, into: State) -> None:
        loaded: State = torch.load(path / "all.pt", mmap=True, weights_only=True)
        _copy(dict(tensors_of(loaded)), into)

    def forget(self) -> None:
        return None


class SafeTensors:
    """``safetensors.torch.load_file``, then a copy into the targets."""

    name = "safetensors"
    description = "safetensors.torch.load_file (get_tensor for one), copied into the targets"
    form = "safetensors"

    def available(self) -> str | None:
        return why_not_importable("safetensors.torch")

    def write(self, state: State, path: Path) -> None:
        path.mkdir(parents=True)
        file = str(path / "all.safetensors")
        import_module("safetensors.torch").save_file(dict(tensors_of(state)), file)

    def load(self, path: Path, into: State) -> None:
        file = str(path / "all.safetensors")
        wanted = dict(tensors_of(into))
        if len(wanted) > 1:
            loaded = import_module("safetensors.torch").load_file(file)
        else:
            with import_module("safetensors").safe_open(file, framework="pt") as opened:
                loaded = {name: opened.get_tensor(name) for name in wanted}
        _copy(loaded, into)

    def forget(self) -> None:
        return None


class TorchCheckpointingLoad:
    """``torch_checkpointing.CheckpointManager.load``, which fills the targets itself."""

    name = "torch_checkpointing"
    description = "CheckpointManager.load(into=...)"
    form = "torch_checkpointing"

    def available(self) -> str | None:
        return why_not_importable("torch_checkpointing")

    def write(self, state: State, path: Path) -> None:
        self._manager().save(str(path), {"state": state})

    def load(self, path: Path, into: State) -> None:
        self._manager().load(str(path), into={"state": into})

    def forget(self) -> None:
        return None

    def _manager(self) -> Any:
        manager = import_module("torch_checkpointing.checkpoint_manager").CheckpointManager
        save = import_module("torch_checkpointing.config").SyncCheckpointSaverConfig()
        storage = import_module("torch_checkpointing.storage.filesystem")
        # As in a save, where its O_DIRECT writer fails on ext4.
        local = storage.LocalFileSystemStorageConfig(use_direct_io=False)
        return manager(manager.Config(save=save, storage_config=local))


def _copy(loaded: Mapping[str, Tensor], into: State) -> None:
    """Copy tensors into those of the same names."""
    targets = dict(tensors_of(into))
    _torch.copy_each(list(targets.values()), [loaded[name] for name in targets])


def load_contenders() -> list[LoadContender]:
    """Everybody, nostall first."""
    return [
        NostallLoad("nostall.load", "nostall.load(state, path)"),
        NostallLoad("nostall.load crc", "the same with verify='crc'", verify="crc"),
        DcpLoad(
            "nostall dcp.load", "dcp.load with nostall.FileSystemReader", nostall.FileSystemReader
        ),
        DcpLoad(
            "nostall dcp.load crc",
            "the same with verify='crc'",
            lambda path: nostall.FileSystemReader(path, verify="crc"),
        ),
        DcpLoad(
            "nostall dcp.load cached",
            "dcp.load with nostall.CachedMetadataFileSystemReader",
            nostall.CachedMetadataFileSystemReader,
            nostall.CachedMetadataFileSystemReader.clear_metadata_cache,
        ),
        DcpLoad("dcp.load", "stock dcp.load", dcp.FileSystemReader),
        TorchLoad(),
        TorchCheckpointingLoad(),
        SafeTensors(),
    ]
