"""Slices of stored tensors, and the memory that they are read into."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nostall._read.forms import Form


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a stored tensor, along its first dimension, that a slice lies in."""

    begin: int
    """Where they begin in the archive."""
    shape: tuple[int, ...]
    nbytes: int
    offsets: tuple[int, ...]
    """Where the slice begins in them."""
    lengths: tuple[int, ...]
    is_exact: bool
    """Whether the slice is all of them."""

    @staticmethod
    def of(form: Form, offsets: Sequence[int], lengths: Sequence[int], *, whole: bool) -> Rows:
        """The rows of a slice that is inside of the tensor; all rows if ``whole``."""
        shape, within, first = form.shape, tuple(offsets), 0
        if shape and not whole:
            first = offsets[0]
            shape, within = (lengths[0], *shape[1:]), (0, *offsets[1:])
        row_nbytes = math.prod(form.shape[1:]) * form.dtype.itemsize
        return Rows(
            begin=form.begin + first * row_nbytes,
            shape=shape,
            nbytes=math.prod(shape) * form.dtype.itemsize,
            offsets=within,
            lengths=tuple(lengths),
            is_exact=shape == tuple(lengths),
        )

    def cut(self, rows: torch.Tensor) -> torch.Tensor:
        """The slice, of the rows."""
        for dimension, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            rows = rows.narrow(dimension, offset, length)
        return rows


def is_plain(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the values of a tensor are bytes in memory, one after the other."""
    return (
        type(target) is torch.Tensor
        and target.device.type == "cpu"
        and target.layout is torch.strided
        and target.dtype is dtype
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def memory_of(tensor: torch.Tensor) -> memoryview:
    nbytes = tensor.numel() * tensor.element_size()
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr() if nbytes else 0)
    return memoryview(array).cast("B")


def over(
    content: bytearray, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """A tensor over bytes that were read."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(content, dtype=dtype, count=count, offset=offset).view(shape)
