"""torchtitan's checkpoint manager saves through nostall."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.ranks import run_ranks

pytest.importorskip("torchtitan.components.checkpointer", reason="`nox -s torchtitan` installs it")


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_each_mode_saves_what_torchtitan_loads(tmp_path: Path, mode: str) -> None:
    """The state as of the save call comes back, in torchtitan's manager and in ours."""
    for found in run_ranks(2, "torchtitan_saves:saved_and_loaded", tmp_path, mode):
        assert found["built"] == "NostallCheckpointManager"
        assert found["same"] == {"CheckpointManager": True, "NostallCheckpointManager": True}
        assert "step-3" in found["names"]
        assert "step-1" not in found["names"]


def test_an_incomplete_directory_costs_no_checkpoint(tmp_path: Path) -> None:
    """The newest committed checkpoint stays while its successor is being written."""
    for found in run_ranks(2, "torchtitan_saves:leftover", tmp_path):
        assert found["complete"]
        assert found["names"] == ["step-10", "step-15"]


def test_the_documented_configuration_saves(tmp_path: Path) -> None:
    """The block of docs/frameworks.md, built as a trainer builds it."""
    for found in run_ranks(2, "torchtitan_saves:documented", tmp_path):
        assert found == {"built": "NostallCheckpointManager", "names": ["step-500"]}


def test_the_training_thread_commits_nothing(tmp_path: Path) -> None:
    """Planning and the commit are of another thread, from the first save on."""
    assert run_ranks(2, "torchtitan_saves:steady", tmp_path) == [[{}, {}]] * 2
