"""``convert`` to and from safetensors, judged by the package and by stock's reader and writer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
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
from support import loaded
from support.parts import save_in_halves

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.uint16, torch.uint32, torch.uint64),
]


def model_state() -> dict[str, torch.Tensor]:
    """A tensor of each dtype, small and large ones, an empty one and one without dimensions."""
    torch.manual_seed(1)
    state = {
        str(dtype).partition(".")[2]: torch.randint(0, 2, (6, 5)).to(dtype) for dtype in DTYPES
    }
    return {
        **state,
        "large": torch.randn(600, 1000),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
    }


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same tensors, to the last bit."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype
        and tensor.shape == other[name].shape
        and tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
        == other[name].contiguous().reshape(-1).view(torch.uint8).tolist()
        for name, tensor in one.items()
        if name != "large"
    )


def saved(path: Path, state: dict[str, Any]) -> Path:
    """A checkpoint of nostall's."""
    dcp.save(state, storage_writer=nostall.FileSystemWriterAsync(path), no_dist=True)
    return path


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
def test_there_and_back(tmp_path: Path, run: Run, *, in_parts: bool) -> None:
    """The package loads it bitwise; back, it is the checkpoint."""
    state = model_state()
    if in_parts:
        save_in_halves(tmp_path / "saved", state)
    else:
        saved(tmp_path / "saved", state)
    file = tmp_path / "model.safetensors"
    assert run("convert", tmp_path / "saved", file)[0] == 0
    loaded = safetensors.torch.load_file(file)
    assert is_same(loaded, state)
    assert torch.equal(loaded["large"], state["large"])
    assert run("convert", file, tmp_path / "again")[0] == 0
    assert nostall.verify(tmp_path / "again").ok
    assert run("diff", "--values", tmp_path / "saved", tmp_path / "again")[0] == 0
    assert len(list(tmp_path.iterdir())) == 3


def test_a_model_is_chosen_by_its_prefix(tmp_path: Path, run: Run) -> None:
    """Names are those of the model then, as stock's reader for Hugging Face expects them."""
    model = {"layer.weight": torch.randn(4, 4), "layer.bias": torch.randn(4)}
    saved(tmp_path / "saved", {"model": model, "step": 3, "optimizer": {"lr": 0.1}})
    hub = tmp_path / "hub"
    hub.mkdir()
    file = hub / "model.safetensors"
    status, shown, _ = run("convert", tmp_path / "saved", file, "--prefix", "model.")
    assert (status, "2 items" in shown) == (0, True)
    found = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(hub)), no_dist=True)
    assert is_same(found, model)


def test_files_of_stock_and_of_hugging_face_become_a_checkpoint(tmp_path: Path, run: Run) -> None:
    """One that stock has written, and several with an index, of which others are ignored."""
    state = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    stock = HuggingFaceStorageWriter(str(tmp_path / "stock"), fqn_to_index_mapping={"a": 1, "b": 2})
    dcp.save(state, storage_writer=stock, no_dist=True)
    safetensors.torch.save_file({"c": torch.ones(1)}, tmp_path / "stock" / "other.safetensors")
    assert run("convert", tmp_path / "stock", tmp_path / "saved")[0] == 0
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert is_same(found, state)
    (tmp_path / "stock" / "model.safetensors.index.json").unlink()
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
    ],
)
def test_what_the_format_does_not_have_is_named(
    tmp_path: Path, run: Run, state: dict[str, Any], more: tuple[str, ...], message: str
) -> None:
    """In one line, and nothing is written."""
    saved(tmp_path / "saved", state)
    status, _, error = run("convert", tmp_path / "saved", tmp_path / "a.safetensors", *more)
    assert status == 2
    assert message in error
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_damaged_files_are_named(tmp_path: Path, run: Run) -> None:
    """Cut off, missing, twice, and with parts of tensors."""
    hub = tmp_path / "hub"
    hub.mkdir()
    safetensors.torch.save_file({"a": torch.ones(100)}, hub / "one.safetensors")

    def refused(message: str) -> None:
        status, _, error = run("convert", hub, tmp_path / "new")
        assert (status, message in error) == (1, True), error
        assert not (tmp_path / "new").exists()

    safetensors.torch.save_file({"a": torch.ones(1)}, hub / "two.safetensors")
    refused("'a' is in two files")
    content = (hub / "one.safetensors").read_bytes()
    (hub / "two.safetensors").write_bytes(content[:-8])
    refused("two.safetensors")
    index = hub / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "three.safetensors"}}))
    refused("three.safetensors")
    for wrong in ("[]", "{", '{"weight_map": {"a": "../hub/one.safetensors"}}'):
        index.write_text(wrong)
        refused("model.safetensors.index.json")
    index.unlink()
    (hub / "two.safetensors").unlink()
    parts = json.dumps({"a": {"saved_offsets": [100]}})
    safetensors.torch.save_file(
        {"a": torch.ones(100)}, hub / "one.safetensors", metadata={"DCP_SHARDING_INFO": parts}
    )
    refused("parts of tensors")


INDEX = "model.safetensors.index.json"
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
from nostall.cli import main
sys.exit(main(sys.argv[1:]))
"""


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def longer_than_memory(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def deep(path: Path) -> None:
    path.write_text("[" * 1_000_000)


def deep_name(path: Path) -> None:
    path.write_text('{"weight_map": {"a": ' + "[" * 900 + "]" * 900 + "}}")


def impossible_name(path: Path) -> None:
    path.write_text(json.dumps({"weight_map": {"a": "a\0b"}}))


def deep_shards(path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(1)}, path, {"DCP_SHARDING_INFO": "[" * 1_000_000})


def other_shards(path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(1)}, path, {"DCP_SHARDING_INFO": '{"a": 7}'})


@pytest.mark.parametrize(
    ("given", "name", "make", "what"),
    [
        (".", INDEX, pipe, "not a regular file"),
        (".", INDEX, endless, "not a regular file"),
        (".", INDEX, longer_than_memory, "limit"),
        (".", INDEX, deep, "cannot read: RecursionError"),
        (".", INDEX, deep_name, "too long"),
        (".", INDEX, impossible_name, "missing"),
        (".", "b.safetensors", pipe, "not a regular file"),
        ("b.safetensors", "b.safetensors", endless, "not a regular file"),
        (".", "b.safetensors", deep_shards, "cannot read: .*recursion"),
        ("b.safetensors", "b.safetensors", other_shards, "cannot read: .*'int'"),
        ("saved.pt", "saved.pt", pipe, "not a regular file"),
    ],
)
def test_whatever_a_source_is_the_command_ends_in_one_line(
    tmp_path: Path, given: str, name: str, make: Callable[[Path], None], what: str
) -> None:
    """It neither waits, nor takes all memory, nor prints a traceback."""
    source = tmp_path / "source"
    source.mkdir()
    make(source / name)
    safetensors.torch.save_file({"x": torch.ones(3)}, source / "a.safetensors")
    ended = subprocess.run(
        [*loaded.python(), "-W", "ignore", "-c", LIMITED, "convert", given, tmp_path / "target"],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert re.search(what, ended.stderr)
    said, _, _ = ended.stderr.partition("nanobind: ")  # what triton says when a process ends
    assert (ended.returncode, len(said.splitlines())) == (1, 1)
    assert not (tmp_path / "target").exists()


def test_names_say_which_format_is_meant(tmp_path: Path, run: Run) -> None:
    """A wrong pair of names is refused before anything is read."""
    saved(tmp_path / "saved", {"w": torch.ones(2)})
    file = tmp_path / "w.safetensors"
    assert run("convert", tmp_path / "saved", file)[0] == 0
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    for source, target, *more in (
        (file, tmp_path / "w2.safetensors"),
        (file, tmp_path / "w2.pt"),
        (tmp_path / "w.pt", tmp_path / "w2.safetensors"),
        (tmp_path / "saved", tmp_path / "w2.pt", "--prefix", "w"),
    ):
        assert run("convert", source, target, *more)[0] == 2


def test_without_the_package_the_command_says_what_to_install(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line."""
    saved(tmp_path / "saved", {"w": torch.ones(2)})
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    status, _, error = run("convert", tmp_path / "saved", tmp_path / "a.safetensors")
    assert (status, "safetensors>=0.4.5" in error) == (2, True)
