"""A step that is restored: what to load into, and what to do with it; see :mod:`contents`."""

from __future__ import annotations

import io
import logging
import warnings
from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Replicate, Shard, empty

from nostall import _torch
from nostall._manager.contents import (
    About,
    PerRank,
    index_of_part,
    key_of_rank,
    parameter_at,
    parameters_of,
)
from nostall._manager.rng import set_rng_states
from nostall._manager.stand_ins import OwnUnpickler, Unavailable, found_in
from nostall._model.wording import some
from nostall._ranks.group import require_numpy
from nostall._read.planner import empty_in, outer_names
from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from nostall.errors import DamagedCheckpointError, OptionError

_log = logging.getLogger("nostall")


class Restoration:
    """Restores a state from one step: what to load, and what to do with it.

    Args:
        state: Objects, tensors and plain values by name; loaded values replace plain ones.
        about: The description of the step.
        checkpoints: The directories of the step's checkpoints; their metadata is read here.
        parts: Names of the parts.
        rank: This rank.
        world_size: Number of ranks that restore.

    Raises:
        OptionError: The state of an object on this rank was not saved; or NumPy is missing.
        OSError: Storage does not answer.
        NostallError: A checkpoint is damaged.
    """

    def __init__(
        self,
        state: MutableMapping[str, Any],
        about: About,
        checkpoints: Sequence[str],
        parts: tuple[str, ...],
        *,
        rank: int,
        world_size: int,
    ) -> None:
        require_numpy()
        self._rank = rank
        self._state = state
        self._step = about.step
        self._checkpoints = checkpoints
        self._exact = about.exact
        self._placements = about.placements
        self._parts = parts
        self._readers = [CachedMetadataFileSystemReader(path) for path in checkpoints]
        self.metadata = [reader.read_metadata() for reader in self._readers]
        """The metadata of each checkpoint."""
        last = self.metadata[-1].state_dict_metadata
        self._has_own = key_of_rank(rank) in last
        self._has_others = key_of_rank(world_size) in last
        key = key_of_rank(rank if self._has_own else 0)
        self._content = bytearray(_bytes_metadata(last, key).size.numel())
        self._items: list[dict[str, Any]] = [{} for _ in checkpoints]
        """The state dict to load into, for each checkpoint."""
        self._items[-1][key] = torch.frombuffer(self._content, dtype=torch.uint8)
        for name, value in state.items():
            self._add(name, value)
        for number, items in enumerate(self._items):
            if lost := _beneath_empty(items, self.metadata[number]):
                why = f"it holds {some(lost)}, for which the state has an empty dictionary"
                raise self._does_not_fit("the state", why, number)

    def _add(self, key: str, value: object) -> None:
        if isinstance(value, PerRank):
            self._require_own(key)
            return
        number = index_of_part(key, self._parts)
        present = value.state_dict() if isinstance(value, Stateful) else value
        parameters = parameters_of(value)
        flat, _ = _torch.flatten_state_dict({key: present, f"parameters of {key}": parameters})
        tensors = {name: each for name, each in flat.items() if isinstance(each, torch.Tensor)}
        if bare := [name for name, each in tensors.items() if each.is_meta]:
            why = f"{some(bare)}: on the meta device, without memory to load into;"
            raise self._does_not_fit("the state", f"{why} Module.to_empty gives it some", number)
        if key in self._exact:
            self._items[number].update(self._templates(key, tensors, parameters, number))
        else:
            self._items[number][key] = present

    def _require_own(self, key: str) -> None:
        if self._has_others and self._rank == 0:
            what = "%r was saved by more ranks than restore it: the others' state is lost: path=%s"
            _log.warning(what, key, self._checkpoints[-1])
        if not self._has_own:
            raise OptionError(
                f"the state of {key!r} differs between ranks, and fewer ranks have saved it",
                phase="read",
                path=self._checkpoints[-1],
                hint="restore it on as many ranks, or leave it out",
            )
        if key not in self._exact:
            raise OptionError(f"the step has no state of {key!r} per rank", hint="leave it out")

    def _templates(
        self,
        key: str,
        present: Mapping[str, torch.Tensor],
        parameters: Sequence[torch.Tensor],
        number: int,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """A tensor for each saved one of an exact object: the present one, or a new one."""
        for name, path in self._paths[number][key]:
            entry = self.metadata[number].state_dict_metadata.get(name)
            if isinstance(entry, TensorStorageMetadata):
                parameter = parameter_at(path, parameters)
                made = self._template(name, entry, present.get(name), parameter)
                if made is None:
                    why = f"it is not known how {name} is to be distributed; let the optimizer take"
                    why += " a step first, or save and restore an object around get_state_dict"
                    raise self._does_not_fit(f"the object {key!r}", why, number)
                yield name, made

    def _template(
        self,
        name: str,
        entry: TensorStorageMetadata,
        present: torch.Tensor | None,
        parameter: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The tensor to load an item into; ``None`` if it is not known how to distribute it.

        Args:
            name: The name of the item.
            entry: The saved tensor.
            present: What the object has under this name, if anything.
            parameter: The optimizer's parameter that it belongs to, if any.
        """
        size, dtype, known = entry.size, entry.properties.dtype, self._placements
        if present is not None and (_torch.global_size(present), present.dtype) == (size, dtype):
            return present
        if isinstance(parameter, DTensor) and known is not None and name in known:
            places, mesh = known[name], parameter.device_mesh
            if places is None or len(places) != mesh.ndim:
                return None
            placements = [Replicate() if each is None else Shard(each) for each in places]
            return empty(size, dtype=dtype, device_mesh=mesh, placements=placements)
        if parameter is not None and _torch.global_size(parameter) == size:
            made = torch.empty_like(parameter, dtype=dtype)
            is_part = type(made) is torch.Tensor and _torch.says_its_place(parameter)
            return _torch.described_as(parameter, made) if is_part else made
        if isinstance(parameter, DTensor) and known is None and size:
            return None
        return torch.empty(size, dtype=dtype)

    @cached_property
    def _paths(self) -> list[defaultdict[str, list[tuple[str, tuple[Any, ...]]]]]:
        """Names and paths of what was saved, by the key of the state; for each checkpoint."""
        found: list[defaultdict[str, list[tuple[str, tuple[Any, ...]]]]] = []
        for metadata in self.metadata:
            found.append(defaultdict(list))
            for name, path in (metadata.planner_data or {}).items():
                found[-1][path[0]].append((name, path))
        return found

    def load(self, process_group: dist.ProcessGroup | None) -> None:
        """Read the values; returns when all ranks have. Collective.

        Raises:
            OptionError: The state of this rank has other names or shapes than the step.
            CheckpointException: A rank could not read them.
        """
        with warnings.catch_warnings():
            # torch's, on each load without a process group
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            for number, (reader, items) in enumerate(zip(self._readers, self._items, strict=True)):
                try:
                    dcp.load(items, storage_reader=reader, process_group=process_group)
                except CheckpointException as error:
                    found = _differences(items, self.metadata[number])
                    if not found:
                        raise
                    refusal = self._does_not_fit("the state", "; ".join(found), number)
                    refusal.cause = error
                    raise refusal from None

    def _does_not_fit(self, what: str, why: str, number: int) -> OptionError:
        return OptionError(
            f"{what} does not fit step {self._step}: {why}",
            phase="read",
            path=self._checkpoints[number],
            hint="restore into objects like those that were saved, leave keys out of the state, or"
            " restore another step",
        )

    def finish(self, *, rng: bool) -> object:
        """Hand the loaded values to the objects of the state; returns ``extra``.

        Args:
            rng: Whether to set the random number generators.

        Raises:
            OptionError: An object refuses what was saved; objects before it have been changed.
        """
        loaded = ChainMap(*self._items)
        content = self._unpickled(loaded)
        for key, value in list(self._state.items()):
            restored = content["objects"][key] if key in self._exact else loaded[key]
            target = value.stateful if isinstance(value, PerRank) else value
            if isinstance(target, Stateful):
                self._hand_over(key, target, restored)
            else:
                self._state[key] = _in_place(target, restored)
        if rng and self._has_own:  # last, as objects may draw numbers
            set_rng_states(content["rng"])
        elif rng:
            _log.warning(
                "rank %d did not save step %d: random number generators keep their states: path=%s",
                *(self._rank, self._step, self._checkpoints[-1]),
            )
        return content["extra"]

    def _unpickled(self, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank has saved beside tensors, of keys that the state has.

        ``extra`` is :class:`Unavailable` if it needs a class that cannot be imported.

        Raises:
            OptionError: An object needs keys that the state leaves out, or such a class.
        """
        unpickler = OwnUnpickler(io.BytesIO(self._content), loaded)
        try:
            content: dict[str, Any] = unpickler.load()
        except Exception as error:  # of an object that finds no content in a missing tensor
            if unpickler.absent:
                raise self._not_importable("a value", sorted(unpickler.absent)) from error
            if not unpickler.missing:
                raise
            raise self._not_alone(sorted(unpickler.missing)) from error
        kept = {key: each for key, each in content["objects"].items() if key in self._state}
        content["objects"] = kept
        if unpickler.absent:
            for key, each in kept.items():
                if absent := found_in(each, unpickler).absent:
                    raise self._not_importable(f"the object {key!r}", sorted(absent))
            if absent := found_in(content["extra"], unpickler).absent:
                content["extra"] = Unavailable(why=self._not_importable("extra", sorted(absent)))
        if unpickler.missing and (shared := found_in(content, unpickler).missing):
            raise self._not_alone(sorted(shared))
        return content

    def _not_importable(self, what: str, names: Sequence[str]) -> OptionError:
        return OptionError(
            f"{what} of step {self._step} needs {some(names)}, which cannot be imported",
            phase="read",
            path=self._checkpoints[-1],
            hint="define it in a module that both programs import, or leave the key out",
        )

    def _not_alone(self, names: Sequence[str]) -> OptionError:
        return OptionError(
            f"a part of step {self._step} cannot be restored without {some(names)}",
            phase="read",
            path=self._checkpoints[-1],
            hint="add the keys of these tensors to the state",
        )

    def _hand_over(self, key: str, target: Stateful, restored: Any) -> None:
        before = [dict(group) for group in getattr(target, "param_groups", ())]
        try:
            target.load_state_dict(restored)
        except Exception as error:  # of any object: an optimizer, a scheduler, one of the user's
            why, number = f"{type(error).__name__}: {error!s:.500}", index_of_part(key, self._parts)
            refusal = self._does_not_fit(f"the object {key!r}", why, number)
            refusal.cause = error
            raise refusal from None
        if isinstance(target, torch.optim.Optimizer):
            _complete_groups(key, target, before)


def _differences(items: Mapping[str, Any], metadata: Metadata) -> list[str]:
    """How a state dict to load into differs from what was saved; nothing if it can be loaded."""
    flat, _ = _torch.flatten_state_dict(dict(items))
    saved, paths = metadata.state_dict_metadata, metadata.planner_data or {}
    shapes = [
        f"{name} {tuple(entry.size)} instead of {tuple(size)}"
        for name, value in flat.items()
        if isinstance(value, torch.Tensor)
        and isinstance(entry := saved.get(name), TensorStorageMetadata)
        and entry.size != (size := _torch.global_size(value))
    ]
    missing = [name for name in flat if name not in saved]
    if not missing and not shapes:
        return []
    unused = [name for name in saved if name not in flat and paths.get(name, ("",))[0] in items]
    named = {"lacks": missing, "holds": shapes, "also holds": unused}
    return [f"the step {what} {some(names)}" for what, names in named.items() if names]


def _beneath_empty(items: Mapping[str, Any], metadata: Metadata) -> list[str]:
    """Names of what was saved in dictionaries that are empty in a state: it would not be loaded."""
    empty = {name for key, value in items.items() for name in empty_in(value, key)}
    saved = metadata.state_dict_metadata if empty else ()
    return [name for name in saved if not empty.isdisjoint(outer_names(name))]


def _complete_groups(
    key: str, optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]
) -> None:
    """Give the groups of an optimizer the options that they had, and have lost by loading.

    Without them its first step would fail. torch's optimizers do so for what a newer version has
    added.
    """
    for group, had in zip(optimizer.param_groups, before, strict=False):
        lost = {name: had[name] for name in had.keys() - group.keys()}
        if lost:
            _log.warning(
                "%r was saved by another class of optimizer, or an older version: it has no %s,"
                " which keep their values",
                key,
                ", ".join(sorted(lost)),
            )
            group.update(lost)


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


def _bytes_metadata(saved: Mapping[str, Any], key: str) -> TensorStorageMetadata:
    entry = saved.get(key)
    if not isinstance(entry, TensorStorageMetadata):
        raise DamagedCheckpointError(f"the step has no item {key!r}", phase="read")
    return entry
