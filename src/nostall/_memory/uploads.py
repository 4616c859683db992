"""Uploads of a load: pinned host memory is filled, and copied to accelerators meanwhile.

A thread takes one part of a bounded ring of pinned memory, fills it, issues its copy on a side
stream, and gives the part back together with the event of that copy. Who takes it next waits for
the event. No thread that holds a part waits for another part, so parts always become free.

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
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch
from typing_extensions import Self

from nostall import _torch
from nostall._memory.copying import memory_of, views_of
from nostall._memory.devices import module_with_streams

_log = logging.getLogger("nostall")

PART_NBYTES = 16 << 20
"""Sent by one copy: issuing one costs a thread 0.05 to 0.2 ms (H200, decision 32)."""
_MOST_PARTS = 8
"""128 MiB per load; parts are allocated when they are needed."""
_BESIDE_NBYTES = 256 << 20
"""Limit on device memory for values that have another form than their target. Training needs what
the device has; larger tensors are converted on the CPU."""
_ALIGNMENT = 64


class Memory(Protocol):
    """Contiguous memory of a tensor, which any threads fill."""

    def part(self, begin: int, end: int) -> AbstractContextManager[memoryview]:
        """Host memory to fill with these bytes inside of the block.

        Args:
            begin: Where they begin.
            end: Where they end, at most one part of the ring later.
        """

    def finish(self) -> None:
        """Make later work of the thread that owns the load see what was filled."""


class _InPlace:
    """Memory of the CPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @contextmanager
    def part(self, begin: int, end: int) -> Iterator[memoryview]:
        yield memory_of(self._tensor)[begin:end]

    def finish(self) -> None:
        """Do nothing: it is there."""


class _Device(NamedTuple):
    """Where the work of a load for one device goes."""

    module: Any
    current: Any
    """The stream of the load."""
    side: Any
    """The stream of its uploads."""


class _Upload:
    """Memory on an accelerator. The copy of a part begins when its block is left."""

    def __init__(self, memory: torch.Tensor, device: _Device, ring: _Ring) -> None:
        self._memory = memory
        self._device = device
        self._ring = ring

    @contextmanager
    def part(self, begin: int, end: int) -> Iterator[memoryview]:
        side = self._device.side
        with self._device.module.stream(side), self._ring.part() as part:
            yield memory_of(part.memory)[: end - begin]
            try:
                # As bytes, a tensor of inference mode may be changed on any thread.
                flat = self._memory.view(-1).view(torch.uint8)
                flat[begin:end].copy_(part.memory[: end - begin], non_blocking=True)
                part.copied = side.record_event()
            except BaseException:  # an interrupt, too
                side.synchronize()  # the part is used again
                raise

    def finish(self) -> None:
        """Order later work of the load's stream after the copies; the host does not wait."""
        self._device.current.wait_stream(self._device.side)


class Uploads:
    """The uploads of one load.

    As a context manager it returns when all copies are complete, also after an error; only then is
    pinned memory released. Leave it when no thread fills parts any more.

    Args:
        part_nbytes: Most bytes that are filled and sent at a time.
        most_parts: Limit on the parts in pinned memory.
    """

    def __init__(self, *, part_nbytes: int = PART_NBYTES, most_parts: int = _MOST_PARTS) -> None:
        self._part_nbytes = part_nbytes
        self._ring = _Ring(part_nbytes, most_parts)
        self._devices: dict[torch.device, _Device] = {}

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

    def can_fill(self, memory: torch.Tensor) -> bool:
        """Whether :meth:`into` is for this memory; what cannot be filled is copied to."""
        return memory.is_cpu or self._is_reached(memory.device, memory.dtype)

    def _is_reached(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device in self._devices and _torch.can_be_viewed(dtype)

    def into(self, memory: torch.Tensor) -> Memory:
        """Begin to fill contiguous memory, after what the load's stream has now; on any thread."""
        if memory.is_cpu:
            return _InPlace(memory)
        device = self._devices[memory.device]
        device.side.wait_stream(device.current)
        return _Upload(memory, device, self._ring)

    def beside(
        self, target: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Memory for values that are to be copied to a target; on any thread.

        It is on the target's device if there is memory, so that torch converts there; else on the
        CPU.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if 0 < nbytes <= _BESIDE_NBYTES and self._is_reached(target.device, dtype):
            with suppress(torch.OutOfMemoryError):
                return self._empty(shape, dtype, target.device)
        return torch.empty(shape, dtype=dtype, device="cpu")

    def _empty(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        found = self._devices[device]
        with found.module.stream(found.current):
            return torch.empty(shape, dtype=dtype, device=device)

    def brought_near(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The sources, or copies of those on the CPU on the devices of their targets.

        For the thread that owns the load. Sources for one device are sent together, if they fit
        into one part of the ring.
        """
        near = list(sources)
        by_device: dict[torch.device, list[int]] = {}
        for at, (source, target) in enumerate(zip(sources, targets, strict=True)):
            if source.is_cpu and not target.is_cpu:
                by_device.setdefault(target.device, []).append(at)
        for device, positions in by_device.items():
            here = self._sent([sources[at] for at in positions], device)
            for at, each in zip(positions, here, strict=True):
                near[at] = each
        return near

    def _sent(
        self, sources: Sequence[torch.Tensor], device: torch.device
    ) -> Sequence[torch.Tensor]:
        places, end = [], 0
        for source in sources:
            places.append((end, source.dtype, source.shape, _contiguous_stride(source.shape)))
            end += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        is_reached = all(self._is_reached(device, source.dtype) for source in sources)
        if not 0 < end <= self._part_nbytes or not is_reached:
            return sources
        try:
            memory = self._empty((end,), torch.uint8, device)
        except torch.OutOfMemoryError:
            return sources
        upload = self.into(memory)
        with upload.part(0, end) as part:
            _torch.copy_each(views_of(part, places), sources)
        upload.finish()
        return [
            memory[begin : begin + source.nbytes].view(source.dtype).view(source.shape)
            for source, (begin, *_) in zip(sources, places, strict=True)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as last:
            last.callback(self._ring.release)
            for device in self._devices.values():
                last.callback(device.side.synchronize)


def _contiguous_stride(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[at + 1 :]) for at in range(len(shape))]


class _Part:
    """A part of the ring, and the event of the last copy from it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.copied: Any = None


class _Ring:
    """Pinned memory, used again and again."""

    def __init__(self, part_nbytes: int, most_parts: int) -> None:
        self._part_nbytes = part_nbytes
        self._most_parts = most_parts
        self._lock = threading.RLock()  # acquired directly: see _model.interrupts
        self._changed = threading.Condition(self._lock)
        self._returned: deque[_Part] = deque()
        self._count = 0
        """Parts that exist, or are being allocated."""
        self._holders: set[int] = set()
        """Threads. None holds a part while it waits for another one."""
        self._may_pin = True
        """Until the first refusal: each attempt is slow, and the next would be refused, too."""

    @contextmanager
    def part(self) -> Iterator[_Part]:
        """A part that no copy needs any more. The caller takes no second one meanwhile."""
        thread = threading.get_ident()
        assert thread not in self._holders, "a thread that holds a part waits for another one"
        part = self._returned_part() or self._new_part()
        self._holders.add(thread)
        try:
            if part.copied is not None:
                part.copied.synchronize()
            yield part
        finally:
            self._holders.discard(thread)
            with self._lock:
                self._returned.append(part)
                self._changed.notify()

    def _returned_part(self) -> _Part | None:
        """The part that was returned first; ``None`` if the caller is to allocate one."""
        with self._lock:
            while True:
                is_full = self._count == self._most_parts
                if self._returned and (is_full or _is_copied(self._returned[0])):
                    return self._returned.popleft()
                if not is_full:
                    self._count += 1
                    return None
                self._changed.wait()

    def _new_part(self) -> _Part:
        try:
            return _Part(self._allocated())
        except BaseException:  # passed on; others may try
            with self._lock:
                self._count -= 1
                self._changed.notify()
            raise

    def _allocated(self) -> torch.Tensor:
        nbytes = self._part_nbytes
        if self._may_pin:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._may_pin = False
                _log.warning("memory to read into is not pinned, uploads are slower: %s", error)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def release(self) -> None:
        """Release the memory. No copy needs it any more."""
        self._returned.clear()
        self._count = 0


def _is_copied(part: _Part) -> bool:
    return part.copied is None or bool(part.copied.query())
