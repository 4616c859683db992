"""nostall on other versions of torch: which of its private names are used, and where."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import serialization
from torch.distributed import _functional_collectives as collectives
from torch.distributed.checkpoint import filesystem, metadata, utils

import nostall
from checkpoints import make
from nostall import _torch
from nostall.errors import UnsupportedTorchError
from support.ranks import run_ranks

PACKAGE = Path(nostall.__file__).parent
OF_OTHERS = {
    *("_asdict", "_codecs", "_compat_pickle", "_exit", "_exit_function", "_fields"),
    *("_local_shards", "_replace", "_sh_ten", "_shutdown"),
}
"""Private names of the standard library's."""
ADAPTERS = PACKAGE / "integrations"
"""They need some of their frameworks' names; the sessions with the real packages notice changes."""


# --- which private names are used -----------------------------------------------------------------


def is_private(name: str) -> bool:
    return (
        name.startswith("_") and name.isidentifier() and name.strip("_") != "" and name[:2] != "__"
    )


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names that a module defines: functions, classes, variables, and attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr if ast.unparse(node.value) == "self" else ""


def used_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private names that are imported from torch, looked up as attributes, or given as texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            for path in (f"{module}.{alias.name}" for alias in node.names):
                if path.lstrip(".").startswith("torch"):
                    yield from ((node.lineno, part) for part in path.split("."))
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, part) for part in node.value.split("."))


def test_private_names_of_torch_are_used_in_one_file_only() -> None:
    """When torch renames something of its own, one place in one file is to be looked at."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    ours = {name for tree in trees.values() for name in own_names(tree)}
    ours |= {path.stem for path in trees} | {path.parent.name for path in trees} | OF_OTHERS
    strays = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, tree in trees.items()
        if path.name != "_torch.py" and path.parent != ADAPTERS
        for line, name in used_names(tree)
        if is_private(name) and name not in ours
    ]
    assert strays == []


# --- what happens without them --------------------------------------------------------------------

NEEDED = {
    "_is_functional_tensor": torch,
    "AsyncCollectiveTensor": collectives,
    "CURRENT_DCP_VERSION": filesystem,
    "_metadata_fn": filesystem,
    "_StorageInfo": filesystem,
    "_StoragePrefix": filesystem,
    "_MEM_FORMAT_ENCODING": metadata,
    "_DistWrapper": utils,
    "_get_layout": serialization,
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_torch_that_lacks_what_is_needed_is_refused_at_import(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch that lacks what is needed gives one error, at nostall's import and by name."""
    monkeypatch.delattr(NEEDED[name], name)
    spec = importlib.util.spec_from_file_location("imported_again", _torch.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(
        UnsupportedTorchError, match=rf"torch {re.escape(torch.__version__)}: .*'{name}'"
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_torch_that_lacks_the_rest_saves_the_same(tmp_path: Path) -> None:
    """Without the private names that make saves faster, sharded states are saved as with them."""
    program = "entry_points:a_torch_that_lacks_the_rest_saves_the_same"
    assert run_ranks(2, program, tmp_path) == [{}, {}]


def test_devices_of_a_group_are_known_without_its_private_attribute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks talk over the CPU where their group can, whichever way torch says so."""
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert _torch.device_for_collectives(None) == torch.device("cpu")
        monkeypatch.delattr(dist.ProcessGroup, "_device_types")
        assert _torch.device_for_collectives(None) == torch.device("cpu")
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


# --- checkpoints of other versions ----------------------------------------------------------------

MADE = sorted(path.parent for path in make.HERE.glob("torch-*/*/.metadata"))


@pytest.mark.parametrize("root", sorted({path.parent for path in MADE}), ids=lambda root: root.name)
def test_checkpoints_of_another_torch_are_found(root: Path) -> None:
    """Each is whole, and a job that was moved to another torch goes on from where it was."""
    made = [path for path in MADE if path.parent == root]
    assert [path for path in made if not nostall.verify(path).ok] == []
    found = {nostall.latest_complete(root, deep=deep) for deep in (False, True)}
    assert found <= {str(path) for path in made}
