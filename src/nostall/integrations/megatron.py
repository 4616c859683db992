"""Megatron-core's distributed checkpoints (``torch_dist``) saved by nostall.

Megatron-core 0.17 and newer take their asynchronous saves from nvidia-resiliency-ext, so
:func:`install` puts nostall under its names (:mod:`nostall.nvrx_alias`). Megatron-core 0.16 has
classes of its own for that, which :func:`install` replaces.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from nostall import core, nvrx_alias, state_dict_saver
from nostall._engine import configure, default_engine
from nostall._plan.agree import with_local_plans
from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from nostall.errors import OptionError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import require_switch
from nostall.state_dict_saver import CheckpointMetadataCache, save_state_dict_async_finalize

__all__ = ["install"]

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_Planned = tuple[FileSystemWriterAsync, Metadata | None, Any]


def install(*, on_error: Literal["raise", "warn"] | None = None, synchronous: bool = False) -> None:
    """Let Megatron-core save through nostall, in this process. Idempotent.

    Call it before Megatron-core is imported. Save and load with Megatron's own functions then. The
    line of each commit is shown on rank 0, if logging was not configured before.

    Args:
        on_error: Whether an asynchronous save that fails ends the job, or is logged on rank 0:
            ``EngineOptions.on_error``, which stays as it is if this is ``None``.
        synchronous: Whether saves that block training take nostall, too. With Megatron-core 0.16
            they always do. Their errors are raised.

    Raises:
        OptionError: Megatron-core is not installed; or nvidia-resiliency-ext was imported before;
            or an argument is not possible.
    """
    synchronous = require_switch("synchronous", synchronous)
    if not _takes_saves_from_nvrx():
        _replace_own()
        nvrx_alias.vouch_for_megatrons_planner()
    else:
        nvrx_alias.install(force=True)
        if synchronous:
            import_module(f"{_STRATEGIES}.torch").TorchDistSaveShardedStrategy.save = _save
    if on_error is not None:
        configure(replace(default_engine().options, on_error=on_error))
    log = logging.getLogger("nostall")
    if log.level == logging.NOTSET and not log.hasHandlers():
        log.addHandler(_Shown())
        log.setLevel(logging.INFO)


class _Shown(logging.Handler):
    """Shows warnings, and the line of each commit, until logging is configured."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:  # it is now
            log = logging.getLogger("nostall")
            log.removeHandler(self)
            log.setLevel(logging.NOTSET)
        elif record.levelno > logging.INFO or record.getMessage().startswith("committed:"):
            with suppress(AttributeError, OSError, ValueError):  # closed or missing
                sys.stderr.write(f"nostall: {self.format(record)}\n")


def _save(strategy: Any, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
    """Save as Megatron's asynchronous saves do, and wait."""
    strategy.async_save(sharded_state_dict, checkpoint_dir, async_strategy="nvrx").execute_sync()


def _takes_saves_from_nvrx() -> bool:
    """Whether this Megatron-core is 0.17 or newer; does not import it."""
    try:
        spec = find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise OptionError("megatron-core is not installed", hint="pip install megatron-core")
    module = os.path.join("dist_checkpointing", "strategies", "nvrx.py")
    folders = spec.submodule_search_locations or ()
    return any(os.path.exists(os.path.join(folder, module)) for folder in folders)


def _replace_own() -> None:
    """Put nostall's classes and functions where modules of Megatron have their own.

    Also a queue, by which verl saves.
    """
    replacements: dict[int, tuple[Any, Any]] = {}
    queue = getattr(import_module(f"{_STRATEGIES}.base"), "async_calls", None)
    if queue is not None and not isinstance(queue, core.AsyncCallsQueue):
        replacements[id(queue)] = queue, core.AsyncCallsQueue()
    for name, ours in _OURS.items():
        module, _, attribute = name.partition(".")
        theirs = getattr(import_module(f"{_STRATEGIES}.{module}"), attribute)
        replacements[id(theirs)] = theirs, ours
    for name, importer in list(sys.modules.items()):
        if name.partition(".")[0] != "megatron":
            continue
        for attribute, value in list(vars(importer).items()):
            if id(value) in replacements:
                setattr(importer, attribute, replacements[id(value)][1])


def _save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    cached_ckpt_structure: tuple[Any, Any, bool] | None = None,
    loaded_all_plans: list[SavePlan] | None = None,
) -> tuple[_Planned, CheckpointMetadataCache | None, None, bool, bool]:
    """Plan a save, with the arguments and results of Megatron-core 0.16. Collective.

    ``cached_ckpt_structure`` is what the last save has returned as its second, third and fourth
    result, which Megatron keeps without looking into it; ``None`` for no cache. Other arguments are
    those of :func:`nostall.save_state_dict_async_plan`, and all ranks' plans from a loaded
    checkpoint.

    Returns the arguments of ``save_state_dict_async_finalize``; the cache, in the place of a plan;
    ``None``; whether the cached plan, and whether the loaded plans are valid for this save.
    """
    cache = _cache_in(cached_ckpt_structure, loaded_all_plans)
    planned = state_dict_saver.save_state_dict_async_plan(
        state_dict,
        storage_writer,
        process_group,
        coordinator_rank,
        planner=planner,
        enable_cache=cache is not None,
        metadata_cache=cache,
    )
    validated, loaded = (False, False) if cache is None else cache.get_metadata_caching_status()
    return planned, cache, None, validated, loaded


def _cache_in(
    structure: tuple[Any, Any, bool] | None, loaded: list[SavePlan] | None
) -> CheckpointMetadataCache | None:
    if structure is None:
        return None
    if isinstance(structure[0], CheckpointMetadataCache):
        return structure[0]
    cache = CheckpointMetadataCache()
    if loaded is not None:
        cache.set_cached_global_metadata(with_local_plans(Metadata({}), loaded))
    return cache


_OURS: dict[str, Any] = {
    "async_utils.AsyncCaller": core.AsyncCaller,
    "async_utils.AsyncCallsQueue": core.AsyncCallsQueue,
    "async_utils.AsyncRequest": core.AsyncRequest,
    "async_utils.PersistentAsyncCaller": core.PersistentAsyncCaller,
    "async_utils.TemporalAsyncCaller": core.TemporalAsyncCaller,
    "cached_metadata_filesystem_reader.CachedMetadataFileSystemReader": (
        CachedMetadataFileSystemReader
    ),
    "filesystem_async.FileSystemWriterAsync": FileSystemWriterAsync,
    "state_dict_saver.save_state_dict_async_finalize": save_state_dict_async_finalize,
    "state_dict_saver.save_state_dict_async_plan": _save_state_dict_async_plan,
}
"""By module and name of Megatron-core 0.16."""
