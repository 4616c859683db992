"""docs/architecture.md is true: what it names exists, and its counts are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from support.ranks import run_script

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "nostall"


def unknown_names(page: str) -> list[str]:
    """Names in backquotes on a page, ``FILE.py`` or ``FILE.py: NAME``, that do not exist."""
    names = re.findall(r"`([\w/]+\.py)(?::\s+([\w.]+))?`", page)
    return [
        f"{file}: {name}" if name else file
        for file, name in names
        if not any(defines(path, name) for path in SOURCE.rglob(file))
    ]


def defines(path: Path, name: str) -> bool:
    """Whether a module has a function, class or method; of a method the class may be left out."""
    names = {""}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if hasattr(each, "name")}
    return name in names


def test_files_and_functions_of_the_architecture_exist() -> None:
    """Each file of docs/architecture.md exists, and has the function that is named with it."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert unknown_names(page) == []
    assert len(re.findall(r"`[\w/]+\.py: ", page)) > 30


def test_a_wrong_name_is_found() -> None:
    """A file, a function, a method, and a function of another file."""
    right = "`core.py`, `_model/progress.py: Progress.to`, `loading.py:\n   load`"
    wrong = ["no_such.py", "loading.py: save", "loading.py: load.me", "core.py: lay_out"]
    assert unknown_names(" ".join([right, *(f"`{each}`" for each in wrong)])) == wrong


def test_the_architecture_counts_right(tmp_path: Path) -> None:
    """Modules as on the page; functions, of which torch and threads choose a few, within 5 %."""
    page = " ".join((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split())
    counts = page.split("one process: ")[1].split(". ###")[0]
    counted = run_script("programs/reach.py", str(tmp_path), cwd=tmp_path, timeout_s=200)
    assert counted.returncode == 0, counted.stderr
    for stated, found in zip(counts.split("; "), counted.stdout.splitlines(), strict=True):
        name, modules, functions = found.split("; ")
        assert stated.startswith(f"{name} {modules}, ")
        assert int(functions) == pytest.approx(int(stated.split()[-1]), rel=0.05)
