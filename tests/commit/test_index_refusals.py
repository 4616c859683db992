"""Invalid indexes: the reader of an index refuses them, and no save writes one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import nostall
from nostall._commit.index import (
    HEADER,
    InvalidIndexError,
    ItemIndex,
    WrittenIndex,
    encoded,
    parsed,
    written,
)
from nostall._commit.indexing import entries_and_places
from nostall._commit.manifest import split, with_manifest
from nostall._commit.metadata import load_metadata
from nostall._commit.publication import publication_of
from nostall._model import checksum
from nostall.errors import NostallError, UnknownMetadataError, UntrustedMetadataError
from nostall.integrity import State
from support.indexes import content_of, index_of, small

FILE = "__0_0.distcp"
NBYTES_OF = {FILE: 400}
NAMES = b"weightsteplr"
ROW = ("float32", "strided", 0, False, False, None)
"""Properties of a tensor."""


def original() -> ItemIndex:
    """The index of a matrix in two chunks, a scalar and an object."""
    made = index_of(small())
    assert made is not None
    index = parsed(content_of(made), NBYTES_OF)
    assert index is not None
    assert list(index.names) == ["weight", "step", "lr"]
    assert index.shapes == [(), (2, 3), (0, 0), (1, 0), (1, 3)]
    return index


def changed(column: str, at: int, value: Any) -> Callable[[ItemIndex], ItemIndex]:
    """Change one value of a column."""

    def change(index: ItemIndex) -> ItemIndex:
        values = list(getattr(index, column))
        values[at] = value
        columns: dict[str, Any] = {column: values}
        return dataclasses.replace(index, **columns)

    return change


def replaced(**columns: Any) -> Callable[[ItemIndex], ItemIndex]:
    """Replace columns."""
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
    """For its own reason."""
    reason, change = (COLUMNS | OF_FILES)[fault]
    forged = content_of(encoded(change(original())))
    with pytest.raises(InvalidIndexError, match=reason):
        parsed(forged, NBYTES_OF)


@pytest.mark.parametrize("fault", COLUMNS)
def test_what_would_be_refused_is_not_written(fault: str) -> None:
    """The writer of an index has the checks of its reader."""
    reason, change = COLUMNS[fault]
    with pytest.raises(InvalidIndexError, match=reason):
        written(change(original()))


@pytest.mark.parametrize("fault", OF_FILES)
def test_an_index_of_other_files_does_not_fit(fault: str) -> None:
    """A save that finds the files otherwise than expected writes no index."""
    _, change = OF_FILES[fault]
    assert written(original()).fits(NBYTES_OF)
    assert not written(change(original())).fits(NBYTES_OF)


def with_number(at: int, number: int) -> bytes:
    """An index with another number in its header."""
    whole = content_of(written(original()))
    values = list(HEADER.unpack_from(whole))
    values[at] = number
    return HEADER.pack(*values) + whole[HEADER.size :]


def with_names(names: bytes) -> bytes:
    """An index with other names of as many bytes."""
    assert len(names) == len(NAMES)
    return content_of(written(original())).replace(NAMES, names)


def with_tables(tables: bytes) -> bytes:
    """An index with another end."""
    return bytes(written(original()).body) + tables


def with_one_dimension_less() -> bytes:
    """The last shape says that it has one less."""
    whole, ndim = (
        content_of(written(original())),
        b"".join(number.to_bytes(4, "little") for number in (0, 2, 2, 2, 2)),
    )
    assert whole.count(ndim) == 1
    return whole.replace(ndim, ndim[:-4] + b"\1\0\0\0")


BYTES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "header": ("too short", lambda: content_of(written(original()))[: HEADER.size - 1]),
    "mark": ("no mark", lambda: b"x" + content_of(written(original()))[1:]),
    "items": ("cut off", lambda: with_number(2, 1 << 60)),
    "length of names": ("cut off", lambda: with_number(6, 1 << 60)),
    "names": ("names or tables that are not UTF-8", lambda: with_names(NAMES[:-1] + b"\xff")),
    "tables": ("names or tables that are not UTF-8", lambda: with_tables(b"\xff")),
    "characters": ("not as many names as items", lambda: with_names("weightstepé".encode())),
    "dimensions": ("not as many dimensions as its shapes have", with_one_dimension_less),
    "list": ("unknown tables", lambda: with_tables(b"[]")),
    "one more": ("unknown tables", lambda: with_tables(b'{"files":[],"more":[],"properties":[]}')),
    "JSON": ("cannot be read: JSONDecodeError", lambda: with_tables(b"{")),
    "depth": ("cannot be read: RecursionError", lambda: with_tables(b"[" * 100_000)),
    "row": ("cannot be read: TypeError", lambda: with_tables(b'{"files":[],"properties":[7]}')),
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
    whole = content_of(written(original()))
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


# --- whole checkpoints ----------------------------------------------------------------------------


def state() -> dict[str, Any]:
    """Two tensors."""
    return {"w": torch.arange(4.0), "v": torch.ones(4)}


def save(path: Path, planner: Any = None) -> None:
    """Save the state."""
    writer = nostall.FileSystemWriterAsync(path)
    dcp.save(state(), storage_writer=writer, planner=planner, no_dist=True)


def load_by(reader: Any, path: Path) -> str:
    """Load the state, or the class of the error."""
    target = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    try:
        if reader is nostall.load:
            nostall.load(target, path)
        else:
            reader(path).read_metadata()  # dcp.load would wrap its error
            dcp.load(target, storage_reader=reader(path), no_dist=True)
    except NostallError as error:
        return f"{type(error).__name__}: {error.message}"
    assert all(torch.equal(target[name], tensor) for name, tensor in state().items())
    return "loaded"


READERS = [nostall.load, nostall.FileSystemReader, nostall.CachedMetadataFileSystemReader]


def with_a_chunk_twice(metadata: Metadata) -> None:
    """A planner lists it twice."""
    entry: Any = metadata.state_dict_metadata["w"]
    entry.chunks = entry.chunks * 2


def with_a_chunk_outside(metadata: Metadata) -> None:
    """A planner gives a tensor a smaller size than its chunk has."""
    entry: Any = metadata.state_dict_metadata["w"]
    entry.size = torch.Size((3,))


def with_a_chunk_of_other_dimensions(metadata: Metadata) -> None:
    """A planner says that a vector is a matrix."""
    entry: Any = metadata.state_dict_metadata["w"]
    entry.size = torch.Size((2, 2))


class ChangingPlanner(dcp.DefaultSavePlanner):
    """A planner whose metadata is its own."""

    def __init__(self, change: Callable[[Metadata], object]) -> None:
        super().__init__()
        self.change = change

    def create_global_plan(self, all_plans: Any) -> Any:
        """Plan like stock's planner, then change the metadata after its check."""
        plans, metadata = super().create_global_plan(all_plans)
        self.change(metadata)
        return plans, metadata


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (with_a_chunk_twice, "duplicate chunk"),
        (with_a_chunk_outside, "outside"),
        (with_a_chunk_of_other_dimensions, "dimensions"),
    ],
)
def test_a_planner_that_describes_a_tensor_wrongly_gets_no_index(
    tmp_path: Path, change: Any, refusal: str
) -> None:
    """Readers treat the checkpoint as one without an index: they refuse what its pickle says."""
    save(tmp_path / "checkpoint", ChangingPlanner(change))
    assert b"#nostall-index" not in (tmp_path / "checkpoint" / ".metadata").read_bytes()
    for reader in READERS:
        outcome = load_by(reader, tmp_path / "checkpoint")
        assert outcome.startswith(UntrustedMetadataError.__name__)
        assert refusal in outcome


def test_items_that_share_bytes_have_no_index_and_are_loaded(tmp_path: Path) -> None:
    """A storage may keep equal items once; stock loads that, and so do our readers."""
    metadata = small()
    weight = MetadataIndex("weight", torch.Size((0, 0)), 0)
    metadata.storage_data[MetadataIndex("lr")] = metadata.storage_data[weight]
    assert index_of(metadata) is None
    loaded = load_metadata(b"".join(publication_of(metadata).content(None)), path="")
    assert loaded.storage_data == metadata.storage_data


def test_a_save_whose_files_end_earlier_has_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader would refuse an index of places that the manifest's files do not have."""
    monkeypatch.setattr(WrittenIndex, "fits", lambda *_: False)
    save(tmp_path / "checkpoint")
    assert b"#nostall-index" not in (tmp_path / "checkpoint" / ".metadata").read_bytes()
    assert {load_by(reader, tmp_path / "checkpoint") for reader in READERS} == {"loaded"}


def test_an_index_of_another_format_is_passed_over(tmp_path: Path) -> None:
    """A later version may write another: this one reads the pickle, and verifies the rest."""
    path = tmp_path / "checkpoint"
    save(path)
    content = (path / ".metadata").read_bytes()
    _, manifest = split(content, path="")
    assert manifest is not None
    pickled = content[: manifest.metadata_nbytes]
    index = content[len(pickled) :][: manifest.index_nbytes]
    unknown = index[:16] + (3).to_bytes(8, "little") + b"of another form"
    other = WrittenIndex(
        body=unknown, body_crc32=checksum.crc32(unknown), properties=(), files=(), ends=()
    )
    pieces = with_manifest(
        [pickled], manifest.files, crc32=manifest.metadata_crc32, committed_at_s=0.0, index=other
    )
    (path / ".metadata").write_bytes(b"".join(pieces))
    assert {load_by(reader, path) for reader in READERS} == {"loaded"}
    assert nostall.verify(path).state is State.WHOLE


def test_a_forged_index_is_an_error_of_each_reader(tmp_path: Path) -> None:
    """With its checksum and all."""
    path = tmp_path / "checkpoint"
    save(path)
    content = (path / ".metadata").read_bytes()
    _, manifest = split(content, path="")
    assert manifest is not None
    begin, end = manifest.metadata_nbytes, manifest.metadata_nbytes + manifest.index_nbytes
    index = parsed(content[begin:end], {file.name: file.nbytes for file in manifest.files})
    assert index is not None
    forged = encoded(changed("offset", 1, index.offset[0])(index))
    pieces = with_manifest(
        [content[:begin]],
        manifest.files,
        crc32=manifest.metadata_crc32,
        committed_at_s=0.0,
        index=forged,
    )
    (path / ".metadata").write_bytes(b"".join(pieces))
    for reader in READERS:
        assert "places that overlap" in load_by(reader, path)
