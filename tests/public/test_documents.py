"""What the documents say is what the code does."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from nostall._model.lifecycle import TRANSITIONS
from nostall.options import EngineOptions

ROOT = Path(__file__).resolve().parents[2]
KILLED_IN_STEP_90 = """
import os, signal, sys, warnings
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # stock's own
from torch.optim.optimizer import register_optimizer_step_post_hook
program, scope, steps = open(sys.argv[1]).read(), {}, []
def count(*_):
    steps.append(len(steps) + 1)
    if sys.argv[2:] and steps[-1] == 70:
        scope["manager"].wait()  # so that there is something to resume from
    if sys.argv[2:] and steps[-1] == 90:
        os.kill(os.getpid(), signal.SIGKILL)
register_optimizer_step_post_hook(count)
exec(compile(program, sys.argv[1], "exec"), scope)
"""


def test_the_programs_of_the_readme_run_and_resume(tmp_path: Path) -> None:
    """The first one is killed in step 90 and started again, with the second one behind it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text("\n".join(blocks))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", KILLED_IN_STEP_90, str(script), *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    killed = run("killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run()
    assert resumed.returncode == 0, resumed.stderr
    first = re.match(r"resumed from (\d+)\n", resumed.stdout)
    assert first is not None, resumed.stdout
    assert int(first[1]) in (60, 80)
    assert "200]" in resumed.stdout  # the last step is there
    assert (tmp_path / "run" / "step-200" / ".metadata").exists()


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
