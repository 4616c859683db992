"""``convert``: a checkpoint directory becomes one ``torch.save`` file, and back."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import nostall
from cli.conftest import Run
from nostall._cli.convert import nested
from nostall.errors import DamagedCheckpointError
from support.object_store import S3Server
from support.parts import save_in_halves
from support.states import small_state


def state_of(seed: int = 0) -> dict[str, Any]:
    """Tensors on both sides of the limit from which they are mapped, of several dtypes."""
    large = torch.arange(600_000.0).reshape(600, 1000) + seed
    return {
        **small_state(seed),
        "large": large,
        "half": large.to(torch.bfloat16),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "layers": [{"w": torch.full((2, 2), float(i))} for i in range(3)],
    }


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
def test_there_and_back(tmp_path: Path, run: Run, *, in_parts: bool) -> None:
    """The file is what ``torch.save`` would have made of the state; back, it is the checkpoint."""
    state = state_of()
    if in_parts:
        save_in_halves(tmp_path / "saved", state)
    else:
        dcp.save(state, storage_writer=nostall.FileSystemWriterAsync(tmp_path / "saved"))
    file = tmp_path / "all.pt"
    assert run("convert", tmp_path / "saved", file)[0] == 0
    assert is_same(torch.load(file), state)
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
    assert run("convert", file, tmp_path / "again")[0] == 0
    assert nostall.verify(tmp_path / "again").ok
    assert run("diff", "--values", tmp_path / "saved", tmp_path / "again")[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "all.pt", "again"}


def test_checkpoints_may_be_in_a_store(tmp_path: Path, run: Run, s3: S3Server) -> None:
    """A checkpoint is read from an address, and made there; a file is on a disk."""
    store = f"s3://{s3.new_bucket()}"
    state = state_of()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save(state, storage_writer=nostall.FileSystemWriterAsync(f"{store}/saved"))
    file = tmp_path / "all.pt"
    assert run("convert", f"{store}/saved", file)[0] == 0
    assert is_same(torch.load(file), state)
    assert run("convert", file, f"{store}/again")[0] == 0
    assert nostall.verify(f"{store}/again").ok
    assert run("diff", "--values", f"{store}/saved", f"{store}/again")[0] == 0
    for source, target, why in (
        (file, f"{store}/again", "the target exists"),
        (f"{store}/saved", f"{store}/all.pt", "a file can be written to a file system only"),
    ):
        status, _, error = run("convert", source, target)
        assert status == 2
        assert why in error
    for name in ("nothing", "all.pt"):
        assert run("convert", f"{store}/{name}", tmp_path / "new.pt")[0] == 3


def test_objects_of_any_class_need_trust(tmp_path: Path, run: Run) -> None:
    """In both directions: without ``--trust`` nothing is unpickled that could run code."""
    state = {"x": torch.ones(2), "options": Namespace(lr=0.1)}
    dcp.save(state, storage_writer=nostall.FileSystemWriterAsync(tmp_path / "saved"))
    file = tmp_path / "all.pt"
    status, _, error = run("convert", tmp_path / "saved", file)
    assert (status, error.count("\n"), file.exists()) == (1, 1, False)
    assert "'options'" in error
    assert "argparse.Namespace" in error
    assert "--trust" in error
    assert run("convert", "--trust", tmp_path / "saved", file)[0] == 0
    assert torch.load(file, weights_only=False)["options"] == state["options"]
    status, _, error = run("convert", file, tmp_path / "again")
    assert (status, error.count("\n"), (tmp_path / "again").exists()) == (1, 1, False)
    assert "argparse.Namespace" in error
    assert "--trust" in error
    assert run("convert", "--trust", file, tmp_path / "again")[0] == 0


def test_what_is_no_state_dict_is_refused(tmp_path: Path, run: Run) -> None:
    """A tensor, a text, a form from before torch 1.6, which cannot be mapped."""
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    torch.save({"x": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.pt").write_text("not a file of torch.save")
    for name, why in (
        ("tensor.pt", "an object of type Tensor"),
        ("text.pt", "it is not a file of torch.save"),
        ("old.pt", "save files of torch before 1.6 anew"),
    ):
        status, _, error = run("convert", tmp_path / name, tmp_path / "other")
        assert (status, error.count("\n"), (tmp_path / "other").exists()) == (1, 1, False)
        assert why in error


@pytest.mark.parametrize("trust", [(), ("--trust",)], ids=["", "trust"])
def test_a_file_of_something_else_is_said_to_be_one(
    tmp_path: Path, run: Run, trust: tuple[str, ...]
) -> None:
    """A program that is given by mistake is not a question of trust."""
    (tmp_path / "make.py").write_text("import torch")
    status, _, error = run("convert", *trust, tmp_path / "make.py", tmp_path / "x")
    assert (status, error.count("\n"), (tmp_path / "x").exists()) == (1, 1, False)
    assert "not a file of torch.save" in error
    assert "--trust" not in error
    assert "weights_only" not in error


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("saved", "all.gguf"),
        ("saved", "all/"),
        ("all.pt", "again.pt"),
        ("all.pt", "again.PTH"),
        ("all.pt", "again.safetensors"),
    ],
)
def test_a_name_that_contradicts_what_is_written_is_refused(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, source: str, target: str
) -> None:
    """No archive of ``torch.save`` is called GGUF, and no directory a file."""
    monkeypatch.chdir(tmp_path)
    dcp.save({"x": torch.ones(2)}, storage_writer=nostall.FileSystemWriterAsync("saved"))
    torch.save({"x": torch.ones(2)}, "all.pt")
    status, _, error = run("convert", source, target)
    assert (status, error.count("\n")) == (2, 1)
    assert "the name of the target says otherwise" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.pt", "saved"]


def test_nothing_is_replaced(tmp_path: Path, run: Run) -> None:
    """A target that exists is a wrong argument; a source that does not is status 3."""
    dcp.save({"x": torch.ones(2)}, storage_writer=nostall.FileSystemWriterAsync(tmp_path / "saved"))
    file = tmp_path / "all.pt"
    file.write_text("precious")
    assert run("convert", tmp_path / "saved", file)[0] == 2
    assert file.read_text() == "precious"
    assert run("convert", tmp_path / "nowhere", tmp_path / "x")[0] == 3
    assert run("convert", tmp_path, tmp_path / "x")[0] == 3


@pytest.mark.parametrize("name", ["zeros", "short", "gone"])
def test_damage_leaves_no_file(tmp_path: Path, run: Run, name: str) -> None:
    """A shard file that cannot be read ends the conversion with one line, and nothing stays."""
    dcp.save(state_of(), storage_writer=nostall.FileSystemWriterAsync(tmp_path / "saved"))
    shard = next((tmp_path / "saved").glob("*.distcp"))
    if name == "zeros":
        shard.write_bytes(bytes(shard.stat().st_size))
    elif name == "short":
        os.truncate(shard, 100)
    else:
        shard.unlink()
    status, _, error = run("convert", tmp_path / "saved", tmp_path / "all.pt")
    assert (status, error.count("\n")) == (1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_full_disk_leaves_no_file(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the target nor what it is made from, with one line that names the target."""
    dcp.save(state_of(), storage_writer=nostall.FileSystemWriterAsync(tmp_path / "saved"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("posix_fallocate", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(f"nostall._cli.convert.os.{name}", full)
            status, _, error = run("convert", tmp_path / "saved", tmp_path / "all.pt")
        assert (status, error.count("\n")) == (1, 1)
        assert "No space left" in error
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_conversion_leaves_no_directory(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """It can be started again at once."""
    torch.save(state_of(), tmp_path / "all.pt")

    def fails(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(nostall.FileSystemWriterAsync, "finish", fails)
        assert run("convert", tmp_path / "all.pt", tmp_path / "new")[0] in (1, 130)
    assert [path.name for path in tmp_path.iterdir()] == ["all.pt"]
    assert run("convert", tmp_path / "all.pt", tmp_path / "new")[0] == 0


def test_the_tensors_are_never_all_in_memory(tmp_path: Path) -> None:
    """192 MiB become one file in a process that may allocate 96 MiB, stacks of threads included."""
    state = {f"layer.{i}": torch.full((2 << 20,), float(i)) for i in range(24)}
    dcp.save(state, storage_writer=nostall.FileSystemWriterAsync(tmp_path / "saved"))
    program = """
import resource, sys
import nostall._cli.convert
from nostall.cli import main
nostall._cli.convert.torch.set_num_threads(1)
with open("/proc/self/status") as stream:
    (now,) = (int(line.split()[1]) << 10 for line in stream if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (now + (96 << 20),) * 2)
sys.exit(main(["convert", *sys.argv[1:]]))
"""
    paths = [str(tmp_path / name) for name in ("saved", "all.pt")]
    root = str(Path(nostall.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program, *paths],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = torch.load(tmp_path / "all.pt", mmap=True)
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_paths_in_metadata_are_not_trusted() -> None:
    """Whatever the planner's data says, each item has one place, and no list grows beyond them."""
    assert nested({"a.b": 1, "a.c": 2}, {"a.b": ("a", "b"), "a.c": ("a", "c")}, "") == {
        "a": {"b": 1, "c": 2}
    }
    assert nested({"l": 1, "m": 2}, {"l": ("x", 1), "m": ("x", 0)}, "") == {"x": [2, 1]}
    assert nested({"l": 1}, {"l": ("x", 1 << 60)}, "") == {"x": {1 << 60: 1}}
    for nonsense in (None, 7, {"a": 7}, {"a": ()}, {"a": (None,)}, {"a": ("k",) * 1000}):
        assert nested({"a": {"own": 1}}, nonsense, "") == {"a": {"own": 1}}
    for clash in ({"a": ("k",), "b": ("k",)}, {"a": ("k",), "b": ("k", "l")}):
        with pytest.raises(DamagedCheckpointError):
            nested({"a": {}, "b": 1}, clash, "")
        with pytest.raises(DamagedCheckpointError):
            nested({"b": 1, "a": {}}, clash, "")


def test_a_damaged_file_is_not_converted(tmp_path: Path, run: Run) -> None:
    """Conversion would give damaged bytes new checksums, which hide the damage for ever."""
    file = tmp_path / "all.pt"
    torch.save({"a": torch.ones(1000)}, file)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    status, _, error = run("convert", file, tmp_path / "new")
    assert (status, "does not match its CRC-32" in error) == (1, True)
    assert not (tmp_path / "new").exists()


def test_files_without_checksums_are_converted(tmp_path: Path, run: Run) -> None:
    """``torch.save`` omits checksums on request; such files convert without an error."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(1000)}, tmp_path / "all.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert run("convert", tmp_path / "all.pt", tmp_path / "new")[0] == 0


def test_what_cannot_be_converted_is_named(tmp_path: Path, run: Run) -> None:
    """A shard file, a plain pickle, an empty state dict."""
    dcp.save({"a": torch.ones(9)}, storage_writer=nostall.FileSystemWriterAsync(tmp_path / "saved"))
    _, _, error = run("convert", tmp_path / "saved" / "__0_0.distcp", tmp_path / "new")
    assert "it is a shard file of a checkpoint (pass the checkpoint's directory)" in error
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps({"a": 1}))
    _, _, error = run("convert", tmp_path / "plain.pkl", tmp_path / "new")
    assert "it is not a file of torch.save" in error
    torch.save({}, tmp_path / "empty.pt")
    _, _, error = run("convert", tmp_path / "empty.pt", tmp_path / "new")
    assert "the state dict in it is empty" in error
