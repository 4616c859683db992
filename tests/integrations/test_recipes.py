"""The code of docs/recipes.md runs, with the real packages: ``nox -s recipes`` installs them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from nostall.integrity import is_complete
from support import loaded
from support.pages import code_blocks
from support.ranks import run_python, run_ranks

ON_TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
FITTED_AGAIN = """
again = trainer.fit()
assert again.checkpoint.path == result.checkpoint.path, again
"""
SMALL_RAY = "ray.init(num_cpus=2, include_dashboard=False, object_store_memory=10**8)\n"


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


def run(program: str, folder: Path, *command: str) -> str:
    """Run a program of the page in a directory; what it prints."""
    (folder / "program.py").write_text(program)
    # Ray has sockets there, whose names are at most 107 bytes long.
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as short:
        ray = {"RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        itself = {loaded.EXECUTABLE: loaded.executable(), "OMP_NUM_THREADS": "1"}
        environment: dict[str, Any] = {**itself, **ray}
        ended = run_python(*command, "program.py", cwd=folder, timeout_s=250, **environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_whole_program_continues_with_the_same_losses(tmp_path: Path) -> None:
    """Interrupted after step 25 and started again, it goes on from step 20 bit by bit."""
    (program,) = code_blocks("recipes.md", "A whole program")
    assert "range(first, 101)" in program
    until = {last: program.replace("first, 101", f"first, {last + 1}") for last in (25, 40)}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    expected = run(until[40], tmp_path / "whole").splitlines()
    assert run(until[25], tmp_path / "parts").splitlines() == expected[:25]
    assert run(until[40], tmp_path / "parts").splitlines() == expected[20:]
    assert len(list((tmp_path / "parts" / "run").glob("step-*"))) == 2


def test_a_plain_loop_keeps_its_newest_checkpoints(tmp_path: Path) -> None:
    """On two ranks: the two newest are complete, older ones are removed."""
    (program,) = code_blocks("recipes.md", "A plain loop")
    run(program, tmp_path, *ON_TWO_RANKS)
    saved = sorted((tmp_path / "run").iterdir())
    assert [path.name for path in saved] == ["step-30", "step-40"]
    assert all(map(is_complete, saved))
    model = torch.nn.Linear(16, 16)  # as on the page about resuming: of a job that has not begun
    optimizer = torch.optim.AdamW(model.parameters())
    own, moments = get_state_dict(model, optimizer)
    found = {"model": own, "optimizer": moments, "step": 0}
    dcp.load(found, checkpoint_id=saved[1])
    set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=moments)
    assert (found["step"], optimizer.state[model.weight]["step"]) == (40, 40)


@needs("ray")
def test_ray_registers_checkpoints_that_are_committed(tmp_path: Path) -> None:
    """Two workers; Ray keeps the two newest. Started again, they resume from the last one."""
    (program,) = code_blocks("recipes.md", "Ray Train")
    program = program.replace("/tmp/ray-results", str(tmp_path / "results"))
    before, made, after = program.partition("trainer = ")
    run(before + SMALL_RAY + made + after + FITTED_AGAIN, tmp_path)
    saved = sorted((tmp_path / "results" / "job").glob("step-*"))
    assert [path.name for path in saved] == ["step-20", "step-30"]
    assert all(map(is_complete, saved))


@needs("torchtune")
def test_torchtunes_client_saves_through_nostall(tmp_path: Path) -> None:
    """Two epochs are committed, and torchtune's checkpointer loads the second."""
    for found in run_ranks(2, "recipes:torchtune", tmp_path):
        assert found == {"same": True, "epoch": 1, "committed": ["dist_epoch_0", "dist_epoch_1"]}


@needs("nemo_automodel")
def test_nemo_automodel_saves_through_nostall(tmp_path: Path) -> None:
    """Model and optimizer are as of the save call, and Automodel's checkpointer loads them."""
    for found in run_ranks(2, "recipes:nemo_automodel", tmp_path):
        assert found == {"same": True, "committed": ["step_1/model", "step_1/optim"]}
