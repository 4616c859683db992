"""A step that is restored: what to load into, and what to do with it; see :mod:`contents`."""

from __future__ import annotations

import io
import logging
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Replicate, Shard, empty

from nostall import _torch
from nostall._manager.contents import (
    About,
    PerRank,
    key_of_rank,
    parameter_at,
    parameters_of,
    set_rng_states,
)
from nostall._ranks.group import Coordination, require_numpy
from nostall._read.planner import Planner, empty_in
from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from nostall.errors import DamagedCheckpointError, OptionError

_log = logging.getLogger("nostall")


class Restoration:
    """Restores a state from one step; its metadata is read at once."""

    def __init__(
        self, state: MutableMapping[str, Any], about: About, path: str, coordination: Coordination
    ) -> None:
        require_numpy()
        self._rank = rank = coordination.rank
        self._state = state
        self._about = about
        self._path = path
        self._reader = CachedMetadataFileSystemReader(path)
        self.metadata = self._reader.read_metadata()
        saved = self.metadata.state_dict_metadata
        self._has_own = key_of_rank(rank) in saved
        self._has_others = key_of_rank(coordination.world_size) in saved
        key = key_of_rank(rank if self._has_own else 0)
        entry = saved.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise DamagedCheckpointError(f"the step has no item {key!r}", phase="read", path=path)
        self._content = bytearray(entry.size.numel())
        self._items: dict[str, Any] = {key: torch.frombuffer(self._content, dtype=torch.uint8)}
        """The state dict to load into."""
        for name, value in state.items():
            self._add(name, value)

    def _add(self, key: str, value: object) -> None:
        if isinstance(value, PerRank):
            self._require_own(key)
            return
        present = value.state_dict() if isinstance(value, Stateful) else value
        if key in self._about.exact:
            self._items.update(self._templates(key, present, parameters_of(value)))
        else:
            self._items[key] = present

    def _require_own(self, key: str) -> None:
        if self._has_others and self._rank == 0:
            what = "%r was saved by more ranks than restore it: the others' state is lost: path=%s"
            _log.warning(what, key, self._path)
        if not self._has_own:
            raise OptionError(
                f"the state of {key!r} differs between ranks, and fewer ranks have saved it",
                phase="read",
                path=self._path,
                hint="restore it on as many ranks, or leave it out",
            )
        if key not in self._about.exact:
            raise OptionError(f"the step has no state of {key!r} per rank", hint="leave it out")

    def _templates(
        self, key: str, present: object, parameters: Sequence[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """A tensor for each saved one of an exact object: the present one, or a new one."""
        flat, _ = _torch.flatten_state_dict({key: present})
        for name, path in self._paths[key]:
            entry = self.metadata.state_dict_metadata.get(name)
            if isinstance(entry, TensorStorageMetadata):
                made = flat.get(name)
                if not _is_like(made, entry):
                    made = self._template(name, entry, parameter_at(path, parameters))
                if made is None:
                    why = f"it is not known how {name} is to be distributed; let the optimizer take"
                    why += " a step first, or save and restore an object around get_state_dict"
                    raise self._does_not_fit(f"the object {key!r}", why)
                yield name, made

    def _template(
        self, name: str, entry: TensorStorageMetadata, parameter: torch.Tensor | None
    ) -> torch.Tensor | None:
        """A new tensor to load an item into; ``None`` if it is not known how to distribute it."""
        size, dtype, known = entry.size, entry.properties.dtype, self._about.placements
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
    def _paths(self) -> defaultdict[str, list[tuple[str, tuple[Any, ...]]]]:
        """Names and paths of what was saved, by the key of the state."""
        found: defaultdict[str, list[tuple[str, tuple[Any, ...]]]] = defaultdict(list)
        for name, path in (self.metadata.planner_data or {}).items():
            found[path[0]].append((name, path))
        return found

    def load(self, process_group: dist.ProcessGroup | None) -> None:
        """Read the values; returns when all ranks have. Collective.

        A state of this rank that does not fit is an ``OptionError``, before any value is read.
        """
        planner = Planner(
            lambda _: True,
            strict=True,
            trust=True,
            path=self._path,
            empty=[name for key, value in self._items.items() for name in empty_in(value, key)],
        )
        try:
            with warnings.catch_warnings():
                # torch's, on each load without a process group
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(
                    self._items,
                    storage_reader=self._reader,
                    planner=planner,
                    process_group=process_group,
                )
        except CheckpointException as error:
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

    def finish(self, *, rng: bool) -> Callable[[], Any]:
        """Hand the loaded values to the objects of the state; returns what gives ``extra``.

        If an object refuses what was saved, objects before it have been changed.
        """
        own = pickle.loads(self._content)
        restored = {
            key: self._unpickled(f"the object {key!r}", own["objects"][key])
            if key in self._about.exact
            else self._items[key]
            for key in self._state
        }
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
            set_rng_states(own["rng"])
        elif rng:
            _log.warning(
                "rank %d did not save step %d: random number generators keep their states: path=%s",
                *(self._rank, self._about.step, self._path),
            )
        return cache(partial(self._unpickled, "extra", own["extra"]))

    def _unpickled(self, what: str, content: bytes) -> Any:
        try:
            return _Unpickler(io.BytesIO(content), self._items).load()
        except (ImportError, AttributeError) as error:  # such as a class of the script that saved
            raise OptionError(
                f"{what} of step {self._about.step} needs a class that cannot be imported: {error}",
                phase="read",
                path=self._path,
                hint="define it in a module that both programs import, or leave the key out",
                cause=error,
            ) from None


class _Unpickler(pickle.Unpickler):
    """Puts loaded tensors into their places."""

    def __init__(self, stream: io.BytesIO, tensors: Mapping[str, Any]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, name: Any) -> Any:
        return self._tensors[name]


def _is_like(present: object, entry: TensorStorageMetadata) -> bool:
    return (
        isinstance(present, torch.Tensor)
        and _torch.global_size(present) == entry.size
        and present.dtype == entry.properties.dtype
    )


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
