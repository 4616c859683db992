"""Accelerate's and the Trainer's sharded checkpoints through nostall, resumed with and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import answer_of
from support.ranks import run_ranks

pytest.importorskip("accelerate", reason="`nox -s accelerate` installs it")
pytest.importorskip("transformers", reason="`nox -s accelerate` installs it")

_PARTS = ["optimizer_0", "pytorch_model_fsdp_0"]


def test_the_trainer_resumes_from_our_checkpoint(tmp_path: Path) -> None:
    """A run that is resumed from our checkpoint ends like an uninterrupted one, bit by bit."""
    for found in run_ranks(2, "accelerate_saves:resumed", tmp_path):
        assert found["names"] == ["checkpoint-2", "checkpoint-4"]
        assert set(_PARTS) < set(found["files"])
        assert found["files"] == found["stock_files"]
        assert found["same"] == {"Trainer": True, "NostallTrainer": True}


def test_rotation_waits_for_the_commit(tmp_path: Path) -> None:
    """With ``save_total_limit=1`` there is a committed checkpoint at every moment."""
    for found in run_ranks(2, "accelerate_saves:rotated", tmp_path):
        assert found["while_saving"] == [[["_saving-checkpoint-4", "checkpoint-2"], "checkpoint-2"]]
        assert found["names"] == ["checkpoint-6"]


def test_the_best_checkpoint_is_kept_and_loaded(tmp_path: Path) -> None:
    """Rotation spares the best checkpoint, and each state names it by its final directory."""
    for found in run_ranks(2, "accelerate_saves:best", tmp_path):
        assert found["names"] == ["checkpoint-10", "checkpoint-4"]
        assert found["best"] == ["run/checkpoint-4", "run/checkpoint-4"]
        assert found["same"]


def test_ranks_that_are_killed_leave_no_checkpoint_in_parts(tmp_path: Path) -> None:
    """A resume ignores the killed run's unfinished checkpoint, and the next run removes it."""
    run_ranks(2, "accelerate_saves:killed", tmp_path, check=False)
    for found in run_ranks(2, "accelerate_saves:after_the_kill", tmp_path):
        assert found["left"] == ["_saving-checkpoint-4", "checkpoint-2"]
        assert found["last"] == "checkpoint-2"
        assert found["same"]
        assert found["names"] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_an_exception_in_training_loses_no_save(tmp_path: Path) -> None:
    """The save before the failing step is committed, and the exception is raised."""
    for found in run_ranks(2, "accelerate_saves:failing", tmp_path):
        assert found == {"message": "the training step fails", "names": ["checkpoint-2"]}


def test_a_loop_of_ones_own_resumes_from_our_checkpoint(tmp_path: Path) -> None:
    """``load_state`` of either accelerator continues an uninterrupted run, bit by bit."""
    for found in run_ranks(2, "accelerate_saves:plain", tmp_path):
        assert found["returned"] == "last"
        assert found["names"] == ["last"]
        assert set(_PARTS) < set(found["files"])
        assert found["same"] == {"Accelerator": True, "NostallAccelerator": True}


def test_named_checkpoints_are_rotated_after_the_commit(tmp_path: Path) -> None:
    """With ``total_limit=1`` the older one stays until the newer one is committed."""
    for found in run_ranks(2, "accelerate_saves:named", tmp_path):
        assert found["while_saving"] == ["checkpoint_0"]
        assert found["same"]
        assert found["names"] == ["checkpoints", "checkpoint_1"]


def test_saves_that_are_the_frameworks_own_are_named_once(tmp_path: Path) -> None:
    """With DDP rank 0 says once that saves wait; not if none are made, or all are ours."""
    found = run_ranks(2, "accelerate_saves:stock", tmp_path)
    assert found[0] == {
        "trainer": ["NostallTrainer saves as the Trainer does, while training waits"],
        "trainer without saves": [],
        "accelerator": ["NostallAccelerator saves as Accelerate does, while training waits"],
        "sharded": [],
        "names": ["checkpoint-2", "checkpoint-4"],
    }
    assert not any(found[1][kind] for kind in ("trainer", "accelerator", "sharded"))


def test_saves_of_one_device_are_the_frameworks_own_and_named(tmp_path: Path) -> None:
    """A process without a launcher says once for each that its saves wait."""
    call = f"one_device(Path({str(tmp_path)!r}))"
    assert answer_of("programs.accelerate_saves", call) == [
        "NostallTrainer saves as the Trainer does, while training waits",
        "NostallAccelerator saves as Accelerate does, while training waits",
    ]


def test_the_lines_of_the_documentation_switch_it_on(tmp_path: Path) -> None:
    """The lines in docs/frameworks.md work, for the Trainer and for a loop of one's own."""
    for found in run_ranks(2, "accelerate_saves:page", tmp_path):
        assert found == {"names": ["accelerate", "trainer"], "trainer": ["checkpoint-2"]}


def test_the_program_of_the_recipes_continues(tmp_path: Path) -> None:
    """Started again with more steps, it goes on from its last checkpoint."""
    for found in run_ranks(2, "accelerate_saves:recipe", tmp_path):
        assert found == {"began": [0, 20], "names": ["checkpoint-30", "checkpoint-40"]}


def test_in_the_steady_state_the_training_thread_commits_nothing(tmp_path: Path) -> None:
    """Nothing is gathered, pickled or published there, as for the first saves."""
    coordinator, other = run_ranks(2, "accelerate_saves:steady", tmp_path)
    for loop in ("Trainer", "Accelerate"):
        assert set(coordinator[loop][0]) >= {"gather", "pickle", "publish"}
        assert coordinator[loop][1] == other[loop][1] == {}
