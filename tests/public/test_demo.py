"""The demo on slow machines."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support import loaded
from support.ranks import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = """
import sys, time
for _ in range(60):
    open(sys.argv[1], "a").write("a step\\n")
    time.sleep(0.1)
"""
STUCK = """
import signal
print("a step", flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The demo as a module."""
    return importlib.import_module("examples.demo")


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program as the demo starts a run."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_slow_run_is_waited_for_as_long_as_it_makes_progress(
    demo: ModuleType, tmp_path: Path
) -> None:
    """A machine may need any time: the run takes three times as long as it may be still."""
    run = demo.wait_for(start(STEPS, str(tmp_path / "losses")), tmp_path, still_limit_s=2)
    assert run.returncode == 0, run.output
    assert (tmp_path / "losses").read_text().count("a step") == 60


def test_a_run_without_progress_is_stopped_and_what_it_printed_is_shown(
    demo: ModuleType, tmp_path: Path
) -> None:
    """The demo ends although a run does not, and says why."""
    process = start(STUCK)
    with pytest.raises(demo.PromiseBroken, match=r"no progress for 1 s.*\na step\n"):
        demo.wait_for(process, tmp_path, still_limit_s=1)
    assert process.returncode is not None


@pytest.mark.slow
def test_a_machine_without_time_measures_one_round_of_a_smaller_state(tmp_path: Path) -> None:
    """Without time, the measurement shrinks instead of failing."""
    size = ("--width", "512", "--rounds", "3", "--seconds", "0")
    torchrun = ("-m", "support.torchrun", "--standalone", "--nproc-per-node", "2")
    ranks = ("--no-python", *loaded.python(ranks=True), "-u", "-m", "support.ending")
    measure = (str(EXAMPLES / "train.py"), "--measure", "--out", str(tmp_path / "saves"))
    run = run_python(*torchrun, *ranks, *measure, *size, timeout_s=250)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    saves = [line for line in lines if "contender" in line]
    assert sorted((save["contender"], save["round"]) for save in saves) == sorted(
        (name, turn) for name in ("nostall", "dcp.save", "dcp.async_save") for turn in (0, 1)
    )
    assert max(save["nbytes"] for save in saves) < 16 << 20  # at width 512: 150 MiB
    assert [line["round"] for line in lines if "loader" in line] == [0, 0, 1, 1]
