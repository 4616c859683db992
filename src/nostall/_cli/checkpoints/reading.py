"""Values of a checkpoint's items. Imports torch.

Nothing is unpickled that could run code: tensors are read with ``weights_only``, as stock does, and
objects as bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from nostall._cli.checkpoints.checkpoint import Checkpoint, Item
from nostall.errors import DamagedCheckpointError, NostallError
from nostall.filesystem_reader import FileSystemReader

TRUST_HINT = "--trust loads any class; only for files of people you trust"
_REFUSED = re.compile(r"WeightsUnpickler error: (.*?)(?:\. |$)", re.MULTILINE)


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
    except Exception as error:  # damaged files can raise anything
        names = ", ".join(str(key) for key in list(state)[:3])
        first_line = str(error).partition("\n")[0]
        raise DamagedCheckpointError(
            f"cannot read {names}: {type(error).__name__}: {first_line:.400}",
            path=checkpoint.path,
            hint="`nostall verify` lists the damage",
        ) from error


def object_in(content: bytes, name: str, *, trust: bool) -> Any:
    """The object that ``torch.save`` has made these bytes of.

    Args:
        content: The bytes.
        name: Its name, for errors.
        trust: Unpickle any class, which can run code; otherwise what ``weights_only`` allows.

    Raises:
        DamagedCheckpointError: It cannot be loaded in this way.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=not trust)
    except Exception as error:  # a pickle can raise anything
        raise DamagedCheckpointError(
            f"cannot load the object {name!r}: {reason_of(error)}",
            hint=None if trust else TRUST_HINT,
        ) from error


def reason_of(error: Exception) -> str:
    """What ``torch.load`` says, in one line; of ``weights_only`` the class that is refused."""
    refused = _REFUSED.search(str(error))
    return f"{refused[1] if refused else str(error).partition(chr(10))[0]:.200}"
