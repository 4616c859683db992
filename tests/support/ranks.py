"""Run functions of modules in ``tests/programs`` on real gloo ranks, started with torchrun.

``run_ranks`` starts ranks for one program, ``on_ranks`` for all programs that tests of a file ask
for: each has an engine and a process group of its own, but is not alone in its processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support import loaded
from support.processes import ended
from support.rank_main import NOT_MET, WHOLE_END

TESTS = Path(__file__).parents[1]
TIMEOUT_S = 300.0
"""Ranks that hang take so long, and no others: also not under coverage on a slow machine."""
_RANKS_SEE = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
_NO_DEVICE = {"CUDA_VISIBLE_DEVICES": ""}
"""Ranks are on the CPU, also where there is an accelerator: there may be fewer than ranks."""


def run_python(
    *arguments: str | Path, timeout_s: float, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter that has torch already, without input; its status and output."""
    command = (*loaded.python(), "-W", "ignore", *arguments)
    return ended(*command, cwd=cwd, timeout_s=timeout_s, check=False, environment=environment)


def run_script(
    name: str, *args: str, cwd: Path, timeout_s: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script below ``tests`` in a process of its own; its status and output."""
    return run_python(TESTS / name, *args, cwd=cwd, timeout_s=timeout_s, **environment)


class RanksFailed(AssertionError):
    """The ranks did not end as expected; carries their output."""


def run_ranks(
    world_size: int,
    program: str,
    out: Path,
    *args: str,
    timeout_s: float = TIMEOUT_S,
    check: bool = True,
    whole_end: bool = False,
    with_device: bool = False,
) -> list[Any]:
    """Run ``module:function`` of ``tests/programs`` on every rank; the results in rank order.

    It is called with ``out``, for results and whatever it writes, and ``args``, in a gloo group.
    Unless ``check``, ranks may fail. For a ``whole_end`` interpreters are taken apart, which takes
    0.25 s more each; ``with_device`` the ranks see the accelerator, which they share.
    """
    environment = {WHOLE_END: "1" if whole_end else "", **({} if with_device else _NO_DEVICE)}
    command = [program, str(out), *args]
    status, output = _run(world_size, [command], timeout_s, environment)
    if check and status != 0:
        raise RanksFailed(f"{program} ended with {status}\n{output}")
    return _results(world_size, out)


class Program(NamedTuple):
    """The programs that a test asks ranks for."""

    ranks: int
    name: str
    """``module:function`` and arguments, with spaces between them."""


def on_ranks(*names: str, ranks: int | tuple[int, ...] = 2) -> pytest.MarkDecorator:
    """Give a test, as ``found``, the results of a program in rank order; once for each name.

    And for each number of ranks. A name is ``module:function``, and arguments after spaces.
    """
    numbers = ranks if isinstance(ranks, tuple) else (ranks,)
    programs = [Program(number, name) for number in numbers for name in names]
    ids = [f"{name} on {number}" for number, name in programs]
    return pytest.mark.parametrize("found", programs, ids=ids, indirect=True)


def run_in_turn(programs: Sequence[Program], out: Path) -> dict[Program, list[Any] | RanksFailed]:
    """Results or failure of programs in one start of ranks; those after a failed one fail, too."""
    places = {program: out / f"{number}" for number, program in enumerate(programs)}
    commands = []
    for program, place in places.items():
        name, *args = program.name.split()
        commands.append([name, str(place), *args])
    ranks = programs[0].ranks
    status, output = _run(ranks, commands, TIMEOUT_S + 10 * len(programs), _NO_DEVICE)
    found: dict[Program, list[Any] | RanksFailed] = {}
    failed = None
    for program, place in places.items():
        if failed is None and status != 0 and len([*place.glob("result-*.json")]) < ranks:
            failed = RanksFailed(f"{program.name} ended with {status}\n{output}")
        found[program] = failed or _results(ranks, place)
    if status != 0 and failed is None:
        raise RanksFailed(f"ranks ended with {status} after all programs\n{output}")
    return found


def _run(
    world_size: int, commands: list[list[str]], timeout_s: float, more: dict[str, str]
) -> tuple[int, str]:
    """Start ranks for some programs; their status and output."""
    environment = {**os.environ, **_RANKS_SEE, **more}
    status, output = _ended(world_size, commands, timeout_s, environment)
    if status != 0 and NOT_MET in output:
        # Gloo itself failed to connect ranks, as it did once in thousands of starts on a busy
        # machine ("connectFullMesh failed"): no test is about that.
        status, output = _ended(world_size, commands, timeout_s, environment)
    return status, output


def _results(world_size: int, out: Path) -> list[Any]:
    files = [out / f"result-{rank}.json" for rank in range(world_size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def _ended(
    world_size: int, commands: list[list[str]], timeout_s: float, environment: dict[str, str]
) -> tuple[int, str]:
    """Status and output of programs on all ranks."""
    torchrun = [*loaded.python(), str(TESTS / "support" / "torchrun.py"), "--standalone"]
    torchrun += ["--nproc-per-node", str(world_size), "--no-python"]
    main = [*loaded.python(ranks=True), str(TESTS / "support" / "rank_main.py")]
    process = subprocess.Popen(
        [*torchrun, *main, json.dumps(commands)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise RanksFailed(f"{commands} were not done after {timeout_s:g} s\n{output}") from error
    return process.returncode, output
