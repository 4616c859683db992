"""Asynchronous PyTorch Distributed Checkpoint saves that do not stall training and never tear.

Importing this package starts nothing and does not import torch; public names are resolved when
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nostall._version import __version__

if TYPE_CHECKING:
    from nostall import cached_metadata_filesystem_reader as cached_metadata_filesystem_reader
    from nostall import core as core
    from nostall import errors as errors
    from nostall import filesystem_async as filesystem_async
    from nostall import filesystem_reader as filesystem_reader
    from nostall import integrity as integrity
    from nostall import loading as loading
    from nostall import options as options
    from nostall import prefetching as prefetching
    from nostall import removal as removal
    from nostall import state_dict_saver as state_dict_saver
    from nostall import stats as stats
    from nostall import tier as tier
    from nostall import torch_ckpt as torch_ckpt
    from nostall._engine import configure as configure
    from nostall._engine import status as status
    from nostall._engine import wait_staged_before_step as wait_staged_before_step
    from nostall._memory.overlap import wait_staged as wait_staged
    from nostall._model.progress import LoadStatus as LoadStatus
    from nostall._model.progress import SaveStatus as SaveStatus
    from nostall._read.planner import LoadPlanner as LoadPlanner
    from nostall._save.planner_by_name import SavePlanner as SavePlanner
    from nostall._save.stager import warmup as warmup
    from nostall.cached_metadata_filesystem_reader import (
        CachedMetadataFileSystemReader as CachedMetadataFileSystemReader,
    )
    from nostall.core import AsyncCallsQueue as AsyncCallsQueue
    from nostall.core import AsyncRequest as AsyncRequest
    from nostall.core import abort_all as abort_all
    from nostall.core import drain_on_sigterm as drain_on_sigterm
    from nostall.filesystem_async import FileSystemWriterAsync as FileSystemWriterAsync
    from nostall.filesystem_reader import FileSystemReader as FileSystemReader
    from nostall.integrity import is_complete as is_complete
    from nostall.integrity import latest_complete as latest_complete
    from nostall.integrity import verify as verify
    from nostall.loading import load as load
    from nostall.manager import CheckpointManager as CheckpointManager
    from nostall.manager import KeepBest as KeepBest
    from nostall.manager import KeepEvery as KeepEvery
    from nostall.manager import KeepLatest as KeepLatest
    from nostall.manager import PerRank as PerRank
    from nostall.options import EngineOptions as EngineOptions
    from nostall.prefetching import prefetch as prefetch
    from nostall.removal import remove_checkpoint as remove_checkpoint
    from nostall.state_dict_saver import (
        save_state_dict_async_finalize as save_state_dict_async_finalize,
    )
    from nostall.state_dict_saver import save_state_dict_async_plan as save_state_dict_async_plan
    from nostall.stats import LoadStats as LoadStats
    from nostall.stats import SaveStats as SaveStats
    from nostall.torch_ckpt import TorchAsyncCheckpoint as TorchAsyncCheckpoint

_NAMES: dict[str, tuple[str, ...]] = {
    "_engine": ("configure", "status", "wait_staged_before_step"),
    "_memory.overlap": ("wait_staged",),
    "_model.progress": ("LoadStatus", "SaveStatus"),
    "_read.planner": ("LoadPlanner",),
    "_save.planner_by_name": ("SavePlanner",),
    "_save.stager": ("warmup",),
    "cached_metadata_filesystem_reader": ("CachedMetadataFileSystemReader",),
    "core": ("AsyncCallsQueue", "AsyncRequest", "abort_all", "drain_on_sigterm"),
    "errors": (),
    "filesystem_async": ("FileSystemWriterAsync",),
    "filesystem_reader": ("FileSystemReader",),
    "integrity": ("is_complete", "latest_complete", "verify"),
    "loading": ("load",),
    "manager": ("CheckpointManager", "KeepBest", "KeepEvery", "KeepLatest", "PerRank"),
    "nvrx_alias": (),
    "options": ("EngineOptions",),
    "prefetching": ("prefetch",),
    "removal": ("remove_checkpoint",),
    "state_dict_saver": ("save_state_dict_async_finalize", "save_state_dict_async_plan"),
    "stats": ("LoadStats", "SaveStats"),
    "tier": (),
    "torch_ckpt": ("TorchAsyncCheckpoint",),
}
"""By module, the names of the package that are defined there. Modules without ``_`` are public."""
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = [module for module in _NAMES if not module.startswith("_")]
__all__ = ["__version__", *_HOME, *_MODULES]


if not TYPE_CHECKING:  # with it, every name would exist for a type checker

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"nostall.{name}")
        if name in _HOME:
            return getattr(import_module(f"nostall.{_HOME[name]}"), name)
        raise AttributeError(f"module 'nostall' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
