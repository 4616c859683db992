"""Slices of stored tensors, and the rows that are read for them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nostall._read.items.forms import Form


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
