"""Lightning: checkpoints that are written while training continues.

``NostallCheckpointIO`` for one device and DDP (one file per checkpoint), and a strategy for sharded
checkpoints, whose saves do not go through a ``CheckpointIO``::

    Trainer(plugins=[NostallCheckpointIO()])
    Trainer(strategy=NostallModelParallelStrategy())

Works with ``lightning`` and with ``pytorch-lightning``; if both are installed, with the one that
was imported first.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from nostall._storage.posix_storage import PosixStorage
from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from nostall.errors import OptionError
from nostall.integrations._saves import Removals, Saves, missing
from nostall.removal import remove_checkpoint
from nostall.torch_ckpt import TorchAsyncCheckpoint

__all__ = ["NostallCheckpointIO", "NostallModelParallelStrategy"]

_is_old_name = "pytorch_lightning" in sys.modules or find_spec("lightning") is None
try:
    if _is_old_name and "lightning.pytorch" not in sys.modules:
        _io = import_module("lightning_fabric.plugins.io.torch_io")
        _strategies = import_module("pytorch_lightning.strategies")
    else:
        _io = import_module("lightning.fabric.plugins.io.torch_io")
        _strategies = import_module("lightning.pytorch.strategies")
except ImportError as error:
    raise missing("lightning", error) from None

_META = "meta.pt"
"""File with what is neither model nor optimizer; Lightning recognises sharded checkpoints by it."""
_REST = "lightning"
"""Item with the content of that file, so that it is committed with the tensors."""


class NostallCheckpointIO(_io.TorchCheckpointIO):  # type: ignore[misc,name-defined]  # no types
    """Writes each checkpoint with ``torch.save`` in the background: one device, DDP.

    The checkpoint is copied when ``save_checkpoint`` returns. The file gets its name when it is
    complete and durable. ``remove_checkpoint``, which ``ModelCheckpoint`` calls right after a save,
    removes the older file when the save is committed. A failed save raises torch's
    ``CheckpointException`` at the next save or at the end of ``fit``, and the older file stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._saves = TorchAsyncCheckpoint()
        self._removals = Removals(super().remove_checkpoint)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Copy a checkpoint and begin to write it; as ``CheckpointIO.save_checkpoint``."""
        if storage_options is not None:
            raise TypeError("NostallCheckpointIO takes no storage_options; use a local path")
        self._poll()
        self._saves.async_save(checkpoint, path)
        self._removals.save_scheduled(os.fspath(path))

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

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Copy a checkpoint and begin to write it; as ``Strategy.save_checkpoint``."""
        if storage_options is not None or not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = os.fspath(self.broadcast(filepath))
        state = {"state_dict": checkpoint.pop("state_dict")}
        for index, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{index}"] = optimizer
        state[_REST] = rest = _dumped(checkpoint)

        def write_meta() -> None:
            if self.is_global_zero:
                PosixStorage(path).publish(_META, [rest])

        self._saves.save(state, path, before_commit=write_meta)
        if not self.lightning_module.trainer.training:
            self._saves.poll(wait=True)  # no training step will poll

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint after pending saves; as ``Strategy.load_checkpoint``."""
        self._saves.poll(wait=True)
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        path = os.fspath(self.broadcast(checkpoint_path))
        return _committed_rest(path, weights_only=weights_only) or loaded

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint when the saves before this call are committed."""
        self._saves.remove(os.fspath(self.broadcast(filepath)))

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
        """As Lightning's, but accelerator tensors are not copied to the host twice."""
        if not self._save_distributed_checkpoint:
            return dict(super().lightning_module_state_dict())
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As Lightning's, but accelerator tensors are not copied to the host twice."""
        if not self._save_distributed_checkpoint:
            return dict(super().optimizer_state(optimizer))
        wrapped = getattr(optimizer, "_optimizer", optimizer)
        return dict(get_optimizer_state_dict(self.model, wrapped))


def _dumped(rest: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(rest, stream)
    return stream.getvalue()


def _committed_rest(path: str, *, weights_only: bool | None) -> dict[str, Any] | None:
    """What was committed with the tensors; ``None`` if this is not a checkpoint of this module.

    A crash while a checkpoint is overwritten may leave the new ``meta.pt`` beside the old tensors.
    """
    if not os.path.isdir(path):
        return None
    reader = CachedMetadataFileSystemReader(path)
    if _REST not in reader.read_metadata().state_dict_metadata:
        return None
    found: dict[str, Any] = {_REST: b""}
    dcp.load(found, storage_reader=reader, no_dist=True)
    rest: dict[str, Any] = torch.load(io.BytesIO(found[_REST]), weights_only=weights_only)
    return rest
