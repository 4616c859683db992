"""Lay out: the file of each item, and its offset there. Pure arithmetic.

Files are filled as in stock ``FileSystemWriter``. A single file has the bytes items in plan order
and then the tensors in plan order. With several files, bytes items are assigned round-robin, and
tensors, largest first, to the least loaded file, by the size of the chunk that is written (stock
counts the size of the whole tensor, also for a shard). Items are contiguous without padding, each
in its container; in files of safetensors behind a header, in that format's order.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nostall._model.jobs import Seal, SealTable, page_aligned
from nostall._model.names import FileFormat
from nostall._model.values import FileLayout, ItemShape, Layout, Slot
from nostall._plan.formats import header_of, order_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNaming:
    """The names of a rank's files, such as ``{group}{prefix}{n}{suffix}.distcp``."""

    prefix: str
    """Stock's storage prefix, ``__{rank}_``."""
    suffix: str = ""
    """Distinguishes the files from those of the checkpoint that is being replaced."""
    separation_hint: str | None = None
    file_format: FileFormat = FileFormat.TORCH_SAVE

    def group_of(self, fqn: str) -> str:
        """The group of files that an item belongs to."""
        hint = self.separation_hint
        return hint if hint and fqn.startswith(hint) else ""

    def name_of(self, group: str, number: int) -> str:
        """The name of a rank's ``number``-th file, which belongs to ``group``."""
        return f"{group}{self.prefix}{number}{self.suffix}{self.file_format.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The number and size of a rank's files."""

    file_count: int
    file_per_item: bool = False
    max_file_nbytes: int | None = None
    """Size limit; a larger item gets a file of its own. ``None`` for no limit."""


def lay_out(shapes: Sequence[ItemShape], naming: FileNaming, packing: Packing) -> Layout:
    """The files of one rank, without empty ones."""
    files: list[FileLayout] = []
    image_offset = 0
    for group, items in _buckets(shapes, naming, packing):
        name = naming.name_of(group, len(files))
        file = _lay_out_file(name, group, items, shapes, image_offset)
        files.append(file)
        image_offset += page_aligned(file.nbytes)
    frozen = tuple(shapes)
    return Layout(
        key=(tuple((s.container, s.nbytes) for s in frozen), tuple(f.slots for f in files)),
        shapes=frozen,
        files=tuple(files),
    )


def _buckets(
    shapes: Sequence[ItemShape], naming: FileNaming, packing: Packing
) -> Iterator[tuple[str, list[int]]]:
    if packing.file_per_item:
        for item, shape in enumerate(shapes):
            yield naming.group_of(shape.fqn), [item]
        return
    groups: dict[str, list[int]] = {"": []}
    for item, shape in enumerate(shapes):
        groups.setdefault(naming.group_of(shape.fqn), []).append(item)
    groups = {name: items for name, items in groups.items() if items}
    count = max(1, packing.file_count // max(1, len(groups)))
    for name, items in groups.items():
        for bucket in _pack(shapes, items, count):
            for apart in _names_apart(shapes, bucket):
                for part in _split(shapes, apart, packing.max_file_nbytes):
                    yield name, part


def _names_apart(shapes: Sequence[ItemShape], items: list[int]) -> list[list[int]]:
    """The items, in several files if a file of safetensors would have two of one name."""
    files: list[list[int]] = [[]]
    seen: Counter[str] = Counter()
    for item in items:
        container = shapes[item].container
        if container is None or container.entry is None:
            return [items]
        number = seen[container.entry.name]
        seen[container.entry.name] += 1
        if number == len(files):
            files.append([])
        files[number].append(item)
    return files


def _split(
    shapes: Sequence[ItemShape], items: list[int], max_nbytes: int | None
) -> Iterator[list[int]]:
    """Consecutive items that fit into one file."""
    part: list[int] = []
    nbytes = 0
    for item in items:
        if part and max_nbytes is not None and nbytes + shapes[item].nbytes > max_nbytes:
            yield part
            part, nbytes = [], 0
        part.append(item)
        nbytes += shapes[item].nbytes
    if part:
        yield part


def _pack(shapes: Sequence[ItemShape], items: list[int], count: int) -> list[list[int]]:
    runs = [item for item in items if shapes[item].weight == 0 and shapes[item].container is None]
    run_set = set(runs)
    tensors = [item for item in items if item not in run_set]
    if count == 1:
        return [runs + tensors]
    buckets: list[list[int]] = [[] for _ in range(count)]
    for position, item in enumerate(runs):
        buckets[position % count].append(item)
    loads = [(0, number) for number in range(count)]
    for item in sorted(tensors, key=lambda i: shapes[i].weight, reverse=True):
        load, number = heapq.heappop(loads)
        buckets[number].append(item)
        heapq.heappush(loads, (load + shapes[item].weight, number))
    return buckets


def with_naming(layout: Layout, naming: FileNaming) -> Layout:
    """A layout with other file names."""
    files = tuple(
        replace(file, name=naming.name_of(file.group, number))
        for number, file in enumerate(layout.files)
    )
    return replace(layout, files=files)


def waves(layout: Layout, max_nbytes: int | None) -> list[Layout]:
    """Consecutive files of a layout, each part with its own image of at most ``max_nbytes`` bytes;
    a larger file is a part by itself.
    """
    runs: list[list[FileLayout]] = [[]]
    nbytes = 0
    for file in layout.files:
        needed = page_aligned(file.nbytes)
        if runs[-1] and max_nbytes is not None and nbytes + needed > max_nbytes:
            runs.append([])
            nbytes = 0
        runs[-1].append(replace(file, image_offset=nbytes))
        nbytes += needed
    if len(runs) == 1:
        return [layout]
    return [
        replace(layout, key=(layout.key, number), files=tuple(files))
        for number, files in enumerate(runs)
    ]


def _lay_out_file(
    name: str, group: str, items: list[int], shapes: Sequence[ItemShape], image_offset: int
) -> FileLayout:
    entries = {
        item: (container.entry, container.payload_nbytes)
        for item in items
        if (container := shapes[item].container) is not None and container.entry is not None
    }
    header = header_of(list(entries.values())) if entries else b""
    if entries:
        items = sorted(items, key=lambda item: order_of(entries[item][0]))
    slots = []
    at = len(header)
    for item in items:
        shape = shapes[item]
        container = shape.container
        head = len(container.prefix) if container else 0
        slots.append(
            Slot(
                item=item,
                offset=at,
                length=shape.nbytes,
                payload_offset=at + head,
                payload_nbytes=container.payload_nbytes if container else shape.nbytes,
            )
        )
        at += shape.nbytes
    return FileLayout(
        name=name,
        group=group,
        nbytes=at,
        header=header,
        slots=tuple(slots),
        image_offset=image_offset,
        seals=_seal_table(slots, shapes),
    )


def _seal_table(slots: Sequence[Slot], shapes: Sequence[ItemShape]) -> SealTable:
    templates: dict[tuple[int, int, Seal | None], int] = {}
    template_of_slot = []
    for slot in slots:
        container = shapes[slot.item].container
        seal = container.seal if container is not None else None
        template = (slot.payload_offset - slot.offset, slot.payload_nbytes, seal)
        template_of_slot.append(templates.setdefault(template, len(templates)))
    return SealTable(
        templates=tuple(templates),
        blob_offsets=tuple(slot.offset for slot in slots),
        template_of_slot=tuple(template_of_slot),
    )
