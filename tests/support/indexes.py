"""Metadata of checkpoints, a small one and any, and their index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nostall import _torch
from nostall._commit.index import IndexBytes, ItemIndex, parsed
from nostall._commit.indexing import indexed
from nostall._commit.manifest import split, with_manifest


def content_of(index: IndexBytes) -> bytes:
    return bytes(index.body) + index.tables


def index_of(found: Metadata) -> IndexBytes | None:
    return indexed(found)


def parsed_of(found: Metadata) -> ItemIndex:
    """The index of metadata as a reader has it, with files that are long enough for anything."""
    made = index_of(found)
    assert made is not None
    index = parsed(content_of(made), dict.fromkeys(made.files, 1 << 62))
    assert index is not None
    return index


def with_index_of(path: Path, index: IndexBytes) -> None:
    """Put another index, with a right checksum, into a checkpoint."""
    content = (path / ".metadata").read_bytes()
    _, manifest = split(content, path="")
    assert manifest is not None
    pieces = with_manifest(
        [content[: manifest.metadata_nbytes]],
        manifest.files,
        crc32=manifest.metadata_crc32,
        committed_at_s=0.0,
        index=index,
    )
    (path / ".metadata").write_bytes(b"".join(pieces))


def small() -> Metadata:
    """Two tensors, one of them in two chunks, and an object."""
    two, one = torch.Size((2, 3)), torch.Size((1, 3))
    begins = torch.Size((0, 0)), torch.Size((1, 0))
    entries: dict[str, Any] = {
        "weight": TensorStorageMetadata(
            TensorProperties(), two, [ChunkStorageMetadata(begin, one) for begin in begins]
        ),
        "step": TensorStorageMetadata(
            TensorProperties(dtype=torch.int64),
            torch.Size(()),
            [ChunkStorageMetadata(torch.Size(()), torch.Size(()))],
        ),
        "lr": BytesStorageMetadata(),
    }
    indices = [
        *(MetadataIndex("weight", begin, number) for number, begin in enumerate(begins)),
        MetadataIndex("step", torch.Size(()), 0),
        MetadataIndex("lr"),
    ]
    places = {
        index: _torch.StorageInfo("__0_0.distcp", 100 * number, 100)
        for number, index in enumerate(indices)
    }
    return Metadata(entries, storage_data=places)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PROPERTIES = st.builds(
    TensorProperties,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool]),
    requires_grad=st.booleans(),
    memory_format=st.sampled_from([torch.contiguous_format, torch.channels_last]),
    pin_memory=st.booleans(),
)


@st.composite
def metadata(draw: st.DrawFn) -> Metadata:
    """Metadata of tensors in rows of chunks, and of objects, one after the other in two files."""
    ends = {"__0_0.distcp": 0, "__1_0.distcp": 0}
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}

    def place(index: MetadataIndex) -> None:
        file = draw(st.sampled_from(list(ends)))
        length = draw(st.integers(0, 1 << 40))
        places[index] = _torch.StorageInfo(file, ends[file], length)
        ends[file] += length

    for name in draw(st.lists(NAMES, unique=True, max_size=6)):
        if draw(st.booleans()):
            entries[name] = BytesStorageMetadata()
            place(MetadataIndex(name))
            continue
        rows = draw(st.lists(st.integers(1, 5), max_size=4))
        columns = tuple(draw(st.lists(st.integers(0, 1 << 20), max_size=3)))
        chunks = []
        for number, height in enumerate(rows):
            offsets = torch.Size((sum(rows[:number]), *(0 for _ in columns)))
            chunks.append(ChunkStorageMetadata(offsets, torch.Size((height, *columns))))
            place(MetadataIndex(name, offsets, number))
        entries[name] = TensorStorageMetadata(
            draw(PROPERTIES), torch.Size((sum(rows), *columns)), chunks
        )
    return Metadata(entries, storage_data=places, planner_data={"of": "planners"})
