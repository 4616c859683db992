"""``convert``: a checkpoint directory becomes one file of ``torch.save`` or safetensors, and back.

Safetensors are judged by the package, and by stock's reader and writer.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import subprocess
import sys
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

import nostall
from cli.conftest import Run
from nostall._cli.convert import nested
from nostall.errors import DamagedCheckpointError
from support import loaded
from support.object_store import S3Server
from support.parts import save_in_halves
from support.processes import ended
from support.reads import same
from support.states import save_now, small_state

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.uint16, torch.uint32, torch.uint64),
]
INDEX = "model.safetensors.index.json"


def state_of_tensors() -> dict[str, Any]:
    """Tensors on both sides of the limit from which they are mapped, of each dtype, and empty."""
    large = torch.arange(600_000.0).reshape(600, 1000)
    small = {str(each).partition(".")[2]: torch.ones(6, 5).to(each) for each in DTYPES}
    return {**small, "large": large, "half": large.bfloat16(), "empty": torch.empty(0, 3)}


def state_of() -> dict[str, Any]:
    """Objects, too."""
    layers = [{"w": torch.full((2, 2), float(i))} for i in range(3)]
    return {**small_state(), **state_of_tensors(), "layers": layers}


@pytest.mark.parametrize("save", [save_now, save_in_halves], ids=["whole", "in parts"])
@pytest.mark.parametrize("name", ["all.pt", "all.safetensors"])
def test_there_and_back(
    tmp_path: Path, run: Run, name: str, save: Callable[[Path, dict[str, Any]], object]
) -> None:
    """The file is what the package would have made of the state; back, it is the checkpoint."""
    is_torchs = name == "all.pt"
    state = state_of() if is_torchs else {**state_of_tensors(), "scalar": torch.tensor(2.5)}
    save(tmp_path / "saved", state)
    file = tmp_path / name
    assert run("convert", tmp_path / "saved", file)[0] == 0
    assert same(torch.load(file) if is_torchs else safetensors.torch.load_file(file), state)
    if is_torchs:
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
    assert run("convert", file, tmp_path / "again")[0] == 0
    assert nostall.verify(tmp_path / "again").ok
    assert run("diff", "--values", tmp_path / "saved", tmp_path / "again")[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"saved", name, "again"}


def test_checkpoints_may_be_in_a_store(tmp_path: Path, run: Run, s3: S3Server) -> None:
    """A checkpoint is read from an address, and made there; a file is on a disk."""
    store = f"s3://{s3.new_bucket()}"
    state = state_of()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        save_now(f"{store}/saved", state)
    file = tmp_path / "all.pt"
    assert run("convert", f"{store}/saved", file)[0] == 0
    assert same(torch.load(file), state)
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
    path = tmp_path / "saved"
    save_now(path, state)
    for source, target in ((path, tmp_path / "all.pt"), (tmp_path / "all.pt", tmp_path / "again")):
        status, _, error = run("convert", source, target)
        assert (status, error.count("\n"), target.exists()) == (1, 1, False)
        assert source != path or "'options'" in error
        assert "argparse.Namespace" in error
        assert "--trust" in error
        assert run("convert", "--trust", source, target)[0] == 0
    assert torch.load(tmp_path / "all.pt", weights_only=False)["options"] == state["options"]


def flipped(path: Path) -> None:
    """A file of ``torch.save`` with a damaged byte."""
    torch.save({"a": torch.ones(1000)}, path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


NOT_CONVERTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "tensor.pt": (lambda path: torch.save(torch.ones(3), path), "an object of type Tensor"),
    "text.pt": (lambda path: path.write_text("text"), "it is not a file of torch.save"),
    "old.pt": (
        lambda path: torch.save({}, path, _use_new_zipfile_serialization=False),
        "save it again if torch before 1.6 wrote it",
    ),
    "plain.pkl": (
        lambda path: path.write_bytes(pickle.dumps({"a": 1})),
        "it is not a file of torch.save",
    ),
    "make.py": (lambda path: path.write_text("import torch"), "it is not a file of torch.save"),
    "empty.pt": (lambda path: torch.save({}, path), "the state dict in it is empty"),
    "__0_0.distcp": (
        lambda path: save_now(path.parent, {"a": torch.ones(9)}),
        "it is a shard file of a checkpoint (pass the checkpoint's directory)",
    ),
    "damaged.pt": (flipped, "does not match its CRC-32"),
}


@pytest.mark.parametrize("name", NOT_CONVERTED)
@pytest.mark.parametrize("trust", [(), ("--trust",)], ids=["", "trust"])
def test_what_cannot_be_converted_is_named(
    tmp_path: Path, run: Run, name: str, trust: tuple[str, ...]
) -> None:
    """It is no question of trust; and damaged bytes would get new checksums, which hide them."""
    make, why = NOT_CONVERTED[name]
    make(tmp_path / name)
    status, _, error = run("convert", *trust, tmp_path / name, tmp_path / "new")
    assert (status, error.count("\n"), (tmp_path / "new").exists()) == (1, 1, False)
    assert why in error
    assert "--trust" not in error
    assert "weights_only" not in error


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        ("saved all.gguf", 2, "the name of the target says otherwise"),
        ("saved all/", 2, "the name of the target says otherwise"),
        ("all.pt again.PTH", 2, "the name of the target says otherwise"),
        ("all.pt again.safetensors", 2, "the name of the target says otherwise"),
        ("a.safetensors again.safetensors", 2, "the name of the target says otherwise"),
        ("a.safetensors again.pt", 2, "the name of the target says otherwise"),
        ("saved again.pt --prefix x", 2, "--prefix is for a target that ends with .safetensors"),
        ("saved all.pt", 2, "the target exists"),
        ("nowhere again", 3, "no such file or directory"),
        (". again", 1, "'x' is in two files"),
    ],
)
def test_nothing_is_replaced_or_named_for_what_it_is_not(
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    status: int,
    why: str,
) -> None:
    """No archive of ``torch.save`` is called GGUF, and no directory a file."""
    monkeypatch.chdir(tmp_path)
    save_now("saved", {"x": torch.ones(2)})
    torch.save({"x": torch.ones(2)}, "all.pt")
    for name in ("a.safetensors", "b.safetensors"):
        safetensors.torch.save_file({"x": torch.ones(2)}, name)
    before = Path("all.pt").read_bytes()
    ended, _, error = run("convert", *arguments.split())
    assert (ended, error.count("\n")) == (status, 1)
    assert why in error
    assert len(list(tmp_path.iterdir())) == 4
    assert Path("all.pt").read_bytes() == before


@pytest.mark.parametrize("name", ["zeros", "short", "gone"])
def test_damage_leaves_no_file(tmp_path: Path, run: Run, name: str) -> None:
    """A shard file that cannot be read ends the conversion with one line, and nothing stays."""
    save_now(tmp_path / "saved", state_of())
    (shard,) = (tmp_path / "saved").glob("*.distcp")
    nbytes = shard.stat().st_size
    shard.unlink()
    if name != "gone":
        shard.write_bytes(bytes(nbytes if name == "zeros" else 100))
    status, _, error = run("convert", tmp_path / "saved", tmp_path / "all.pt")
    assert (status, error.count("\n")) == (1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_full_disk_leaves_no_file(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the target nor what it is made from, with one line that names the target."""
    save_now(tmp_path / "saved", state_of())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("posix_fallocate", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(f"nostall._cli.convert.os.{name}", full)
            status, _, error = run("convert", tmp_path / "saved", tmp_path / "all.pt")
        assert (status, error.count("\n")) == (1, 1)
        assert "No space left" in error
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        status, _, error = run("convert", tmp_path / "saved", tmp_path / "all.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (status, error.count("\n")) == (1, 1)
    assert "all.pt: cannot write: File too large (name a target in" in error  # not torch's words
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_conversion_leaves_no_directory(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """It can be started again at once; a file without checksums, as torch makes them, is fine."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state_of(), tmp_path / "all.pt")
    finally:
        torch.serialization.set_crc32_options(True)

    def fails(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(nostall.FileSystemWriterAsync, "finish", fails)
        assert run("convert", tmp_path / "all.pt", tmp_path / "new")[0] in (1, 130)
    assert [path.name for path in tmp_path.iterdir()] == ["all.pt"]
    assert run("convert", tmp_path / "all.pt", tmp_path / "new")[0] == 0


def convert_limited(limit: str, *paths: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Convert in a process whose memory is limited once it has imported what it needs."""
    program = f"""
import resource, sys
import nostall._cli.convert
from nostall.cli import main
nostall._cli.convert.torch.set_num_threads(1)
with open("/proc/self/status") as stream:
    (now,) = (int(line.split()[1]) << 10 for line in stream if line.startswith("VmData"))
resource.setrlimit({limit})
sys.exit(main(["convert", *sys.argv[1:]]))
"""
    command = *loaded.python(), "-W", "ignore", "-c", program, *map(str, paths)
    return ended(
        *command, cwd=cwd, timeout_s=200, check=False, environment={"OMP_NUM_THREADS": "1"}
    )


def test_the_tensors_are_never_all_in_memory(tmp_path: Path) -> None:
    """192 MiB become one file in a process that may allocate 96 MiB, stacks of threads included."""
    state = {f"layer.{i}": torch.full((2 << 20,), float(i)) for i in range(24)}
    save_now(tmp_path / "saved", state)
    limit = "resource.RLIMIT_DATA, (now + (96 << 20),) * 2"
    done = convert_limited(limit, "saved", "all.pt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "all.pt", mmap=True)
    assert all(torch.equal(found[name], value) for name, value in state.items())


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
        for items in ({"a": {}, "b": 1}, {"b": 1, "a": {}}):
            with pytest.raises(DamagedCheckpointError):
                nested(items, clash, "")


# --- safetensors ----------------------------------------------------------------------------------


def test_a_model_is_chosen_by_its_prefix(tmp_path: Path, run: Run) -> None:
    """Names are those of the model then, as stock's reader for Hugging Face expects them."""
    model = {"layer.weight": torch.randn(4, 4), "layer.bias": torch.randn(4)}
    save_now(tmp_path / "saved", {"model": model, "step": 3, "optimizer": {"lr": 0.1}})
    hub = tmp_path / "hub"
    hub.mkdir()
    file = hub / "model.safetensors"
    status, shown, _ = run("convert", tmp_path / "saved", file, "--prefix", "model.")
    assert (status, "2 items" in shown) == (0, True)
    found = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(hub)), no_dist=True)
    assert same(found, model)


def test_files_of_stock_and_of_hugging_face_become_a_checkpoint(tmp_path: Path, run: Run) -> None:
    """One that stock has written, and several with an index, of which others are ignored."""
    state = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    stock = HuggingFaceStorageWriter(str(tmp_path / "stock"), fqn_to_index_mapping={"a": 1, "b": 2})
    dcp.save(state, storage_writer=stock, no_dist=True)
    safetensors.torch.save_file({"c": torch.ones(1)}, tmp_path / "stock" / "other.safetensors")
    assert run("convert", tmp_path / "stock", tmp_path / "saved")[0] == 0
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert same(found, state)
    (tmp_path / "stock" / INDEX).unlink()
    assert run("convert", tmp_path / "stock", tmp_path / "all")[0] == 0
    items = json.loads(run("inspect", "--json", tmp_path / "all")[1])["items"]
    assert [each["name"] for each in items] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("state", "more", "message"),
    [
        ({"w": torch.ones(2), "step": 3}, (), "tensors only; 1 item of another kind"),
        ({"w": torch.ones(2)}, ("--prefix", "model."), "no item's name begins with 'model.'"),
        ({"w": torch.ones(2)}, ("--prefix", "w"), "nothing is left of its name"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, (), "complex128"),
        ({"w": torch.ones(2)}, ("no package",), "safetensors>=0.4.5"),
    ],
)
def test_what_the_format_does_not_have_is_named(
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    state: dict[str, Any],
    more: tuple[str, ...],
    message: str,
) -> None:
    """In one line, and nothing is written; so is the package, where it is missing."""
    save_now(tmp_path / "saved", state)
    if more == ("no package",):
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
        more = ()
    status, _, error = run("convert", tmp_path / "saved", tmp_path / "a.safetensors", *more)
    assert (status, error.count("\n")) == (2, 1)
    assert message in error
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def cut_off(path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(100)}, path)
    os.truncate(path, path.stat().st_size - 8)


def with_shards(text: str) -> Callable[[Path], object]:
    """A file of stock's writer that says this about the parts of its tensors."""
    about = {"DCP_SHARDING_INFO": text}
    return lambda path: safetensors.torch.save_file({"a": torch.ones(100)}, path, about)


@pytest.mark.parametrize(
    ("name", "make", "what"),
    [
        (INDEX, lambda path: path.write_text("[]"), INDEX),
        (INDEX, lambda path: path.write_text("{"), INDEX),
        (INDEX, lambda path: path.write_text('{"weight_map": {"a": "c.safetensors"}}'), "c.safe"),
        (INDEX, lambda path: path.write_text('{"weight_map": {"a": "../a.safetensors"}}'), INDEX),
        ("b.safetensors", cut_off, "b.safetensors"),
        ("b.safetensors", with_shards('{"a": {"saved_offsets": [100]}}'), "parts of tensors"),
    ],
    ids=["no index", "no JSON", "missing", "outside", "cut off", "parts"],
)
def test_damaged_files_are_named(
    tmp_path: Path, run: Run, name: str, make: Callable[[Path], object], what: str
) -> None:
    """Also those that the index names, and none outside of the directory."""
    hub = tmp_path / "hub"
    hub.mkdir()
    safetensors.torch.save_file({"x": torch.ones(100)}, hub / "a.safetensors")
    make(hub / name)
    status, _, error = run("convert", hub, tmp_path / "new")
    assert (status, what in error) == (1, True), error
    assert not (tmp_path / "new").exists()


def longer_than_memory(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize(
    ("given", "name", "make", "what"),
    [
        (".", INDEX, os.mkfifo, "not a regular file"),
        (".", INDEX, lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (".", INDEX, longer_than_memory, "limit"),
        (".", INDEX, lambda path: path.write_text("[" * 1_000_000), "read: RecursionError"),
        (
            *(".", INDEX),
            lambda path: path.write_text('{"weight_map": {"a": ' + "[" * 900 + "]" * 900 + "}}"),
            "too long",
        ),
        (".", INDEX, lambda path: path.write_text('{"weight_map": {"a": "a\\u0000b"}}'), "missing"),
        ("b.safetensors", "b.safetensors", os.mkfifo, "not a regular file"),
        (".", "b.safetensors", with_shards("[" * 1_000_000), "cannot read: .*recursion"),
        ("b.safetensors", "b.safetensors", with_shards('{"a": 7}'), "cannot read: .*'int'"),
        ("saved.pt", "saved.pt", os.mkfifo, "not a regular file"),
    ],
)
def test_whatever_a_source_is_the_command_ends_in_one_line(
    tmp_path: Path, given: str, name: str, make: Callable[[Path], object], what: str
) -> None:
    """It neither waits, nor takes all memory, nor prints a traceback."""
    source = tmp_path / "source"
    source.mkdir()
    make(source / name)
    safetensors.torch.save_file({"x": torch.ones(3)}, source / "a.safetensors")
    limit = "resource.RLIMIT_AS, (8 << 30, 8 << 30)"
    ended = convert_limited(limit, given, tmp_path / "target", cwd=source)
    assert re.search(what, ended.stderr)
    said, _, _ = ended.stderr.partition("nanobind: ")  # what triton says when a process ends
    assert (ended.returncode, len(said.splitlines())) == (1, 1)
    assert not (tmp_path / "target").exists()
