"""Copy tensors to their places in host memory, save after save.

Large CPU tensors are cut into pieces, and a few threads each take the next piece until none is left. torch's own copy cuts
every tensor into as many parts as it has threads and waits for the slowest of them, tensor by tensor; when anything else
wants a core, that costs several times the copy. Many pieces go past the cache (``_memory.nontemporal``), which could not hold them.
Small tensors are copied in one call. Tensors on an accelerator are copied on a side stream.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

import torch

from nostall import _torch
from nostall._memory.nontemporal import Copy, copy_past_caches
from nostall._model.values import TensorForm

Source = TypeVar("Source", bound="torch.Tensor | bytes")

_LARGE_NBYTES = 128 << 10
"""From here on torch copies with several threads."""
_PIECE_NBYTES = 4 << 20
"""Takes a fraction of a millisecond, so threads end together; and far more than handing it out."""
_MORE_THAN_CACHES_HOLD_NBYTES = 64 << 20
"""Less than this may still be in a cache when it is checksummed and written, which is worth more than a faster copy."""

_SMALL_NBYTES = 32 << 10
"""Statistics of a batch norm over 8,192 channels; vectors of a spectral norm; what observers keep; counters."""
_SMALL_AT_ONCE_NBYTES = 8 << 20
_AT_ONCE_NBYTES = 4 << 20
"""What is copied inside the call may add up to, with small tensors only and in all: it takes a millisecond or two."""

_memcpy = ctypes.CDLL(None).memcpy  # not ctypes.memmove(), whose argument conversion costs more
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None

# It keeps the interpreter's lock: to give that up and get it back costs more than a small copy does.
_memcpy_at_once = ctypes.PyDLL(None).memcpy
_memcpy_at_once.argtypes = _memcpy.argtypes
_memcpy_at_once.restype = None


@lru_cache(maxsize=1)
def _copy_of_much() -> Copy:
    """The fastest copy of more than caches hold."""
    past_caches = copy_past_caches(_memcpy_at_once) if _torch.runs_avx() else None
    return past_caches or _memcpy


_on_cpu = attrgetter("is_cpu")

_Piece = tuple[int, int, int]
"""Address to copy to, address to copy from, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyMethod:
    """How large CPU tensors are copied."""

    threads: int
    past_caches: bool = True
    """Whether more than caches hold may be copied past them."""


class Copies:
    """Copies off accelerators that were begun."""

    def __init__(self) -> None:
        self._copies: list[_torch.DeviceCopy] = []

    def add(self, copy: _torch.DeviceCopy) -> None:
        """Count one more."""
        self._copies.append(copy)

    def precede_what_follows(self) -> None:
        """Order what the current streams are told from now on after the copies; the host does not wait."""
        for copy in self._copies:
            copy.precede_what_follows()

    def wait(self) -> None:
        """Return when all bytes are there."""
        for copy in self._copies:
            copy.wait()


class Places:
    """Views on host memory that tensors are copied into."""

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
        self._any_odd = any(view.dtype is torch.complex128 for view in self._views)

    def fill(
        self,
        sources: Sequence[torch.Tensor],
        *,
        method: CopyMethod,
        after: Mapping[torch.device, Any] | None = None,
    ) -> Copies:
        """Copy every source into its view; those in host memory are copied when this returns.

        Sources on an accelerator are copied on a side stream, ordered after its event in ``after`` or else after what
        the caller's stream was told so far, so that the copy sees the values which the caller's program order says.
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
                    copies.add(_torch.DeviceCopy(device, views, here, (after or {}).get(device)))
                rest = Places([self._views[position] for position in from_cpu])
                rest._fill_from_cpu([sources[position] for position in from_cpu], method)
            except BaseException:
                copies.wait()  # who asked gives the memory back
                raise
        return copies

    def _fill_from_cpu(self, sources: Sequence[torch.Tensor], method: CopyMethod) -> None:
        pieces: list[_Piece] = []
        to = list(self._small_views)
        of = [sources[position] for position in self._small]
        for position, address, nbytes in self._large:
            view, source = self._views[position], sources[position]
            if _lie_alike(view, source):
                _require_unchanged(source, view.dtype, view.shape)
                pieces += _pieces(address, source.data_ptr(), nbytes)
            else:
                to.append(_as_copyable(view))
                of.append(source)
        much = sum(nbytes for _, _, nbytes in pieces) >= _MORE_THAN_CACHES_HOLD_NBYTES
        copy = _copy_of_much() if much and method.past_caches else _memcpy
        with ExitStack() as joins:
            for _ in range(1, min(method.threads, len(pieces))):
                thread = threading.Thread(
                    target=_take_turns, args=(copy, pieces), name="nostall-copy"
                )
                try:
                    thread.start()
                except RuntimeError:  # the system has no thread to give; this one does it all
                    break
                joins.callback(thread.join)
            joins.callback(pieces.clear)  # on an error nobody goes on
            if to:
                _torch.copy_each(to, [_as_copyable(each) for each in of] if self._any_odd else of)
            _take_turns(copy, pieces)


def _lie_alike(view: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the bytes of both are in the same order; those of a view are without gaps."""
    return (view.is_contiguous() and source.is_contiguous()) or view.stride() == source.stride()


def in_payload_order(source: torch.Tensor, form: TensorForm) -> torch.Tensor:
    """A CPU tensor whose memory is the payload of ``source``: itself, or a copy if it lies in memory in another way.

    Raises:
        ValueError: The tensor is not any more what was planned.
    """
    if tuple(source.stride()) == form.stride:
        _require_unchanged(source, form.dtype, form.size)
        return source
    payload = torch.empty_strided(form.size, form.stride, dtype=form.dtype, device="cpu")
    return payload.copy_(source.detach())


def copied_at_once(sizes: Sequence[int]) -> set[int]:
    """Which tensors to copy inside the call, by their sizes in bytes: the smallest, up to a limit."""
    chosen: set[int] = set()
    total = 0
    for position in sorted(range(len(sizes)), key=sizes.__getitem__):
        total += sizes[position]
        if total > (_SMALL_AT_ONCE_NBYTES if sizes[position] <= _SMALL_NBYTES else _AT_ONCE_NBYTES):
            break
        chosen.add(position)
    return chosen


def detach_all(sources: Sequence[Source]) -> tuple[list[Source], list[int]]:
    """Sources that are nobody else's objects, and which of them have the trainer's memory; that of the others is private.

    A parameter's ``data`` can be replaced meanwhile, which does not concern a tensor that was detached from it.
    """
    detached: list[Any] = list(sources)
    tensors = [at for at, each in enumerate(detached) if isinstance(each, torch.Tensor)]
    chosen = copied_at_once([detached[at].nbytes for at in tensors])
    live = []
    # On an accelerator the copy is made in the order of the current stream: what follows on it may change the original.
    with torch.inference_mode(mode=False), torch.no_grad():
        for number, at in enumerate(tensors):
            tensor = detached[at]
            if number in chosen or tensor.is_inference():  # which has no version counter
                detached[at] = _duplicate(tensor)
            else:
                detached[at] = tensor.detach()
                live.append(at)
    return detached, live


def _duplicate(tensor: torch.Tensor) -> torch.Tensor:
    """A private copy on the same device. Of little: where torch's threads wait for a core, they take longer than one alone."""
    if not tensor.is_cpu or tensor.nbytes < _LARGE_NBYTES or not tensor.is_contiguous():
        return tensor.clone()
    _require_unchanged(tensor, tensor.dtype, tensor.shape)
    twin = torch.empty_like(tensor)
    copy_bytes(twin.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return twin


def copy_bytes(to: int, of: int, nbytes: int) -> None:
    """Copy memory from one address to another; other threads run meanwhile if that takes long."""
    (_memcpy_at_once if nbytes < _LARGE_NBYTES else _memcpy)(to, of, nbytes)


def _require_unchanged(source: torch.Tensor, dtype: torch.dtype, size: Sequence[int]) -> None:
    """Refuse to read past the end of memory that was replaced or freed since the tensor was planned."""
    there = source.untyped_storage().nbytes()
    needed = source.storage_offset() * source.itemsize + source.numel() * source.itemsize
    if source.dtype != dtype or source.shape != torch.Size(size) or there < needed:
        raise ValueError(
            f"a tensor of {tuple(size)} {dtype} is now one of {tuple(source.shape)} {source.dtype} over {there} bytes"
        )


def _pieces(to: int, of: int, nbytes: int) -> list[_Piece]:
    return [
        (to + begin, of + begin, min(_PIECE_NBYTES, nbytes - begin))
        for begin in range(0, nbytes, _PIECE_NBYTES)
    ]


def _take_turns(copy: Copy, pieces: list[_Piece]) -> None:
    """Copy pieces as long as there are any; other threads take from the same list."""
    while pieces:
        try:
            piece = pieces.pop()
        except IndexError:  # another thread was faster
            return
        copy(*piece)


def _as_copyable(tensor: torch.Tensor) -> torch.Tensor:
    # Alone of all dtypes, complex128 is copied with instructions that fault on an address no multiple of 16.
    return torch.view_as_real(tensor) if tensor.dtype is torch.complex128 else tensor
