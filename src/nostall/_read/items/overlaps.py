"""Which targets share memory with others.

Values of such targets have to be written one after the other, in the order of the plan. Slices of
one tensor that lie beside each other span the same addresses and still share nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch

_MOST_SLICES = 256
"""Slices that span the same addresses and are compared in pairs; more count as overlapping."""


def overlapping(
    targets: Sequence[torch.Tensor], spans: Sequence[tuple[int, int] | None]
) -> list[bool]:
    """Whether each target shares memory with another one, or may do so.

    Tensors whose memory is not known, such as those of a subclass, may.

    Args:
        targets: The tensors.
        spans: Where the values of each are, first address and one past the last, if it is dense.
    """
    found = [False] * len(targets)
    extents: list[tuple[int, int, int]] = []
    for number, target in enumerate(targets):
        addresses = spans[number] or _addresses(target)
        if addresses is None:
            found[number] = True
        elif addresses[0] < addresses[1]:
            extents.append((*addresses, number))
    extents.sort()
    if all(end <= begin for (_, end, _), (begin, _, _) in pairwise(extents)):
        return found
    for cluster in _clusters(extents):
        if len(cluster) > 1 and not _are_apart([targets[number] for number in cluster]):
            for number in cluster:
                found[number] = True
    return found


def _addresses(target: torch.Tensor) -> tuple[int, int] | None:
    """First and one past the last; ``None`` if unknown."""
    if type(target) is not torch.Tensor or target.layout is not torch.strided:
        return None
    begin = target.data_ptr()
    if target.is_contiguous():
        return begin, begin + target.nbytes
    if not target.numel():
        return 0, 0
    reach = zip(target.shape, target.stride(), strict=True)
    count = 1 + sum((length - 1) * step for length, step in reach)
    return begin, begin + count * target.element_size()


def _clusters(extents: Sequence[tuple[int, int, int]]) -> Iterator[list[int]]:
    """Numbers of targets between which no address is free, from ordered extents."""
    cluster: list[int] = []
    last = -1
    for begin, end, number in extents:
        if begin >= last and cluster:
            yield cluster
            cluster = []
        cluster.append(number)
        last = max(last, end)
    if cluster:
        yield cluster


def _are_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are disjoint slices of one tensor; false if that is not certain."""
    if len(tensors) > _MOST_SLICES:
        return False
    first = min(tensors, key=lambda each: each.data_ptr())
    boxes = [_box(each, first) for each in tensors]
    return all(
        one is not None and other is not None and one.is_apart(other)
        for one, other in combinations(boxes, 2)
    )


@dataclass(frozen=True, slots=True)
class _Box:
    """Begin and end of a slice along each dimension, the one with the largest step first."""

    sides: tuple[tuple[int, int], ...]

    def is_apart(self, other: _Box) -> bool:
        return any(
            end <= other_begin or other_end <= begin
            for (begin, end), (other_begin, other_end) in zip(self.sides, other.sides, strict=True)
        )


def _box(tensor: torch.Tensor, first: torch.Tensor) -> _Box | None:
    """The place of a slice in the coordinates of the first one; ``None`` if it has none there."""
    if tensor.dtype is not first.dtype or tensor.stride() != first.stride():
        return None
    left, rest = divmod(tensor.data_ptr() - first.data_ptr(), first.element_size())
    if rest:
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda each: -strides[each])
    sides: list[tuple[int, int]] = []
    room = math.inf
    for dimension in order:
        step = strides[dimension]
        if step == 0:
            return None
        begin, left = divmod(left, step)
        end = begin + tensor.shape[dimension]
        # Beyond its room a row would reach into the next one, and coordinates would not be unique.
        if end * step > room:
            return None
        sides.append((begin, end))
        room = step
    return None if left else _Box(tuple(sides))
