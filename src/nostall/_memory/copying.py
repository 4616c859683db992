"""Copy tensors to their places in host memory, save after save.

Large CPU tensors are split into pieces; each of a few threads takes the next piece until none is
left. torch's own copy splits every tensor into one part per thread and waits for the slowest part,
tensor by tensor; when other work competes for a core, that multiplies the time. Large amounts
bypass the cache (``_memory.nontemporal``), which could not hold them. Small tensors are copied in
one call. Tensors on an accelerator are copied on a side stream.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import torch

from nostall import _torch
from nostall._memory.devices import begin_copies
from nostall._memory.nontemporal import Copy, copy_past_caches
from nostall._model.threads import work_together
from nostall._model.values import TensorForm

Source = TypeVar("Source", bound="torch.Tensor | bytes")

_LARGE_NBYTES = 128 << 10
"""From this size on torch copies with several threads."""
_PIECE_NBYTES = 4 << 20
"""Copied in a fraction of a millisecond, so threads finish together; handing it out takes less."""
_MORE_THAN_CACHES_HOLD_NBYTES = 64 << 20
"""Less than this may still be cached when it is checksummed and written, which saves more than a
faster copy would."""

_SMALL_NBYTES = 32 << 10
"""Batch norm statistics of 8,192 channels, spectral norm vectors, observer state, counters."""
_SMALL_AT_ONCE_NBYTES = 8 << 20
_AT_ONCE_NBYTES = 4 << 20
"""Limits on the bytes copied inside the call, in small tensors and in all: 1 to 2 ms."""
_LARGEST_AT_ONCE_NBYTES = 1 << 20
"""Limit on one tensor: no statistic is larger, and new pages for a copy cost 0.4 ms per MiB."""

_memcpy = ctypes.CDLL(None).memcpy  # not ctypes.memmove(), whose argument conversion is slower
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None

# Holds the interpreter lock: releasing and reacquiring it takes longer than a small copy.
_memcpy_at_once = ctypes.PyDLL(None).memcpy
_memcpy_at_once.argtypes = _memcpy.argtypes
_memcpy_at_once.restype = None


@lru_cache(maxsize=1)
def _copy_of_much() -> Copy:
    """The fastest copy of more bytes than caches hold."""
    past_caches = copy_past_caches(_memcpy_at_once) if _torch.runs_avx() else None
    return past_caches or _memcpy


_on_cpu = attrgetter("is_cpu")

ViewSpec: TypeAlias = tuple[int, torch.dtype, Sequence[int], Sequence[int]]
"""Offset in memory in bytes, dtype, size, stride in elements."""


@torch.inference_mode(mode=False)  # a view made in inference mode could not be written to outside
def views_of(memory: Any, places: Iterable[ViewSpec]) -> list[torch.Tensor]:
    """Tensors over raw memory, one per place; addresses need not be aligned to element sizes."""
    views: list[torch.Tensor] = []
    for offset, dtype, size, stride in places:
        count = math.prod(size)
        if count == 0:
            view = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="cpu")
        else:
            view = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
            if len(size) != 1 or stride[0] != 1:
                view = view.as_strided(tuple(size), tuple(stride))
        views.append(view)
    return views


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which has to live as long."""
    nbytes = tensor.numel() * tensor.element_size()
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr() if nbytes else 0)
    return memoryview(array).cast("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyMethod:
    """How large CPU tensors are copied."""

    threads: int
    past_caches: bool = True
    """Whether amounts larger than the caches may bypass them."""


class Copies(dict[torch.device, Any]):
    """Copies from accelerators that have started: for each one, the event that follows them."""

    def precede_what_follows(self) -> None:
        """Make later work on the current streams wait for the copies; the host does not wait."""
        for device, copied in self.items():
            torch.get_device_module(device).current_stream(device).wait_event(copied)

    def wait(self) -> None:
        """Return when all copies are complete."""
        for copied in self.values():
            copied.synchronize()


_ODD = {torch.complex128, torch.float4_e2m1fn_x2}
"""Dtypes that are not copied as they are: see :func:`_as_copyable`."""


class TargetViews:
    """Views of host memory that tensors are copied into."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = list(views)
        self._large = [
            (position, view.data_ptr(), view.nbytes)
            for position, view in enumerate(self._views)
            if view.nbytes >= _LARGE_NBYTES
        ]
        large = {position for position, _, _ in self._large}
        self._small = [position for position in range(len(self._views)) if position not in large]
        self._small_views = [_as_copyable(self._views[position]) for position in self._small]
        self._any_odd = any(view.dtype in _ODD for view in self._views)

    def fill(
        self,
        sources: Sequence[torch.Tensor],
        *,
        method: CopyMethod,
        after: Mapping[torch.device, Any] | None = None,
    ) -> Copies:
        """Copy every source into its view; CPU sources are copied when this returns.

        A source on an accelerator is copied on a side stream, ordered after the event for its
        device in ``after``, or else after the work queued on the caller's current stream. The copy
        sees the values of that point in program order.
        """
        copies = Copies()
        with torch.inference_mode(mode=False), torch.no_grad():
            if all(map(_on_cpu, sources)):
                self._fill_from_cpu(sources, method)
                return copies
            by_device: dict[torch.device, list[int]] = {}
            for position, source in enumerate(sources):
                by_device.setdefault(source.device, []).append(position)
            from_cpu = by_device.pop(torch.device("cpu"), [])
            try:
                for device, positions in by_device.items():
                    views = [self._views[position] for position in positions]
                    here = [sources[position] for position in positions]
                    copied = begin_copies(device, views, here, (after or {}).get(device))
                    if copied is not None:
                        copies[device] = copied
                rest = TargetViews([self._views[position] for position in from_cpu])
                rest._fill_from_cpu([sources[position] for position in from_cpu], method)
            except BaseException:  # passed on; the caller releases the memory
                copies.wait()
                raise
        return copies

    def _fill_from_cpu(self, sources: Sequence[torch.Tensor], method: CopyMethod) -> None:
        pieces: list[tuple[int, int, int]] = []  # addresses to copy to and from, and bytes
        to = list(self._small_views)
        of = [sources[position] for position in self._small]
        for position, address, nbytes in self._large:
            view, source = self._views[position], sources[position]
            # The same order of elements; views are without gaps.
            if (
                view.is_contiguous() and source.is_contiguous()
            ) or view.stride() == source.stride():
                require_unchanged(source, view.dtype, view.shape)
                of_large = source.data_ptr()
                pieces += [
                    (address + begin, of_large + begin, min(_PIECE_NBYTES, nbytes - begin))
                    for begin in range(0, nbytes, _PIECE_NBYTES)
                ]
            else:
                to.append(_as_copyable(view))
                of.append(source)
        much = sum(nbytes for _, _, nbytes in pieces) >= _MORE_THAN_CACHES_HOLD_NBYTES
        copy = _copy_of_much() if much and method.past_caches else _memcpy

        def work(number: int) -> None:
            if to and number == 0:
                _torch.copy_each(to, [_as_copyable(each) for each in of] if self._any_odd else of)
            with suppress(IndexError):  # none is left: the threads take from the same list
                while True:
                    copy(*pieces.pop())

        count = max(1, min(method.threads, len(pieces)))
        work_together(work, count, give_up=pieces.clear, name="nostall-copy")


def in_payload_order(source: torch.Tensor, form: TensorForm) -> torch.Tensor:
    """A CPU tensor whose memory is the payload of ``source``; a copy if the strides differ.

    ``ValueError`` if a tensor that would not be copied differs from what was planned.
    """
    if tuple(source.stride()) == form.stride:
        require_unchanged(source, form.dtype, form.size)
        return source
    payload = torch.empty_strided(form.size, form.stride, dtype=form.dtype, device="cpu")
    _as_bytes(payload).copy_(_as_bytes(source.detach()))
    return payload


def copied_at_once(sizes: Sequence[int]) -> set[int]:
    """Positions of the tensors to copy inside the call: the smallest, up to a limit."""
    chosen: set[int] = set()
    total = 0
    for position in sorted(range(len(sizes)), key=sizes.__getitem__):
        nbytes = sizes[position]
        total += nbytes
        limit = _SMALL_AT_ONCE_NBYTES if nbytes <= _SMALL_NBYTES else _AT_ONCE_NBYTES
        if nbytes > _LARGEST_AT_ONCE_NBYTES or total > limit:
            break
        chosen.add(position)
    return chosen


def detach_all(sources: Sequence[Source]) -> tuple[list[Source], list[int]]:
    """Private tensor objects for all sources, and the positions of those still sharing memory.

    Replacing a parameter's ``data`` meanwhile does not affect a tensor detached from it.
    """
    detached: list[Any] = list(sources)
    tensors = [at for at, each in enumerate(detached) if isinstance(each, torch.Tensor)]
    chosen = copied_at_once([detached[at].nbytes for at in tensors])
    live = []
    # On an accelerator the copy is queued on the current stream; later work may change the
    # original.
    with torch.inference_mode(mode=False), torch.no_grad():
        for number, at in enumerate(tensors):
            tensor = detached[at]
            if number in chosen or tensor.is_inference():  # no version counter
                detached[at] = _duplicate(tensor)
            else:
                detached[at] = tensor.detach()
                live.append(at)
    return detached, live


def _duplicate(tensor: torch.Tensor) -> torch.Tensor:
    """A private copy on the same device."""
    # Not by torch's threads, which take longer when cores are busy.
    if not tensor.is_cpu or tensor.nbytes < _LARGE_NBYTES or not tensor.is_contiguous():
        return _as_bytes(tensor).clone().view(tensor.dtype)
    require_unchanged(tensor, tensor.dtype, tensor.shape)
    twin = torch.empty_like(tensor)
    copy_bytes(twin.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return twin


def copy_bytes(to: int, of: int, nbytes: int) -> None:
    """Copy memory between two addresses; a large copy releases the interpreter lock."""
    (_memcpy_at_once if nbytes < _LARGE_NBYTES else _memcpy)(to, of, nbytes)


def require_unchanged(source: torch.Tensor, dtype: torch.dtype, size: Sequence[int]) -> None:
    """Refuse to read past the end of memory that was replaced or freed after planning."""
    there = source.untyped_storage().nbytes()
    needed = source.storage_offset() * source.itemsize + source.numel() * source.itemsize
    if source.dtype != dtype or source.shape != torch.Size(size) or there < needed:
        raise ValueError(
            f"the tensor was planned as {tuple(size)} {dtype} and is now {tuple(source.shape)}"
            f" {source.dtype} in {there} bytes of storage"
        )


def _as_copyable(tensor: torch.Tensor) -> torch.Tensor:
    # Only complex128 is copied with instructions that fault unless the address is a multiple of 16.
    return torch.view_as_real(tensor) if tensor.dtype is torch.complex128 else _as_bytes(tensor)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; its bytes if it is of a dtype that torch before 2.10 cannot copy."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.float4_e2m1fn_x2 else tensor
