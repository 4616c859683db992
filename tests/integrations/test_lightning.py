"""Lightning saves through nostall, and resumes from what it saved with and without nostall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from nostall.testing import Hold, inject
from support.pages import code_blocks
from support.ranks import run_ranks

pytest.importorskip("lightning.pytorch", reason="`nox -s lightning` installs it")

from nostall.integrations.lightning import NostallCheckpointIO  # needs Lightning
from programs.lightning_saves import Regression, fit, same  # as above

# Lightning warns about its use of torch, and about workers that such data does not need.
pytestmark = pytest.mark.filterwarnings("ignore")

SHARDED = [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]


def test_lightning_resumes_from_our_file(tmp_path: Path) -> None:
    """A run that is resumed from our checkpoint ends like an uninterrupted one, bit by bit."""
    expected, _ = fit(tmp_path / "stock", 4)
    _, names = fit(tmp_path / "ours", 2, plugins=[NostallCheckpointIO()])
    assert names == ["epoch=1.ckpt"]
    saved = tmp_path / "ours" / names[0]
    for kind in ([], [NostallCheckpointIO()]):
        resumed, _ = fit(tmp_path / "resumed", 4, resume=saved, plugins=kind)
        assert same(resumed, expected)


def test_the_file_holds_what_lightning_puts_into_it(tmp_path: Path) -> None:
    """Our file holds the same as Lightning's own, and holds it as of the save."""
    state: dict[str, Any] = {"state_dict": {"weight": torch.arange(6.0)}, "loops": {"epoch": 3}}
    ours = NostallCheckpointIO()
    ours.save_checkpoint(state, tmp_path / "new" / "one.ckpt")
    state["state_dict"]["weight"].zero_()
    ours.teardown()
    loaded = torch.load(tmp_path / "new" / "one.ckpt")
    assert loaded["loops"] == {"epoch": 3}
    assert loaded["state_dict"]["weight"].tolist() == [0, 1, 2, 3, 4, 5]


def test_the_older_file_stays_until_the_newer_one_is_committed(tmp_path: Path) -> None:
    """Rotation while a save is being written leaves the newest committed checkpoint alone."""
    older, newer = tmp_path / "older.ckpt", tmp_path / "newer.ckpt"
    ours = NostallCheckpointIO()
    ours.save_checkpoint({"step": 1}, older)
    ours.load_checkpoint(older)
    with Hold("chunk") as hold:
        with inject(hold.fault):
            ours.save_checkpoint({"step": 2}, newer)
        hold.wait_reached()
        ours.remove_checkpoint(older)
        assert older.exists()
        hold.release()
        ours.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["newer.ckpt"]


def test_a_failed_save_costs_no_older_file(tmp_path: Path) -> None:
    """A file whose successor could not be written stays, until another successor is written."""
    older, taken, newest = (tmp_path / name for name in ("older.ckpt", "taken", "newest.ckpt"))
    ours = NostallCheckpointIO()
    ours.save_checkpoint({"step": 1}, older)
    ours.load_checkpoint(older)
    taken.mkdir()
    with Hold("chunk") as hold:
        with inject(hold.fault):
            ours.save_checkpoint({"step": 2}, taken)
        ours.remove_checkpoint(older)
        hold.release()
        with pytest.raises(CheckpointException, match="taken"):
            ours.teardown()
    assert torch.load(older) == {"step": 1}
    ours.save_checkpoint({"step": 3}, newest)
    ours.teardown()
    assert not older.exists()
    assert torch.load(newest) == {"step": 3}


def test_ranks_of_ddp_resume_from_our_file(tmp_path: Path) -> None:
    """With DDP rank 0 writes the one file, which all ranks resume from."""
    for found in run_ranks(2, "lightning_saves:ddp", tmp_path):
        assert found == {"names": ["epoch=1.ckpt"], "same": True}


def test_sharded_checkpoints_are_resumed_with_and_without_nostall(tmp_path: Path) -> None:
    """Each rank's shards, and what is in ``meta.pt``, come back under either strategy."""
    for rank, found in enumerate(run_ranks(2, "lightning_saves:sharded", tmp_path)):
        assert found["names"] == ["epoch=1.ckpt"]
        assert found["files"] == SHARDED
        assert found["rows"] == ([8, 8, 1, 1], [8, 8, 0, 0])[rank]
        assert found["same"] == {
            "ModelParallelStrategy": True,
            "NostallModelParallelStrategy": True,
        }


def test_the_documented_trainers_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of docs/frameworks.md, for one device and for a sharded strategy."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(code_blocks("frameworks.md")[0], namespace)
    namespace["trainer"].fit(Regression())
    (file,) = tmp_path.glob("**/*.ckpt")
    assert torch.load(file)["epoch"] == 2
    for found in run_ranks(2, "lightning_saves:documented", tmp_path / "sharded"):
        assert found == {"files": SHARDED}


def test_meta_is_committed_with_the_tensors(tmp_path: Path) -> None:
    """A newer ``meta.pt`` beside older tensors, as a crash may leave them, is not used."""
    for found in run_ranks(2, "lightning_saves:overwritten", tmp_path):
        assert found == {"began": [1]}


def test_an_exception_in_training_loses_no_save(tmp_path: Path) -> None:
    """The save before the failing step is committed, and the exception is raised."""
    for found in run_ranks(2, "lightning_saves:failing", tmp_path):
        assert found["message"] == "the training step fails"
        assert found["files"] == [".metadata"]


def test_options_of_storage_are_refused(tmp_path: Path) -> None:
    """Lightning's ``storage_options`` mean object stores."""
    options: Any = {"key": "value"}
    with pytest.raises(TypeError, match="storage_options"):
        NostallCheckpointIO().save_checkpoint({}, tmp_path / "one.ckpt", options)
