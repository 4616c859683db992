"""The tensors that values go to: what they must be, and how values get into them.

Values are read straight into a target whose memory has the form of the file: contiguous memory.
For any other target they are read into memory beside it, and brought from there (:func:`bring`).
How memory of an accelerator is filled is the business of ``_memory.uploads``.

Values of targets that share memory have to be written one after the other, in the order of the
plan. Parts of one tensor that lie beside each other span the same addresses and still share
nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import combinations, pairwise

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.planner import ReadItem

from nostall import _torch
from nostall._memory.uploads import Uploads
from nostall._read.plan import Wanted
from nostall.errors import OptionError

_MOST_PARTS = 256
"""Parts of one tensor that are compared in pairs; more count as sharing memory."""


def without_gradient(target: torch.Tensor) -> torch.Tensor:
    """The tensor, as one that can be overwritten."""
    is_so = type(target) is torch.Tensor and not target.requires_grad
    return target if is_so else target.detach()


def require_usable(target: torch.Tensor, wanted: Wanted) -> None:
    """Require that a planner's tensor has memory and the item's shape, else ``OptionError``."""
    if target.shape != wanted.item.lengths:
        raise OptionError(
            f"cannot load {wanted.name}: its tensor has the shape {tuple(target.shape)}, the"
            f" checkpoint {tuple(wanted.item.lengths)}",
            phase="read",
            hint="load into a tensor of the shape that was saved",
        )
    if missing_memory := _torch.missing_data(target):
        raise OptionError(f"cannot load {wanted.name}: {missing_memory}", phase="read")


def span_of(target: torch.Tensor) -> tuple[int, int] | None:
    """The first address of a dense target's values and one past the last; ``None`` for others.

    The values of a dense tensor are bytes in memory, one after the other, on any device.
    """
    if (
        type(target) is torch.Tensor
        and target.layout is torch.strided
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    ):
        begin = target.data_ptr()
        return begin, begin + target.nbytes
    return None


def note_changes(
    targets: Sequence[torch.Tensor], spans: Sequence[tuple[int, int] | None]
) -> list[int]:
    """Tell autograd that dense targets change; call it before the first byte is written.

    Other targets are changed by torch itself, which tells it. Tensors made in inference mode have
    no count of changes.

    Returns the address of each target's values if it is dense and on the CPU, otherwise 0: threads
    that read do not ask torch, which would hand the interpreter lock over.
    """
    addresses = []
    changing = []
    for each, span in zip(targets, spans, strict=True):
        addresses.append(span[0] if span and each.is_cpu else 0)
        if span and not each.is_inference():
            changing.append(each)
    increment_version(changing)
    return addresses


def overlapping(
    items: Sequence[Wanted],
    targets: Sequence[torch.Tensor],
    spans: Sequence[tuple[int, int] | None],
) -> list[bool]:
    """Whether each target shares memory with another one, or may do so.

    Tensors whose memory is not known, such as a subclass's, may. The planner of these items must
    give the same tensor for the same ``dest_index``.
    """
    found = [False] * len(targets)
    extents: list[tuple[int, int, int]] = []
    for number, target in enumerate(targets):
        addresses = spans[number] or _addresses(target)
        if addresses is None:
            found[number] = True
        elif addresses[0] < addresses[1]:
            extents.append((*addresses, number))
    extents.sort()
    if all(end <= begin for (_, end, _), (begin, _, _) in pairwise(extents)):
        return found
    cluster: list[int] = []
    last = 0
    for begin, end, number in [*extents, (sys.maxsize, sys.maxsize, -1)]:
        if begin >= last:  # the cluster of those before it is complete
            parts = [(items[at].item, targets[at]) for at in cluster]
            if len(parts) > 1 and not _are_apart(parts):
                for at in cluster:
                    found[at] = True
            cluster = []
        cluster.append(number)
        last = max(last, end)
    return found


def _addresses(target: torch.Tensor) -> tuple[int, int] | None:
    """The first address of a target's values and one past the last; ``None`` if unknown."""
    if type(target) is not torch.Tensor or target.layout is not torch.strided:
        return None
    begin = target.data_ptr()
    if not target.numel():
        return 0, 0
    reach = zip(target.shape, target.stride(), strict=True)
    count = 1 + sum((length - 1) * step for length, step in reach)
    return begin, begin + count * target.element_size()


def _overlaps_itself(target: torch.Tensor) -> bool:
    """Whether two elements may have the same memory, also in parts beside this one."""
    reach = 1
    for step, length in sorted(zip(target.stride(), target.shape, strict=True)):
        if step < reach:
            return True
        reach += step * (length - 1)
    return False


def _are_apart(cluster: Sequence[tuple[ReadItem, torch.Tensor]]) -> bool:
    """Whether targets are disjoint parts of one tensor; false if that is not certain."""
    items = [item for item, _ in cluster]
    if len(items) > _MOST_PARTS or any(each.dest_index != items[0].dest_index for each in items):
        return False
    if any(_overlaps_itself(target) for _, target in cluster):
        return False  # nor are parts of an expanded tensor apart, for example
    return all(
        any(
            begin + length <= other_begin or other_begin + other_length <= begin
            for begin, length, other_begin, other_length in zip(
                one.dest_offsets, one.lengths, other.dest_offsets, other.lengths, strict=False
            )
        )
        for one, other in combinations(items, 2)
    )


def bring(
    uploads: Uploads,
    targets: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    items: Sequence[Wanted],
) -> None:
    """Copy values into targets that share no memory; on the thread that called the load.

    ``OptionError`` if torch cannot copy into one of them.
    """
    try:
        _torch.copy_each(targets, uploads.brought_near(values, targets))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        for target, value, wanted in zip(targets, values, items, strict=True):
            try:
                target.copy_(value)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                why = str(error).partition("\n")[0]
                raise OptionError(
                    f"cannot load {wanted.name} into its tensor: {why:.300}",
                    phase="read",
                    hint="load into a dense tensor with memory for each element, such as its"
                    " clone()",
                    cause=error,
                ) from None
