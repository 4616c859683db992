"""Hostile input, case by case: what the fuzzer or a review has found, and what is refused since."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import metadata as of_sharded_tensors
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

import nostall
from nostall._commit.metadata import load_metadata
from nostall._commit.metadata_pickle import _KNOWN
from nostall.errors import UnknownMetadataError, UntrustedMetadataError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.integrity import State
from stress.fuzz_inputs import _METADATA, _named, _text
from stress.fuzz_oracles import _attributes, _shared
from support.manifests import with_manifest_of
from support.states import small_state

TWO = pickle.PROTO + b"\2"
END = pickle.STOP


def get(index: int) -> bytes:
    return struct.pack("<cI", pickle.LONG_BINGET, index)


def put(index: int) -> bytes:
    return struct.pack("<cI", pickle.LONG_BINPUT, index)


def indices_of_indices(levels: int) -> bytes:
    """An item's index whose name is another index, and so on; the last one is a key."""
    make = _named(_METADATA, "MetadataIndex") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    program = pickle.NONE + put(0)
    for n in range(levels):
        state = pickle.EMPTY_DICT + _text("fqn") + get(n) + pickle.SETITEM
        program += make + put(n + 1) + state + pickle.BUILD
    return program + pickle.EMPTY_DICT + get(levels) + AS_KEY


def state(*, as_slots: bool) -> bytes:
    """A state with one attribute, given to what is on the stack."""
    attributes = pickle.EMPTY_DICT + _text("x") + pickle.NONE + pickle.SETITEM
    return (pickle.NONE + attributes + pickle.TUPLE2 if as_slots else attributes) + pickle.BUILD


AS_KEY = pickle.NONE + pickle.SETITEM
NAMED = {
    "class": (_METADATA, "Metadata"),
    "class with a state of its own": (_METADATA, "TensorProperties"),
    "enumeration": (_METADATA, "_MEM_FORMAT_ENCODING"),
    "function": ("torch.serialization", "_get_layout"),
    "function of Python": ("builtins", "getattr"),
    "class of C": ("collections", "OrderedDict"),
    "size": ("torch", "Size"),
    "dtype": ("torch", "float32"),
    "path": ("pathlib", "PosixPath"),
}
ATTRIBUTES = {
    "class of an enumeration": _named(_METADATA, "_MEM_FORMAT_ENCODING") + _text("__class__"),
    "method of an enumeration": _named(_METADATA, "_MEM_FORMAT_ENCODING") + _text("mro"),
    "no name": _named(_METADATA, "_MEM_FORMAT_ENCODING") + pickle.NONE,
    "method of a class": _named(_METADATA, "MetadataIndex") + _text("__init__"),
    "method of a size": _named("torch", "Size") + _text("count"),
    "globals": _named("torch", "device") + _text("__globals__"),
    "module of a function": _named("builtins", "getattr") + _text("__self__"),
    "method of a list": pickle.EMPTY_LIST + _text("append"),
    "method of a text": _text("{}") + _text("format"),
}
"""An attribute leads to any other; only members of enumerations are looked up."""
PROGRAMS = {
    **{
        f"attribute, {kind}": _named("builtins", "getattr") + of + pickle.TUPLE2 + pickle.REDUCE
        for kind, of in ATTRIBUTES.items()
    },
    **{f"state of a {kind}": _named(*name) + state(as_slots=False) for kind, name in NAMED.items()},
    **{f"slots of a {kind}": _named(*name) + state(as_slots=True) for kind, name in NAMED.items()},
    "item of a class": _named(_METADATA, "Metadata") + _text("x") + pickle.NONE + pickle.SETITEM,
    "part of a class": _named(_METADATA, "Metadata") + pickle.NONE + pickle.APPEND,
    "state of an enum member": _named(_METADATA, "_MEM_FORMAT_ENCODING")
    + (pickle.BININT1 + b"\0" + pickle.TUPLE1 + pickle.REDUCE)
    + (pickle.EMPTY_DICT + _text("_value_") + pickle.NONE + pickle.SETITEM + pickle.BUILD),
    "text longer than the file": struct.pack("<cI", pickle.BINUNICODE, 2**31),
    "bytes longer than the file": struct.pack("<cQ", pickle.BINBYTES8, 2**40),
    "key nested too deep": indices_of_indices(5000),
    "key that has no hash": pickle.EMPTY_DICT + pickle.EMPTY_LIST + AS_KEY,
    "instance that was called": _named(_METADATA, "MetadataIndex")
    + (_text("x") + pickle.TUPLE1 + pickle.REDUCE),
    "instance with arguments": _named(_METADATA, "MetadataIndex")
    + (_text("x") + pickle.TUPLE1 + pickle.NEWOBJ),
    "instance with named arguments": _named(_METADATA, "MetadataIndex")
    + (pickle.EMPTY_TUPLE + pickle.EMPTY_DICT + pickle.NEWOBJ_EX),
    "external object": pickle.NONE + pickle.BINPERSID,
    "number of an extension": pickle.EXT1 + b"\1",
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_program_that_metadata_never_is_changes_nothing(kind: str) -> None:
    """It is refused, and no class, function or enum member has another attribute."""
    named = [_KNOWN[name] for name in NAMED.values()]
    shared = [*_shared(), *(each for each in named if hasattr(each, "__dict__"))]
    before = _attributes(shared)
    reason = "not a member of an enumeration" if kind.startswith("attribute") else None
    with pytest.raises(UntrustedMetadataError, match=reason):
        load_metadata(TWO + PROGRAMS[kind] + END, path="p")
    assert _attributes(shared) == before


NO_CODE = [
    *(("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec")),
    *(("subprocess", "Popen"), ("torch", "load"), ("torch", "Tensor"), ("builtins", "open")),
    *(("importlib", "import_module"), ("pickle", "loads"), ("copyreg", "_reconstructor")),
    *(("torch.distributed.device_mesh", "DeviceMesh"), (_METADATA, "os.system")),
    *(("torch.distributed.checkpoint.filesystem", "FileSystemWriter"), (_METADATA, "Enum")),
]


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(("module", "name"), NO_CODE)
def test_no_code_is_run(protocol: int, module: str, name: str) -> None:
    """Only names of the allow-list are looked up, and nothing is imported."""
    named = _named(module, name)
    if protocol >= 4:
        named = _text(module) + _text(name) + pickle.STACK_GLOBAL
    version = pickle.PROTO + bytes([protocol])
    for use in (pickle.REDUCE, pickle.NEWOBJ):
        content = version + named + _text("true") + pickle.TUPLE1 + use + END
        with pytest.raises(UnknownMetadataError, match=f"the name {module}.{name},"):
            load_metadata(content, path="p")


class Kind(Enum):
    ROWS = "rows"


@dataclass
class Placed:
    """An object with a state, as a planner may leave in the metadata."""

    kind: Kind


class Allowed:
    """A class that is pickled as a call with it."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return rebuilt, (Allowed, self.mark)


def rebuilt(cls: type[Allowed], mark: str) -> Allowed:
    """A function that the program allows, too."""
    return cls(mark)


def test_what_the_program_allows_is_read_and_cannot_be_changed() -> None:
    """Only ``add_safe_globals`` lets classes be called and get a state; no pickle changes them."""
    metadata = whole()
    metadata.planner_data = Placed(Kind.ROWS), Allowed("given")
    content = pickle.dumps(metadata, 4)
    with pytest.raises(UnknownMetadataError, match=r"Placed.*add_safe_globals"):
        load_metadata(content, path="p")
    with torch.serialization.safe_globals([Placed, Allowed, rebuilt]):
        with pytest.raises(UnknownMetadataError, match="Kind"):
            load_metadata(content, path="p")
        allowed: list[Any] = [Placed, Allowed, rebuilt]
        for each, as_slots in itertools.product(allowed, (False, True)):
            program = _named(each.__module__, each.__name__) + state(as_slots=as_slots)
            with pytest.raises(UnknownMetadataError, match="state for"):
                load_metadata(TWO + program + END, path="p")
            assert not hasattr(each, "x")
    with torch.serialization.safe_globals([Placed, Allowed, rebuilt, Kind]):
        placed, made = load_metadata(content, path="p").planner_data
    assert placed == Placed(Kind.ROWS)
    assert (type(made), made.mark) == (Allowed, "given")


CALLS: dict[str, tuple[str, str, Any]] = {
    "set of endless numbers": ("builtins", "set", range(10**12)),
    "bytes without a measure": ("builtins", "bytearray", 1 << 60),
    "index that is called": (_METADATA, "MetadataIndex", "a"),
    "size of endless numbers": ("torch", "Size", range(10**12)),
    "member of another kind": (_METADATA, "_MEM_FORMAT_ENCODING", [[1]]),
    "device of another kind": ("torch", "device", [1]),
    "device of a newer torch": ("torch", "device", "abacus"),
    "member of a newer torch": (_METADATA, "_MEM_FORMAT_ENCODING", 99),
    "layout of a newer torch": ("torch.serialization", "_get_layout", "torch.woven"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_take_what_metadata_gives_them(call: tuple[str, str, Any]) -> None:
    """Whatever else a function or class could be made to do with its arguments."""
    module, name, argument = call
    plain = pickle.dumps(argument, protocol=3)[2:-1]
    with pytest.raises(UnknownMetadataError):
        load_metadata(
            TWO + _named(module, name) + plain + pickle.TUPLE1 + pickle.REDUCE + END, path="p"
        )


def whole() -> Metadata:
    """Metadata of one tensor in two chunks."""
    half, zero = torch.Size([2]), torch.Size([0])
    chunks = [ChunkStorageMetadata(zero, half), ChunkStorageMetadata(half, half)]
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size([4]), chunks)
    return Metadata(state_dict_metadata={"a": tensor}, storage_data={})


def nested_lists(levels: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested, nested]
    return nested


def an_index_of_lists(metadata: Metadata, _: Any) -> None:
    index = MetadataIndex("a")
    metadata.storage_data = {index: None}
    object.__setattr__(index, "fqn", nested_lists(60))


Change = Callable[[Any, Any], object]
"""Changes metadata, or its tensor."""
IMPOSSIBLE: dict[str, Change] = {
    "a chunk twice": lambda _, tensor: tensor.chunks.append(tensor.chunks[0]),
    "a chunk outside": lambda _, tensor: setattr(tensor, "size", torch.Size([3])),
    "a chunk below zero": lambda _, tensor: setattr(tensor.chunks[0], "offsets", torch.Size([-1])),
    "a size below zero": lambda _, tensor: tensor.__dict__.update(size=torch.Size([-1]), chunks=[]),
    "no size": lambda _, tensor: setattr(tensor, "size", 4),
    "no properties": lambda _, tensor: setattr(tensor, "properties", None),
    "another entry": lambda metadata, _: metadata.state_dict_metadata.update(b=7),
    "another name": lambda metadata, tensor: setattr(
        metadata, "state_dict_metadata", {("a",): tensor}
    ),
    "no storage": lambda metadata, _: setattr(metadata, "storage_data", 1.5),
    "no save": lambda metadata, _: setattr(metadata, "storage_meta", 7),
    "an index of lists": an_index_of_lists,
}
UNKNOWN: dict[str, Change] = {
    "properties of lists": lambda _, tensor: setattr(tensor.properties, "layout", nested_lists(60)),
    "two kinds of members": lambda _, tensor: setattr(
        tensor.properties, "dtype", WriteItemType.SHARD
    ),
}


@pytest.mark.parametrize("change", [*IMPOSSIBLE, *UNKNOWN])
def test_entries_that_are_not_what_they_are_declared_to_be_are_refused(
    tmp_path: Path, change: str
) -> None:
    """One typed error; it is damage if metadata and manifest disagree. No endless text is made."""
    metadata = whole()
    assert load_metadata(pickle.dumps(metadata), path="p") == metadata
    (IMPOSSIBLE | UNKNOWN)[change](metadata, metadata.state_dict_metadata["a"])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UntrustedMetadataError):
        nostall.CachedMetadataFileSystemReader(tmp_path).read_metadata()
    found = nostall.verify(tmp_path)
    if change in UNKNOWN:
        assert (found.state, found.damages) == (State.NOT_UNDERSTOOD, ())
    else:
        assert [damage.file for damage in found.damages] == [".metadata"]


def test_values_of_all_lengths_are_read() -> None:
    """In any pickle protocol, with thousands of shared tuples; a truncated pickle is refused."""
    metadata, shares = whole(), whole()
    paths = {f"model.{n}": ("model", n) for n in range(5000)}
    shares.planner_data = {"one": paths, "other": dict(paths), "third": dict(paths)}
    texts = {"x" * nchars: ("ä" * nchars, nchars) for nchars in (0, 1, 255, 256, 257, 70_000)}
    numbers = [sign << bits for bits in (0, 7, 8, 15, 16, 31, 32, 62, 70) for sign in (1, -1)]
    sizes = [torch.Size([2**bits] * bits) for bits in (0, 1, 2, 3, 4, 8, 16, 33)]
    metadata.planner_data = {
        **texts,
        1: numbers,
        2: sizes,
        ("a", 3): (1, (2, (3.5, "x"))),
        None: True,
    }
    for protocol in range(2, 6):
        content = pickle.dumps(metadata, protocol)
        assert load_metadata(content, path="p") == metadata
        assert load_metadata(pickle.dumps(shares, protocol), path="p") == shares
        for nbytes in range(0, len(content), 1009):
            with pytest.raises(UntrustedMetadataError, match=r"EOFError|truncated"):
                load_metadata(content[:nbytes], path="p")


class OfPython3112(pickle.Pickler):
    """Pickles as Python 3.11.0 to 3.11.3, of which Debian 12 has one."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_members_of_enumerations_are_read_as_every_python_pickles_them() -> None:
    """Some versions look them up by name."""
    metadata = whole()
    index = MetadataIndex("a")
    plan = SavePlan([WriteItem(index, kind) for kind in WriteItemType])
    metadata.planner_data = {"plan": plan}
    of_torch_2_2 = copy.deepcopy(metadata)
    properties: Any = of_sharded_tensors.TensorProperties()
    of_torch_2_2.state_dict_metadata["a"].properties = properties  # type: ignore[union-attr]  # of a tensor
    for protocol in range(2, 6):
        for written in (metadata, of_torch_2_2):
            stream = io.BytesIO()
            OfPython3112(stream, protocol).dump(written)
            assert b"getattr" in stream.getvalue()
            assert load_metadata(stream.getvalue(), path="p") == metadata


MANIFESTS = {
    "a file twice": lambda plain: plain["files"].append(plain["files"][0]),
    "a length that is a truth": lambda plain: plain["files"][0].update(nbytes=True),
    "a length beyond any": lambda plain: plain["files"][0].update(nbytes=2**70),
    "a checksum below zero": lambda plain: plain["files"][0].update(crc32="-1"),
    "a checksum of another form": lambda plain: plain["files"][0].update(crc32="0x00_01"),
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_says_everything_once_and_as_it_is_written(tmp_path: Path, change: Any) -> None:
    """Python's own readers of numbers take more than that."""
    dcp.save(small_state(), storage_writer=FileSystemWriterAsync(tmp_path), no_dist=True)
    with_manifest_of(tmp_path, change)
    (damage,) = nostall.verify(tmp_path).damages
    assert "manifest cannot be read" in damage.what
