"""Documentation agrees with the code: its programs run, and the names in it exist."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import textwrap
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from importlib.metadata import metadata
from pathlib import Path

import pytest

from nostall._model.progress import TRANSITIONS, SaveState
from nostall.options import EngineOptions
from support import loaded
from support.pages import code_blocks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TESTED_ELSEWHERE = {
    *("cli.md", "frameworks.md", "manager.md", "megatron.md", "object-stores.md", "recipes.md")
}
"""Pages whose code needs more than nostall, or is tested beside what it documents."""
ON_TWO_RANKS = {"howto-parallel", "tutorial-train"}
STRICT = (
    *("-W", "error", "-W", "ignore:torch.distributed is disabled"),
    *("-W", "ignore:TypedStorage is deprecated", "-W", "ignore:Guards may run slower on Python 3"),
)
"""Filters for torch's warnings: on a single rank, in 2.9, and compiling on Python 3.13.0."""
KILLED_IN_STEP_90 = """
import os, pathlib, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
program, scope, steps = pathlib.Path(sys.argv[1]).read_text(), {}, []
def count(*_):
    steps.append(len(steps) + 1)
    if sys.argv[2:] and steps[-1] == 70:
        scope["manager"].wait()  # so that there is something to resume from
    if sys.argv[2:] and steps[-1] == 90:
        os.kill(os.getpid(), signal.SIGKILL)
register_optimizer_step_post_hook(count)
exec(compile(program, sys.argv[1], "exec"), scope)
"""


def run(*arguments: str, cwd: Path, ranks: int = 1, status: int = 0) -> str:
    """Rank 0's output of a program; each rank has to end with a status."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that spin wait for busy cores
    if ranks > 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            environment["MASTER_PORT"] = str(server.getsockname()[1])
        environment["MASTER_ADDR"] = "127.0.0.1"
        environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = str(ranks)
    processes = [
        subprocess.Popen(
            [*loaded.python(), *STRICT, *arguments],
            cwd=cwd,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # apart: torch's packages write there as they end
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [each.communicate(timeout=100) for each in processes]
    finally:
        for each in processes:
            each.kill()
    assert [each.returncode for each in processes] == [status] * ranks, "\n".join(
        error for _, error in printed
    )
    return printed[0][0]


def test_the_programs_of_the_readme_run_and_resume(tmp_path: Path) -> None:
    """The first one is killed in step 90 and started again, with the second one behind it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text("\n".join(blocks))
    run("-c", KILLED_IN_STEP_90, str(script), "killed", cwd=tmp_path, status=-signal.SIGKILL)
    resumed = run("-c", KILLED_IN_STEP_90, str(script), cwd=tmp_path)
    first = re.search(r"^resumed from (\d+)$", resumed, re.MULTILINE)
    assert first is not None, resumed
    assert int(first[1]) in (60, 80)
    assert "200]" in resumed  # the last step is there
    assert (tmp_path / "run" / "step-200" / ".metadata").exists()


def test_the_life_of_a_save_in_the_architecture_is_the_one_in_the_code() -> None:
    """docs/architecture.md names the states in the order in which the code goes through them."""
    text = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    states = text.split("part of a save is ")[1].split(", in this order")[0].split(", ")
    for position, state in enumerate(states[:-1]):
        assert SaveState(states[position + 1]) in TRANSITIONS[SaveState(state)]
        assert (
            not {SaveState(each) for each in states[: position + 1]} & TRANSITIONS[SaveState(state)]
        )
    assert {*states, "failed", "aborted"} == {state.value for state in TRANSITIONS}


@pytest.mark.parametrize("option", [field.name for field in fields(EngineOptions)])
def test_every_engine_option_is_documented(option: str) -> None:
    """docs/options.md has a row for each option of the engine."""
    assert f"| `{option}` |" in (ROOT / "docs" / "options.md").read_text()


def unknown_tests(text: str) -> list[str]:
    """Names in a text, ``tests/FOLDER/FILE.py`` or ``...::TEST``, of what does not exist."""
    unknown = []
    for file, test in set(re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", text)):
        path = ROOT / file
        if not path.is_file() or (test and test not in functions_of(path)):
            unknown.append(f"{file}::{test}" if test else file)
    return sorted(unknown)


@cache
def functions_of(path: Path) -> set[str]:
    """Names of the functions of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_pages_name_exists() -> None:
    """A promise whose test was renamed or removed is found, on any page."""
    pages = [path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))]
    assert unknown_tests("\n".join(pages)) == []


def test_a_wrong_name_of_a_test_is_found() -> None:
    """The test is in a file that exists, or in one that does not."""
    here = "tests/public/test_documents.py"
    names = f"`{here}`, `{here}::test_a_wrong_name_of_a_test_is_found`"
    wrong = [f"{here}::test_that_does_not_exist", "tests/public/test_no_file.py::test_any"]
    assert unknown_tests(" ".join([names, *wrong])) == wrong


def test_every_promise_names_its_test() -> None:
    """Each row of the tables of promises in docs/reliability.md ends with at least one test."""
    text = (DOCS / "reliability.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| promise \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert [row for row in rows if "::test_" not in row.split(" | ")[-1]] == []
    assert len(rows) > 100


def programs() -> dict[str, str]:
    """The Python of each page, by the name of the page or of the program on it.

    A block that begins with ``# NAME.py`` is a program; all other blocks of a page are another.
    Line numbers are those of the page.
    """
    found = {}
    for page in sorted(DOCS.rglob("*.md")):
        if page.name in TESTED_ELSEWHERE:
            continue
        of_page: dict[str, list[str]] = {}
        name = "-".join(page.relative_to(DOCS).with_suffix("").parts)
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^( *)```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
            code = textwrap.dedent(block[2])
            own = re.match(r"# (\w+)\.py\n", code)
            lines = of_page.setdefault(f"{name}-{own[1]}" if own else name, [])
            lines += [""] * (text[: block.start(2)].count("\n") - len(lines))
            lines += code.splitlines()
        found.update({program: "\n".join(lines) for program, lines in of_page.items()})
    return found


PROGRAMS = programs()


Pages = Callable[..., str]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which each program has one of its own."""
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def ran(out: Path) -> Pages:
    """Runs a program, once each time, and returns what it prints."""

    @cache
    def run_program(program: str, time: int = 1) -> str:
        (out / program).mkdir(exist_ok=True)
        file = out / f"{program}.py"
        file.write_text(PROGRAMS[program] + "\n")
        ranks = 2 if program in ON_TWO_RANKS else 1
        return run(str(file), cwd=out / program, ranks=ranks)

    return run_program


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_code_on_the_pages_runs(program: str, ran: Pages) -> None:
    """Every Python block of the documentation runs, after the blocks before it on its page."""
    ran(program)


@pytest.mark.slow
def test_the_program_of_the_tutorial_resumes(ran: Pages) -> None:
    """Started again, it continues where it ended, and prints what the page shows."""
    shown = re.findall(r"^steps .*", (DOCS / "tutorial.md").read_text(), re.MULTILINE)
    printed = ran("tutorial-train") + ran("tutorial-train", 2)
    lines = printed.splitlines()
    assert [line for line in lines if not line.startswith("[Gloo]")] == shown  # torch 2.9's own


LOOKS_AT_MOMENTS = """
saved = {key: torch.zeros(256, 64) for key in ("exp_avg", "exp_avg_sq")}
names = {f"optimizer.state.0.weight.{key}": each for key, each in saved.items()}
dcp.load(names, checkpoint_id="checkpoints/step-3")
held = optimizer.state[model[0].weight]
assert saved["exp_avg"].any() and held["step"] == 30, held
assert all(torch.equal(each, held[key]) for key, each in saved.items())
"""


@pytest.mark.slow
def test_the_tutorial_loads_in_a_new_process(out: Path, ran: Pages) -> None:
    """AdamW's moments are those that were saved, although the optimizer has not begun."""
    (loads, _) = code_blocks("tutorial.md", "Load it")
    ran("tutorial")
    run("-c", loads + LOOKS_AT_MOMENTS, cwd=out / "tutorial")


@pytest.mark.slow
def test_the_program_on_the_page_about_resuming_resumes_in_a_new_process(tmp_path: Path) -> None:
    """The optimizer's state, the schedule and the generators are those that were saved."""
    definitions, trains, resumes, compares, *_ = code_blocks("howto/resume.md")
    assert "def resume" in resumes
    assert "train_step() == expected" in compares
    first = f"{definitions}\n{trains}\nprint(repr(expected), scheduler.last_epoch)"
    second = f"{definitions}\n{resumes}\nassert resume() == 1\n"
    second += "print(repr(train_step()), scheduler.last_epoch)"
    shown = [run("-c", program, cwd=tmp_path) for program in (first, second)]
    assert shown[0] == shown[1]
    assert len(shown[0].split()) == 2


@pytest.mark.slow
def test_what_the_format_page_shows_is_what_it_prints(ran: Pages) -> None:
    """docs/format.md names the files of a real checkpoint and the parts of its manifest."""
    (shown,) = re.findall(
        r"It prints\n\n```text\n(.*?)```", (DOCS / "format.md").read_text(), re.DOTALL
    )
    assert ran("format") == shown


def test_the_manifest_on_the_format_page_is_consistent() -> None:
    """Length and checksum in the footer are those of the line above it."""
    page = (DOCS / "format.md").read_text()
    (line, nbytes, crc32) = re.findall(
        r"<pickle><index>\\n\n(.*?)\\n\n#nostall-manifest (\d{12}) (\w{8})\\n", page, re.DOTALL
    )[0]
    content = line.replace("\n", "").encode() + b"\n"
    assert (len(content), f"{zlib.crc32(content):08x}") == (int(nbytes), crc32)
    assert json.loads(content)["format"] == 1


def messages(source: str) -> Iterator[str]:
    """The texts in a module, except docstrings, with an ellipsis for what is inserted."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (each.value if isinstance(each, ast.Constant) else "…" for each in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield re.sub(r"%(\.\d+f|[sdgr])", "…", str(node.value))


def test_the_readme_names_the_extras_that_there_are() -> None:
    """pip only warns of another name, and installs nothing for it."""
    readme = (ROOT / "README.md").read_text()
    (others,) = re.findall(r"Other extras:(.*?)\.\n", readme, re.DOTALL)
    named = {"fast", *re.findall(r"`(\w+)`", others)}
    assert named == set(metadata("nostall").get_all("Provides-Extra") or ())


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    """Every message that docs/howto/troubleshooting.md explains is one that nostall can give."""
    page = (DOCS / "howto" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^`(.+?)`.*\n: ", page, re.MULTILINE)
    known = [
        message
        for module in (ROOT / "src").rglob("*.py")
        for message in messages(module.read_text(encoding="utf-8"))
    ]
    assert [each for each in quoted if not any(each in message for message in known)] == []
    assert len(quoted) > 40
