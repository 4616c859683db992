"""Lightning saves through nostall, and resumes from what it saved with and without nostall."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from support.faults import Hold, inject
from support.pages import code_blocks
from support.processes import answer_of
from support.ranks import run_ranks
from support.states import all_equal

pytest.importorskip("lightning.pytorch", reason="`nox -s lightning` installs it")

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy

from nostall.integrations.lightning import (  # needs Lightning
    NostallCheckpointIO,
    NostallModelParallelStrategy,
)
from programs.lightning_saves import QUIET, Regression, fit, trainer  # as above

# Lightning warns about its use of torch, and about workers that such data does not need.
pytestmark = pytest.mark.filterwarnings("ignore")

SHARDED = [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]


def during_a_fit(act: Callable[[], None], ours: NostallCheckpointIO) -> None:
    """Call a function when training has begun; returns when the fit is over."""

    class Acts(pl.Callback):  # type: ignore[misc]  # Lightning is not installed for mypy
        def on_train_start(self, trainer: Any, module: Any) -> None:
            act()

    pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        plugins=[ours],
        callbacks=[Acts()],
        enable_checkpointing=False,
        **QUIET,
    ).fit(Regression())


def test_lightning_resumes_from_our_file(tmp_path: Path) -> None:
    """A run that is resumed from our checkpoint ends like an uninterrupted one, bit by bit."""
    expected, _ = fit(tmp_path / "stock", 4)
    _, names = fit(tmp_path / "ours", 2, plugins=[NostallCheckpointIO()])
    assert names == ["epoch=1.ckpt"]
    saved = tmp_path / "ours" / names[0]
    for kind in ([], [NostallCheckpointIO()]):
        resumed, _ = fit(tmp_path / "resumed", 4, resume=saved, plugins=kind)
        assert all_equal(resumed, expected)


def test_the_file_holds_what_lightning_puts_into_it(tmp_path: Path) -> None:
    """Our file holds the same as Lightning's own, and holds it as of the save."""
    state: dict[str, Any] = {"state_dict": {"weight": torch.arange(6.0)}, "loops": {"epoch": 3}}
    ours = NostallCheckpointIO()

    def save_and_change() -> None:
        ours.save_checkpoint(state, tmp_path / "new" / "one.ckpt")
        state["state_dict"]["weight"].zero_()

    during_a_fit(save_and_change, ours)
    loaded = torch.load(tmp_path / "new" / "one.ckpt")
    assert loaded["loops"] == {"epoch": 3}
    assert loaded["state_dict"]["weight"].tolist() == [0, 1, 2, 3, 4, 5]


def test_the_older_file_stays_until_the_newer_one_is_committed(tmp_path: Path) -> None:
    """Rotation while a save is being written leaves the newest committed checkpoint alone."""
    older, newer = tmp_path / "older.ckpt", tmp_path / "newer.ckpt"
    ours = NostallCheckpointIO()
    ours.save_checkpoint({"step": 1}, older)

    def save_and_rotate() -> None:
        with Hold("chunk") as hold:
            hold.stop(ours.save_checkpoint, {"step": 2}, newer)
            ours.remove_checkpoint(older)
            assert older.exists()
            hold.release()

    during_a_fit(save_and_rotate, ours)
    assert [path.name for path in tmp_path.iterdir()] == ["newer.ckpt"]


def test_a_failed_save_costs_no_older_file(tmp_path: Path) -> None:
    """A file whose successor could not be written stays, until another successor is written."""
    older, taken, newest = (tmp_path / name for name in ("older.ckpt", "taken", "newest.ckpt"))
    ours = NostallCheckpointIO()
    ours.save_checkpoint({"step": 1}, older)
    taken.mkdir()

    def save_and_rotate() -> None:
        with Hold("chunk") as hold:
            with inject(hold.fault):
                ours.save_checkpoint({"step": 2}, taken)
            ours.remove_checkpoint(older)
            hold.release()

    with pytest.raises(CheckpointException, match="taken"):
        during_a_fit(save_and_rotate, ours)
    assert torch.load(older) == {"step": 1}
    ours.save_checkpoint({"step": 3}, newest)
    assert not older.exists()
    assert torch.load(newest) == {"step": 3}


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook"])
def test_ranks_that_lightning_starts_save_and_bring_back_the_weights(
    tmp_path: Path, strategy: str
) -> None:
    """Spawned and forked ranks train; the process that started them has what they have saved."""
    call = f"launched(Path({str(tmp_path)!r}), {strategy!r})"
    assert answer_of("programs.lightning_saves", call) == {
        "names": ["after.ckpt", "epoch=1.ckpt"],
        "trained": True,
        "same": [True, True],
    }


def test_a_checkpoint_that_is_saved_after_the_fit_is_there(tmp_path: Path) -> None:
    """``trainer.save_checkpoint`` outside of ``fit`` returns when the file can be loaded."""
    ours, model = NostallCheckpointIO(), Regression()
    fitted = trainer(tmp_path, 1, plugins=[ours])
    fitted.fit(model)
    with Hold("chunk") as hold, inject(hold.fault):
        saving = Thread(target=fitted.save_checkpoint, args=[tmp_path / "after.ckpt"])
        saving.start()
        hold.wait_reached()
        assert saving.is_alive()
        assert not (tmp_path / "after.ckpt").exists()
        hold.release()
        saving.join(60)
    loaded = Regression.load_from_checkpoint(tmp_path / "after.ckpt")
    assert all_equal(list(loaded.parameters()), list(model.parameters()))


def test_fabric_saves_before_it_goes_on(tmp_path: Path) -> None:
    """``Fabric.save`` returns when the file is there, and ``Fabric.load`` loads it."""
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[NostallCheckpointIO()])
    model, other = (fabric.setup(torch.nn.Linear(3, 3)) for _ in range(2))
    fabric.save(tmp_path / "one.ckpt", {"model": model, "step": 7})
    assert torch.load(tmp_path / "one.ckpt")["step"] == 7
    assert fabric.load(tmp_path / "one.ckpt", {"model": other}) == {"step": 7}
    assert all_equal(list(other.parameters()), list(model.parameters()))


def test_addresses_mean_what_they_mean_to_lightning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In and after a fit: other file systems, addresses of local files, and the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    paths = ["memory://runs/one.ckpt", f"file://{tmp_path}/two.ckpt", "~/three.ckpt"]
    ours = NostallCheckpointIO()

    def save(step: int) -> None:
        for path in paths:
            ours.save_checkpoint({"step": step}, path)

    during_a_fit(lambda: save(1), ours)
    assert [ours.load_checkpoint(path)["step"] for path in paths] == [1, 1, 1]
    save(2)
    assert [TorchCheckpointIO().load_checkpoint(path)["step"] for path in paths] == [2, 2, 2]
    files = sorted(path.name for path in tmp_path.glob("**/*") if path.is_file())
    assert files == ["three.ckpt", "two.ckpt"]
    ours.remove_checkpoint(paths[0])
    with pytest.raises(FileNotFoundError):
        ours.load_checkpoint(paths[0])


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
    """The trainers in docs/frameworks.md save, on one device and with a sharded strategy."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(code_blocks("frameworks.md")[0], namespace)
    namespace["trainer"].fit(Regression())
    (file,) = tmp_path.glob("**/*.ckpt")
    assert torch.load(file)["epoch"] == 2
    for found in run_ranks(2, "lightning_saves:documented", tmp_path / "sharded"):
        assert found == {"files": SHARDED}


def test_sharded_checkpoints_that_are_saved_after_the_fit_are_there(tmp_path: Path) -> None:
    """They are complete where Lightning's strategy has them, also if the path is an address."""
    for found in run_ranks(2, "lightning_saves:after_the_fit", tmp_path):
        assert found["NostallModelParallelStrategy"] == found["ModelParallelStrategy"]
        assert "memory:/runs/two.ckpt/meta.pt" in found["ModelParallelStrategy"]


def test_the_program_of_the_recipes_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started again with more epochs, it goes on from its last checkpoint."""
    monkeypatch.chdir(tmp_path)
    (program,) = code_blocks("recipes.md", "Lightning")
    for epochs in (2, 4):
        names: dict[str, Any] = {}
        exec(program.replace("max_epochs=4", f"max_epochs={epochs}, logger=False"), names)
        assert torch.load("final.ckpt")["epoch"] == epochs
        assert names["trainer"].fit_loop.epoch_progress.total.completed == epochs
        assert len(list(Path("run").glob("epoch=*"))) == 2
        assert torch.load("run/last.ckpt")["global_step"] == 32 * epochs


def test_meta_is_committed_with_the_tensors(tmp_path: Path) -> None:
    """A newer ``meta.pt`` beside older tensors, as a crash may leave them, is not used."""
    for found in run_ranks(2, "lightning_saves:overwritten", tmp_path):
        assert found == {"began": [1]}


def test_an_exception_in_training_loses_no_save(tmp_path: Path) -> None:
    """The save before the failing step is committed, and the exception is raised."""
    for found in run_ranks(2, "lightning_saves:failing", tmp_path):
        assert found["message"] == "the training step fails"
        assert found["files"] == [".metadata"]


def test_a_plugin_beside_lightnings_strategy_for_shards_says_so(tmp_path: Path) -> None:
    """Once, on rank 0, when a trainer is made, whatever it keeps; beside no other strategy."""
    for rank, found in enumerate(run_ranks(2, "lightning_saves:beside_a_strategy", tmp_path)):
        says = {"made": [] if rank else ["NostallCheckpointIO has no effect"], "run": []}
        names = [f"epoch={number}.ckpt" for number in range(3)]
        assert found["keeps 1"] == {"names": names[2:], **says}
        assert found["keeps -1"] == {"names": names, **says}
        assert found["others"] == []


@pytest.mark.parametrize(
    ("strategy", "warned"),
    [
        (partial(FSDPStrategy, state_dict_type="sharded"), 1),
        (partial(FSDPStrategy, state_dict_type="full"), 0),
        (NostallModelParallelStrategy, 0),
    ],
    ids=["sharded", "full", "nostall's"],
)
def test_a_plugin_warns_beside_a_strategy_that_saves_shards_while_training_waits(
    strategy: Callable[[], Any], warned: int
) -> None:
    """Lightning makes no trainer with FSDP without an accelerator, so its connector is played."""

    class Connector:
        def __init__(self) -> None:
            self.strategy = strategy()
            self.has_plugin = bool(NostallCheckpointIO())

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert Connector().has_plugin
    assert len([each for each in said if "no effect" in str(each.message)]) == warned


def test_a_strategy_that_saves_as_lightning_does_says_so() -> None:
    """Full state dicts are assembled by Lightning, and written while training waits."""
    with pytest.warns(UserWarning, match="saves as Lightning does, while training waits"):
        NostallModelParallelStrategy(save_distributed_checkpoint=False)


def test_options_of_storage_are_refused(tmp_path: Path) -> None:
    """Lightning's ``storage_options`` mean object stores."""
    options: Any = {"key": "value"}
    with pytest.raises(TypeError, match="storage_options"):
        NostallCheckpointIO().save_checkpoint({}, tmp_path / "one.ckpt", options)


def test_in_the_steady_state_the_training_thread_commits_nothing(tmp_path: Path) -> None:
    """Nothing is gathered, pickled or published there, as for the first saves."""
    coordinator, other = run_ranks(2, "lightning_saves:steady", tmp_path)
    assert set(coordinator[0]) >= {"gather", "pickle", "publish"}
    assert coordinator[1] == other[1] == {}
