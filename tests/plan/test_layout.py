"""Layout is arithmetic: these properties hold for any items in any number of files."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _split_by_size_and_type
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nostall._engine import Engine
from nostall._model.jobs import Seal, page_aligned
from nostall._model.values import Container, FileLayout, ItemShape
from nostall._plan.layout import FileNaming, Packing, lay_out


def run_item(fqn: str, nbytes: int, weight: int) -> ItemShape:
    return ItemShape(fqn=fqn, container=None, nbytes=nbytes, weight=weight)


def seal_of(number: int) -> Seal:
    return Seal(
        payload_crc_at=(number, number + 50),
        hash_before=7,
        crcs_after=(1, 2),
        id_at=number + 20,
        id_names=b"0" * 20,
        id_crc_at=(number + 60, number + 70),
    )


def tensor_item(
    fqn: str,
    payload_nbytes: int,
    *,
    weight: int | None = None,
    head: int = 700,
    tail: int = 900,
    seal: Seal | None = None,
) -> ItemShape:
    container = Container(
        prefix=b"p" * head, payload_nbytes=payload_nbytes, suffix=b"s" * tail, seal=seal
    )
    return ItemShape(
        fqn=fqn,
        container=container,
        nbytes=container.nbytes,
        weight=payload_nbytes if weight is None else weight,
    )


FQNS = st.sampled_from(["model.w", "model.b", "optimizer.m", "optimizer.v", "opt", "step", ""])
SIZES = st.one_of(st.integers(0, 20), st.sampled_from([4095, 4096, 4097]), st.integers(0, 20_000))
ITEMS = st.lists(
    st.one_of(
        st.builds(run_item, FQNS, SIZES, st.just(0) | st.integers(1, 20_000)),
        st.builds(
            tensor_item,
            FQNS,
            SIZES,
            head=st.integers(1, 800),
            tail=st.integers(1, 999),
            seal=st.none() | st.integers(0, 3).map(seal_of),
        ),
    ),
    max_size=40,
)
PACKINGS = st.builds(Packing, file_count=st.integers(1, 6), file_per_item=st.booleans())
NAMINGS = st.builds(
    FileNaming,
    prefix=st.sampled_from(["__0_", "__17_"]),
    suffix=st.sampled_from(["", "-1a2b3c4d"]),
    separation_hint=st.sampled_from([None, "optimizer", "opt", "absent"]),
)
PLAIN = FileNaming(prefix="__0_")


def items_of(file: FileLayout) -> list[int]:
    return [slot.item for slot in file.slots]


@given(shapes=ITEMS, naming=NAMINGS, packing=PACKINGS)
def test_items_tile_files_and_files_tile_pages(
    shapes: list[ItemShape], naming: FileNaming, packing: Packing
) -> None:
    """No gap, overlap or byte too many: each item lies once, each file in whole pages of its own.

    Equal items give equal layouts, so places are known on every rank and in every save. No items
    have no file and need no memory.
    """
    layout = lay_out(shapes, naming, packing)
    assert layout == lay_out(tuple(shapes), naming, packing)
    assert layout.shapes == tuple(shapes)
    places = Counter(item for file in layout.files for item in items_of(file))
    assert places == Counter(range(len(shapes)))
    image_end = 0
    for file in layout.files:
        assert file.slots
        assert file.image_offset == image_end
        image_end += page_aligned(file.nbytes)
        at = 0
        for slot in file.slots:
            assert slot.offset == at
            assert slot.length == shapes[slot.item].nbytes
            at += slot.length
        assert file.nbytes == at
    assert layout.image_nbytes == image_end


@given(shapes=ITEMS, naming=NAMINGS, packing=PACKINGS)
def test_payloads_and_seals_lie_where_their_containers_have_room(
    shapes: list[ItemShape], naming: FileNaming, packing: Packing
) -> None:
    """A payload lies between its container's prefix and suffix; a run of bytes is all payload.

    The writer, which sees no container, learns each slot's payload and seal positions.
    """
    for file in lay_out(shapes, naming, packing).files:
        table = file.seals
        assert table.blob_offsets == tuple(slot.offset for slot in file.slots)
        assert len(set(table.templates)) == len(table.templates)
        for slot, template in zip(file.slots, table.template_of_slot, strict=True):
            container = shapes[slot.item].container
            head = len(container.prefix) if container else 0
            tail = len(container.suffix) if container else 0
            assert slot.payload_offset == slot.offset + head
            assert slot.payload_offset + slot.payload_nbytes + tail == slot.offset + slot.length
            seal = container.seal if container else None
            assert table.templates[template] == (head, slot.payload_nbytes, seal)


@given(shapes=ITEMS, naming=NAMINGS, packing=PACKINGS, another=PACKINGS)
def test_what_was_laid_out_for_one_checkpoint_serves_the_next_one(
    shapes: list[ItemShape], naming: FileNaming, packing: Packing, another: Packing
) -> None:
    """Saves that replace each other have file names of their own, and are laid out once.

    Those with other options are laid out anew.
    """
    engine = Engine()
    other = replace(naming, suffix="-deadbeef")
    one, two = (engine.lay_out(shapes, each, packing) for each in (naming, other))
    assert two.key is one.key
    assert (one, two) == tuple(lay_out(shapes, each, packing) for each in (naming, other))
    assert engine.lay_out(shapes, naming, another) == lay_out(shapes, naming, another)


@given(shapes=ITEMS.filter(bool), packing=PACKINGS, other=PACKINGS, data=st.data())
def test_the_key_changes_with_any_place_or_length(
    shapes: list[ItemShape], packing: Packing, other: Packing, data: st.DataObject
) -> None:
    """Memory laid down for other files, or items of other lengths, is not taken for a layout's."""
    one, two = lay_out(shapes, PLAIN, packing), lay_out(shapes, PLAIN, other)
    same = [file.slots for file in one.files] == [file.slots for file in two.files]
    assert (one.key == two.key) == same
    position = data.draw(st.integers(0, len(shapes) - 1))
    before = shapes[position]
    if before.container is None:
        after = run_item(before.fqn, before.nbytes + 1, before.weight)
    else:
        after = tensor_item(before.fqn, before.container.payload_nbytes + 1)
    changed = [*shapes[:position], after, *shapes[position + 1 :]]
    assert one.key != lay_out(changed, PLAIN, packing).key


@given(shapes=ITEMS, naming=NAMINGS, packing=PACKINGS)
def test_file_names_differ_and_count_up(
    shapes: list[ItemShape], naming: FileNaming, packing: Packing
) -> None:
    """``{group}{prefix}{n}{suffix}.distcp`` with n from 0, so no two files share a name."""
    names = [file.name for file in lay_out(shapes, naming, packing).files]
    assert len(set(names)) == len(names)
    for number, name in enumerate(names):
        plain = f"{naming.prefix}{number}{naming.suffix}.distcp"
        assert name in {plain, f"{naming.separation_hint}{plain}"}


# --- as stock packs -------------------------------------------------------------------------------


def write_item(shape: ItemShape) -> WriteItem:
    """An item that stock's packing weighs as ours."""
    if shape.weight == 0 and shape.container is None:
        return WriteItem(index=MetadataIndex(shape.fqn), type=WriteItemType.BYTE_IO)
    size = torch.Size([shape.weight])
    return WriteItem(
        index=MetadataIndex(shape.fqn),
        type=WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size([0]), sizes=size),
            properties=TensorProperties(dtype=torch.uint8),
            size=size,
        ),
    )


@given(shapes=ITEMS, file_count=st.integers(1, 8))
def test_items_are_packed_as_stock_packs_them(shapes: list[ItemShape], file_count: int) -> None:
    """Files hold stock's items in stock's order, largest first, each in the least loaded file.

    Stock's empty files are left out.
    """
    items = [write_item(shape) for shape in shapes]
    position = {id(item): number for number, item in enumerate(items)}
    expected = []
    for bucket in _split_by_size_and_type(file_count, items):
        objects = [item for item in bucket if item.type == WriteItemType.BYTE_IO]
        tensors = [item for item in bucket if item.type != WriteItemType.BYTE_IO]
        if bucket:
            expected.append([position[id(item)] for item in (*objects, *tensors)])
    layout = lay_out(shapes, PLAIN, Packing(file_count=file_count))
    assert [items_of(file) for file in layout.files] == expected


@given(shapes=ITEMS)
def test_a_file_per_item_keeps_plan_order(shapes: list[ItemShape]) -> None:
    """File number n holds item number n and nothing else."""
    layout = lay_out(shapes, PLAIN, Packing(file_count=1, file_per_item=True))
    assert [items_of(file) for file in layout.files] == [[item] for item in range(len(shapes))]


# --- separation -----------------------------------------------------------------------------------


@given(shapes=ITEMS, hint=st.sampled_from(["optimizer", "model", "absent"]), packing=PACKINGS)
def test_no_file_mixes_hinted_items_with_others(
    shapes: list[ItemShape], hint: str, packing: Packing
) -> None:
    """A file with the hint's name has only items with it; every other file has none."""
    naming = FileNaming(prefix="__3_", separation_hint=hint)
    for file in lay_out(shapes, naming, packing).files:
        hinted = {shapes[item].fqn.startswith(hint) for item in items_of(file)}
        assert hinted == {file.name.startswith(hint)}


@pytest.mark.parametrize("file_count", [2, 3, 7])
def test_two_groups_get_half_of_the_files_each_and_one_gets_all(file_count: int) -> None:
    """Rounded down; a hint that no item matches, or every item, does not halve their number."""
    shapes = [tensor_item(f"{group}.{n}", 50) for group in ("model", "opt") for n in range(9)]
    for hint, count in (("opt", file_count // 2), ("absent", file_count)):
        naming = FileNaming(prefix="__0_", separation_hint=hint)
        layout = lay_out(shapes, naming, Packing(file_count=file_count))
        groups = Counter(file.name.startswith("opt") for file in layout.files)
        assert groups == ({True: count, False: count} if hint == "opt" else {False: count})
    hinted = FileNaming(prefix="__0_", separation_hint="model")
    assert len(lay_out(shapes[:9], hinted, Packing(file_count=file_count)).files) == file_count
