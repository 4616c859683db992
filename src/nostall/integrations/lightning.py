"""Lightning: checkpoints that are written while training continues.

``NostallCheckpointIO`` for one device and DDP (one file per checkpoint), and a strategy for sharded
checkpoints, whose saves do not go through a ``CheckpointIO``::

    Trainer(plugins=[NostallCheckpointIO()])
    Trainer(strategy=NostallModelParallelStrategy())

Works with ``lightning`` and with ``pytorch-lightning``; if both are installed, with the one that
was imported first.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from nostall._engine import default_engine
from nostall._storage.deadlines import call_with_deadline
from nostall._storage.posix import PosixStorage
from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from nostall.errors import OptionError
from nostall.integrations._saves import Removals, Saves, missing
from nostall.loading import load
from nostall.removal import remove_checkpoint
from nostall.torch_ckpt import TorchAsyncCheckpoint

__all__ = ["NostallCheckpointIO", "NostallModelParallelStrategy"]

_is_old_name = "pytorch_lightning" in sys.modules or find_spec("lightning") is None
try:
    if _is_old_name and "lightning.pytorch" not in sys.modules:
        _io = import_module("lightning_fabric.plugins.io.torch_io")
        _fitting = import_module("pytorch_lightning.loops.fit_loop")
        _strategies = import_module("pytorch_lightning.strategies")
    else:
        _io = import_module("lightning.fabric.plugins.io.torch_io")
        _fitting = import_module("lightning.pytorch.loops.fit_loop")
        _strategies = import_module("lightning.pytorch.strategies")
    _addresses = import_module("fsspec.core")
    _local = import_module("fsspec.implementations.local")
    _rank_zero = import_module("lightning_utilities.core.rank_zero")
except ImportError as error:
    raise missing("lightning", error) from None

_META = "meta.pt"
"""File with what is neither model nor optimizer; Lightning recognises sharded checkpoints by it."""
_REST = "lightning"
"""Item with the content of that file, so that it is committed with the tensors."""


class NostallCheckpointIO(_io.TorchCheckpointIO):  # type: ignore[misc,name-defined]  # no types
    """Writes each checkpoint with ``torch.save`` in the background: one device, DDP.

    For shards use :class:`NostallModelParallelStrategy`: a trainer whose strategy writes sharded
    checkpoints without a ``CheckpointIO`` warns when it is made.

    During ``fit`` the checkpoint is copied when ``save_checkpoint`` returns. The file gets its name
    when it is complete and durable. ``remove_checkpoint``, which ``ModelCheckpoint`` calls right
    after a save, removes the older file when the save is committed. A failed save raises torch's
    ``CheckpointException`` at the next save or at the end of ``fit``, and the older file stays.

    Outside ``fit``, and with ``Fabric``, the file exists when ``save_checkpoint`` returns. Files on
    other than local file systems (``s3://``, ``memory://``) are written by Lightning.
    """

    def __init__(self) -> None:
        super().__init__()
        self._saves = TorchAsyncCheckpoint()
        self._removals = Removals(super().remove_checkpoint)

    def __bool__(self) -> bool:
        """Warn if Lightning is about to give the plugin to a strategy that will not use it; true.

        Its connector asks this just before. A strategy that saves by itself calls nothing else of
        a plugin, and a plugin is not told its strategy, so the caller is looked at.
        """
        caller = inspect.currentframe()
        caller = None if caller is None else caller.f_back
        connector = None if caller is None else caller.f_locals.get("self")
        if _saves_itself(getattr(connector, "strategy", None)):
            _rank_zero.rank_zero_warn(
                "NostallCheckpointIO has no effect: the strategy writes sharded checkpoints itself,"
                " while training waits. For FSDP2 and tensor parallelism use"
                " NostallModelParallelStrategy."
            )
        return True

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the saves, which belong to this process: Lightning spawns others."""
        own = ("_saves", "_removals")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        NostallCheckpointIO.__init__(self)
        self.__dict__.update(state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Copy a checkpoint and begin to write it; as ``CheckpointIO.save_checkpoint``."""
        filesystem, local_path = _addresses.url_to_fs(str(path))
        is_local = storage_options is None and isinstance(filesystem, _local.LocalFileSystem)
        self._poll(wait=not is_local)
        if is_local:
            self._saves.async_save(checkpoint, local_path)
        else:
            super().save_checkpoint(checkpoint, path, storage_options)
        self._removals.save_scheduled(os.fspath(path))
        if not _fit_runs():
            self._poll(wait=True)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint after pending saves; as ``TorchCheckpointIO.load_checkpoint``."""
        self._poll(wait=True)
        loaded: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint when the saves before this call are committed."""
        self._removals.add(os.fspath(path))
        self._poll()

    def teardown(self) -> None:
        """Wait for pending saves; Lightning calls this when ``fit`` ends, whatever ends it."""
        self._poll(wait=True)
        self._saves.close()

    def _poll(self, *, wait: bool = False) -> None:
        with self._removals.after_poll(self._saves):
            self._saves.finalize_async_save(blocking=wait)


class NostallModelParallelStrategy(
    _strategies.ModelParallelStrategy  # type: ignore[misc,name-defined]  # no types
):
    """``ModelParallelStrategy`` (FSDP2, tensor parallelism) with sharded saves in the background.

    Saves are committed at the start of training steps, all of them at the end of ``fit`` and before
    a checkpoint is loaded. A failed save raises torch's ``CheckpointException`` there on every
    rank, and the checkpoint that it was to replace stays.

    Args:
        writer_options: Options of :class:`nostall.FileSystemWriterAsync`.
    """

    def __init__(
        self, *args: Any, writer_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._saves = Saves(self._remove_now, **(writer_options or {}))
        if not self._save_distributed_checkpoint:
            _rank_zero.rank_zero_warn(
                "NostallModelParallelStrategy(save_distributed_checkpoint=False) saves as Lightning"
                " does, while training waits."
            )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Copy a checkpoint and begin to write it; as ``Strategy.save_checkpoint``."""
        if storage_options is not None or not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = self._local_path(filepath)
        state = {"state_dict": checkpoint.pop("state_dict")}
        for index, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{index}"] = optimizer
        stream = io.BytesIO()
        torch.save(checkpoint, stream)
        state[_REST] = rest = stream.getvalue()

        def write_meta() -> None:
            call_with_deadline(
                lambda: PosixStorage(path).publish(_META, [rest]),
                timeout_s=default_engine().options.save_timeout_s,
                doing=f"writing {_META}",
                phase="commit",
                path=path,
            )

        self._saves.save(state, path, before_commit=write_meta)
        if not _fit_runs():
            self._saves.poll(wait=True)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint after pending saves; as ``Strategy.load_checkpoint``."""
        self._saves.poll(wait=True)
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        path = self._local_path(checkpoint_path)
        return _committed_rest(path, weights_only=weights_only) or loaded

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint when the saves before this call are committed."""
        self._saves.remove(self._local_path(filepath))

    def _local_path(self, path: Any) -> str:
        """The path on all ranks; local also if it is an address, as with Lightning's strategy."""
        return os.path.abspath(Path(self.broadcast(path)))

    def _remove_now(self, path: str) -> None:
        if self.is_global_zero and os.path.isdir(path):
            with suppress(OptionError):  # not a checkpoint: Lightning has asked for its removal
                remove_checkpoint(path)  # metadata first
        super().remove_checkpoint(path)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Commit the saves that are done on all ranks."""
        super().on_train_batch_start(batch, batch_idx)
        self._saves.poll()

    def on_train_end(self) -> None:
        """Commit all saves."""
        super().on_train_end()
        self._saves.poll(wait=True)

    def on_exception(self, exception: BaseException) -> None:
        """Commit pending saves if all ranks are here within seconds; give them up otherwise."""
        super().on_exception(exception)
        self._saves.close(exception)

    def teardown(self) -> None:
        """End worker processes."""
        self._saves.close()
        super().teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state dict; accelerator tensors are not copied to the host twice."""
        if not self._save_distributed_checkpoint:
            return dict(super().lightning_module_state_dict())
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's state dict; accelerator tensors are not copied to the host twice."""
        if not self._save_distributed_checkpoint:
            return dict(super().optimizer_state(optimizer))
        wrapped = getattr(optimizer, "_optimizer", optimizer)
        return dict(get_optimizer_state_dict(self.model, wrapped))


def _saves_itself(strategy: Any) -> bool:
    """Whether a strategy of Lightning's writes sharded checkpoints without a ``CheckpointIO``."""
    return not isinstance(strategy, NostallModelParallelStrategy) and (
        bool(getattr(strategy, "_save_distributed_checkpoint", False))  # FSDP2, tensor parallelism
        or getattr(strategy, "_state_dict_type", None) == "sharded"  # FSDP
        or type(strategy).__name__ == "DeepSpeedStrategy"
    )


def _fit_runs() -> bool:
    """Whether the caller is called by a fit, at whose end Lightning tears down what saves for it.

    A ``CheckpointIO`` is told neither its trainer nor its strategy, so the callers are looked at.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module == _strategies.ModelParallelStrategy.__module__:
            return False  # does not tear down its CheckpointIO
        if module == _fitting.__name__:
            return True
        frame = frame.f_back
    return False


def _committed_rest(path: str, *, weights_only: bool | None) -> dict[str, Any] | None:
    """The rest, committed with the tensors; ``None`` if this is not a checkpoint of this module.

    A crash while a checkpoint is overwritten may leave the new ``meta.pt`` beside the old tensors.
    """
    if not os.path.isdir(path):
        return None
    if _REST not in CachedMetadataFileSystemReader(path).read_metadata().state_dict_metadata:
        return None
    found: dict[str, Any] = {_REST: b""}
    load(found, path)
    rest: dict[str, Any] = torch.load(io.BytesIO(found[_REST]), weights_only=weights_only)
    return rest
