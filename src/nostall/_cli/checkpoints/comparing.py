"""How two tensors of the same dtype and shape differ. Imports torch."""

from __future__ import annotations

import torch

_SLICE = 1 << 22
"""Elements compared at a time, so that copies in double precision stay small."""


def difference(one: torch.Tensor, other: torch.Tensor) -> str | None:
    """A description of the difference; ``None`` if all bits are equal."""
    left, right = one.reshape(-1), other.reshape(-1)
    count = different = 0
    largest: float | None = 0.0
    for begin in range(0, left.numel(), _SLICE):
        part, counterpart = left[begin : begin + _SLICE], right[begin : begin + _SLICE]
        count += part.numel()
        unequal = _unequal_bits(part, counterpart)
        if unequal.any():
            different += int(unequal.sum())
            distance = _distance(part[unequal], counterpart[unequal])
            largest = None if largest is None or distance is None else max(largest, distance)
    if not different:
        return None
    by = "" if largest is None else f", at most by {largest:.6g}"
    return f"{different} of {count} elements differ{by}"


def _unequal_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    shape = (one.numel(), one.element_size())
    left, right = (each.view(torch.uint8).reshape(shape) for each in (one, other))
    return (left != right).any(dim=1)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float | None:
    """The largest absolute difference; ``None`` if an element is not finite, or has no distance."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    try:
        distances = (one.to(wide) - other.to(wide)).abs()
    except RuntimeError:  # a dtype that only stores bits
        return None
    return float(distances.max()) if bool(distances.isfinite().all()) else None
