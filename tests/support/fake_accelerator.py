"""An accelerator in host memory that does its work as late as its streams and events allow.

Inside of ``with FakeAccelerator() as fake``, ``torch.empty(..., device=fake.device)`` makes a plain
tensor that says it is on ``privateuseone:0``. Copies and fills are queued on the current stream of
the thread. They run when something synchronises with them: the host, or a stream that it waits for
and that waits for an event after them. So a wait that was forgotten gives wrong values.

Pinned memory is read when a copy runs, not when it is issued. ``fake.faults`` names pinned memory
that was released before a copy from it had run.

What the fake does not know raises :class:`NotImplementedError`. Threads that are started meanwhile
see the fake, too; those that were started before do not.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

_DEVICE = "privateuseone"
_UNCHANGING = frozenset(
    {
        *("as_strided", "__getitem__", "detach", "narrow", "reshape", "t", "untyped_storage"),
        *("view", "data_ptr", "dim", "element_size", "is_conj", "is_contiguous", "is_inference"),
        *("is_neg", "numel", "size", "stride"),
    }
)
"""Functions of tensors that return views or facts."""


class FakeEvent:
    """A position in the queue of a stream."""

    def __init__(self, stream: FakeStream, position: int) -> None:
        self._stream = stream
        self._position = position

    def synchronize(self) -> None:
        self._stream.run(self._position)

    def query(self) -> bool:
        return self._stream.done >= self._position


class FakeStream:
    """Work in order; none of it is done before it has to be."""

    def __init__(self, fake: FakeAccelerator) -> None:
        self.fake = fake
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        fake.streams.append(self)

    def add(self, work: Callable[[], object]) -> None:
        with self.fake.lock:
            self.queue.append(work)

    def run(self, until: int) -> None:
        # A device knows no modes of the thread that waits for it.
        with self.fake.lock, torch._C.DisableTorchFunction(), torch.inference_mode():
            while self.done < until:
                self.queue[self.done]()
                self.done += 1

    def record_event(self) -> FakeEvent:
        if self.fake.records_no_event:
            raise RuntimeError("the fake accelerator has no events left")
        with self.fake.lock:
            return FakeEvent(self, len(self.queue))

    def wait_event(self, event: FakeEvent) -> None:
        self.add(event.synchronize)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.run(len(self.queue))


class FakeModule:
    """The device's module, like ``torch.cuda`` for CUDA."""

    def __init__(self, fake: FakeAccelerator) -> None:
        self._fake = fake
        self._current = threading.local()
        self._default = FakeStream(fake)
        self.made_on: list[str] = []
        """Names of the threads that have made streams."""

    def Stream(self, device: torch.device) -> FakeStream:
        self.made_on.append(threading.current_thread().name)
        return FakeStream(self._fake)

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        current: FakeStream = getattr(self._current, "stream", self._default)
        return current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before


class FakeAccelerator:
    """See the module; ``free_nbytes`` is the largest tensor there is memory for."""

    def __init__(
        self, *, can_pin: bool = True, free_nbytes: int = 1 << 40, has_module: bool = True
    ) -> None:
        self.device = torch.device(_DEVICE, 0)
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self.module = FakeModule(self)
        self._has_module = has_module
        self.can_pin = can_pin
        self.free_nbytes = free_nbytes
        self.faults: list[str] = []
        self.pinned_nbytes = 0
        """In use now."""
        self.most_pinned_nbytes = 0
        self.copies: list[int] = []
        """Bytes of each copy from the host, in order."""
        self.records_no_event = False
        self.allocated_on: list[FakeStream] = []
        """The current stream of each allocation, to which torch's allocators give the memory."""
        self._on_device: dict[int, torch.Tensor] = {}
        self.pinned_at: dict[int, _Pinned] = {}
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        if self._has_module:
            setattr(torch, _DEVICE, self.module)
            self._entered.callback(_forget_modules)
            self._entered.callback(delattr, torch, _DEVICE)
        self._entered.enter_context(_Mode(self))
        threading.setprofile(self._enter_thread)
        self._entered.callback(threading.setprofile, None)
        return self

    def _enter_thread(self, *_: object) -> None:
        """Called for the first event in a new thread. Modes of torch end with their thread."""
        sys.setprofile(None)
        ExitStack().enter_context(_Mode(self))

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def empty(self, *size: Any, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(*size, dtype=dtype).fill_(1)
        if not made.nbytes:  # with an address, by which it is known
            made = torch.ones(1, dtype=dtype)[:0].view(made.shape)
        if made.nbytes > self.free_nbytes:
            raise torch.OutOfMemoryError(f"no {made.nbytes} bytes on the fake accelerator")
        self.allocated_on.append(self.module.current_stream())
        self._on_device[made.untyped_storage().data_ptr()] = made  # never used again
        return made

    def pinned(self, nbytes: int) -> torch.Tensor:
        if not self.can_pin:
            raise RuntimeError("the fake accelerator refuses to pin memory")
        pinned = _Pinned(self, nbytes)
        made = torch.frombuffer(pinned.memory(), dtype=torch.uint8)
        with self.lock:
            self.pinned_at[made.data_ptr()] = pinned
            self.pinned_nbytes += nbytes
            self.most_pinned_nbytes = max(self.most_pinned_nbytes, self.pinned_nbytes)
        return made

    def has(self, value: object) -> bool:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return False
        return value.untyped_storage().data_ptr() in self._on_device

    def queue(self, work: Callable[[], object]) -> None:
        self.module.current_stream().add(work)

    def synchronize(self) -> None:
        self.module.current_stream().synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
        if target.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode")
        if not self.has(target):  # off the device
            self.synchronize()
            target.copy_(source)
            return
        if not self.has(source):
            self.copies.append(source.nbytes)
            pinned = self.pinned_at.get(source.untyped_storage().data_ptr())
            if pinned is not None and non_blocking:
                self.queue(pinned.copy_to(target, source))
                return
            source = source.clone()
        self.queue(functools.partial(target.copy_, source))
        if not non_blocking and not self.has(source):
            self.synchronize()


class _Pinned:
    """Pinned memory, which knows the copies from it that are to run."""

    def __init__(self, fake: FakeAccelerator, nbytes: int) -> None:
        self._fake = fake
        self._nbytes = nbytes
        self._waiting = 0
        self._is_alive = True

    def memory(self) -> Any:
        made = (ctypes.c_char * self._nbytes)()
        weakref.finalize(made, self._released, ctypes.addressof(made)).atexit = False
        return made

    def _released(self, address: int) -> None:
        with self._fake.lock:
            del self._fake.pinned_at[address]
            self._is_alive = False
            self._fake.pinned_nbytes -= self._nbytes
            if self._waiting:
                self._fake.faults.append(f"pinned memory released before {self._waiting} copies")

    def copy_to(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        address, nbytes = source.data_ptr(), source.nbytes
        dtype, shape = source.dtype, source.shape
        assert source.is_contiguous()
        self._waiting += 1

        def run() -> None:
            self._waiting -= 1
            if self._is_alive:
                content = (ctypes.c_char * nbytes).from_address(address)
                target.copy_(torch.frombuffer(content, dtype=dtype).view(shape))

        return run


class _Mode(TorchFunctionMode):
    def __init__(self, fake: FakeAccelerator) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return self._done(func, args, kwargs or {})

    def _done(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        fake = self._fake
        if func == torch.empty:
            if kwargs.get("pin_memory"):
                return fake.pinned(*args)
            if torch.device(kwargs.get("device") or "cpu").type == _DEVICE:
                return fake.empty(*args, dtype=kwargs["dtype"])
        if func == torch._foreach_copy_:
            for target, source in zip(*args, strict=True):
                fake.copy(target, source, non_blocking=False)
            return None
        if not any(fake.has(each) for each in args):
            return func(*args, **kwargs)
        if func.__name__ == "__get__":
            name = func.__self__.__name__
            return {"device": fake.device, "is_cpu": False}.get(name, func(*args))
        match func.__name__:
            case "copy_":
                non_blocking = kwargs.get("non_blocking", False)
                fake.copy(args[0], args[1], non_blocking=non_blocking)
                return args[0]
            case "fill_" | "zero_":
                fake.queue(functools.partial(func, *args))
                return args[0]
            case "cpu":
                fake.synchronize()
                return args[0].clone()
            case name if name in _UNCHANGING:
                return func(*args, **kwargs)
        raise NotImplementedError(f"{func} on the fake accelerator")


def _forget_modules() -> None:
    """Make torch look for the modules of devices anew; older versions do not remember them."""
    getattr(torch.get_device_module, "cache_clear", lambda: None)()
