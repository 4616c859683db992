"""Read the items of a load plan: few large reads, straight into the tensors where that is possible.

The planner is called on one thread, as stock's reader calls it; only reads and checksums happen on
others. Stock's planner, and that of ``nostall.load``, are asked for all tensors first. So it is
known which of them share memory; all others can be read at the same time, in any order. Tensors
that share memory, and all tensors of any other planner, which may use one buffer for all of them,
are read one after the other in stock's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from typing import TypeAlias, TypeVar

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner

from nostall._memory.uploads import Uploads
from nostall._model import checksum
from nostall._read.items.ahead import Ahead, Read
from nostall._read.items.archives import Archives
from nostall._read.items.large import PIECE_NBYTES, LargeRead, LargeReadInTurn, LargeReads
from nostall._read.items.opened import OpenFile
from nostall._read.items.overlaps import overlapping
from nostall._read.items.shared import Shared
from nostall._read.items.small import SmallRead
from nostall._read.items.targets import note_changes, require_usable, span_of, without_gradient
from nostall._read.items.workers import Workers
from nostall._read.plan import SMALL_NBYTES, Wanted, regions, rotated
from nostall._read.planner import Planner
from nostall._storage.port import ReadableFiles

T = TypeVar("T")
_OF_TENSORS = ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")
"""What a planner does for each tensor."""


def read_items(
    wanted: Iterable[Wanted],
    planner: LoadPlanner,
    files: ReadableFiles,
    *,
    threads: int,
    verify: bool,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Read items and hand them to a planner; returns when it has all of them.

    Args:
        wanted: The items, in the order of the plan; those with transforms are not for this
            function.
        planner: Called on this thread only.
        files: The checkpoint's files.
        threads: Number of reads at a time.
        verify: Whether to compare whole tensors with the checksums in their archives.
        rank: Among the ranks that read at the same time: each begins with another file.
        world_size: Number of these ranks.

    Raises:
        DamagedCheckpointError: A file is missing or shorter than expected, or an item in it is
            damaged. Targets, also of other items, may hold some of the values then.
        OptionError: An item cannot be loaded into its tensor.
        OSError: A file cannot be read.
    """
    if verify:
        checksum.use_fastest()
    items = list(wanted)
    # In this order: nothing reads from a closed file, or into memory that was released.
    with Ahead() as ahead, Uploads() as uploads, Workers(threads) as workers:
        archives = Archives(verify=verify)
        shared = Shared(planner=planner, workers=workers, archives=archives, uploads=uploads)
        in_turn: Sequence[Wanted] = items
        if _gives_every_item_its_own_tensor(planner):
            known, in_turn = _with_targets(items, planner)
            uploads.prepare(target for _, target, _ in known if target is not None)
            by_file = _by_file(known, lambda each: each[0].file)
            for name in rotated(sorted(by_file), rank, world_size):
                in_order = sorted(by_file[name], key=lambda each: each[0].offset)
                file = ahead.open(files, name, [wanted for wanted, _, _ in in_order], workers)
                ahead.read(file, list(_reads(shared, file, in_order)), workers)
            ahead.finish_all(workers)
        in_turn_of = _by_file(in_turn, lambda each: each.file)
        for name in _by_file(items, lambda each: each.file):
            if of_file := in_turn_of.get(name):
                file = ahead.open(files, name, of_file, workers)
                ahead.read(file, list(_reads_in_turn(shared, file, of_file)), workers)
        ahead.finish_all(workers)


def _gives_every_item_its_own_tensor(planner: LoadPlanner) -> bool:
    """Whether a planner's methods for tensors are stock's or ours, which only look tensors up."""
    of_class, of_instance = type(planner), vars(planner)
    return all(
        name not in of_instance
        and getattr(of_class, name, None)
        in (getattr(DefaultLoadPlanner, name, ()), getattr(Planner, name, ()))
        for name in _OF_TENSORS
    )


_Known: TypeAlias = "tuple[Wanted, torch.Tensor | None, int]"
"""An item; its tensor, ``None`` for an object; where its values are, if the tensor is plain."""


def _with_targets(
    items: Sequence[Wanted], planner: LoadPlanner
) -> tuple[list[_Known], list[Wanted]]:
    """What can be read in any order, and what in the order of the plan; nothing is read yet."""
    known: list[_Known] = []
    of: list[Wanted] = []
    tensors: list[torch.Tensor] = []
    for wanted in items:
        if wanted.item.type is LoadItemType.BYTE_IO:
            known.append((wanted, None, 0))
            continue
        target = without_gradient(planner.resolve_tensor(wanted.item))
        require_usable(target, wanted)
        of.append(wanted)
        tensors.append(target)
    spans = [span_of(target) for target in tensors]
    shared = overlapping(tensors, spans)
    in_turn = list(compress(of, shared))
    if in_turn:
        alone = [not each for each in shared]
        of, tensors = list(compress(of, alone)), list(compress(tensors, alone))
        spans = list(compress(spans, alone))
    known.extend(zip(of, tensors, note_changes(tensors, spans), strict=True))
    return known, in_turn


def _by_file(items: Iterable[T], file_of: Callable[[T], str]) -> dict[str, list[T]]:
    """Files in the order in which they appear first, as stock reads them."""
    by_file: dict[str, list[T]] = {}
    for each in items:
        by_file.setdefault(file_of(each), []).append(each)
    return by_file


def _reads(shared: Shared, file: OpenFile, known: Sequence[_Known]) -> Iterator[Read]:
    """Reads of items in the order of their offsets."""
    items = [wanted for wanted, _, _ in known]
    targets = [target for _, target, _ in known]
    addresses = [address for _, _, address in known]
    few: list[LargeRead] = []
    for region in regions(items):
        first, target = items[region.start], targets[region.start]
        if first.nbytes <= SMALL_NBYTES or target is None:
            yield SmallRead(shared, file, items[region], targets[region], addresses[region])
            continue
        read = LargeRead(shared, file, first, target)
        if read.tasks > 1:
            yield read
            continue
        few.append(read)
        if sum(each.nbytes for each in few) >= PIECE_NBYTES:
            yield LargeReads(few)
            few = []
    if few:
        yield LargeReads(few)


def _reads_in_turn(shared: Shared, file: OpenFile, items: Sequence[Wanted]) -> Iterator[Read]:
    """Reads of items whose targets are not known, in their order."""
    for region in regions(items):
        first = items[region.start]
        if first.nbytes <= SMALL_NBYTES or first.item.type is LoadItemType.BYTE_IO:
            yield SmallRead(shared, file, items[region], None, [0] * (region.stop - region.start))
        else:
            yield LargeReadInTurn(shared, file, first)
