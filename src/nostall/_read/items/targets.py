"""The tensors that values go to: what they must be, and how values get into them.

Values are read straight into a target whose memory has the form of the file: contiguous memory.
For any other target they are read into memory beside it, and brought from there (:func:`bring`).
How memory of an accelerator is filled is the business of ``_memory.uploads``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from nostall import _torch
from nostall._memory.uploads import Uploads
from nostall._read.plan import Wanted
from nostall.errors import OptionError


def without_gradient(target: torch.Tensor) -> torch.Tensor:
    """The tensor, as one that can be overwritten."""
    is_so = type(target) is torch.Tensor and not target.requires_grad
    return target if is_so else target.detach()


def require_usable(target: torch.Tensor, wanted: Wanted) -> None:
    """Check a planner's tensor before anything is read for it.

    Raises:
        OptionError: It has another shape than the item, or no memory.
    """
    if target.shape != wanted.item.lengths:
        raise OptionError(
            f"cannot load {wanted.name}: its tensor has the shape {tuple(target.shape)}, the"
            f" checkpoint {tuple(wanted.item.lengths)}",
            phase="read",
            hint="load into a tensor of the shape that was saved",
        )
    if missing_memory := _torch.missing_data(target):
        raise OptionError(f"cannot load {wanted.name}: {missing_memory}", phase="read")


def is_dense(target: torch.Tensor) -> bool:
    """Whether the values of a tensor are bytes in memory, one after the other, on any device."""
    return (
        type(target) is torch.Tensor
        and target.layout is torch.strided
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def span_of(target: torch.Tensor) -> tuple[int, int] | None:
    """The first address of a dense target's values and one past the last; ``None`` of others."""
    if not is_dense(target):
        return None
    begin = target.data_ptr()
    return begin, begin + target.nbytes


def note_changes(
    targets: Sequence[torch.Tensor], spans: Sequence[tuple[int, int] | None]
) -> list[int]:
    """Tell autograd that dense targets change; call it before the first byte is written.

    Other targets are changed by torch itself, which tells it. Tensors made in inference mode have
    no count of changes.

    Args:
        targets: The tensors.
        spans: For each of them what :func:`span_of` returns.

    Returns:
        Where the values of each target are if it is dense and on the CPU; otherwise 0. Threads
        that read do not ask torch themselves: it would hand the interpreter lock over.
    """
    addresses = []
    changing = []
    for each, span in zip(targets, spans, strict=True):
        addresses.append(span[0] if span and each.is_cpu else 0)
        if span and not each.is_inference():
            changing.append(each)
    increment_version(changing)
    return addresses


def bring(
    uploads: Uploads,
    targets: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    items: Sequence[Wanted],
) -> None:
    """Copy values into targets that share no memory; on the thread that called the load.

    Raises:
        OptionError: torch cannot copy into one of them.
    """
    try:
        _torch.copy_each(targets, uploads.brought_near(values, targets))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        for target, value, wanted in zip(targets, values, items, strict=True):
            _bring_one(target, value, wanted)


def _bring_one(target: torch.Tensor, value: torch.Tensor, wanted: Wanted) -> None:
    try:
        target.copy_(value)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise OptionError(
            f"cannot load {wanted.name} into its tensor: {why:.300}",
            phase="read",
            hint="load into a dense tensor with memory for each element, such as its clone()",
            cause=error,
        ) from None


def address_of(content: bytearray) -> int:
    """Where its bytes are; it must not change its length meanwhile."""
    return ctypes.addressof(ctypes.c_char.from_buffer(content))
