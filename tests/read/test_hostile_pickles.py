"""Pickles inside of archives: a hostile one runs no code, and its error has a documented type."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._cli.convert import to_checkpoint
from nostall._read.objects import Broken, loaded_safely
from nostall.errors import DamagedCheckpointError, UntrustedObjectError
from support.states import read_metadata

BEGIN = b"\x80\x02"


def named(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def call(module: str, name: str, *arguments: bytes) -> bytes:
    row = pickle.MARK + b"".join(arguments) + pickle.TUPLE
    return named(module, name) + row + pickle.REDUCE


def storage() -> bytes:
    parts = (text("storage"), named("torch", "FloatStorage"), text("0"), text("cpu"))
    number = pickle.BININT1 + b"\3"
    return pickle.MARK + b"".join(parts) + number + pickle.TUPLE + pickle.BINPERSID


HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "a command": lambda ran: call("os", "system", text(f"touch {ran}")),
    "an expression": lambda ran: call("builtins", "eval", text(f"open({str(ran)!r}, 'w')")),
    "a file": lambda ran: call("builtins", "open", text(str(ran)), text("w")),
    "a new instance": lambda ran: (
        named("pathlib", "Path") + text(str(ran)) + pickle.TUPLE1 + pickle.NEWOBJ
    ),
    "a storage that is called": lambda _: storage() + pickle.EMPTY_TUPLE + pickle.REDUCE,
    "an unknown instruction": lambda _: pickle.BINBYTES + struct.pack("<I", 1) + b"x",
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


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_object_is_refused(tmp_path: Path, name: str) -> None:
    """Nothing of it runs; the error says that it needs trust."""
    ran = tmp_path / "ran"
    forged({"o": {"a": 1}}, "o.a", HOSTILE[name](ran), tmp_path)
    with pytest.raises(UntrustedObjectError, match=r"o\.a"):
        nostall.load({"o": {"a": 0}}, tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a command", "GLOBAL os.system whose module os is blocked"),
        ("an expression", "GLOBAL eval was not an allowed global"),
        ("an unknown instruction", "Unsupported operand 66"),
    ],
)
def test_the_error_says_what_was_refused(tmp_path: Path, name: str, what: str) -> None:
    """Not torch's general advice to load without ``weights_only``."""
    forged({"o": {"a": 1}}, "o.a", HOSTILE[name](tmp_path), tmp_path)
    with pytest.raises(UntrustedObjectError, match=what):
        nostall.load({"o": {"a": 0}}, tmp_path)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("way", ["nostall.load", "dcp.load"])
def test_a_hostile_tensor_is_refused(tmp_path: Path, name: str, way: str) -> None:
    """A hostile pickle in place of a tensor runs nothing, and its error is a documented one."""
    ran = tmp_path / "ran"
    forged({"x": torch.ones(3)}, "x", HOSTILE[name](ran), tmp_path)
    loads: dict[str, Callable[[dict[str, Any]], object]] = {
        "nostall.load": lambda state: nostall.load(state, tmp_path),
        "dcp.load": lambda state: dcp.load(
            state, storage_reader=nostall.FileSystemReader(tmp_path), no_dist=True
        ),
    }
    refusals = (DamagedCheckpointError, UntrustedObjectError, CheckpointException)
    with pytest.raises(refusals, match=r"DamagedC|UntrustedO|the tensor 'x'"):
        loads[way]({"x": torch.zeros(3)})
    assert not ran.exists()


def test_a_file_to_convert_is_not_trusted(tmp_path: Path) -> None:
    """Files of ``torch.save`` come from others, too."""
    ran = tmp_path / "ran"
    torch.save({"a": 1}, tmp_path / "saved.pt")
    program = BEGIN + HOSTILE["a command"](ran) + pickle.STOP
    archive = (tmp_path / "saved.pt").read_bytes()
    (tmp_path / "saved.pt").write_bytes(with_pickle(archive, program))
    with pytest.raises(DamagedCheckpointError, match="system"):
        to_checkpoint(str(tmp_path / "saved.pt"), str(tmp_path / "checkpoint"), trust=False)
    assert not ran.exists()


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


@pytest.mark.parametrize(("compression", "copies"), [(zipfile.ZIP_DEFLATED, 1), (0, 1000)])
def test_an_archive_that_unfolds_is_not_loaded(compression: int, copies: int) -> None:
    """Its records take no more than its length."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as written:
        written.writestr("archive/data.pkl", bytes(1 << 20))
        written.filelist *= copies
    with pytest.raises(Broken, match="longer than the archive"):
        loaded_safely(stream)


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


@pytest.mark.parametrize("cls", [Point, Slotted, Listed])
def test_allowed_classes_are_loaded(cls: type[Point]) -> None:
    """A class loads, with state of every form, only once the program has allowed it."""
    out = io.BytesIO()
    torch.save([cls((1, 2)), {(1, "a"): cls("text")}], out)
    with pytest.raises(pickle.UnpicklingError, match=cls.__name__):
        loaded_safely(out)
    with torch.serialization.safe_globals([cls]):
        loaded = loaded_safely(out)
    assert loaded[0].x == (1, 2)
    assert loaded[1][1, "a"].x == "text"
