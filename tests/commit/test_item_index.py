"""The index of items in ``.metadata``: what it says, and that it says nothing that was changed."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable
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
from nostall._commit.description import on_demand
from nostall._commit.index import (
    HEADER,
    IndexBytes,
    InvalidIndexError,
    ItemIndex,
    encoded,
    index_bytes,
    parsed,
)
from nostall._commit.indexing import entries_and_places, read_index
from nostall._commit.manifest import split, with_manifest
from nostall._commit.metadata import load_metadata
from nostall._commit.publication import publication_of
from nostall._model import checksum
from nostall._model.values import WrittenFile
from nostall.errors import NostallError, UnknownMetadataError, UntrustedMetadataError
from nostall.integrity import State
from support.indexes import content_of, index_of, metadata, parsed_of, small, with_index_of


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
    """Everything comes back in order; so do items made on demand, where alike ones share."""
    read = parsed_of(original)
    entries, places = entries_and_places(read, path="")
    assert (entries, places) == (original.state_dict_metadata, original.storage_data)
    assert list(entries) == list(original.state_dict_metadata)
    assert [each.index for each in places] == [each.index for each in original.storage_data]
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
    with (tmp_path / ".metadata").open("rb") as stream:
        assert read_index(stream, path="") is not None
    stock = dcp.FileSystemReader(tmp_path).read_metadata()
    shared = nostall.FileSystemReader(tmp_path).shared_metadata()
    assert dict(shared.state_dict_metadata) == stock.state_dict_metadata
    assert dict(shared.storage_data) == stock.storage_data


@given(metadata())
def test_an_index_is_between_the_pickle_and_the_end_of_the_file(original: Metadata) -> None:
    """Stock's reader stops before it; ours finds it through the manifest, without the pickle."""
    content = file_of(original)
    assert pickle.loads(content) == original
    found = read_index(io.BytesIO(content), path="")
    assert found is not None
    assert found[0] == parsed_of(original)


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


class OwnPlace(_torch.StorageInfo):
    """A storage's own class for places."""


def renamed(name: Any) -> Callable[[Any, Any], None]:
    """Give an item another name."""

    def change(entries: Any, places: Any) -> None:
        entries[name] = entries.pop("lr")
        places[MetadataIndex(name)] = places.pop(MetadataIndex("lr"))

    return change


STRANGE: dict[str, Callable[[Any, Any], object]] = {
    "a transform": lambda _, places: setattr(
        places[MetadataIndex("lr")], "transform_descriptors", ("zstd",)
    ),
    "a property of a newer torch": lambda entries, _: setattr(
        entries["step"].properties, "extra", 1
    ),
    "a place of another class": lambda _, places: places.update(
        {MetadataIndex("lr"): OwnPlace("__0_0.distcp", 0, 1)}
    ),
    "a name that is not a string, as unflattened": renamed(7),
    "a name that UTF-8 does not have": renamed("\ud800"),
    "an item without a place": lambda _, places: places.popitem(),
    "a place without an item": lambda _, places: places.update(
        {MetadataIndex("other"): _torch.StorageInfo("__0_0.distcp", 900, 1)}
    ),
}


@pytest.mark.parametrize("change", STRANGE.values(), ids=STRANGE)
def test_no_index_is_made_of_what_it_cannot_represent(change: Callable[[Any, Any], object]) -> None:
    """There is no index that would say less than the pickle."""
    found = small()
    assert index_of(found) is not None
    change(found.state_dict_metadata, found.storage_data)
    assert index_of(found) is None


@pytest.mark.parametrize("what", ["name", "size", "place", "dtype"])
def test_an_index_that_contradicts_the_pickle_is_damage(tmp_path: Path, what: str) -> None:
    """Two descriptions of a checkpoint, each with a right checksum, must be the same."""
    state = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "lr": 3}
    dcp.save(state, storage_writer=nostall.FileSystemWriterAsync(tmp_path), no_dist=True)
    assert nostall.verify(tmp_path).ok
    other = dcp.FileSystemReader(tmp_path).read_metadata()
    match what:
        case "name":
            renamed("other")(other.state_dict_metadata, other.storage_data)
        case "size":
            other.state_dict_metadata["model.weight"].size = torch.Size((3, 3))  # type: ignore[union-attr]  # a tensor
        case "place":
            other.storage_data[MetadataIndex("lr")].length -= 1
    index = index_of(other)
    assert index is not None
    if what == "dtype":
        unknown = [each._replace(dtype="float33") for each in index.properties]
        index = dataclasses.replace(index, properties=unknown)
    with_index_of(tmp_path, index)
    verified = nostall.verify(tmp_path)
    assert verified.state is State.DAMAGED
    assert [each.file for each in verified.damages] == [".metadata"]


# --- invalid indexes ------------------------------------------------------------------------------


FILE = "__0_0.distcp"
NBYTES_OF = {FILE: 400}
ROW = ("float32", "strided", 0, False, False, None)
"""Properties of a tensor."""


def original() -> ItemIndex:
    """The index of a matrix in two chunks, a scalar and an object."""
    index = parsed_of(small())
    assert list(index.names) == ["weight", "step", "lr"]
    assert index.shapes == [(), (2, 3), (0, 0), (1, 0), (1, 3)]
    return index


def changed(column: str, at: int, value: Any) -> Callable[[ItemIndex], ItemIndex]:

    def change(index: ItemIndex) -> ItemIndex:
        values = list(getattr(index, column))
        values[at] = value
        columns: dict[str, Any] = {column: values}
        return dataclasses.replace(index, **columns)

    return change


def replaced(**columns: Any) -> Callable[[ItemIndex], ItemIndex]:
    return lambda index: dataclasses.replace(index, **columns)


def with_the_first_chunk_twice(index: ItemIndex) -> ItemIndex:
    """Both chunks of the matrix are the same, and have the same place."""
    return changed("offset", 1, 0)(changed("begin", 1, index.begin[0])(index))


COLUMNS: dict[str, tuple[str, Callable[[ItemIndex], ItemIndex]]] = {
    "kind": ("a property that it does not have", changed("kind", 0, 3)),
    "file": ("a file that it does not have", changed("file", 0, 1)),
    "size": ("a shape that it does not have", changed("size", 0, 5)),
    "begin": ("a shape that it does not have", changed("begin", 0, 5)),
    "extent": ("a shape that it does not have", changed("extent", 0, 5)),
    "count": ("not as many places as its items have", changed("count", 0, 3)),
    "dimensions": ("a shape of more than 64 dimensions", changed("shapes", 4, (0,) * 65)),
    "impossible size": ("a size that is impossible", changed("shapes", 1, (1 << 63, 3))),
    "file name": ("file names that are not strings", replaced(files=[7])),
    "duplicate file": ("or a duplicate one", replaced(files=[FILE, FILE])),
    "type of a property": (
        "properties of another form",
        replaced(properties=[(*ROW[:4], 0, None)]),
    ),
    "type of strides": ("properties of another form", replaced(properties=[(*ROW[:5], 7)])),
    "stride": ("a stride that is impossible", replaced(properties=[(*ROW[:5], [-1, 1])])),
    "more properties": ("cannot be read: ValueError", replaced(properties=[(*ROW, None)])),
    "duplicate name": ("a duplicate name", replaced(names=["weight", "weight", "lr"])),
    "object with a shape": ("an object that has a shape", changed("size", 2, 1)),
    "object in two places": ("or not one place", replaced(count=[2, 0, 2])),
    "other dimensions": ("differs from its tensor in dimensions", changed("begin", 0, 0)),
    "outside": ("a chunk outside of its tensor", changed("extent", 1, 1)),
    "two places": ("two places of a chunk of 'weight'", changed("begin", 1, 2)),
    "duplicate chunk": ("a duplicate chunk of 'weight'", with_the_first_chunk_twice),
    "overlap": ("places that overlap in '__0_0.distcp'", changed("offset", 3, 299)),
}
OF_FILES: dict[str, tuple[str, Callable[[ItemIndex], ItemIndex]]] = {
    "other file": ("the file '__7_0.distcp', which the manifest", replaced(files=["__7_0.distcp"])),
    "beyond the end": ("a place beyond the end of its file", changed("length", 3, 101)),
}


@pytest.mark.parametrize("fault", [*COLUMNS, *OF_FILES])
def test_each_impossible_column_is_refused(fault: str) -> None:
    """For its own reason by the reader, and by the writer, if it can know."""
    reason, change = (COLUMNS | OF_FILES)[fault]
    forged = change(original())
    with pytest.raises(InvalidIndexError, match=reason):
        parsed(content_of(encoded(forged)), NBYTES_OF)
    if fault in COLUMNS:
        with pytest.raises(InvalidIndexError, match=reason):
            index_bytes(forged)
    else:
        assert not index_bytes(forged).fits(NBYTES_OF)
        assert index_bytes(original()).fits(NBYTES_OF)


def with_number(at: int, number: int) -> bytes:
    """An index with another number in its header."""
    whole = content_of(index_bytes(original()))
    values = list(HEADER.unpack_from(whole))
    values[at] = number
    return HEADER.pack(*values) + whole[HEADER.size :]


def with_tables(tables: bytes) -> bytes:
    return bytes(index_bytes(original()).body) + tables


BYTES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "header": ("too short", lambda: content_of(index_bytes(original()))[: HEADER.size - 1]),
    "items": ("cut off", lambda: with_number(2, 1 << 60)),
    "length of names": ("cut off", lambda: with_number(6, 1 << 60)),
    "tables": ("names or tables that are not UTF-8", lambda: with_tables(b"\xff")),
    "list": ("unknown tables", lambda: with_tables(b"[]")),
    "JSON": ("cannot be read: JSONDecodeError", lambda: with_tables(b"{")),
    "depth": ("cannot be read: RecursionError", lambda: with_tables(b"[" * 100_000)),
}


@pytest.mark.parametrize("fault", BYTES)
def test_each_fault_of_the_bytes_is_refused(fault: str) -> None:
    """An index with a damaged header, name or table is refused, and the error says why."""
    reason, forged = BYTES[fault]
    with pytest.raises(InvalidIndexError, match=reason):
        parsed(forged(), NBYTES_OF)


def outcome_of(content: bytes) -> Metadata | None:
    """The items of an index without a checksum; ``None`` after an error that is documented."""
    try:
        index = parsed(content, NBYTES_OF)
        assert index is not None or content[16:24] != (1).to_bytes(8, "little")
        if index is None:
            return None
        entries, places = entries_and_places(index, path="")
    except (InvalidIndexError, UnknownMetadataError):
        return None
    return Metadata(entries, storage_data=places)


def test_each_change_of_an_index_without_a_checksum_is_an_error_or_possible_metadata() -> None:
    """The checks of the pickle accept what is not refused, and no change is lost on the way."""
    whole = content_of(index_bytes(original()))
    same = 0
    for at in range(len(whole)):
        assert outcome_of(whole[:at]) is None
        for value in {0, 1, 2, 3, 0x22, 0x5B, 0x7F, 0xFF} - {whole[at]}:
            found = outcome_of(whole[:at] + bytes([value]) + whole[at + 1 :])
            if found is None:
                continue
            load_metadata(b"".join(publication_of(found).content(None)), path="")
            assert all(each.offset + each.length <= 400 for each in found.storage_data.values())
            same += found == small()
    assert same == 0


def test_a_name_of_torch_that_is_not_a_dtype_imports_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``torch`` imports some of its modules when they are asked for by name."""
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    properties = [row._replace(dtype="_inductor") for row in original().properties]
    index = dataclasses.replace(original(), properties=properties)
    with pytest.raises(UnknownMetadataError, match="'_inductor'"):
        entries_and_places(index, path="")
    assert asked == []


def state() -> dict[str, Any]:
    return {"w": torch.arange(4.0), "v": torch.ones(4)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    dcp.save(state(), storage_writer=nostall.FileSystemWriterAsync(tmp_path), no_dist=True)
    return tmp_path


def require_loaded(path: Path) -> None:
    for reader in (nostall.FileSystemReader, nostall.CachedMetadataFileSystemReader):
        target = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
        dcp.load(target, storage_reader=reader(path), no_dist=True)
        assert all(torch.equal(target[name], tensor) for name, tensor in state().items())


def test_items_that_share_bytes_have_no_index_and_are_loaded(tmp_path: Path) -> None:
    """A storage may keep equal items once; stock loads that, and so do our readers."""
    metadata = small()
    weight = MetadataIndex("weight", torch.Size((0, 0)), 0)
    metadata.storage_data[MetadataIndex("lr")] = metadata.storage_data[weight]
    assert index_of(metadata) is None
    loaded = load_metadata(b"".join(publication_of(metadata).content(None)), path="")
    assert loaded.storage_data == metadata.storage_data


def test_a_save_whose_files_end_earlier_has_no_index(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A reader would refuse an index of places that the manifest's files do not have."""
    monkeypatch.setattr(IndexBytes, "fits", lambda *_: False)
    checkpoint = request.getfixturevalue("checkpoint")
    assert b"#nostall-index" not in (checkpoint / ".metadata").read_bytes()
    require_loaded(checkpoint)


def test_an_index_of_another_format_is_passed_over(checkpoint: Path) -> None:
    """A later version may write another: this one reads the pickle, and verifies the rest."""
    index = content_of(index_bytes(original()))
    unknown = index[:16] + (3).to_bytes(8, "little") + b"of another form"
    crc32 = checksum.crc32(unknown)
    other = IndexBytes(body=unknown, body_crc32=crc32, properties=(), files=(), ends=())
    with_index_of(checkpoint, other)
    require_loaded(checkpoint)
    assert nostall.verify(checkpoint).state is State.WHOLE


def test_a_forged_index_is_an_error_of_each_reader(checkpoint: Path) -> None:
    """With its checksum and all."""
    index = parsed_of(dcp.FileSystemReader(checkpoint).read_metadata())
    with_index_of(checkpoint, encoded(changed("offset", 1, index.offset[0])(index)))
    for reader in (nostall.FileSystemReader, nostall.CachedMetadataFileSystemReader):
        with pytest.raises(UntrustedMetadataError, match="places that overlap"):
            reader(checkpoint).read_metadata()
    with pytest.raises(UntrustedMetadataError, match="places that overlap"):
        nostall.load(state(), checkpoint)
