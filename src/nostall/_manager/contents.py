"""What a step holds besides the tensors of the state, and how it gets there.

Two items are added to the state, so that they are committed with it:

* ``nostall.about``, by rank 0: step and metrics as JSON. It is read without the rest. Each
  part of a step has it, so that parts of different saves are told apart.
* ``nostall.rank-<n>``, by every rank: one pickle of the user's ``extra``, the states of random
  number generators, and the state of each *exact* object, in which tensors are references to items.

Both are tensors of bytes, padded, so that their shapes, and with them the plan, rarely change.

DCP flattens a state dict and loses what does not fit: keys that are integers, empty dictionaries,
counters, tensors that the object of a new process does not have yet. So optimizers, schedulers and
other objects get exactly what they returned, and dictionaries and lists what they held. Modules,
and objects whose tensors are distributed, are loaded as stock does it: into the structure they have
now, on any number of ranks.
"""

from __future__ import annotations

import io
import json
import pickle
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader

from nostall import _torch
from nostall._manager.rng import rng_states
from nostall._read.objects import loaded_safely
from nostall._storage.places import storage_at
from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from nostall.errors import DamagedCheckpointError, OptionError, UnknownMetadataError

ABOUT = "nostall.about"
_RESERVED = "nostall"
_PADDING_NBYTES = 4096
_FORMAT = 1


class PerRank:
    """Marks an object in a state whose state differs between ranks, such as a data loader.

    Other objects are taken to have the same state on all ranks, or distributed tensors. The state
    is pickled whole, so it should be small. It can be restored on as many ranks as saved it.

    Args:
        stateful: An object with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, stateful: Stateful) -> None:
        if not isinstance(stateful, Stateful):
            raise OptionError(
                f"PerRank got an object of type {type(stateful).__name__}",
                hint="pass an object with state_dict and load_state_dict",
            )
        self.stateful = stateful


def require_state(state: object, parts: tuple[str, ...]) -> None:
    """Require that a state can be saved.

    Raises:
        OptionError: It is not a mapping, has a key that is not a string or is reserved, has a data
            loader without a state, has a state dict instead of an object, or lacks a part.
    """
    if not isinstance(state, Mapping):
        raise OptionError(
            f"the state is an object of type {type(state).__name__}",
            hint='pass a dictionary, such as {"model": model, "optimizer": optimizer}',
        )
    for key in state:
        if not isinstance(key, str) or key.split(".")[0] == _RESERVED:
            raise OptionError(f"the key {key!r} is not possible", hint="use another string")
        if isinstance(state[key], DataLoader) and not isinstance(state[key], Stateful):
            raise OptionError(
                f"the DataLoader {key!r} has no state: what is restored would begin anew",
                hint="use one with state_dict and load_state_dict, such as torchdata's"
                " StatefulDataLoader, in PerRank; or save the number of batches",
            )
        _require_objects(key, state[key])
    missing = [part for part in parts if part not in state]
    if missing:
        raise OptionError(f"the state lacks the parts {missing}", hint="pass all parts")


_STATE_DICTS = {
    "an optimizer": {"state", "param_groups"},
    "a learning rate scheduler": {"last_epoch", "_last_lr"},
    "a gradient scaler": {"growth_factor", "_growth_tracker"},
}
"""Keys of state dicts whose objects would keep their old values when the dictionary is filled."""


def _require_objects(name: str, value: object) -> None:
    if isinstance(value, dict):
        for kind, keys in _STATE_DICTS.items():
            if keys <= value.keys():
                raise OptionError(
                    f"{name!r} is the state dict of {kind}: restoring would fill this dictionary,"
                    " and the object would keep its old values",
                    hint="pass the object itself, or one with state_dict and load_state_dict that"
                    " has it",
                )
        for key, each in value.items():
            _require_objects(f"{name}.{key}", each)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            _require_objects(f"{name}.{number}", each)


# --- saving ---------------------------------------------------------------------------------------

Placements: TypeAlias = "dict[str, list[int | None] | None]"
"""By the name of a tensor, the dimension that is sharded over each dimension of the mesh, if any;
``None`` for placements of another kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The description of a step."""

    step: int
    metrics: Mapping[str, float]
    exact: frozenset[str]
    """Keys of the objects that get exactly what they returned."""
    parts: tuple[str, ...]
    """Names of the parts that the step was saved in; none if it is one checkpoint."""
    save: str
    """Names the save: the same in all parts."""
    placements: Placements | None
    """Of the optimizers' distributed tensors that are not placed as their parameters are; ``None``
    if no parameter was distributed."""


def capture(
    state: Mapping[str, Any],
    step: int,
    metrics: Mapping[str, float],
    extra: object,
    *,
    parts: tuple[str, ...],
    rank: int,
) -> list[dict[str, Any]]:
    """The state dict of each part to save; objects are asked for their state now.

    Args:
        state: Objects, tensors and plain values by name.
        step: The step.
        metrics: Its metrics.
        extra: Anything that can be pickled.
        parts: Names of the parts; without any, there is one.
        rank: This rank; rank 0 adds the description.

    Raises:
        OptionError: ``extra``, or the state of an object, cannot be pickled.
        Exception: Whatever an object raises when it is asked.
    """
    items: dict[str, Any] = {}
    exact: dict[str, Any] = {}
    placements: Placements | None = None
    for key, value in state.items():
        if isinstance(value, PerRank):
            exact[key] = value.stateful.state_dict()
            continue
        items[key] = value.state_dict() if isinstance(value, Stateful) else value
        if _is_exact(value, items[key]):
            exact[key] = items[key]
        parameters = parameters_of(value)
        if rank == 0 and any(isinstance(each, DTensor) for each in parameters):
            placements = {**(placements or {}), **_placed_otherwise(key, items[key], parameters)}
    named = {key: exact[key] for key in exact if key in items}
    own = {"extra": extra, "rng": rng_states(), "objects": exact}
    try:
        pickled = _pickled(own, named)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a user's object raises
        raise OptionError(
            f"step {step}: {_unpicklable(exact)} cannot be pickled:"
            f" {type(error).__name__}: {error}",
            hint="leave out what belongs to this process, such as locks, files and lambdas",
            cause=error,
        ) from None
    items[key_of_rank(rank)] = _as_tensor(pickled)
    divided = _in_parts(items, parts)
    if rank == 0:
        about = {"format": _FORMAT, "step": step, "metrics": metrics, "exact": sorted(exact)}
        about |= {"parts": parts, "save": uuid.uuid4().hex, "placements": placements}
        content = json.dumps(about)
        for part in divided:
            part[ABOUT] = _as_tensor(content.encode())
    return divided


def index_of_part(key: str, parts: tuple[str, ...]) -> int:
    """The part that an item belongs to: that of its name, or the last one."""
    return parts.index(key) if key in parts else max(0, len(parts) - 1)


def _in_parts(items: Mapping[str, Any], parts: tuple[str, ...]) -> list[dict[str, Any]]:
    divided: list[dict[str, Any]] = [{} for _ in parts or ("",)]
    for key, value in items.items():
        divided[index_of_part(key, parts)][key] = value
    return divided


def _is_exact(value: object, state: object) -> bool:
    """Whether an object gets exactly what it returned, instead of its present structure."""
    if not isinstance(value, Stateful | dict | list) or isinstance(value, torch.nn.Module):
        return False
    if isinstance(value, torch.optim.Optimizer):
        return True
    leaves = _torch.flatten_state_dict({"": state})[0].values()
    return not any(
        isinstance(leaf, _torch.ShardedTensor)
        or (isinstance(leaf, torch.Tensor) and _torch.says_its_place(leaf))
        for leaf in leaves
    )


def parameters_of(value: object) -> list[torch.Tensor]:
    """An optimizer's parameters in the order in which its state numbers them; else none."""
    groups = value.param_groups if isinstance(value, torch.optim.Optimizer) else ()
    return [each for group in groups for each in group["params"]]


def parameter_at(path: tuple[Any, ...], parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The parameter to which an optimizer's tensor at ``(key, "state", number, name)`` belongs."""
    if path[1:2] != ("state",) or len(path) < 4 or not str(path[2]).isdecimal():
        return None
    number = int(path[2])
    return parameters[number] if number < len(parameters) else None


def _placed_otherwise(key: str, state: object, parameters: Sequence[torch.Tensor]) -> Placements:
    """The placements of distributed tensors that are not placed as their parameters are."""
    flat, paths = _torch.flatten_state_dict({key: state})
    found: Placements = {}
    for name, each in flat.items():
        if isinstance(each, DTensor):
            parameter = parameter_at(paths[name], parameters)
            if not isinstance(parameter, DTensor) or (parameter.shape, parameter.placements) != (
                each.shape,
                each.placements,
            ):
                usual = all(type(place) in (Shard, Replicate) for place in each.placements)
                dimensions = [getattr(place, "dim", None) for place in each.placements]
                found[name] = dimensions if usual else None
    return found


def key_of_rank(rank: int) -> str:
    """The name of a rank's own item."""
    return f"nostall.rank-{rank}"


def _as_tensor(content: bytes) -> torch.Tensor:
    padded = bytearray(content.ljust(-(-len(content) // _PADDING_NBYTES) * _PADDING_NBYTES))
    return torch.frombuffer(padded, dtype=torch.uint8)


def _pickled(content: object, named: Mapping[str, Any]) -> bytes:
    """A pickle in which the tensors of ``named`` are references to items of these names."""
    flat, _ = _torch.flatten_state_dict(dict(named))
    names = {id(leaf): name for name, leaf in flat.items() if isinstance(leaf, torch.Tensor)}
    stream = io.BytesIO()
    _Pickler(stream, names).dump(content)
    return stream.getvalue()


def _unpicklable(exact: Mapping[str, Any]) -> str:
    for key, value in exact.items():
        try:
            _pickled(value, exact)
        except Exception:  # whatever a user's object raises
            return f"the state of {key!r}"
    return "extra"


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(stream)
        self._names = names

    def persistent_id(self, value: Any) -> str | None:
        return self._names.get(id(value)) if isinstance(value, torch.Tensor) else None


# --- descriptions ---------------------------------------------------------------------------------


def read_about(directory: str) -> About | None:
    """The description of a step from one of its checkpoints; ``None`` if it has none.

    Reads the metadata and that item, without torch's load planner: its global switch of naming
    would disturb a save on another thread.

    Raises:
        OSError: Storage refuses to answer.
        UnknownMetadataError: A newer nostall has written it.
        NostallError: The checkpoint is damaged.
    """
    reader = CachedMetadataFileSystemReader(directory, cache_metadata=False)
    places = reader.shared_metadata().storage_data
    place = None if places is None else places.get(MetadataIndex(ABOUT, torch.Size([0])))
    if place is None:
        return None
    files = storage_at(directory)
    with closing(files.open(place.relative_path)) as source:
        content = bytearray(place.length)
        source.read_into(place.offset, memoryview(content))
    try:
        tensor = loaded_safely(io.BytesIO(content))
        plain = json.loads(bytes(tensor.tolist()))
        if plain["format"] == _FORMAT:
            return _about(plain)
    except (ImportError, MemoryError):  # of this environment
        raise
    except Exception as error:  # the bytes may be anything
        raise DamagedCheckpointError(
            f"the description of the step is damaged ({type(error).__name__})",
            phase="read",
            path=files.where(place.relative_path),
            hint=f"`nostall verify {directory}` lists all damage",
        ) from error
    raise UnknownMetadataError(
        f"the step has a description of format {plain['format']!r:.20}, not {_FORMAT}",
        phase="read",
        path=directory,
        hint="restore it with the version of nostall that saved it, or a later one",
    )


def _about(plain: Mapping[str, Any]) -> About:
    return About(
        step=int(plain["step"]),
        metrics={str(name): float(value) for name, value in plain["metrics"].items()},
        exact=frozenset(map(str, plain["exact"])),
        parts=tuple(map(str, plain["parts"])),
        save=str(plain["save"]),
        placements=_placements(plain.get("placements")),
    )


def _placements(plain: Mapping[str, Any] | None) -> Placements | None:
    if plain is None:  # also in steps of older versions
        return None
    return {
        name: None if places is None else [None if dim is None else int(dim) for dim in places]
        for name, places in plain.items()
    }
