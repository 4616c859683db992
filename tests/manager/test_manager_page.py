"""docs/manager.md does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nostall import CheckpointManager, manager

DOCUMENT = (Path(__file__).parents[2] / "docs" / "manager.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


def run(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    warnings = ("-W", "error", "-W", "ignore:TypedStorage is deprecated:UserWarning")
    return subprocess.run(
        [sys.executable, *warnings, "-c", program],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_examples_run_and_resume(tmp_path: Path) -> None:
    """All of the page in one program; then again, interrupted in the middle and resumed."""
    seeded = "import torch\ntorch.manual_seed(0)\n"
    (tmp_path / "whole").mkdir()
    whole = run(seeded + "\n".join(BLOCKS), tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    killed = BLOCKS[0].replace("loss.backward()", "loss.backward(); step == 57 and 1 / 0")
    assert run(seeded + killed, tmp_path).returncode == 1
    assert CheckpointManager(tmp_path / "checkpoints").latest_step() == 50
    resumed = run(BLOCKS[0], tmp_path)
    assert resumed.stdout == whole.stdout
    assert set(CheckpointManager(tmp_path / "checkpoints").all_steps()) >= {50, 90, 100}


@pytest.mark.parametrize("name", [each for each in manager.__all__ if each.startswith("Keep")])
def test_every_policy_is_documented(name: str) -> None:
    """In the table."""
    assert f"| `{name}(" in DOCUMENT
