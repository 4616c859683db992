"""Stage a whole state dict into snapshot memory for ``dcp.async_save``, where planning comes later.

Stock's executors plan and save a copy that consists of views into one block. Every tensor is copied
straight to its expected place in the file image, so that the later write finds the image complete:
still one copy. Correctness does not depend on the prediction: ``snapshot.adopt_staged`` compares
addresses.
"""

from __future__ import annotations

import copy
import io
import mmap
import os
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from nostall import _torch
from nostall._memory.arena import Lease
from nostall._memory.copying import TargetViews, views_of
from nostall.errors import NostallError, StagingError

_ALIGNMENT = 64

Structure = tuple[tuple[str, int], ...]
Placement = Mapping[str, tuple[int, int]]
"""Offset and length of each known payload in an image, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A tensor of a state dict, and its strides in a file."""

    fqn: str
    tensor: torch.Tensor
    stride: tuple[int, ...]


class StagedStateDict(dict[str, Any]):
    """A private copy of a state dict with its tensors in leased memory. The lease ends with it.

    If the lease's label is an error in place of the structure, the copy must not be saved.
    """

    def __init__(self, content: Mapping[str, Any], lease: Lease, structure: Structure) -> None:
        super().__init__(content)
        self.lease = lease
        lease.label = structure
        weakref.finalize(self, lease.release).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as one descriptor and places in its memory, instead of one file per tensor."""
        if isinstance(self.lease.label, StagingError):
            raise copy.copy(self.lease.label)
        block = self.lease.block
        stream = io.BytesIO()
        _PlacePickler(stream, block.memory).dump(dict(self))
        return (_arrive, (DupFd(block.fd), block.nbytes, stream.getvalue()))


class Unstaged:
    """Replaces a value that could not be copied: planning to save it raises the reason.

    DCP shares planning failures, so every rank receives the error. An error raised by the stager
    would leave the other ranks waiting.
    """

    def __init__(self, error: NostallError) -> None:
        self._error = error

    def __create_write_items__(
        self, fqn: str, value: object
    ) -> NoReturn:  # DCP's planner looks for this name
        del fqn, value
        raise copy.copy(self._error)  # without the traceback of an earlier raise

    def __reduce__(self) -> NoReturn:
        raise copy.copy(self._error)


def unstaged(value: Any, error: NostallError) -> Any:
    """A state dict of the same keys with every value replaced by :class:`Unstaged`."""
    if isinstance(value, Mapping):
        return {key: unstaged(element, error) for key, element in value.items()}
    if type(value) in (list, tuple):
        return [unstaged(element, error) for element in value]
    return Unstaged(error)


def find_leaves(state_dict: Mapping[str, Any]) -> list[Leaf]:
    """The tensors of a state dict that one payload can hold, in a fixed order."""
    leaves: list[Leaf] = []

    def note(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        stride = _payload_stride(local)
        if stride is not None:
            leaves.append(Leaf(fqn=fqn, tensor=local, stride=stride))
        return tensor

    _rebuild(state_dict, "", note, lambda _, value: value)
    return leaves


def _payload_stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return None if _torch.missing_data(tensor) else _torch.payload_stride(tensor)


def structure_of(leaves: list[Leaf]) -> Structure:
    """Names and lengths; state dicts with equal structures can use the same placement."""
    return tuple((leaf.fqn, leaf.tensor.nbytes) for leaf in leaves)


def stage_state_dict(
    state_dict: Mapping[str, Any],
    leaves: list[Leaf],
    placement: Placement,
    lease_of: Callable[[int], Lease],
) -> tuple[StagedStateDict, TargetViews]:
    """Copy a state dict into leased memory, except for its leaves (from :func:`find_leaves`).

    Returns the copy, and the places that the leaves have yet to be copied to. ``lease_of`` takes
    the least number of bytes.
    """
    names = Counter(leaf.fqn for leaf in leaves)
    reused = [_known_offset(leaf, placement) if names[leaf.fqn] == 1 else None for leaf in leaves]
    is_image = any(offset is not None for offset in reused)
    end = max((sum(place) for place in placement.values()), default=0) if is_image else 0
    offsets = []
    for leaf, offset in zip(leaves, reused, strict=True):
        if offset is not None:
            offsets.append(offset)
        else:
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            offsets.append(end)
            end += leaf.tensor.nbytes
    lease = lease_of(end)
    try:
        content, places = _copied(state_dict, leaves, offsets, lease)
    except BaseException:  # passed on; no copy owns the lease yet
        lease.release()
        raise
    return StagedStateDict(content, lease, structure_of(leaves)), places


def _known_offset(leaf: Leaf, placement: Placement) -> int | None:
    offset, nbytes = placement.get(leaf.fqn, (0, -1))
    # The caller may compute with the copy; complex128 faults at addresses not a multiple of 16.
    movable = leaf.tensor.dtype is not torch.complex128 or offset % _ALIGNMENT == 0
    return offset if nbytes == leaf.tensor.nbytes and movable else None


def _copied(
    state_dict: Mapping[str, Any],
    leaves: list[Leaf],
    offsets: list[int],
    lease: Lease,
) -> tuple[dict[str, Any], TargetViews]:
    views = views_of(
        lease.block.memory,
        (
            (offset, leaf.tensor.dtype, leaf.tensor.shape, leaf.stride)
            for leaf, offset in zip(leaves, offsets, strict=True)
        ),
    )
    lease.block.prepared_views = None
    lease.block.is_shown = True
    remaining = iter(views)

    def place(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return _with_local(fqn, tensor, place(fqn, tensor.to_local()))
        if _payload_stride(tensor.detach()) is not None:
            copied = next(remaining)
        else:
            copied = _private_copy(fqn, _torch.plain(tensor))
        copied = _described(fqn, tensor, copied)
        return copied.requires_grad_() if tensor.requires_grad else copied

    content: dict[str, Any] = _rebuild(state_dict, "", place, _private_copy)
    return content, TargetViews(views)


def _private_copy(fqn: str, value: Any) -> Any:
    try:
        return _torch.private_copy(value)
    except Exception as error:  # of a user's object
        raise _not_staged(fqn, error) from None


def _described(fqn: str, original: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """The copy, which answers planners as the original does."""
    if not vars(original) and not _torch.says_its_place(original):
        return copied  # most tensors
    try:
        return _torch.described_as(original, copied)
    except Exception as error:  # of a user's class
        raise _not_staged(fqn, error) from None


def _not_staged(fqn: str, error: Exception) -> StagingError:
    return StagingError(
        f"item {fqn!r} cannot be staged: {type(error).__name__}: {error}",
        phase="stage",
        hint="change the item or leave it out of the state dict",
        cause=error,
    )


def _rebuild(
    value: Any,
    path: str,
    on_tensor: Callable[[str, torch.Tensor], torch.Tensor],
    on_object: Callable[[str, Any], Any],
) -> Any:
    """Copy what DCP flattens; call back with the flattened names of tensors and objects."""

    def inner(key: object, element: Any) -> Any:
        name = f"{path}.{key}" if path else str(key)
        return _rebuild(element, name, on_tensor, on_object)

    if isinstance(value, _torch.ShardedTensor):
        return _torch.with_other_shards(
            value, lambda number, shard: on_tensor(f"{path}#{number}", shard)
        )
    if isinstance(value, torch.Tensor):
        return on_tensor(path, value)
    if isinstance(value, Mapping):
        return {key: inner(key, element) for key, element in value.items()}
    if _is_taken_apart(value):
        return [inner(key, element) for key, element in enumerate(value)]
    return on_object(path, value)


def _with_local(fqn: str, original: DTensor, copied: torch.Tensor) -> torch.Tensor:
    """A DTensor like another one, with a copy of its local tensor."""
    with torch.no_grad():  # returns the local tensor itself, which DTensors ask
        local = _described(fqn, original.to_local(), copied)
    return _described(fqn, original, _torch.with_other_local(original, local))


def _is_taken_apart(value: Any) -> bool:
    """Whether DCP saves the elements one by one: of mappings, and of lists with one or a tensor."""
    return isinstance(value, Mapping) or (
        isinstance(value, list)
        and any(isinstance(each, torch.Tensor) or _is_taken_apart(each) for each in value)
    )


# --- to another process ---------------------------------------------------------------------------


class _PlacePickler(pickle.Pickler):
    """Pickles tensors in a block as their place in it."""

    def __init__(self, stream: io.BytesIO, memory: mmap.mmap) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        self._begin, self._end = flat.data_ptr(), flat.data_ptr() + flat.nbytes

    def persistent_id(self, value: Any) -> Any:
        if (
            isinstance(value, torch.Tensor)
            # Wrappers such as DTensor have no memory of their own: what they hold is asked next.
            and type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
            and self._begin <= value.data_ptr() < self._end
        ):
            return (
                type(value),
                vars(value),
                value.data_ptr() - self._begin,
                value.dtype,
                tuple(value.shape),
                tuple(value.stride()),
                value.requires_grad,
            )
        return None


class _PlaceUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, memory: mmap.mmap) -> None:
        super().__init__(stream)
        self._memory = memory

    def persistent_load(self, place: Any) -> torch.Tensor:
        of_class, attributes, offset, dtype, shape, stride, requires_grad = place
        (view,) = views_of(self._memory, [(offset, dtype, shape, stride)])
        if of_class is not torch.Tensor:
            view = view.as_subclass(of_class)
        vars(view).update(attributes)
        return view.requires_grad_(requires_grad)


def _arrive(descriptor: Any, nbytes: int, pickled: bytes) -> dict[str, Any]:
    fd = descriptor.detach()
    try:
        memory = mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
    content: dict[str, Any] = _PlaceUnpickler(io.BytesIO(pickled), memory).load()
    return content
