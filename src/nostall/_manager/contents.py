"""The items of a step besides the tensors of the state: how they are saved, and restored.

Two items are added to the state, so that they are committed with it:

* ``nostall.about``, by rank 0: step and metrics as JSON. It is read without the rest.
* ``nostall.rank-<n>``, by every rank: a pickle of the states of random number generators, of the
  user's ``extra``, and of the state of each *exact* object, each a pickle of its own: a program
  needs only the classes of what it asks for. Tensors are references to items. It also has the
  placements of the optimizers' distributed tensors of other shapes than their parameters.

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
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Replicate, Shard, empty
from torch.utils.data import DataLoader

from nostall import _torch
from nostall._ranks.group import Coordination, require_numpy
from nostall._storage.locations import is_address
from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from nostall.errors import DamagedCheckpointError, OptionError, UnknownMetadataError
from nostall.filesystem_reader import sends_from_cpu
from nostall.loading import load

_log = logging.getLogger("nostall")

ABOUT = "nostall.about"
_RESERVED = "nostall"
_PADDING_NBYTES = 4096
_FORMAT = 3


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
            raise OptionError(
                f"invalid key {key!r}",
                hint=f"use a string; {_RESERVED!r} and '{_RESERVED}.*' are reserved",
            )
        if isinstance(state[key], DataLoader) and not isinstance(state[key], Stateful):
            raise OptionError(
                f"the DataLoader {key!r} has no state: it would start over after restore()",
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

Placements: TypeAlias = "dict[str, list[int | None]]"
"""By the name of a tensor, which of its dimensions each dimension of the mesh shards, if any."""


def capture(
    state: Mapping[str, Any], step: int, metrics: Mapping[str, float], extra: object, rank: int
) -> tuple[dict[str, Any], Counter[str]]:
    """The state dict to save, and by key the number of plain values outside of modules.

    DCP saves each plain value as one item. Objects are asked for their state, and may raise
    anything.
    """
    items: dict[str, Any] = {}
    plain: Counter[str] = Counter()
    exact: dict[str, bytes] = {}
    placements: Placements | None = None
    for key, value in state.items():
        what = f"step {step}: the state of {key!r}"
        if isinstance(value, PerRank):
            exact[key] = _pickled(value.stateful.state_dict(), {}, what)
            continue
        items[key] = value.state_dict() if isinstance(value, Stateful) else value
        if isinstance(value, torch.nn.Module) or not isinstance(value, Stateful | dict | list):
            plain[key] = not isinstance(value, torch.nn.Module | torch.Tensor)
            continue  # loaded into its present structure
        flat, paths = _torch.flatten_state_dict({key: items[key]})
        plain[key] = sum(not isinstance(leaf, torch.Tensor) for leaf in flat.values())
        is_optimizer = isinstance(value, torch.optim.Optimizer)
        if is_optimizer or not any(map(_is_distributed, flat.values())):
            exact[key] = _pickled(items[key], flat, what)
        parameters = _parameters_of(value)
        if any(isinstance(each, DTensor) for each in parameters):
            placements = {**(placements or {}), **_placements_of(flat, paths, parameters)}
    own: dict[str, Any] = {"rng": rng_states(), "objects": exact, "placements": placements}
    own["extra"] = _pickled(extra, {}, f"step {step}: extra")
    items[_key_of_rank(rank)] = _as_tensor(pickle.dumps(own))
    if rank == 0:
        about = {"format": _FORMAT, "step": step, "metrics": metrics}
        items[ABOUT] = _as_tensor(json.dumps(about).encode())
    return items, plain


def _is_distributed(leaf: object) -> bool:
    return isinstance(leaf, _torch.ShardedTensor) or (
        isinstance(leaf, torch.Tensor) and _torch.says_its_place(leaf)
    )


def _parameters_of(value: object) -> list[torch.Tensor]:
    """An optimizer's parameters in the order in which its state numbers them; else none."""
    groups = value.param_groups if isinstance(value, torch.optim.Optimizer) else ()
    return [each for group in groups for each in group["params"]]


def _parameter_at(path: tuple[Any, ...], parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The parameter to which an optimizer's tensor at ``(key, "state", number, name)`` belongs."""
    if path[1:2] != ("state",) or len(path) < 4 or not str(path[2]).isdecimal():
        return None
    number = int(path[2])
    return parameters[number] if number < len(parameters) else None


def _placements_of(
    flat: Mapping[str, Any], paths: Mapping[str, Any], parameters: Sequence[torch.Tensor]
) -> Placements:
    """The placements of distributed tensors of other shapes than their parameters."""
    return {
        name: [getattr(place, "dim", None) for place in leaf.placements]
        for name, leaf in flat.items()
        if isinstance(leaf, DTensor)
        and getattr(_parameter_at(paths[name], parameters), "shape", None) != leaf.shape
    }


def _key_of_rank(rank: int) -> str:
    """The name of a rank's own item."""
    return f"nostall.rank-{rank}"


def _as_tensor(content: bytes) -> torch.Tensor:
    padded = bytearray(content.ljust(-(-len(content) // _PADDING_NBYTES) * _PADDING_NBYTES))
    return torch.frombuffer(padded, dtype=torch.uint8)


def _pickled(content: object, named: Mapping[str, Any], what: str) -> bytes:
    """A pickle in which the tensors of ``named`` are references to items of these names."""
    names = {id(leaf): name for name, leaf in named.items() if isinstance(leaf, torch.Tensor)}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> str | None:
            return names.get(id(value)) if isinstance(value, torch.Tensor) else None

    stream = io.BytesIO()
    try:
        Pickler(stream).dump(content)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a user's object raises
        raise OptionError(
            f"{what} cannot be pickled: {type(error).__name__}: {error}",
            hint="leave out what belongs to this process, such as locks, files and lambdas",
            cause=error,
        ) from None
    return stream.getvalue()


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
            _log.warning("the random state of %s is not restored: %s", name, error)


# --- descriptions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The description of a step."""

    step: int
    metrics: Mapping[str, float]


def read_about(directory: str) -> About | None:
    """The description of a step, which is read alone; ``None`` if it has none."""
    try:
        saved = CachedMetadataFileSystemReader(directory).shared_metadata().state_dict_metadata
        if ABOUT not in saved:
            return None
        content = _content_of(directory, saved, ABOUT)
    finally:  # a step is described once, and metadata may be large
        CachedMetadataFileSystemReader.clear_metadata_cache(directory)
    try:
        plain = json.loads(content)
        if plain["format"] == _FORMAT:
            metrics = {str(name): float(value) for name, value in plain["metrics"].items()}
            return About(step=int(plain["step"]), metrics=metrics)
    except Exception as error:  # the bytes may be anything
        raise DamagedCheckpointError(
            f"the description of the step is damaged ({type(error).__name__})",
            phase="read",
            path=directory,
            hint=f"`nostall verify {directory}` lists all damage",
        ) from error
    raise UnknownMetadataError(
        f"the step has a description of format {plain['format']!r:.20}, not {_FORMAT}",
        phase="read",
        path=directory,
        hint="restore it with the version of nostall that saved it",
    )


def _content_of(directory: str, saved: Mapping[str, Any], name: str) -> bytearray:
    """The bytes of an item."""
    entry = saved.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        what = f"the step has no item {name!r}"
        raise DamagedCheckpointError(what, phase="read", path=directory)
    content = bytearray(entry.size.numel())
    load({name: torch.frombuffer(content, dtype=torch.uint8)}, directory, verify="crc", threads=1)
    return content


# --- restoring ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A step that :meth:`CheckpointManager.restore` has restored."""

    step: int
    metrics: Mapping[str, float]
    state: MutableMapping[str, Any] = field(repr=False)
    """The state that was passed, with the restored values."""
    _extra: Callable[[], Any] = field(repr=False)

    @property
    def extra(self) -> Any:
        """This rank's ``extra``; rank 0's if fewer ranks have saved the step.

        Raises:
            OptionError: It needs a class that this program cannot import.
        """
        return self._extra()


class Restoration:
    """Restores a state from one step; its metadata and this rank's own item are read at once."""

    def __init__(
        self, state: MutableMapping[str, Any], about: About, path: str, coordination: Coordination
    ) -> None:
        require_numpy()
        self._state = state
        self._about = about
        self._path = path
        self._rank, self._world_size = coordination.rank, coordination.world_size
        self.metadata = CachedMetadataFileSystemReader(path).read_metadata()
        saved = self.metadata.state_dict_metadata
        self._has_own = _key_of_rank(self._rank) in saved
        own = _key_of_rank(self._rank if self._has_own else 0)
        self._own = pickle.loads(_content_of(path, saved, own))
        self._exact: dict[str, bytes] = self._own["objects"]
        """Pickles of the objects that get exactly what they returned."""
        self._items: dict[str, Any] = {}
        """The state dict to load into."""
        present: dict[str, tuple[dict[str, Any], list[torch.Tensor]]] = {}
        for key, value in state.items():
            if isinstance(value, PerRank):
                self._require_own(key, is_of_more=_key_of_rank(self._world_size) in saved)
                continue
            now = value.state_dict() if isinstance(value, Stateful) else value
            if key in self._exact:
                flat, _ = _torch.flatten_state_dict({key: now})
                present[key] = flat, _parameters_of(value)
            else:
                self._items[key] = now
        for name, path_of_item in (self.metadata.planner_data or {}).items():
            key, entry = path_of_item[0], saved.get(name)
            if key in present and isinstance(entry, TensorStorageMetadata):
                flat, parameters = present[key]
                parameter = _parameter_at(path_of_item, parameters)
                self._items[name] = self._target(key, name, flat.get(name), entry, parameter)

    def _require_own(self, key: str, *, is_of_more: bool) -> None:
        if not self._has_own or key not in self._exact:
            raise OptionError(
                f"the state of {key!r} differs between ranks, and the step has none for rank"
                f" {self._rank}",
                phase="read",
                path=self._path,
                hint="restore it on as many ranks as saved it, or leave it out",
            )
        if is_of_more and self._rank == 0:
            what = "%r was saved by more ranks; the others' state is not restored: path=%s"
            _log.warning(what, key, self._path)

    def _target(
        self,
        key: str,
        name: str,
        present: object,
        entry: TensorStorageMetadata,
        parameter: torch.Tensor | None,
    ) -> torch.Tensor:
        """The tensor of an exact object to load an item into: the present one, or a new one."""
        size, dtype = entry.size, entry.properties.dtype
        known: Placements | None = self._own["placements"]
        if (
            isinstance(present, torch.Tensor)
            and present.dtype == dtype
            and _torch.global_size(present) == size
        ):
            return present
        places = None if known is None else known.get(name)
        if parameter is not None and _torch.global_size(parameter) == size:
            made = torch.empty_like(parameter, dtype=dtype)
            is_part = type(made) is torch.Tensor and _torch.says_its_place(parameter)
            return _torch.described_as(parameter, made) if is_part else made
        if isinstance(parameter, DTensor) and places and len(places) == parameter.device_mesh.ndim:
            placements = [Replicate() if each is None else Shard(each) for each in places]
            mesh = parameter.device_mesh
            return empty(size, dtype=dtype, device_mesh=mesh, placements=placements)
        if not isinstance(parameter, DTensor) or not size or (known is not None and not places):
            return torch.empty(size, dtype=dtype)
        why = f"it is not known how {name} is to be distributed; let the optimizer take a step"
        why += " first, or save and restore an object around get_state_dict"
        raise self._does_not_fit(f"the object {key!r}", why)

    def load(self, process_group: dist.ProcessGroup | None) -> None:
        """Read the values; returns when all ranks have. Collective.

        A state of this rank that does not fit is an ``OptionError``, before any value is read.
        """
        group = (process_group or dist.group.WORLD) if self._world_size > 1 else None
        # A store would send the same bytes to each rank; of files, the page cache reads them once.
        once = group is not None and is_address(self._path) and sends_from_cpu(group)
        try:
            load(self._items, self._path, trust=True, process_group=group, read_once=once)
        except (OptionError, CheckpointException) as error:
            own: BaseException | None = error
            if isinstance(error, CheckpointException):
                own, _ = error.failures.get(self._rank, (None, None))
            if not isinstance(own, OptionError):
                raise
            why = own.message.removeprefix("the state does not fit: ")
            raise self._does_not_fit("the state", why, error) from None

    def _does_not_fit(self, what: str, why: str, cause: BaseException | None = None) -> OptionError:
        return OptionError(
            f"{what} does not fit step {self._about.step}: {why}",
            phase="read",
            path=self._path,
            hint="restore into objects like those that were saved, leave keys out of the state, or"
            " restore another step",
            cause=cause,
        )

    def finish(self, *, rng: bool) -> Restored:
        """Hand the loaded values to the objects of the state.

        If an object refuses what was saved, objects before it have been changed.
        """
        restored: dict[str, Any] = {
            key: None if key in self._exact else self._items[key] for key in self._state
        }
        for key in [key for key in restored if key in self._exact]:
            what = f"the object {key!r} of step {self._about.step}"
            restored[key] = _unpickled(self._exact[key], what, self._path, self._items)
        for key, value in list(self._state.items()):
            target = value.stateful if isinstance(value, PerRank) else value
            if isinstance(target, Stateful):
                try:
                    target.load_state_dict(restored[key])
                except Exception as error:  # of any object, such as one of the user's
                    why = f"{type(error).__name__}: {error!s:.500}"
                    raise self._does_not_fit(f"the object {key!r}", why, error) from None
            else:
                self._state[key] = _in_place(target, restored[key])
        if rng and self._has_own:  # last, as objects may draw numbers
            set_rng_states(self._own["rng"])
        elif rng:
            _log.warning(
                "rank %d did not save step %d: random number generators keep their states: path=%s",
                *(self._rank, self._about.step, self._path),
            )
        about, what = self._about, f"extra of step {self._about.step}"
        extra = cache(partial(_unpickled, self._own["extra"], what, self._path, {}))
        return Restored(step=about.step, metrics=about.metrics, state=self._state, _extra=extra)


def _unpickled(content: bytes, what: str, path: str, tensors: Mapping[str, Any]) -> Any:
    """The object in a pickle that refers to tensors by their names."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name: Any) -> Any:
            return tensors[name]

    try:
        return Unpickler(io.BytesIO(content)).load()
    except (ImportError, AttributeError) as error:  # such as a class of the script that saved
        raise OptionError(
            f"{what} needs a class that cannot be imported: {error}",
            phase="read",
            path=path,
            hint="define it in a module that both programs import, or leave the key out",
            cause=error,
        ) from None


def _in_place(target: object, restored: object) -> object:
    """A dictionary or list that holds what was saved, the present one if possible."""
    if isinstance(target, dict) and isinstance(restored, dict) and target is not restored:
        target.clear()
        target.update(restored)
        return target
    if isinstance(target, list) and isinstance(restored, list):
        target[:] = restored
        return target
    return restored
