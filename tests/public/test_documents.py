"""What the documents say is what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from nostall._model.lifecycle import TRANSITIONS
from nostall.options import EngineOptions

ROOT = Path(__file__).resolve().parents[2]
PREAMBLE = """
import warnings
import torch
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
"""


def test_code_in_the_readme_runs_in_order(tmp_path: Path) -> None:
    """The README's Python, pasted into one script after a model, saves and loads as it says."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "readme.py"
    script.write_text(PREAMBLE + "\n".join(blocks))
    run = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    committed = {path.parent.name for path in tmp_path.glob("checkpoints/*/.metadata")}
    assert committed == {"step-100", "final", "split-20", "split-30", "overlapped"}


def test_lifecycle_table_in_the_architecture_is_the_one_in_the_code() -> None:
    """docs/architecture.md shows exactly the transitions that are possible."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(
        r"^\| ([a-z, ]+) \| ([a-z, -]+) \|$", text.split("## The life of")[1], re.MULTILINE
    )
    shown = {
        name: {leads for leads in leads_to.split(", ") if leads != "-"}
        for names, leads_to in rows
        for name in names.split(", ")
        if name != "state"
    }
    assert shown == {
        state.value: {next_.value for next_ in leads_to} for state, leads_to in TRANSITIONS.items()
    }


@pytest.mark.parametrize("option", [field.name for field in fields(EngineOptions)])
def test_every_engine_option_is_documented(option: str) -> None:
    """docs/options.md has a row for each option of the engine."""
    assert f"| `{option}` |" in (ROOT / "docs" / "options.md").read_text()


def test_every_test_that_the_documents_name_is_there() -> None:
    """docs/reliability.md names tests that exist; ``::name`` is one in the last named file."""
    text = (ROOT / "docs" / "reliability.md").read_text()
    missing, file = [], ""
    for name, test in re.findall(r"`((?:tests/\w+/)?\w+\.py)?(?:::(\w+))?`", text):
        file = name or file
        paths = [ROOT / file] if "/" in file else [*(ROOT / "tests").glob(f"*/{file}")]
        texts = [path.read_text() for path in paths if path.is_file()]
        if file and not any(not test or f"def {test}(" in source for source in texts):
            missing.append((file, test))
    assert missing == []
    assert text.count("test_") > 50
