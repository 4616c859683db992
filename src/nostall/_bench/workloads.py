"""What is saved: a state dict whose values change in place, so that no stale snapshot passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict

from nostall._bench.llama import sizes_for
from nostall._bench.transformer import train_one_step

State: TypeAlias = dict[str, Any]

LARGE_TENSORS = 216
SMALL_TENSOR_NBYTES = 4096

FROZEN = "base."
"""What is in the names of tensors that never change, in ``--shape lora``."""
_FROZEN_SHARE = 0.97
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMES_SHOWN = 5
_STRIDE = 0x01000193
"""What one version adds to every element, as an odd integer: all versions differ."""


class Workload:
    """One rank's state dict, at a known version of its values."""

    def __init__(self, shape: str, state: State) -> None:
        self.shape = shape
        self.state = state
        self.version = 0
        self.tensors = tuple(tensor for _, tensor in tensors_of(state))
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        self._integers = tuple(
            integers(tensor) for name, tensor in tensors_of(state) if FROZEN not in name
        )
        """Of what changes."""

    def set_version(self, version: int) -> None:
        """Give what changes its value of that version, in place; any version can be had again."""
        step = (version - self.version) * _STRIDE
        for tensor in self._integers:
            tensor.add_(_wrapped(step, 8 * tensor.element_size()))
        self.version = version

    def advance(self) -> None:
        """Change every element that is not frozen, as a training step would."""
        self.set_version(self.version + 1)

    def blank(self) -> State:
        """A state dict of the same structure, all zeros: what a checkpoint is loaded into."""
        blank: State = _mapped(self.state, torch.zeros_like)
        return blank

    def same_tensors(self) -> State:
        """A state dict of its own with these very tensors: its entries may be replaced."""
        same: State = _mapped(self.state, lambda tensor: tensor)
        return same


def make_workload(shape: str, nbytes: int, *, rank: int, world_size: int) -> Workload:
    """A rank's state dict of about ``nbytes`` bytes; with several ranks, names differ."""
    seed = 17 + rank
    if shape == "mixed":
        state = _training_state(nbytes, seed)
    elif shape == "llama3-8b":
        state = _llama_state(nbytes, seed)
    elif shape == "lora":
        state = _lora_state(nbytes, seed)
    else:
        state = _parameters(_lengths(shape, nbytes), seed)
    return Workload(shape, state if world_size == 1 else {f"rank{rank}": state})


def tensors_of(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested state dict with its dotted name, in order."""
    if isinstance(state, Tensor):
        yield prefix, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors_of(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(state, list):
        for number, value in enumerate(state):
            yield from tensors_of(value, f"{prefix}.{number}")


def differences(saved: State, loaded: State) -> list[str]:
    """Names whose dtype, shape or bits differ, or that are missing; empty if both are equal."""
    expected, found = dict(tensors_of(saved)), dict(tensors_of(loaded))
    wrong = [name for name, tensor in expected.items() if not _same_bits(tensor, found.get(name))]
    return wrong + sorted(found.keys() - expected.keys())


def said_of(differing: list[str]) -> str | None:
    """How many names differ, and the first of them; ``None`` if none does."""
    shown = ", ".join(differing[:_NAMES_SHOWN])
    return f"{len(differing)} differ: {shown}" if differing else None


def integers(tensor: Tensor) -> Tensor:
    """The same memory as integers: every bit counts, and NaNs are equal to themselves."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def _wrapped(number: int, bits: int) -> int:
    """The number as a signed integer of so many bits; sums wrap: a step can be undone exactly."""
    half = 1 << (bits - 1)
    return (number + half) % (2 * half) - half


def _same_bits(tensor: Tensor, other: Tensor | None) -> bool:
    return (
        other is not None
        and other.dtype == tensor.dtype
        and other.shape == tensor.shape
        and torch.equal(integers(tensor), integers(other))
    )


def _mapped(value: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """A nested state dict with new containers, and what ``make`` returns for each tensor."""
    if isinstance(value, Tensor):
        return make(value)
    if isinstance(value, dict):
        return {key: _mapped(entry, make) for key, entry in value.items()}
    if isinstance(value, list):
        return [_mapped(entry, make) for entry in value]
    return value


def _lengths(shape: str, nbytes: int) -> list[int]:
    """Elements of each float32 tensor."""
    if shape == "many":
        return [SMALL_TENSOR_NBYTES // 4] * max(1, nbytes // SMALL_TENSOR_NBYTES)
    each, rest = divmod(max(nbytes // 4, LARGE_TENSORS), LARGE_TENSORS)
    return [each] * (LARGE_TENSORS - 1) + [each + rest]


def _parameters(lengths: list[int], seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{number // 9}.{number % 9}.weight": torch.randn(length, generator=generator)
        for number, length in enumerate(lengths)
    }


def _llama_state(nbytes: int, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    model, moments = {}, {}
    for name, size in sizes_for(nbytes).items():
        copy, first, second = (torch.randn(size, generator=generator) for _ in range(3))
        model[name] = copy.to(torch.bfloat16)
        moments[name] = {"fp32_param": copy, "exp_avg": first, "exp_avg_sq": second}
    return {"model": model, "optimizer": {"state": moments}}


def _lora_state(nbytes: int, seed: int) -> State:
    frozen = int(nbytes * _FROZEN_SHARE)
    base = _parameters(_lengths("large", frozen), seed)
    return {"base": base, "adapter": _parameters(_lengths("large", nbytes - frozen), seed + 1)}


def _training_state(nbytes: int, seed: int) -> State:
    model, optimizer = train_one_step(nbytes, seed)
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": dict(parameters), "optimizer": dict(moments)}
