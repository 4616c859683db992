"""Values of a checkpoint's items. Imports torch.

Nothing is unpickled that could run code: tensors are read with ``weights_only``, as stock does, and
objects as bytes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from nostall._cli.checkpoints.checkpoint import Checkpoint, Item
from nostall._storage.port import reason
from nostall.errors import DamagedCheckpointError, NostallError, ReadError
from nostall.filesystem_reader import FileSystemReader

TRUST_HINT = "--trust loads any class; only for files of people you trust"


class _ObjectsAsBytes(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = value.getvalue()


def read_into(checkpoint: Checkpoint, tensors: Mapping[Any, torch.Tensor]) -> None:
    """Fill whole tensors with the values stored under their keys.

    Raises:
        DamagedCheckpointError: A file is missing or cannot be read.
    """
    _read(checkpoint, dict(tensors))


def read_objects(checkpoint: Checkpoint, items: list[Item]) -> dict[Any, bytes]:
    """The bytes of objects, by key, as ``torch.save`` made them.

    Raises:
        DamagedCheckpointError: A file is missing or cannot be read.
    """
    state: dict[Any, Any] = {item.key: b"" for item in items}
    _read(checkpoint, state)
    return state


def read_tensor(checkpoint: Checkpoint, item: Item) -> torch.Tensor:
    """One tensor, whatever its parts.

    Raises:
        DamagedCheckpointError: A file is missing or cannot be read.
        MemoryError: There is no room for it; hostile metadata can have any size.
    """
    item.require_covered(checkpoint.path)
    try:
        tensor = torch.empty(item.shape, dtype=item.dtype)
    except RuntimeError as error:
        raise MemoryError(f"no memory for {item.name!r}") from error
    read_into(checkpoint, {item.key: tensor})
    return tensor


def _read(checkpoint: Checkpoint, state: dict[Any, Any]) -> None:
    planner = _ObjectsAsBytes(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = FileSystemReader(checkpoint.path)
    planner.set_up_planner(state, checkpoint.metadata, is_coordinator=True)
    reader.set_up_storage_reader(checkpoint.metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    try:
        reader.read_data(plan, planner).wait()
    except (NostallError, MemoryError):
        raise
    except (OSError, ImportError) as error:
        raise ReadError(f"cannot read: {reason(error)}", path=checkpoint.path) from error
    except Exception as error:  # damaged files can raise anything
        names = ", ".join(str(key) for key in list(state)[:3])
        first_line = str(error).partition("\n")[0]
        raise DamagedCheckpointError(
            f"cannot read {names}: {type(error).__name__}: {first_line:.400}",
            path=checkpoint.path,
            hint=f"`nostall verify {checkpoint.path}` lists the damage",
        ) from error
