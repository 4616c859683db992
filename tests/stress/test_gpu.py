"""Saves off an accelerator and loads onto it: what is copied, when, and what is left there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from programs import accelerator
from support.ranks import TESTS, run_python, run_ranks

BARE = """
import runpy, sys
# As if they were not installed.
sys.modules.update(dict.fromkeys(("hypothesis", "isal", "nox", "pytest")))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


FAIL_THEMSELVES = (
    {"dcp.async_save pinned stager"} if torch.__version__.startswith("2.11.") else set[str]()
)
"""Contenders of stock that fail in torch's own code: a ``KeyError`` in the stager of torch 2.11."""


def run_command(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", BARE, TESTS / "stress" / "gpu.py", *options, cwd=out, timeout_s=100)


needs_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")


@pytest.mark.gpu
@needs_one
@pytest.mark.parametrize(
    "check", accelerator.ANYWHERE + accelerator.WITH_CUDA, ids=lambda check: check.__name__
)
def test_on_an_accelerator(check: accelerator.Check, tmp_path: Path) -> None:
    """Each of these says in its own docstring what it promises."""
    check(tmp_path, "cuda")


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),  # a rehearsal
        pytest.param("cuda", marks=[pytest.mark.gpu, needs_one]),
    ],
)
def test_ranks_that_share_a_device_save_and_load_what_is_on_it(device: str, tmp_path: Path) -> None:
    """Split saves, overlapped ones and dcp.async_save, into the steady state, loaded by stock."""
    found = run_ranks(
        2, "ranks_on_device:everything", tmp_path, device, with_device=device == "cuda"
    )
    assert len(found[0]) == 15
    for rank in found:
        assert {name: wrong for name, wrong in rank.items() if wrong} == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator here")
def test_the_command_for_accelerators_says_that_there_is_none(tmp_path: Path) -> None:
    """With an exit status of its own, and without a file that could be taken for a result."""
    done = run_command(tmp_path)
    assert done.returncode == 3, done.stderr
    assert "no accelerator" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_for_accelerators_can_be_rehearsed(tmp_path: Path) -> None:
    """Each step runs with torch, psutil and typing_extensions alone, and writes one file."""
    done = run_command(tmp_path, "--device", "cpu", "--bytes", "65536", "--seconds", "0")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    assert found["complete"]
    assert found["device"] == "cpu, a rehearsal"
    expected = {check.__name__: None for check in accelerator.ANYWHERE}
    assert {name: each["failure"] for name, each in found["checks"].items()} == expected
    assert list(found["benchmarks"]) == ["large", "many"]
    assert list(found["loads"]) == ["large", "many"]
    for benchmark in found["loads"].values():
        assert {"nostall.load", "dcp.load"} <= benchmark["contenders"].keys()
        for row in benchmark["contenders"].values():
            assert (row["wrong"], row["error"]) == ([], None)
            assert len(row["load_s"]) >= 1
    for benchmark in found["benchmarks"].values():
        assert len(benchmark["limits"]["pinned_copy_s"]) >= 1
        assert {"nostall", "nostall overlapped", "dcp.save"} <= benchmark["ratios"].keys()
        failed = {name for name, row in benchmark["contenders"].items() if row["error"]}
        assert failed == FAIL_THEMSELVES
        for name, row in benchmark["contenders"].items():
            assert row["wrong"] == [] or name in failed
