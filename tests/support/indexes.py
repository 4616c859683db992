"""A small checkpoint's metadata, and its index."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nostall import _torch
from nostall._commit.index.writing import WrittenIndex


def content_of(index: WrittenIndex) -> bytes:
    """The bytes of an index."""
    return index.body + index.tables


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
