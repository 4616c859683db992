"""Pickles inside of archives: a hostile one runs no code, and its error has a documented type."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._cli.convert import to_checkpoint
from nostall._read.archives import Broken, loaded_safely
from nostall._storage.damage import damage_of_container
from nostall.errors import DamagedCheckpointError, UntrustedObjectError
from stress.fuzz_inputs import _named, _text
from support.states import read_metadata, save_stock_way

BEGIN = b"\x80\x02"


def call(module: str, name: str, *arguments: bytes) -> bytes:
    row = pickle.MARK + b"".join(arguments) + pickle.TUPLE
    return _named(module, name) + row + pickle.REDUCE


def storage() -> bytes:
    parts = (_text("storage"), _named("torch", "FloatStorage"), _text("0"), _text("cpu"))
    number = pickle.BININT1 + b"\3"
    return pickle.MARK + b"".join(parts) + number + pickle.TUPLE + pickle.BINPERSID


HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "a command": lambda ran: call("os", "system", _text(f"touch {ran}")),
    "an expression": lambda ran: call("builtins", "eval", _text(f"open({str(ran)!r}, 'w')")),
    "a file": lambda ran: call("builtins", "open", _text(str(ran)), _text("w")),
    "a new instance": lambda ran: (
        _named("pathlib", "Path") + _text(str(ran)) + pickle.TUPLE1 + pickle.NEWOBJ
    ),
    "a storage that is called": lambda _: storage() + pickle.EMPTY_TUPLE + pickle.REDUCE,
    "an unknown instruction": lambda _: pickle.BINBYTES + struct.pack("<I", 1) + b"x",
}


def rewritten(archive: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    """An archive whose records have other contents."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
    return out.getvalue()


def with_pickle(program: bytes) -> Callable[[bytes], bytes]:
    """Archives with another pickle."""
    pickled = BEGIN + program + pickle.STOP
    return lambda archive: rewritten(
        archive, lambda name, content: pickled if name.endswith("data.pkl") else content
    )


def forged(state: dict[str, Any], item: str, change: Callable[[bytes], bytes], path: Path) -> None:
    """Save a state, and change the archive of one item."""
    save_stock_way(path, state)
    metadata = read_metadata(path)
    for index, info in metadata.storage_data.items():
        if index.fqn == item:
            shard = (path / info.relative_path).read_bytes()
            content = change(shard[info.offset : info.offset + info.length])
            (path / "__9_0.distcp").write_bytes(content)
            info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(content)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


REASONS = {
    "a command": r"o\.a.*GLOBAL os.system whose module os is blocked",
    "an expression": r"o\.a.*GLOBAL eval was not an allowed global",
    "an unknown instruction": r"o\.a.*Unsupported operand 66",
}
"""Not torch's general advice to load without ``weights_only``."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_object_is_refused(tmp_path: Path, name: str) -> None:
    """Nothing of it runs; the error says that it needs trust, and what was refused."""
    ran = tmp_path / "ran"
    forged({"o": {"a": {torch.ones(3)}}}, "o.a", with_pickle(HOSTILE[name](ran)), tmp_path)
    with pytest.raises(UntrustedObjectError, match=rf"(?s){REASONS.get(name, 'o.a')}"):
        nostall.load({"o": {"a": 0}}, tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("way", ["nostall.load", "dcp.load"])
def test_a_hostile_tensor_is_refused(tmp_path: Path, name: str, way: str) -> None:
    """A hostile pickle in place of a tensor runs nothing, and its error is a documented one."""
    ran = tmp_path / "ran"
    forged({"x": torch.ones(3)}, "x", with_pickle(HOSTILE[name](ran)), tmp_path)
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


def test_values_that_end_too_early_are_not_read_past(tmp_path: Path) -> None:
    """Also where only ``torch.load`` understands a tensor: that of torch 2.9 does not look."""
    image = torch.ones(2, 3, 40, 50).to(memory_format=torch.channels_last)
    forged({"x": image}, "x", with_too_few_values, tmp_path)
    with pytest.raises(DamagedCheckpointError, match="its values have 47996 bytes, not 48000"):
        nostall.load({"x": torch.zeros_like(image)}, tmp_path)


def test_a_file_to_convert_is_not_trusted(tmp_path: Path) -> None:
    """Files of ``torch.save`` come from others, too."""
    ran = tmp_path / "ran"
    torch.save({"a": 1}, tmp_path / "saved.pt")
    archive = (tmp_path / "saved.pt").read_bytes()
    change = with_pickle(HOSTILE["a command"](ran))
    (tmp_path / "saved.pt").write_bytes(change(archive))
    with pytest.raises(DamagedCheckpointError, match="system"):
        to_checkpoint(str(tmp_path / "saved.pt"), str(tmp_path / "checkpoint"), trust=False)
    assert not ran.exists()


def of_another_shape(_: bytes) -> bytes:
    out = io.BytesIO()
    torch.save(torch.ones(2), out)
    return out.getvalue()


def with_zeros_only(archive: bytes) -> bytes:
    return bytes(len(archive))


def with_too_few_values(archive: bytes) -> bytes:
    return rewritten(
        archive, lambda name, content: content[:-4] if name.endswith("data/0") else content
    )


@pytest.mark.parametrize("count", [3, 200_000], ids=["small", "large"])
@pytest.mark.parametrize("change", [of_another_shape, with_too_few_values, with_zeros_only])
def test_another_archive_is_damage(
    tmp_path: Path, count: int, change: Callable[[bytes], bytes]
) -> None:
    """A tensor of another shape, one with fewer values than that, or no archive at all."""
    forged({"x": torch.ones(count)}, "x", change, tmp_path)
    with pytest.raises(DamagedCheckpointError):
        nostall.load({"x": torch.zeros(count)}, tmp_path)


def test_what_is_not_an_archive_is_damage(tmp_path: Path) -> None:
    """torch would take it for several pickles of an older version."""
    forged({"o": {"a": 1}}, "o.a", lambda _: pickle.dumps(7) * 30, tmp_path)
    with pytest.raises(DamagedCheckpointError, match="not an archive"):
        nostall.load({"o": {"a": 0}}, tmp_path)


@pytest.mark.parametrize(
    ("compression", "copies", "what"),
    [(zipfile.ZIP_DEFLATED, 1, "compressed"), (zipfile.ZIP_STORED, 1000, "longer records")],
)
def test_an_archive_that_unfolds_is_not_loaded(compression: int, copies: int, what: str) -> None:
    """If its records take more than its length; for ``verify`` it is damage, soon."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as written:
        written.writestr("archive/data.pkl", bytes(1 << 20))
        written.filelist *= copies
    with pytest.raises(Broken, match="longer than the archive"):
        loaded_safely(stream)
    damage = damage_of_container(stream)
    assert damage is not None
    assert what in damage


@dataclass
class Point:
    """Allowed by the program; its state is a dictionary."""

    x: object


@dataclass(slots=True)
class Slotted:
    """Its state is a pair."""

    x: object


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
