"""Uploads of a load: pinned host memory is filled, and copied to accelerators meanwhile.

Each thread has two buffers of pinned memory. It fills one of them while a side stream copies from
the other, and waits for the event of that copy before it fills the other one again.

Order on the device: the side stream waits for what the load's stream has when an upload begins, as
that may write to the same memory; the load's stream waits for the side stream before the values
are used. The load's stream is the current one of the thread that owns the load. Memory beside a
target belongs to it, so torch's allocator may use that again as soon as it is released.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from nostall import _torch
from nostall._memory.copying import memory_of
from nostall._memory.devices import module_with_streams
from nostall._model.jobs import PAGE_NBYTES

_log = logging.getLogger("nostall")

_PINNED_NBYTES = 128 << 20
"""Limit per load."""
_MOST_BUFFER_NBYTES = 16 << 20
"""Sent by one copy: issuing one costs a thread 0.05 to 0.2 ms (H200, decision 32)."""
_SCRATCH_NBYTES = 256 << 20
"""Limit on device memory for values that have another form than their target. Training needs what
the device has; larger tensors are converted on the CPU."""


class _Device(NamedTuple):
    """Where the work of a load for one device goes."""

    module: Any
    current: Any
    """The stream of the load."""
    side: Any
    """The stream of its uploads."""


class _Buffer:
    """Pinned memory, and the event of the last copy from it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.copied: Any = None


class Uploads:
    """The uploads of one load; ``threads`` threads fill at most ``pinned_nbytes`` of pinned memory.

    As a context manager it returns when all copies are complete, also after an error; only then is
    pinned memory released. Leave it when no thread fills parts.
    """

    def __init__(self, threads: int, *, pinned_nbytes: int = _PINNED_NBYTES) -> None:
        share_nbytes = pinned_nbytes // (2 * threads)
        if share_nbytes > PAGE_NBYTES:
            share_nbytes -= share_nbytes % PAGE_NBYTES
        self.buffer_nbytes = min(_MOST_BUFFER_NBYTES, share_nbytes)
        """Limit on a part in memory of a device."""
        self._devices: dict[torch.device, _Device] = {}
        self._buffers: dict[int, deque[_Buffer]] = {}
        """By thread, the one that was filled last at the end."""
        self._may_pin = True
        """Until the first refusal: each attempt is slow, and the next would be refused, too."""

    def prepare(self, targets: Iterable[torch.Tensor]) -> None:
        """Make a stream for each new device of these tensors; for the thread that owns the load.

        Devices whose work does not go on streams, or whose type has no module in torch, are left
        out: tensors on them are copied to.
        """
        for device in {target.device for target in targets if not target.is_cpu}:
            module = module_with_streams(device)
            if device not in self._devices and module is not None:
                self._devices[device] = _Device(
                    module, module.current_stream(device), module.Stream(device=device)
                )

    def can_fill(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether memory of a device can be filled in parts; otherwise it is copied to."""
        return device.type == "cpu" or (device in self._devices and _torch.can_be_viewed(dtype))

    def begin(self, memory: torch.Tensor) -> None:
        """Before the first part of contiguous memory: order copies after the load's stream."""
        if not memory.is_cpu:
            device = self._devices[memory.device]
            device.side.wait_stream(device.current)

    @contextmanager
    def part(self, memory: torch.Tensor, begin: int, end: int) -> Iterator[memoryview]:
        """Host memory to fill with some bytes of contiguous memory; on any thread.

        For a device, the copy is issued when the block is left; it has at most
        :attr:`buffer_nbytes`.
        """
        if memory.is_cpu:
            yield memory_of(memory)[begin:end]
            return
        buffer, device = self._next_buffer(), self._devices[memory.device]
        filled = buffer.memory[: end - begin]
        yield memory_of(filled)
        try:
            with device.module.stream(device.side):
                # As bytes, a tensor of inference mode may be changed on any thread.
                flat = memory.view(-1).view(torch.uint8)
                flat[begin:end].copy_(filled, non_blocking=True)
                buffer.copied = device.side.record_event()
        except BaseException:  # an interrupt, too
            device.side.synchronize()  # the buffer is filled again
            raise

    def finish(self, memory: torch.Tensor) -> None:
        """After the last part: order the load's stream after the copies; the host does not wait."""
        if not memory.is_cpu:
            device = self._devices[memory.device]
            device.current.wait_stream(device.side)

    def _next_buffer(self) -> _Buffer:
        """The buffer of this thread that no copy needs."""
        mine = self._buffers.setdefault(threading.get_ident(), deque())
        if len(mine) < 2:
            mine.append(_Buffer(self._pinned()))
        else:
            mine.rotate(-1)
            if mine[-1].copied is not None:
                mine[-1].copied.synchronize()
        return mine[-1]

    def _pinned(self) -> torch.Tensor:
        if self._may_pin:
            try:
                return torch.empty(
                    self.buffer_nbytes, dtype=torch.uint8, device="cpu", pin_memory=True
                )
            except RuntimeError as error:
                self._may_pin = False
                _log.warning("memory to read into is not pinned, uploads are slower: %s", error)
        return torch.empty(self.buffer_nbytes, dtype=torch.uint8, device="cpu")

    def scratch_for(
        self, target: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Memory for values that are to be copied to a target; on any thread.

        On the target's device if it has memory, so that torch converts there; else on the CPU.
        """
        nbytes, device = math.prod(shape) * dtype.itemsize, self._devices.get(target.device)
        if device is not None and 0 < nbytes <= _SCRATCH_NBYTES and _torch.can_be_viewed(dtype):
            with suppress(torch.OutOfMemoryError), device.module.stream(device.current):
                return torch.empty(shape, dtype=dtype, device=target.device)
        return torch.empty(shape, dtype=dtype, device="cpu")

    def brought_near(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The sources, or copies of small ones on the CPU on the devices of their targets.

        For the thread that owns the load. Sources of one dtype for one device are sent together.
        """
        near = list(sources)
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for at, (source, target) in enumerate(zip(sources, targets, strict=True)):
            if source.is_cpu and not target.is_cpu and self.can_fill(target.device, source.dtype):
                alike.setdefault((target.device, source.dtype), []).append(at)
        for (_, dtype), positions in alike.items():
            nbytes = sum(sources[at].nbytes for at in positions)
            if not 0 < nbytes <= _MOST_BUFFER_NBYTES:
                continue
            packed = torch.cat([sources[at].reshape(-1).view(torch.uint8) for at in positions])
            memory = self.scratch_for(targets[positions[0]], (nbytes,), torch.uint8)
            memory.copy_(packed)
            begin = 0
            for at in positions:
                end = begin + sources[at].nbytes
                near[at] = memory[begin:end].view(dtype).view(sources[at].shape)
                begin = end
        return near

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as last:
            last.callback(self._buffers.clear)
            for device in self._devices.values():
                last.callback(device.side.synchronize)
