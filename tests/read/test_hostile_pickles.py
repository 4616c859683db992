"""Pickles inside of archives: each hostile one is refused at once, each honest one is loaded."""

from __future__ import annotations

import io
import pickle
import struct
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._cli.checkpoints.converting import to_checkpoint
from nostall._read.objects import loaded_safely
from nostall._read.pickles import Broken, Harmful, require_harmless
from nostall.errors import DamagedCheckpointError, UntrustedObjectError
from support.states import read_metadata

SOON_S = 20.0
BEGIN = b"\x80\x02"


def shared_tuples(depth: int) -> bytes:
    """Pairs of the same pair: 2**depth steps to hash."""
    program = pickle.NONE + put(0)
    for level in range(depth):
        program += get(level) * 2 + pickle.TUPLE2 + put(level + 1)
    return program + get(depth)


def get(index: int) -> bytes:
    return struct.pack("<cI", pickle.LONG_BINGET, index)


def put(index: int) -> bytes:
    return struct.pack("<cI", pickle.LONG_BINPUT, index)


def named(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def as_key(key: bytes) -> bytes:
    return pickle.EMPTY_DICT + key + pickle.NONE + pickle.SETITEM


STORAGE = (
    pickle.MARK
    + b"".join(
        (
            pickle.BINUNICODE + struct.pack("<I", 7) + b"storage",
            named("torch", "FloatStorage"),
            pickle.BINUNICODE + struct.pack("<I", 1) + b"0",
            pickle.BINUNICODE + struct.pack("<I", 3) + b"cpu",
            pickle.BININT + struct.pack("<i", 3),
        )
    )
    + pickle.TUPLE
    + pickle.BINPERSID
)
HOSTILE = {
    "a key that takes 2**60 steps": as_key(shared_tuples(60)),
    "keys of a whole row": pickle.EMPTY_DICT
    + pickle.MARK
    + shared_tuples(60)
    + pickle.NONE
    + pickle.SETITEMS,
    "a key that is nested 300,000 times": as_key(pickle.NONE + pickle.TUPLE1 * 300_000),
    "a key inside of what is called": named("collections", "OrderedDict")
    + pickle.EMPTY_LIST
    + shared_tuples(60)
    + pickle.NONE
    + pickle.TUPLE2
    + pickle.APPEND
    + pickle.TUPLE1
    + pickle.REDUCE,
    "a size that is a key": as_key(
        named("torch", "Size") + shared_tuples(60) + pickle.TUPLE1 + pickle.REDUCE
    ),
    "memory for a number": named("builtins", "bytearray")
    + pickle.LONG1
    + b"\x08"
    + struct.pack("<q", 1 << 50)
    + pickle.TUPLE1
    + pickle.REDUCE,
    "a storage that is called, and printed": STORAGE + pickle.EMPTY_TUPLE + pickle.REDUCE,
    "a tensor as arguments": named("torch", "Size") + STORAGE + pickle.REDUCE,
    "a tensor without values": named("torch._utils", "_rebuild_meta_tensor_no_storage")
    + pickle.dumps((torch.float32, (3,), (1,), False), 2)[2:-1]
    + pickle.REDUCE,
    "an unknown instruction": pickle.BINBYTES + struct.pack("<I", 1) + b"x",
}


def forged(state: dict[str, Any], item: str, program: bytes, path: Path) -> None:
    """Save a state, and put another pickle into the archive of one item."""
    dcp.save(state, checkpoint_id=path, no_dist=True)
    metadata = read_metadata(path)
    for index, info in metadata.storage_data.items():
        if index.fqn != item:
            continue
        shard = (path / info.relative_path).read_bytes()
        archive = shard[info.offset : info.offset + info.length]
        content = with_pickle(archive, BEGIN + program + pickle.STOP)
        (path / "__9_0.distcp").write_bytes(content)
        info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(content)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def with_pickle(archive: bytes, pickled: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            new.writestr(entry.filename, pickled if is_pickle else old.read(entry))
    return out.getvalue()


OF_TENSORS = "a tensor without values"
"""Harmless as an object."""


@pytest.mark.parametrize("name", sorted({*HOSTILE} - {OF_TENSORS}))
def test_a_hostile_object_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """Not run, whatever it would have cost; the error says that it needs trust."""
    forged({"o": {"a": 1}}, "o.a", HOSTILE[name], tmp_path)
    began_s = time.monotonic()
    with pytest.raises(UntrustedObjectError, match=r"o\.a"):
        nostall.load({"o": {"a": 0}}, tmp_path)
    assert time.monotonic() - began_s < SOON_S


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("way", ["nostall.load", "dcp.load"])
def test_a_hostile_tensor_is_damage(tmp_path: Path, program: bytes, way: str) -> None:
    """Of an item that has to be a tensor nothing is run, either."""
    forged({"x": torch.ones(3)}, "x", program, tmp_path)
    loads: dict[str, Callable[[dict[str, Any]], object]] = {
        "nostall.load": lambda state: nostall.load(state, tmp_path),
        "dcp.load": lambda state: dcp.load(
            state, storage_reader=nostall.FileSystemReader(tmp_path), no_dist=True
        ),
    }
    with pytest.raises((DamagedCheckpointError, CheckpointException), match=r"DamagedC|items x"):
        loads[way]({"x": torch.zeros(3)})


def test_a_file_to_convert_is_looked_through(tmp_path: Path) -> None:
    """Files of ``torch.save`` come from others, too."""
    torch.save({"a": 1}, tmp_path / "saved.pt")
    program = BEGIN + HOSTILE["a key that takes 2**60 steps"] + pickle.STOP
    archive = (tmp_path / "saved.pt").read_bytes()
    (tmp_path / "saved.pt").write_bytes(with_pickle(archive, program))
    with pytest.raises(DamagedCheckpointError, match="key"):
        to_checkpoint(str(tmp_path / "saved.pt"), str(tmp_path / "checkpoint"), trust=False)


def test_what_is_not_an_archive_is_damage(tmp_path: Path) -> None:
    """torch would take it for several pickles of an older version."""
    forged({"o": {"a": 1}}, "o.a", pickle.NONE, tmp_path)
    (tmp_path / "__9_0.distcp").write_bytes(pickle.dumps(7) * 99)
    metadata = read_metadata(tmp_path)
    for info in metadata.storage_data.values():
        info.length = min(info.length, 90)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError, match="not an archive"):
        nostall.load({"o": {"a": 0}}, tmp_path)


def test_two_pickles_in_one_archive_are_one_for_both_readers(tmp_path: Path) -> None:
    """What is looked through is what torch finds, not what another reader of archives finds."""
    program = BEGIN + HOSTILE["a key that takes 2**60 steps"] + pickle.STOP
    out = io.BytesIO()
    torch.save({"a": 1}, out)
    for names in (["DATA.PKL", "data.pkl"], ["data.pkl", "DATA.PKL"]):
        two = io.BytesIO()
        with zipfile.ZipFile(out) as old, zipfile.ZipFile(two, "w") as new:
            for entry in old.infolist():
                folder, _, name = entry.filename.partition("/")
                if name != "data.pkl":
                    new.writestr(entry.filename, old.read(entry))
                    continue
                new.writestr(f"{folder}/{names[0]}", old.read(entry))
                new.writestr(f"{folder}/{names[1]}", program)
        with suppress(Harmful, Broken):
            assert loaded_safely(two) == {"a": 1}


# --- honest ones ----------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
)
keys = st.text(max_size=5) | st.integers(-9, 9) | st.tuples(st.integers(0, 9), st.text(max_size=3))
objects = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(keys, max_size=4)
        | st.binary(max_size=9).map(bytearray)
        | st.text(max_size=9).map(Counter)
    ),
    max_leaves=20,
)


@given(objects)
def test_an_object_is_what_torch_loads(saved: Any) -> None:
    """Nothing that ``weights_only`` allows is refused."""
    out = io.BytesIO()
    torch.save(saved, out)
    assert loaded_safely(out) == torch.load(io.BytesIO(out.getvalue()), weights_only=True)


def test_states_of_programs_are_loaded() -> None:
    """Long tuples, random number generators, and tensors of every kind."""
    model = torch.nn.Linear(2, 2)
    saved = {
        "random": (3, tuple(range(625)), None),
        "long": tuple(range(100_000)),
        "torch": torch.get_rng_state(),
        "model": model.state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "strided": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "size": torch.Size((1, 2)),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    out = io.BytesIO()
    torch.save(saved, out)
    loaded = loaded_safely(out)
    assert loaded["long"] == saved["long"]
    assert loaded["random"] == saved["random"]
    assert loaded.keys() == saved.keys()


@given(st.binary(max_size=60))
def test_any_bytes_are_followed_or_refused(program: bytes) -> None:
    """Looking through a pickle raises its own errors only."""
    with suppress(Harmful, Broken):
        require_harmless(BEGIN + program)
