"""docs/manager.md does what it says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nostall import CheckpointManager, manager
from support.pages import DOCS, code_blocks
from support.ranks import run_python

BLOCKS = code_blocks("manager.md")


def run(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    warnings = ("-W", "error", "-W", "ignore:TypedStorage is deprecated:UserWarning")
    return run_python(*warnings, "-c", program, cwd=cwd, timeout_s=100)


def test_the_examples_run_and_resume(tmp_path: Path) -> None:
    """The first one interrupted in the middle; then all of the page in one program."""
    interrupted = BLOCKS[0].replace("loss.backward()", "loss.backward(); step == 57 and 1 / 0")
    assert "ZeroDivisionError" in run(interrupted, tmp_path).stderr
    assert CheckpointManager(tmp_path / "checkpoints").latest_step() == 50
    resumed = run("\n".join(BLOCKS), tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert set(CheckpointManager(tmp_path / "checkpoints").all_steps()) >= {50, 90, 100}
    assert CheckpointManager(tmp_path / "by-name").all_steps() == [1]


@pytest.mark.parametrize("name", [each for each in manager.__all__ if each.startswith("Keep")])
def test_every_policy_is_documented(name: str) -> None:
    """In the table."""
    assert f"| `{name}(" in (DOCS / "manager.md").read_text()
