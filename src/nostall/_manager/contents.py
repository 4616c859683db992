"""What a step holds besides the tensors of the state, and how it gets there.

Two items are added to the state, so that they are committed with it:

* ``nostall.about``, by rank 0: step and metrics as JSON. It is read without the rest.
* ``nostall.rank-<n>``, by every rank: a pickle of the states of random number generators, of the
  user's ``extra``, and of the state of each *exact* object, each a pickle of its own: a program
  needs only the classes of what it asks for. Tensors are references to items.

Both are tensors of bytes, padded, so that their shapes, and with them the plan, rarely change.

DCP flattens a state dict and loses what does not fit: keys that are integers, empty dictionaries,
counters, tensors that the object of a new process does not have yet. So optimizers, schedulers and
other objects get exactly what they returned, and dictionaries and lists what they held. Modules,
and objects whose tensors are distributed, are loaded as stock does it: into the structure they have
now, on any number of ranks.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import pickle
import random
import sys
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
from nostall._read.objects import loaded_safely
from nostall._storage.places import storage_at
from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from nostall.errors import DamagedCheckpointError, OptionError, UnknownMetadataError

_log = logging.getLogger("nostall")

ABOUT = "nostall.about"
_RESERVED = "nostall"
_PADDING_NBYTES = 4096
_FORMAT = 2


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


def require_state(state: object) -> None:
    """Require that a state can be saved, and restored into."""
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


def _require_objects(name: str, value: object) -> None:
    if isinstance(value, dict):
        for kind, keys in _torch.STATE_DICTS.items():
            if keys <= value.keys():
                raise OptionError(
                    f"{name!r} is the state dict of {kind}: restoring would fill this dictionary,"
                    " and the object would keep its old values",
                    hint="pass the object itself, or one with state_dict and load_state_dict that"
                    " has it",
                )
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            _require_objects(f"{name}.{key}", each)


# --- saving ---------------------------------------------------------------------------------------

Placements: TypeAlias = "dict[str, list[int | None] | None]"
"""By the name of a tensor, the dimension that is sharded over each dimension of the mesh, if any;
``None`` for placements of another kind."""


def capture(
    state: Mapping[str, Any], step: int, metrics: Mapping[str, float], extra: object, rank: int
) -> dict[str, Any]:
    """The state dict to save; objects are asked for their state, and may raise anything."""
    items: dict[str, Any] = {}
    exact: dict[str, bytes] = {}
    placements: Placements | None = None
    for key, value in state.items():
        what = f"step {step}: the state of {key!r}"
        if isinstance(value, PerRank):
            exact[key] = _pickled(value.stateful.state_dict(), {}, what)
            continue
        items[key] = value.state_dict() if isinstance(value, Stateful) else value
        if _is_exact(value, items[key]):
            exact[key] = _pickled(items[key], {key: items[key]}, what)
        parameters = parameters_of(value)
        if rank == 0 and any(isinstance(each, DTensor) for each in parameters):
            placements = {**(placements or {}), **_placed_otherwise(key, items[key], parameters)}
    own = {"extra": _pickled(extra, {}, f"step {step}: extra"), "rng": rng_states()}
    items[key_of_rank(rank)] = _as_tensor(pickle.dumps({**own, "objects": exact}))
    if rank == 0:
        about = {"format": _FORMAT, "step": step, "metrics": metrics, "exact": sorted(exact)}
        items[ABOUT] = _as_tensor(json.dumps({**about, "placements": placements}).encode())
    return items


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
            of_parameter = parameter_at(paths[name], parameters)
            like = [getattr(of_parameter, what, None) for what in ("shape", "placements")]
            if like != [each.shape, each.placements]:
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


def _pickled(content: object, named: Mapping[str, Any], what: str) -> bytes:
    """A pickle in which the tensors of ``named`` are references to items of these names."""
    flat, _ = _torch.flatten_state_dict(dict(named))
    names = {id(leaf): name for name, leaf in flat.items() if isinstance(leaf, torch.Tensor)}
    stream = io.BytesIO()
    try:
        _Pickler(stream, names).dump(content)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a user's object raises
        raise OptionError(
            f"{what} cannot be pickled: {type(error).__name__}: {error}",
            hint="leave out what belongs to this process, such as locks, files and lambdas",
            cause=error,
        ) from None
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(stream)
        self._names = names

    def persistent_id(self, value: Any) -> str | None:
        return self._names.get(id(value)) if isinstance(value, torch.Tensor) else None


# --- random number generators ---------------------------------------------------------------------


def rng_states() -> dict[str, bytes]:
    """The states of the generators that a process has by default, by name.

    Each is bytes, so that one that cannot be restored does not prevent the others.
    """
    states = {"python": pickle.dumps(random.getstate())}
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = pickle.dumps(numpy.random.get_state(legacy=False))
    modules: dict[str, Any] = {"torch": torch}
    device = torch.accelerator.current_accelerator()
    if device and torch.get_device_module(device).is_initialized():  # this process uses it
        modules[device.type] = torch.get_device_module(device)
    packed = {name: bytes(each.get_rng_state().tolist()) for name, each in modules.items()}
    return {**states, **packed}


def set_rng_states(states: dict[str, bytes]) -> None:
    """Set them; one whose package or device is not available here is skipped with a warning."""
    for name, state in states.items():
        try:
            if name == "python":
                random.setstate(pickle.loads(state))
            elif name == "numpy":
                importlib.import_module("numpy").random.set_state(pickle.loads(state))
            else:
                module = torch if name == "torch" else torch.get_device_module(name)
                module.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        except (ImportError, RuntimeError, AssertionError) as error:
            # torch raises either of the last two for a device that it does not have.
            _log.warning("the state of the generator of %s is not restored: %s", name, error)


# --- descriptions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The description of a step."""

    step: int
    metrics: Mapping[str, float]
    exact: frozenset[str]
    """Keys of the objects that get exactly what they returned."""
    placements: Placements | None
    """Placements of the optimizers' distributed tensors that differ from their parameters';
    ``None`` if no parameter was distributed."""


def read_about(directory: str) -> About | None:
    """The description of a step; ``None`` if it has none.

    Reads the metadata and that item, without torch's load planner: its global switch of naming
    would disturb a save on another thread.
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
            return About(
                step=int(plain["step"]),
                metrics={str(name): float(value) for name, value in plain["metrics"].items()},
                exact=frozenset(map(str, plain["exact"])),
                placements=plain["placements"],
            )
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
        hint="restore it with the version of nostall that saved it",
    )
