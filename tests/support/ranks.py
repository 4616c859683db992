"""Run a function of a module in ``tests/programs`` on real gloo ranks, started with torchrun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

from support import loaded
from support.rank_main import NOT_MET, WHOLE_END

TESTS = Path(__file__).parents[1]
TIMEOUT_S = 120.0
_RANKS_SEE = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
_NO_DEVICE = {"CUDA_VISIBLE_DEVICES": ""}
"""Ranks are on the CPU, also where there is an accelerator: there may be fewer than ranks."""


def run_script(
    name: str, *args: str, cwd: Path, timeout_s: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script below ``tests`` in a process of its own; its status and output."""
    return subprocess.run(
        [*loaded.python(), "-W", "ignore", str(TESTS / name), *args],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


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

    Args:
        world_size: Number of ranks.
        program: ``module:function``; called with ``out`` and ``args`` after
            ``init_process_group("gloo")``.
        out: Directory for results and for whatever the program writes.
        *args: More arguments, as strings.
        timeout_s: The whole process group is killed after this many seconds.
        check: Whether a rank that fails is an error here.
        whole_end: Whether interpreters are taken apart at the end, which takes 0.25 s more each.
        with_device: Whether the ranks see the accelerator, which they share.
    """
    out.mkdir(parents=True, exist_ok=True)
    command = [program, str(out), *args]
    environment = {**os.environ, **_RANKS_SEE, WHOLE_END: "1" if whole_end else ""}
    environment |= {} if with_device else _NO_DEVICE
    was_there = set(out.iterdir())
    status, output = _ended(world_size, command, timeout_s, environment)
    if status != 0 and NOT_MET in output:
        # Gloo itself failed to connect ranks, as it did once in thousands of starts on a busy
        # machine ("connectFullMesh failed"): no test is about that. The other ranks may have begun.
        for left in set(out.iterdir()) - was_there:
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()
        status, output = _ended(world_size, command, timeout_s, environment)
    results = []
    for rank in range(world_size):
        result = out / f"result-{rank}.json"
        results.append(json.loads(result.read_text()) if result.exists() else None)
    if check and status != 0:
        raise RanksFailed(f"{program} ended with {status}\n{output}")
    return results


def _ended(
    world_size: int, command: list[str], timeout_s: float, environment: dict[str, str]
) -> tuple[int, str]:
    """Status and output of a program on all ranks."""
    torchrun = [*loaded.python(), str(TESTS / "support" / "torchrun.py"), "--standalone"]
    torchrun += ["--nproc-per-node", str(world_size), "--no-python"]
    main = [*loaded.python(ranks=True), str(TESTS / "support" / "rank_main.py")]
    process = subprocess.Popen(
        [*torchrun, *main, *command],
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
        raise RanksFailed(f"{command[0]} was not done after {timeout_s:g} s\n{output}") from error
    return process.returncode, output
