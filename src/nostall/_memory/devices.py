"""Accelerators: their modules, the current ones, copies off them, and pinned memory for these."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch

from nostall._memory.arena import Block, address_of

_log = logging.getLogger("nostall")
_ALREADY_REGISTERED = 712
"""``cudaErrorHostMemoryAlreadyRegistered``."""


def module_with_streams(device: torch.device) -> Any | None:
    """The module of a device's type, if work for the device goes on streams."""
    if device.type == "cpu":
        return None
    try:
        module = torch.get_device_module(device)
    except RuntimeError:  # there is none for "meta" and for some accelerators
        return None
    return module if hasattr(module, "Stream") else None


def stream_marks(tensors: Sequence[torch.Tensor]) -> dict[torch.device, Any]:
    """For each accelerator with tensors, an event recorded on its current stream."""
    marks = {}
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        if module := module_with_streams(device):
            marks[device] = module.current_stream(device).record_event()
    return marks


def current_devices(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    """The calling thread's current device of each tensor kind; new threads start at device 0."""
    kinds = {tensor.device.type for tensor in tensors if not tensor.is_cpu}
    modules = {kind: torch.get_device_module(kind) for kind in kinds}
    return [
        torch.device(kind, module.current_device())
        for kind, module in modules.items()
        if hasattr(module, "current_device")
    ]


@contextmanager
def on_devices(devices: Sequence[torch.device]) -> Iterator[None]:
    """Make these accelerators current for the calling thread."""
    with ExitStack() as entered:
        for device in devices:
            entered.enter_context(torch.get_device_module(device).device(device))
        yield


def begin_copies(
    device: torch.device,
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    after: Any,
) -> Any | None:
    """Issue copies off one accelerator to its side stream, after the event ``after``.

    If that is ``None``, all work queued on the current stream precedes them. Returns the event that
    follows them, until which the sources must live; ``None`` if they are made, as by a backend
    without streams.
    """
    module = module_with_streams(device)
    if module is None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return None
    stream = _side_stream(device)
    if after is None:
        stream.wait_stream(module.current_stream(device))
    else:
        stream.wait_event(after)
    try:
        with module.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
    except BaseException:  # an interrupt, too
        stream.synchronize()  # the caller releases the memory
        raise
    return stream.record_event()


@lru_cache(maxsize=64)
def _side_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device=device)


class Pinning:
    """Which blocks are pinned. Not thread-safe."""

    def __init__(self) -> None:
        self._pinned: set[int] = set()
        self._may_pin = True
        """Until the first refusal: each attempt is slow, and the next would be refused, too."""

    def pin(self, block: Block) -> None:
        """Pin a block, if CUDA is initialised and has refused none before."""
        if block.id in self._pinned or not self._may_pin:
            return
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return
        try:
            pin(address_of(block), block.nbytes)
            self._pinned.add(block.id)
        except RuntimeError as error:
            self._may_pin = False
            _log.warning(
                "snapshot memory is not pinned, copies from the device are slower: %s", error
            )

    def unpin(self, block: Block) -> None:
        """Undo :meth:`pin`, if it did anything."""
        if block.id in self._pinned:
            self._pinned.discard(block.id)
            torch.cuda.cudart().cudaHostUnregister(address_of(block))


def pin(address: int, nbytes: int) -> None:
    """Pin host memory for the copy engines of CUDA, which is initialised.

    ``RuntimeError`` if CUDA refuses.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if code:
        # Clears this thread's last CUDA error, which torch would report for the next kernel.
        with suppress(RuntimeError):
            torch.ones((), device="cuda")
    if code not in (0, _ALREADY_REGISTERED):
        raise RuntimeError(f"cudaHostRegister of {nbytes} bytes failed with code {code}")
