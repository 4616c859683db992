"""Pickles inside of archives: each hostile one is refused at once, each honest one is loaded."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import subprocess
import sys
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
from nostall import _torch
from nostall._cli.checkpoints.converting import to_checkpoint
from nostall._read.objects import loaded_safely
from nostall._read.pickles import Broken, Harmful, require_harmless
from nostall.errors import DamagedCheckpointError, UntrustedObjectError
from support.states import read_metadata

SOON_S = 20.0
BEGIN = b"\x80\x02"


def shared_tuples(depth: int) -> bytes:
    """Pairs of the same pair: 2**depth steps to hash."""
    pairs = (put(level) + get(level) + pickle.TUPLE2 for level in range(depth))
    return pickle.NONE + b"".join(pairs)


def get(index: int) -> bytes:
    return struct.pack("<cI", pickle.LONG_BINGET, index)


def put(index: int) -> bytes:
    return struct.pack("<cI", pickle.LONG_BINPUT, index)


def named(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def as_key(key: bytes) -> bytes:
    return pickle.EMPTY_DICT + key + pickle.NONE + pickle.SETITEM


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return pickle.LONG1 + b"\x08" + struct.pack("<q", value)


def row(*parts: bytes) -> bytes:
    return pickle.MARK + b"".join(parts) + pickle.TUPLE


def listed(*parts: bytes) -> bytes:
    return pickle.EMPTY_LIST + pickle.MARK + b"".join(parts) + pickle.APPENDS


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return named(module, name) + row(*arguments) + pickle.REDUCE


def storage(kind: str, key: bytes) -> bytes:
    parts = (text("storage"), named("torch", kind), key, text("cpu"), number(3))
    return row(*parts) + pickle.BINPERSID


def tensor(kind: str, shape: bytes, strides: bytes) -> bytes:
    return call(
        "torch._utils",
        "_rebuild_tensor_v2",
        storage(kind, text("0")),
        number(0),
        shape,
        strides,
        pickle.NEWFALSE,
        NO_HOOKS,
    )


def repeated_encoding(times: int) -> bytes:
    program = call("_codecs", "encode", text("a"), text("latin1"))
    for _ in range(times):
        program = call("_codecs", "encode", program, text("hex_codec"))
    return program


def many_sets(count: int) -> bytes:
    """Of one list, each as long as all of the pickle's numbers."""
    numbers = listed(*(pickle.BININT + struct.pack("<i", each) for each in range(count)))
    one = named("builtins", "set") + get(1) + pickle.REDUCE
    return row(numbers + pickle.TUPLE1 + put(1), one * count)


NO_HOOKS = call("collections", "OrderedDict")
HUGE = 1 << 33
"""Elements."""
DEEP = shared_tuples(60)
EXPANDED = tensor("FloatStorage", row(number(HUGE)), row(number(0)))
STORAGE = storage("FloatStorage", text("0"))
STORED = tensor("FloatStorage", row(number(3)), row(number(1)))
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
    "a set of tuples": call("builtins", "set", listed(DEEP)),
    "a storage whose number is hashed": storage("FloatStorage", DEEP),
    "a state that is hashed": NO_HOOKS + listed(row(DEEP, pickle.NONE)) + pickle.BUILD,
    "memory for the number in a tensor": call(
        "builtins", "bytearray", tensor("IntStorage", row(), row())
    ),
    "a new tensor of any length": call("torch", "Tensor", number(HUGE)),
    "an object that is a new tensor": named("torch", "Tensor") + row(number(HUGE)) + pickle.NEWOBJ,
    "a new tensor of a type": call("torch", "FloatTensor", number(HUGE)),
    "a new storage": call("torch.storage", "UntypedStorage", number(HUGE)),
    "a new storage of a type": call("torch.storage", "TypedStorage", number(HUGE)),
    "a new tensor in a tensor with attributes": call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        named("torch", "Tensor"),
        named("torch", "Tensor"),
        row(number(HUGE)),
        pickle.EMPTY_DICT,
    ),
    "a layout that is looked up": call("torch.serialization", "_get_layout", DEEP),
    "text that is encoded again and again": repeated_encoding(40),
    "a quantised tensor of any length": call(
        "torch._utils",
        "_rebuild_qtensor",
        storage("QInt32Storage", text("0")),
        number(0),
        row(number(HUGE)),
        row(number(0)),
        row(named("torch", "per_tensor_affine"), pickle.BINFLOAT + struct.pack(">d", 1), number(0)),
        pickle.NEWFALSE,
        NO_HOOKS,
    ),
    "a tensor that is copied": call(
        "torch._utils",
        "_rebuild_device_tensor_from_cpu_tensor",
        EXPANDED,
        named("torch", "float64"),
        text("cpu"),
        pickle.NEWFALSE,
    ),
    "a state of a parameter that is printed": call(
        "torch._utils",
        "_rebuild_parameter_with_state",
        STORED,
        pickle.NEWFALSE,
        NO_HOOKS,
        row(DEEP, pickle.NONE, pickle.NONE),
    ),
    "a state of a parameter that sets elements": call(
        "torch._utils",
        "_rebuild_parameter_with_state",
        STORED,
        pickle.NEWFALSE,
        NO_HOOKS,
        pickle.EMPTY_DICT + text("real") + STORED + pickle.SETITEM,
    ),
    "sets of the same list": many_sets(20_000),
    "a process group": call("torch.distributed.device_mesh", "DeviceMesh", text("cpu")),
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
    """The archive with another pickle, and with a storage of three numbers."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        folder = old.namelist()[0].partition("/")[0]
        for entry in old.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            new.writestr(entry.filename, pickled if is_pickle else old.read(entry))
        if f"{folder}/data/0" not in old.namelist():
            new.writestr(f"{folder}/data/0", torch.ones(3).numpy().tobytes())
    return out.getvalue()


OF_TENSORS = "a tensor without values"
"""Harmless as an object."""


@pytest.mark.parametrize("name", sorted({*HOSTILE} - {OF_TENSORS}))
def test_a_hostile_object_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """Not run, whatever it would have cost; the error says that it needs trust."""
    forged({"o": {"a": 1}}, "o.a", HOSTILE[name], tmp_path)
    began_s = time.process_time()
    with pytest.raises(UntrustedObjectError, match=r"o\.a"):
        nostall.load({"o": {"a": 0}}, tmp_path)
    assert time.process_time() - began_s < SOON_S


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


def test_two_pickles_in_one_archive_are_one_for_both_readers() -> None:
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
        two.seek(0)
        if _torch.pickle_in(two) == program:
            with pytest.raises(Harmful, match="key"):
                loaded_safely(two)
        else:
            assert loaded_safely(two) == {"a": 1}


LIMITED = """
import pathlib, resource, sys
import torch
from nostall._read.objects import loaded_safely
from nostall._read.pickles import Harmful

pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (1 << 29)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    with path.open("rb") as archive:
        try:
            loaded_safely(archive)
        except Harmful:
            print(path.name)
"""


def test_refusals_need_little_memory(tmp_path: Path) -> None:
    """All of them within half a gibibyte of address space."""
    out = io.BytesIO()
    torch.save({"a": 1}, out)
    refused = sorted({*HOSTILE} - {OF_TENSORS})
    for index, name in enumerate(refused):
        archive = with_pickle(out.getvalue(), BEGIN + HOSTILE[name] + pickle.STOP)
        (tmp_path / f"{index:02}").write_bytes(archive)
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = [refused[int(line)] for line in ran.stdout.split()]
    assert said == refused, ran.stderr


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


class Point:
    """Allowed by the program; its state is a dictionary."""

    def __init__(self, x: object) -> None:
        self.x = x


class Slotted:
    """Its state is a pair."""

    __slots__ = ("x",)

    def __init__(self, x: object) -> None:
        self.x = x


class Listed(Point):
    """Its state is a list, which it takes apart itself."""

    def __getstate__(self) -> list[object]:
        return [self.x, "more"]

    def __setstate__(self, state: list[object]) -> None:
        self.x = state[0]


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.mark = "kept"  # type: ignore[attr-defined]  # any tensor takes attributes
    return tensor


def every_kind() -> dict[str, Any]:
    """What ``torch.save`` writes and ``weights_only`` loads, by name."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    rows = torch.ones(3, 2)
    return {
        "module": model.state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "parameter with an attribute": with_attribute(torch.nn.Parameter(torch.ones(2))),
        "buffer": torch.nn.Buffer(torch.ones(2)),
        "tensor with an attribute": with_attribute(torch.ones(2)),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "expanded and quantised": torch.quantize_per_tensor(
            torch.ones(1), 0.1, 0, torch.qint8
        ).expand(100),
        "quantised by channel": torch.quantize_per_channel(
            rows, torch.ones(3), torch.zeros(3), 0, torch.qint8
        ),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([rows, rows[:1]], layout=torch.jagged),
        "sparse": torch.eye(3).to_sparse(),
        "rows": torch.eye(3).to_sparse_csr(),
        "columns": torch.eye(3).to_sparse_csc(),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "uint16": torch.ones(3).to(torch.uint16),
        "expanded": torch.ones(1).expand(1 << 40),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "without values": torch.ones(3, device="meta"),
        "storage": torch.ones(3).untyped_storage(),
        "typed storage": torch.ones(3).storage(),
        "generator": torch.Generator().get_state(),
        "bytes": b"\xff\x00",
        "no bytes": bytearray(),
        "complex": 1 + 2j,
        "layout": torch.strided,
        "scheme": torch.per_tensor_affine,
        "device": torch.device("cuda", 1),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")  # quantised and nested tensors are prototypes
def test_every_kind_is_loaded() -> None:
    """Of torch's own classes nothing is refused that ``weights_only`` allows."""
    refused_by_torch = []
    for name, saved in every_kind().items():
        out = io.BytesIO()
        torch.save([saved, saved], out)
        try:
            plain, _ = torch.load(io.BytesIO(out.getvalue()), weights_only=True)
        except pickle.UnpicklingError:
            refused_by_torch.append(name)
            continue
        first, second = loaded_safely(out)
        assert type(first) is type(plain), name
        assert first is second, name
    assert {*refused_by_torch} <= {"nested", "jagged"}  # by torch 2.15


@pytest.mark.parametrize("cls", [Point, Slotted, Listed])
def test_allowed_classes_are_loaded(cls: type[Point]) -> None:
    """Those that the program has allowed, with state of every form; before that, none."""
    out = io.BytesIO()
    torch.save([cls((1, 2)), {(1, "a"): cls("text")}], out)
    with pytest.raises(Harmful, match=cls.__name__):
        loaded_safely(out)
    with torch.serialization.safe_globals([cls]):
        loaded = loaded_safely(out)
    assert loaded[0].x == (1, 2)
    assert loaded[1][1, "a"].x == "text"


def instructions_of(pickled: bytearray) -> list[str]:
    """Their names, as far as they can be told."""
    names: list[str] = []
    with suppress(ValueError, DeprecationWarning):  # of an escape sequence
        names.extend(op.name for op, _, _ in pickletools.genops(bytes(pickled)))
    return names


@given(objects, st.data())
def test_a_refused_pickle_is_not_what_was_saved(saved: Any, data: st.DataObject) -> None:
    """One changed byte: what is refused is damaged, or torch would make something else of it.

    Or another instruction, or another name of a codec, such as "latin\x01", says the same.
    """
    out = io.BytesIO()
    torch.save(saved, out)
    pickled = bytearray(_torch.pickle_in(io.BytesIO(out.getvalue())))
    require_harmless(bytes(pickled), len(out.getvalue()))
    instructions = instructions_of(pickled)
    where = data.draw(st.integers(0, len(pickled) - 1))
    pickled[where] = data.draw(st.integers(0, 255))
    archive = with_pickle(out.getvalue(), bytes(pickled))
    try:
        require_harmless(bytes(pickled), len(archive))
    except (Harmful, Broken) as refusal:
        if "encodes text" in str(refusal) or instructions_of(pickled) != instructions:
            return
    else:
        return
    try:
        loaded = torch.load(io.BytesIO(archive), weights_only=True)
    except Exception:  # a changed pickle can raise anything
        return
    assert (type(loaded), loaded) != (type(saved), saved)


@given(st.binary(max_size=60))
def test_any_bytes_are_followed_or_refused(program: bytes) -> None:
    """Looking through a pickle raises its own errors only; after its end nothing counts."""
    whole = BEGIN + pickle.NONE + pickle.STOP
    require_harmless(whole + program, len(program))
    with suppress(Harmful, Broken):
        require_harmless(BEGIN + program, len(program))
