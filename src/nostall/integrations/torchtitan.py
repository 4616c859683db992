"""torchtitan: a checkpoint manager whose asynchronous modes are nostall's.

In a trainer's configuration, in place of torchtitan's own::

    checkpoint = NostallCheckpointManager.Config(enable=True, async_mode="async")
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from nostall._model.threads import is_done
from nostall._save.planner_by_name import SavePlanner
from nostall._storage.posix import PosixStorage
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.integrations._saves import missing

__all__ = ["NostallCheckpointManager"]

try:
    _titan = import_module("torchtitan.components.checkpointer.dcp")
    _tools = import_module("torchtitan.tools.utils")
except ImportError as error:
    raise missing("torchtitan", error) from None

_METADATA = (".metadata", "model.safetensors.index.json")
"""A step with one of these is a checkpoint, for torchtitan, too."""


class NostallCheckpointManager(_titan.CheckpointManager):  # type: ignore[misc,name-defined]  # no types
    """torchtitan's ``CheckpointManager`` with nostall's writer.

    * ``async_mode="disabled"``: a synchronous save;
    * ``"async"``: the save call returns when the state is copied;
    * ``"async_with_pinned_mem"``: it returns at once, and the next optimizer step waits for the
      copy (``staging="overlapped"``).

    ``keep_latest_k`` counts committed checkpoints, and one that is being written. Checkpoints in
    Hugging Face format, ``export_dtype`` and loading are torchtitan's own. A failed save raises
    torch's ``CheckpointException`` at the next save or when the manager is closed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_titan.CheckpointManager.Config):  # type: ignore[misc,name-defined]  # as above
        """torchtitan's options; torchtitan builds the class that declares them."""

    def __init__(self, config: Any, **parts: Any) -> None:
        super().__init__(config, **parts)
        if self.enable:
            # In place of a stager, which torchtitan would make and close; writers are stagers here.
            self.stager = ExitStack()

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,  # noqa: FBT002  # torchtitan's signature
        to_hf: bool = False,  # noqa: FBT002  # as above
    ) -> Any:
        """Save in DCP's format; torchtitan saves in others."""
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        overlapped = async_mode == _titan.AsyncMode.ASYNC_WITH_PINNED_MEM
        writer = FileSystemWriterAsync(
            checkpoint_id, staging="overlapped" if overlapped else "blocking"
        )
        saving = None
        if async_mode == _titan.AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer, planner=SavePlanner())
        else:
            saving = dcp.async_save(
                state_dict,
                storage_writer=writer,
                planner=SavePlanner(process_group=self.pg),
                process_group=self.pg,
            )
        if enable_garbage_collection:
            _tools.GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saving

    def _purge_stale_checkpoints(self) -> None:
        """Remove older checkpoints, counting committed ones only.

        torchtitan counts directories: with one that a crash has left incomplete, it would remove
        the newest committed checkpoint while its successor is being written.
        """
        if not self._should_purge():
            return
        is_saving = self.save_future is not None and not is_done(self.save_future)
        keep = self.keep_latest_k - is_saving  # at least 1, as torchtitan asks for 2
        for _, path in self._committed()[:-keep]:
            files = PosixStorage(path)
            files.remove(_METADATA)  # first: no crash leaves an incomplete one with metadata
            files.flush()
            self.purge_queue.put(path)

    def _committed(self) -> list[tuple[int, str]]:
        """Steps and directories of committed checkpoints, oldest first."""
        found = [
            (int(match[1]), os.path.join(self.folder, match.string))
            for match in map(re.compile(r"step-(\d+)").fullmatch, os.listdir(self.folder))
            if match
        ]
        return sorted(
            (step, path)
            for step, path in found
            if any(os.path.isfile(os.path.join(path, name)) for name in _METADATA)
        )

    def _close(self) -> None:
        self.maybe_wait_for_saving()
        super()._close()
