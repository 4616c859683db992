"""The saved state: a state dict whose values change in place, so that no stale snapshot passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

State: TypeAlias = dict[str, Tensor]

DEFAULT_MIB = {"large": 1024, "many": 78.125}
"""Per rank. ``large`` has 216 tensors, ``many`` 20,000 of 4 KiB."""
SHAPES = tuple(DEFAULT_MIB)

_LARGE_TENSORS = 216
_SMALL_NBYTES = 4096
_NAMES_SHOWN = 5
_STRIDE = 0x01000193
"""Amount that one version adds to every element, as an odd integer: all versions differ."""


class Workload:
    """One rank's state dict of float32 tensors, at a known version of its values."""

    def __init__(self, shape: str, state: State) -> None:
        self.shape = shape
        self.state = state
        self.version = 0
        self.tensors = tuple(state.values())
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)

    def set_version(self, version: int) -> None:
        """Give every element its value of that version, in place; any can be had again."""
        step = (version - self.version) * _STRIDE
        for tensor in self.tensors:
            bits(tensor).add_((step + 2**31) % 2**32 - 2**31)  # a signed integer: sums wrap
        self.version = version

    def advance(self) -> None:
        """Change every element, as a training step would."""
        self.set_version(self.version + 1)

    def blank(self) -> State:
        """A state dict of the same structure, all zeros: what a checkpoint is loaded into."""
        return {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}


def make_workload(shape: str, nbytes: int, *, rank: int = 0, world_size: int = 1) -> Workload:
    """A rank's state dict of about ``nbytes`` bytes; with several ranks, names differ.

    Values are the same in every process.
    """
    generator = torch.Generator().manual_seed(17 + rank)
    if shape == "many":
        lengths = [_SMALL_NBYTES // 4] * max(1, nbytes // _SMALL_NBYTES)
    else:
        each, rest = divmod(max(nbytes // 4, _LARGE_TENSORS), _LARGE_TENSORS)
        lengths = [each] * (_LARGE_TENSORS - 1) + [each + rest]
    prefix = f"rank{rank}." if world_size > 1 else ""
    state = {
        f"{prefix}layers.{number // 9}.{number % 9}.weight": torch.randn(
            length, generator=generator
        )
        for number, length in enumerate(lengths)
    }
    return Workload(shape, state)


def differences(saved: Mapping[str, Tensor], loaded: Mapping[str, object]) -> list[str]:
    """Names whose dtype, shape or bits differ, or that are missing; empty if both are equal."""
    wrong = [name for name, tensor in saved.items() if not _same_bits(tensor, loaded.get(name))]
    return wrong + sorted(loaded.keys() - saved.keys())


def said_of(differing: list[str]) -> str:
    """How many names differ, and the first of them."""
    return f"{len(differing)} differ: {', '.join(differing[:_NAMES_SHOWN])}"


def bits(tensor: Tensor) -> Tensor:
    """The tensor's memory as integers: every bit counts, and NaNs are equal to themselves."""
    return tensor.detach().view(torch.int32)


def _same_bits(tensor: Tensor, other: object) -> bool:
    return (
        isinstance(other, Tensor)
        and (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        and torch.equal(bits(tensor), bits(other))
    )
