"""Accelerate: sharded checkpoints that are written while training continues.

An ``Accelerator`` whose ``save_state`` does not wait for FSDP2's sharded state dicts::

    accelerator = NostallAccelerator(fsdp_plugin=plugin)
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import StateDictType

from nostall.integrations._saves import DirectorySaves, attribute_set, missing

__all__ = ["NostallAccelerator"]

_log = logging.getLogger("nostall")

try:
    _accelerate = import_module("accelerate")
except ImportError as error:
    raise missing("accelerate", error) from None


class NostallAccelerator(_accelerate.Accelerator):  # type: ignore[misc,name-defined]  # no types
    """``Accelerator`` with sharded saves of FSDP2 in the background.

    ``save_state`` copies models and optimizers, and returns. The directory gets its name when all
    of it is written on all ranks, from a later ``backward`` or ``save_state``, or from
    ``load_state`` or ``end_training``, which wait. With automatic naming, ``total_limit`` counts
    committed checkpoints, and older ones are removed after the commit. A failed save raises torch's
    ``CheckpointException`` there on every rank. Other states are saved by Accelerate.

    Args:
        writer_options: Options of :class:`nostall.FileSystemWriterAsync`.
    """

    def __init__(
        self, *args: Any, writer_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._directories = DirectorySaves(writer_options)
        if self.is_main_process and not saves_shards(self):
            _log.warning(
                "NostallAccelerator saves as Accelerate does, while training waits: only FSDP2 with"
                " SHARDED_STATE_DICT is saved in the background"
            )

    def save_state(
        self,
        output_dir: Any = None,
        safe_serialization: bool = True,  # noqa: FBT002  # Accelerate's signature
        **kwargs: Any,
    ) -> Any:
        """Copy the state and begin to write it; as ``Accelerator.save_state``.

        Returns:
            The directory that the checkpoint will have.
        """
        if not (saves_shards(self) and self._models):
            return super().save_state(output_dir, safe_serialization, **kwargs)
        naming = self.project_configuration
        if naming.automatic_checkpoint_naming:
            path = os.path.join(self._named(), f"checkpoint_{self.save_iteration}")
            saving = self._directories.save(
                path, self.project_dir, replaces=False, then=partial(self._rotate, path)
            )
        else:
            path = os.path.abspath(output_dir)
            saving = self._directories.save(path, os.path.dirname(path))
        # So that Accelerate takes a directory, and rotates nothing.
        without_naming = attribute_set(naming, "automatic_checkpoint_naming", False)
        with saving as directory, shards_on_device(self), without_naming:
            super().save_state(directory, safe_serialization, **kwargs)
        return Path(path)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint after pending saves; as ``Accelerator.load_state``."""
        self._directories.poll(wait=True)
        if input_dir is not None:
            path = os.path.abspath(os.path.expanduser(input_dir))
            self._directories.recover_one(path, os.path.dirname(path))
        elif self.project_configuration.automatic_checkpoint_naming:
            self._named()
        super().load_state(input_dir, *args, **kwargs)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Commit the saves that are done on all ranks; as ``Accelerator.backward``."""
        self._directories.poll()
        super().backward(loss, **kwargs)

    def end_training(self) -> None:
        """Commit all saves and end worker processes; as ``Accelerator.end_training``."""
        self._directories.close()
        super().end_training()

    def _named(self) -> str:
        """The directory of named checkpoints, without what a crash has left."""
        home = os.path.join(self.project_dir, "checkpoints")
        self._directories.recover(home, self.project_dir)
        return home

    def _rotate(self, newest: str) -> None:
        keep = self.project_configuration.total_limit
        if keep is not None:
            home = os.path.dirname(newest)
            paths = sorted((os.path.join(home, name) for name in os.listdir(home)), key=_number)
            self._directories.rotate(paths, self.project_dir, keep=keep, protected={newest})


def saves_shards(accelerator: Any) -> bool:
    """Whether an ``Accelerator`` saves sharded state dicts of FSDP2."""
    if accelerator.distributed_type != "FSDP":
        return False
    plugin = accelerator.state.fsdp_plugin
    wanted = (2, StateDictType.SHARDED_STATE_DICT)
    return (plugin.fsdp_version, plugin.state_dict_type) == wanted


def shards_on_device(accelerator: Any) -> AbstractContextManager[None]:
    """Leave shards where they are during a save: copying them to the host once is enough."""
    config = accelerator.state.fsdp_plugin.state_dict_config
    return attribute_set(config, "offload_to_cpu", False)


def _number(path: str) -> int:
    """The number in a checkpoint's name, by which Accelerate sorts, too."""
    return int(re.findall(r"\d+", os.path.basename(path))[0])
