"""The index of items in ``.metadata``: what it says, and that it says nothing that was changed."""

from __future__ import annotations

import dataclasses
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
)

import nostall
from nostall import _torch
from nostall._commit.index import WrittenIndex, parsed
from nostall._commit.indexing import entries_and_places, read_index
from nostall._commit.manifest import split, with_manifest
from nostall._commit.publication import publication_of
from nostall._describe.on_demand import on_demand
from nostall._model import checksum
from nostall._model.values import WrittenFile
from nostall.errors import NostallError
from nostall.integrity import State
from support.indexes import content_of, index_of, metadata, small


def nbytes_of(index: WrittenIndex) -> dict[str, int]:
    """Files that are long enough for all that an index can say."""
    return dict.fromkeys(index.files, 1 << 62)


def file_of(found: Metadata) -> bytes:
    """A ``.metadata`` file."""
    publication = publication_of(found)
    pieces = publication.content(None)
    files = [WrittenFile(name=each, nbytes=1 << 50, crc32=None) for each in publication.files]
    crc32 = checksum.crc32(b"".join(pieces))
    return b"".join(
        with_manifest(pieces, files, crc32=crc32, committed_at_s=0.0, index=publication.index)
    )


@given(metadata())
def test_an_index_says_what_the_metadata_says(original: Metadata) -> None:
    """Names in their order, kinds, dtypes and properties, sizes, chunks and places come back."""
    index = index_of(original)
    assert index is not None
    read = parsed(content_of(index), nbytes_of(index))
    assert read is not None
    entries, places = entries_and_places(read, path="")
    assert (entries, places) == (original.state_dict_metadata, original.storage_data)
    assert list(entries) == list(original.state_dict_metadata)
    assert [each.index for each in places] == [each.index for each in original.storage_data]


@given(metadata())
def test_items_made_on_demand_are_those_of_the_metadata(original: Metadata) -> None:
    """Also where alike items share an entry; what is not there is absent."""
    index = index_of(original)
    assert index is not None
    read = parsed(content_of(index), nbytes_of(index))
    assert read is not None
    shared = on_demand(read, path="")
    for name, entry in original.state_dict_metadata.items():
        assert shared.state_dict_metadata.get(name) == entry
        assert shared.state_dict_metadata[name] == entry
    for place, info in original.storage_data.items():
        assert shared.storage_data[place] == info
        elsewhere = dataclasses.replace(place, offset=torch.Size((1 << 30,)))
        with pytest.raises(KeyError):
            shared.storage_data[elsewhere]
    assert shared.state_dict_metadata.get("absent, and too long to be drawn") is None


def test_items_that_are_only_alike_do_not_share(tmp_path: Path) -> None:
    """Tensors of different dtype, length or dimensions, and objects, are described apart."""
    state = {
        "one": torch.zeros(2),
        "same": torch.ones(2),
        "dtype": torch.zeros(2, dtype=torch.float64),
        "longer": torch.zeros(3),
        "shape": torch.zeros(2, 1),
        "scalar": torch.tensor(1.0),
        "object": 3,
    }
    dcp.save(state, storage_writer=nostall.FileSystemWriterAsync(tmp_path), no_dist=True)
    stock = dcp.FileSystemReader(tmp_path).read_metadata()
    shared = nostall.FileSystemReader(tmp_path).shared_metadata()
    assert dict(shared.state_dict_metadata) == stock.state_dict_metadata
    assert dict(shared.storage_data) == stock.storage_data


@given(metadata())
def test_stock_reads_the_pickle_in_front_of_an_index(original: Metadata) -> None:
    """An index is after the STOP instruction of the pickle, where stock's reader stops."""
    assert pickle.loads(file_of(original)) == original


@given(metadata())
def test_an_index_is_read_from_the_end_of_the_file(original: Metadata) -> None:
    """It is found through the manifest, without the pickle."""
    content = file_of(original)
    index = index_of(original)
    found = read_index(io.BytesIO(content), path="")
    assert index is not None
    assert found is not None
    assert found[0] == parsed(content_of(index), nbytes_of(index))


@given(metadata())
def test_other_file_names_change_the_tables_alone(original: Metadata) -> None:
    """A save under new names writes the index that it would have made anew."""
    index = index_of(original)
    assert index is not None
    names = {name: f"renamed-{name}" for name in index.files}
    renamed = index.renamed(names)
    for place in original.storage_data.values():
        place.relative_path = names[place.relative_path]
    assert index_of(original) == renamed
    assert renamed.crc32 == checksum.crc32(content_of(renamed))


def test_no_changed_byte_of_an_index_goes_unnoticed() -> None:
    """With its checksum, each change of a byte and each truncation of the file is an error."""
    content = file_of(small())
    begin = content.index(b"\n#nostall-index\n")
    end = content.index(b'\n{"committed_at"')
    for at in range(begin, end):
        changed = bytearray(content)
        for value in (changed[at] ^ 0xFF, changed[at] ^ 1):
            changed[at] = value
            with pytest.raises(NostallError):
                read_index(io.BytesIO(changed), path="")
        with pytest.raises(NostallError):
            split(content[:at] + content[at + 1 :], path="")


def with_a_descriptor(found: Metadata) -> None:
    """A transform changed an item's bytes."""
    next(iter(found.storage_data.values())).transform_descriptors = ("zstd",)


def with_an_unknown_property(found: Metadata) -> None:
    """A newer torch knows more of a tensor."""
    found.state_dict_metadata["step"].properties.extra = 1  # type: ignore[union-attr]  # a tensor


def with_another_storage_info(found: Metadata) -> None:
    """A storage has its own class for places."""

    class Own(_torch.StorageInfo):
        pass

    index = next(iter(found.storage_data))
    found.storage_data[index] = Own("__0_0.distcp", 0, 1)


def with_a_name_that_is_not_a_string(found: Metadata) -> None:
    """With ``flatten_state_dict=False`` names are any keys."""
    entries: dict[Any, Any] = found.state_dict_metadata
    entries[7] = entries.pop("lr")
    found.storage_data[MetadataIndex(7)] = found.storage_data.pop(MetadataIndex("lr"))  # type: ignore[arg-type]  # as unflattened


def with_a_surrogate(found: Metadata) -> None:
    """UTF-8 has no such character."""
    found.state_dict_metadata["\ud800"] = found.state_dict_metadata.pop("lr")
    found.storage_data[MetadataIndex("\ud800")] = found.storage_data.pop(MetadataIndex("lr"))


def without_a_place(found: Metadata) -> None:
    """An item was not written."""
    found.storage_data.popitem()


def with_a_stray_place(found: Metadata) -> None:
    """A place of something that is not an item."""
    found.storage_data[MetadataIndex("other")] = _torch.StorageInfo("__0_0.distcp", 900, 1)


@pytest.mark.parametrize(
    "change",
    [
        with_a_descriptor,
        with_an_unknown_property,
        with_another_storage_info,
        with_a_name_that_is_not_a_string,
        with_a_surrogate,
        without_a_place,
        with_a_stray_place,
    ],
)
def test_no_index_is_made_of_what_it_cannot_represent(change: Any) -> None:
    """There is no index that would say less than the pickle."""
    found = small()
    assert index_of(found) is not None
    change(found)
    assert index_of(found) is None


STATE = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "epoch": 3}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with an index."""
    path = tmp_path / "checkpoint"
    dcp.save(STATE, storage_writer=nostall.FileSystemWriterAsync(path), no_dist=True)
    return path


def test_a_save_writes_an_index(checkpoint: Path) -> None:
    """``verify`` reads it, and it has the items of stock's reader."""
    with (checkpoint / ".metadata").open("rb") as stream:
        found = read_index(stream, path="")
    assert found is not None
    index, _ = found
    stock = dcp.FileSystemReader(checkpoint).read_metadata()
    entries, places = entries_and_places(index, path="")
    assert (entries, places) == (stock.state_dict_metadata, stock.storage_data)
    assert nostall.verify(checkpoint).ok


@pytest.mark.parametrize("what", ["name", "size", "place", "dtype"])
def test_an_index_that_contradicts_the_pickle_is_damage(checkpoint: Path, what: str) -> None:
    """Two descriptions of a checkpoint, each with a right checksum, must be the same."""
    content = (checkpoint / ".metadata").read_bytes()
    _, manifest = split(content, path="")
    assert manifest is not None
    other = dcp.FileSystemReader(checkpoint).read_metadata()
    weight: Any = other.state_dict_metadata["model.weight"]
    match what:
        case "name":
            other.state_dict_metadata["other"] = other.state_dict_metadata.pop("epoch")
            other.storage_data[MetadataIndex("other")] = other.storage_data.pop(
                MetadataIndex("epoch")
            )
        case "size":
            weight.size = torch.Size((3, 3))
        case "place":
            other.storage_data[MetadataIndex("epoch")].length -= 1
    index = index_of(other)
    assert index is not None
    if what == "dtype":
        unknown = [each._replace(dtype="float33") for each in index.properties]
        index = dataclasses.replace(index, properties=unknown)
    pieces = with_manifest(
        [content[: manifest.metadata_nbytes]],
        manifest.files,
        crc32=manifest.metadata_crc32,
        committed_at_s=0.0,
        index=index,
    )
    (checkpoint / ".metadata").write_bytes(b"".join(pieces))
    verified = nostall.verify(checkpoint)
    assert verified.state is State.DAMAGED
    assert [each.file for each in verified.damages] == [".metadata"]
