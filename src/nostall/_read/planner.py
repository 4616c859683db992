"""``LoadPlanner``: stock's, with a short way for whole plain tensors.

Stock compares the chunks of each tensor with those that are stored, and narrows each target. A
plain tensor that was stored in one chunk needs neither.
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from nostall import _torch
from nostall._model.names import some
from nostall._model.threads import gc_paused
from nostall._read.archives import object_in
from nostall.errors import OptionError
from nostall.options import require_flags

TRUST_HINT = (
    "torch.serialization.add_safe_globals allows a class; trust=True loads any, only for files of"
    " people you trust"
)
_TENSORS = (torch.Tensor, _torch.ShardedTensor)


class LoadPlanner(DefaultLoadPlanner):
    """The planner of :func:`nostall.load`, for ``dcp.load`` with a :class:`FileSystemReader`.

    It plans many small tensors faster than stock's, unpickles objects through an allow-list, and
    replaces in the state only what is loaded. Make one for each checkpoint.

    Args:
        keys: Names of what to load, as in :func:`nostall.load`.
        strict: Whether the checkpoint must have everything that is to be loaded, and nothing for a
            dictionary that is empty in the state.
        strict_dtype: Whether tensors must have the dtypes in the checkpoint.
        trust: Unpickle objects of any class, which can run code.

    Raises:
        OptionError: An argument is not possible. When planning: the state does not fit the
            checkpoint, or a key selects nothing.
    """

    def __init__(
        self,
        *,
        keys: Collection[str] | None = None,
        strict: bool = True,
        strict_dtype: bool = False,
        trust: bool = False,
    ) -> None:
        require_flags(strict=strict, strict_dtype=strict_dtype, trust=trust)
        super().__init__()
        if isinstance(keys, str):
            keys = [keys]
        given = [] if keys is None else list(keys)
        if not all(isinstance(key, str) for key in given):
            raise OptionError(
                "keys contains an object that is not a string", hint="pass names of items"
            )
        self._keys = None if keys is None else frozenset(given)
        self._containing = {outer for key in given for outer in _and_outer(key)}
        self._strict = strict
        self._strict_dtype = strict_dtype
        self._trust = trust
        self._empty: frozenset[str] = frozenset()
        self._whole: dict[str, torch.Tensor] = {}
        self.missing: tuple[str, ...] = ()
        """Names of selected items that the checkpoint does not have."""
        self.loaded: tuple[str, ...] = ()
        """Names of the selected items that it has."""
        self.casts: dict[str, str] = {}
        """Dtypes of the tensors that are loaded into one of another dtype: ``saved to target``."""
        self.path: str | None = None
        """The checkpoint, for errors; the reader sets it."""

    @gc_paused()
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # DCP's signature
    ) -> None:
        # Not stock's: it replaces objects in the state, also those that are not loaded.
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = _torch.flatten_state_dict(state_dict)
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._whole, self.casts = {}, {}
        self._empty = frozenset(
            empty
            for name, value in state_dict.items()
            if not isinstance(value, torch.Tensor)
            for empty in _empty_in(value, str(name))
        )

    def touches(self, name: object) -> bool:
        """Whether an entry of the state may have a selected item."""
        return str(name) in self._containing or self._is_selected(str(name))

    def _is_selected(self, name: str) -> bool:
        return self._keys is None or not self._keys.isdisjoint(_and_outer(name))

    @gc_paused()
    def create_local_plan(self) -> LoadPlan:
        """This rank's reads; ``OptionError`` if the state does not fit the checkpoint."""
        assert isinstance(self.metadata, Metadata)
        wanted = self._fitting(self.metadata.state_dict_metadata)
        items: list[ReadItem] = []
        for name, (value, entry) in wanted.items():
            # A subclass may look tensors up elsewhere.
            if type(self) is LoadPlanner and _is_whole(value, entry):
                self._whole[name] = value
                items.append(_tensor(name, entry))
            else:
                try:
                    items += create_default_local_load_plan({name: value}, self.metadata).items
                except Exception as error:  # of the tensor's class, or for what it says of itself
                    # Stock's planner calls each ValueError wrong metadata.
                    why = error.__cause__ or error
                    raise self._misfit(f"{name}: {type(why).__name__}: {why}") from error
        self.loaded = tuple(wanted)
        return LoadPlan(items)

    def _fitting(self, entries: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """The selected values and their entries, by name; all of them fit."""
        selected = {name: entries.get(name) for name in filter(self._is_selected, self.state_dict)}
        missing = [name for name, entry in selected.items() if entry is None]
        wanted = {
            name: (self.state_dict[name], entry)
            for name, entry in selected.items()
            if entry is not None
        }
        self.missing = tuple(missing)
        if missing and self._strict:
            others = some([name for name in entries if name not in selected], 3) or "nothing else"
            raise self._misfit(
                f"Missing key in checkpoint state_dict: {some(missing)}; there is {others}",
                ", and strict=False leaves out what is missing",
            )
        if self._strict and self._empty:
            self._require_places(entries)
        self._require_forms(wanted)
        if self._keys and (unused := self._keys.difference(*map(_and_outer, self.state_dict))):
            raise OptionError(
                f"the state has nothing named {', '.join(sorted(unused)[:5])}",
                path=self.path,
                hint="keys are names as in `nostall inspect`, such as model.0.weight",
            )
        return wanted

    def _require_places(self, entries: Mapping[str, Any]) -> None:
        """Require that the checkpoint has nothing in dictionaries that are empty in the state."""
        found = [
            name
            for name in map(str, entries)
            if any(outer in self._empty for outer in _outer_names(name)) and self._is_selected(name)
        ]
        if found:
            raise OptionError(
                "the state does not fit: the checkpoint has"
                f" {some(found)}, for which the state has an empty dictionary",
                phase="read",
                path=self.path,
                hint="an optimizer has no state before its first step: load what"
                " torch.distributed.checkpoint.state_dict.get_state_dict returns, or restore it"
                " with a CheckpointManager; strict=False leaves it empty",
            )

    def _require_forms(self, wanted: Mapping[str, tuple[Any, Any]]) -> None:
        shapes, without, kinds = [], [], []
        for name, (value, entry) in wanted.items():
            is_tensor = isinstance(value, _TENSORS)
            if is_tensor is isinstance(entry, BytesStorageMetadata):
                where = "state" if is_tensor else "checkpoint"
                kinds.append(f"{name} (a tensor in the {where} only)")
            elif is_tensor and (size := _torch.global_size(value)) != entry.size:
                shapes.append(f"saved {entry.size} and current: {size} for {name}")
            elif is_tensor and value.dtype != entry.properties.dtype:
                self.casts[name] = f"{entry.properties.dtype} to {value.dtype}"
            if is_tensor and value.is_meta:
                without.append(name)
        if shapes:
            raise self._misfit(f"Size mismatch between {some(shapes)}")
        if self._strict_dtype and self.casts:
            casts = some([f"{name} from {dtypes}" for name, dtypes in self.casts.items()])
            raise self._misfit(f"loading would cast {casts}", ", and strict_dtype=False casts")
        if without:
            raise self._misfit(f"{some(without)}: on the meta device, without memory to load into")
        if kinds:
            raise self._misfit(f"the state does not fit: {some(kinds)}")

    def _misfit(self, what: str, hint: str = "") -> OptionError:
        return OptionError(
            what,  # for stock's causes in stock's words, which programs look for
            phase="read",
            path=self.path,
            hint=f"`nostall inspect` lists what a checkpoint has; `keys` selects{hint}",
        )

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        whole = self._whole.get(read_item.dest_index.fqn)
        return super().resolve_tensor(read_item) if whole is None else whole

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert isinstance(self.metadata, Metadata)
        name, place = read_item.dest_index.fqn, self.metadata.storage_data[read_item.storage_index]
        path = os.path.join(self.path or "", place.relative_path)
        loaded = object_in(value, name, path=path, trust=self._trust, hint=TRUST_HINT)
        *outer, last = self.mappings[name]
        container: Any = self.original_state_dict
        for key in outer:
            container = container[_own_key(container, key)]
        container[_own_key(container, last)] = loaded


def _and_outer(name: str) -> Iterator[str]:
    """A name, and the names of all that it is in."""
    yield name
    yield from _outer_names(name)


def _empty_in(state: object, name: str) -> Iterator[str]:
    """Names of the empty dictionaries in a value."""
    if isinstance(state, Mapping):
        if not state:
            yield name
        for key, value in state.items():
            yield from _empty_in(value, f"{name}.{key}")


def _outer_names(name: str) -> Iterator[str]:
    """The names of all that an item is in, innermost first."""
    end = name.rfind(".")
    while end > 0:
        yield name[:end]
        end = name.rfind(".", 0, end)


def _own_key(container: Any, key: Any) -> Any:
    """The key that has this text in names; in the state of an optimizer it is a number."""
    if not isinstance(container, Mapping) or key in container:
        return key
    return next(own for own in container if str(own) == key)


def _is_whole(value: object, entry: TensorStorageMetadata | BytesStorageMetadata) -> bool:
    """Whether a tensor has all values of a stored one, which is one chunk."""
    return (
        isinstance(entry, TensorStorageMetadata)
        and isinstance(value, torch.Tensor)
        and not _torch.says_its_place(value)
        and len(entry.chunks) == 1
        and entry.chunks[0].sizes == entry.size
    )


def _tensor(name: str, entry: TensorStorageMetadata) -> ReadItem:
    begin = entry.chunks[0].offsets
    # As the constructors of frozen dataclasses do it, but in a fifth of the time.
    index = object.__new__(MetadataIndex)
    index.__dict__.update(fqn=name, offset=begin, index=None)
    item = object.__new__(ReadItem)
    item.__dict__.update(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=begin,
        storage_index=index,
        storage_offsets=begin,
        lengths=entry.size,
    )
    return item
