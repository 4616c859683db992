"""The reference page of the command line says what happens."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import nostall
from cli.conftest import Run
from nostall._cli.output import Status
from nostall.cli import _COMMANDS
from support import loaded
from support.processes import ended
from support.reads import save

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
NUMBERS = re.compile(r"\d+(?:[.:-]\d+)*")


def without_numbers(text: str) -> list[list[str]]:
    """Words of each line; numbers differ with the versions of torch and nostall."""
    return [NUMBERS.sub("N", line).split() for line in text.splitlines()]


def decisions(table: str) -> list[str]:
    """Rows of ``prune``'s table, and their spaces, without sizes, which differ with torch."""
    return re.findall(r"(?:action|keep|removed?)  .*", table)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_examples_show_what_they_say(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block of the page runs, in order, and prints what it shows but for numbers."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    commands = 0
    for language, block in blocks:
        if language == "python":
            exec(compile(block, "cli.md", "exec"), {})
        elif language == "console":
            for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, shown = example.partition("\n")
                output = output_of(command, run)
                assert without_numbers(output) == without_numbers(shown), command
                if command.startswith("nostall prune"):
                    assert len(decisions(shown)) == 6
                    assert decisions(output) == decisions(shown)
                commands += 1
        else:
            assert (language, script(block)) == ("sh", "resuming from checkpoints/step-2500\n")
    assert commands > 10


def output_of(command: str, run: Run) -> str:
    """The output of one line; ``|| echo word`` runs if the status is not 0."""
    first, _, otherwise = command.partition(" || echo ")
    name, *arguments = shlex.split(first)
    assert name == "nostall"
    status, shown, error = run(*arguments)
    assert (status != 0) == bool(otherwise), error
    return shown + (f"{otherwise}\n" if otherwise else "")


def script(block: str) -> str:
    """The output of a script, with the real program."""
    program = f'nostall() {{ {shlex.join(loaded.python())} -W ignore -m nostall "$@"; }}\n'
    root = str(Path(nostall.__file__).parents[1])
    return ended("bash", "-c", program + block, environment={"PYTHONPATH": root}).stdout


def test_the_page_and_the_help_list_the_same(run: Run) -> None:
    """All exit statuses that the code has, and every command."""
    table = PAGE.split("| exit status |")[1].split("\n\n")[0]
    on_page = set(
        re.findall(r"\d+", " ".join(re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)))
    )
    shown = run("--help")[1]
    in_help = set(re.findall(r"\d+", shown.split("exit status:")[1]))
    assert on_page == in_help == {str(status.value) for status in Status}
    first = PAGE.split("\n## ")[0]
    assert set(_COMMANDS) <= set(re.findall(r"^\| `([a-z]+)[ `]", first, re.MULTILINE))
    assert all(re.search(rf"^    {name} ", shown, re.MULTILINE) for name in _COMMANDS)


def fields_of(value: Any) -> set[str]:
    """Names of the fields of objects, at any depth; the fields of ``kept`` are paths."""
    if isinstance(value, list):
        return set().union(*map(fields_of, value))
    if isinstance(value, dict):
        names = {name for name in value if os.sep not in name}
        return names.union(*map(fields_of, value.values()))
    return set()


def test_the_page_describes_every_field_of_the_json(tmp_path: Path, run: Run) -> None:
    """In the row of the command that prints it."""
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}", {"weight": torch.full((4, 2), step), "step": step})
    first, second = tmp_path / "step-1", tmp_path / "step-2"
    shutil.copytree(first, tmp_path / "damaged")
    (tmp_path / "damaged" / "__0_0.distcp").write_bytes(b"")
    table = PAGE.split("\n## JSON\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)", table, re.MULTILINE))
    commands: dict[str, list[list[object]]] = {
        "ls": [[tmp_path]],
        "latest": [[tmp_path]],
        "inspect": [[first]],
        "diff": [["--values", first, second]],
        "verify": [[tmp_path / "damaged"], [tmp_path]],
        "convert": [[first, tmp_path / "first.pt"]],
        "prune": [["--keep", "latest=2", tmp_path], ["--keep", "latest=1", "--delete", tmp_path]],
    }
    assert set(rows) == set(commands)
    for command, calls in commands.items():
        printed = [json.loads(run(command, "--json", *arguments)[1]) for arguments in calls]
        assert fields_of(printed)
        assert fields_of(printed) <= set(re.findall(r"`(\w+)`", rows[command])), command
