"""Parts that adapters share: saves committed by polling, and removals that wait for commits."""

from __future__ import annotations

import errno
import importlib
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from nostall.integrations._saves import Saves
from nostall.integrity import is_complete
from nostall.removal import remove_checkpoint
from support.faults import Fault, Hold, inject
from support.ranks import run_ranks


@pytest.mark.parametrize(
    ("adapter", "absent", "advice"),
    [
        ("accelerate", "accelerate", "needs accelerate: pip install accelerate ("),
        ("lightning", "lightning", "needs lightning: pip install lightning ("),
        ("torchtitan", "torchtitan", "needs torchtitan: pip install torchtitan ("),
        (
            "transformers",
            "accelerate",
            "needs transformers and accelerate: pip install transformers accelerate (",
        ),
    ],
)
def test_a_framework_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, adapter: str, absent: str, advice: str
) -> None:
    """In one line, with everything that the adapter needs, and one traceback."""
    monkeypatch.delitem(sys.modules, f"nostall.integrations.{adapter}", raising=False)
    all_absent = {absent, "lightning_fabric", "pytorch_lightning"}
    imported = [name for name in sys.modules if name.partition(".")[0] in all_absent]
    for name in all_absent.union(imported):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(advice)) as raised:
        importlib.import_module(f"nostall.integrations.{adapter}")
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("Traceback") == 1
    assert str(raised.value).count("pip install") == 1


@pytest.fixture
def saves() -> Iterator[Saves]:
    opened = Saves(remove_checkpoint)
    yield opened
    opened.close()


def _state(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((100,), float(step))}


def test_a_removal_waits_for_the_saves_before_it(tmp_path: Path, saves: Saves) -> None:
    """At no moment is there no committed checkpoint."""
    older, newer = str(tmp_path / "older"), str(tmp_path / "newer")
    saves.save(_state(1), older)
    saves.poll(wait=True)
    with Hold("chunk") as hold:
        hold.stop(saves.save, _state(2), newer)
        saves.remove(older)
        assert is_complete(older)
        hold.release()
        saves.poll(wait=True)
    assert is_complete(newer)
    assert not Path(older).exists()


def test_a_failed_save_keeps_the_checkpoint_before_it(tmp_path: Path, saves: Saves) -> None:
    """A checkpoint that a failed save was to replace is removed after the next success."""
    older, failed, newest = (str(tmp_path / name) for name in ("older", "failed", "newest"))
    saves.save(_state(1), older)
    saves.poll(wait=True)
    with Hold("start") as hold:
        with inject(hold.fault, Fault.errno("chunk", errno.ENOSPC)):
            saves.save(_state(2), failed)
        saves.remove(older)
        hold.release()
        with pytest.raises(CheckpointException, match="No space left"):
            saves.poll(wait=True)
    saves.poll(wait=True)
    assert is_complete(older)
    saves.save(_state(3), newest)
    saves.poll(wait=True)
    assert not Path(older).exists()
    assert is_complete(newest)


def test_a_failed_save_costs_no_later_one(tmp_path: Path, saves: Saves) -> None:
    """Closing raises the error of the first save and commits the second."""
    failed, newest = str(tmp_path / "failed"), str(tmp_path / "newest")
    with Hold("start") as hold:
        with inject(hold.fault, Fault.errno("chunk", errno.ENOSPC)):
            saves.save(_state(1), failed)
        saves.save(_state(2), newest)
        hold.release()
        with pytest.raises(CheckpointException, match="No space left"):
            saves.close()
    assert is_complete(newest)


def test_a_checkpoint_that_is_saved_again_is_not_removed(tmp_path: Path, saves: Saves) -> None:
    """A save to a path that waits for its removal takes the removal back."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    with Hold("chunk") as hold:
        with inject(hold.fault):
            saves.save(_state(1), first)
        saves.remove(first)
        hold.wait_reached()
        hold.release()
    saves.save(_state(2), second)
    saves.remove(second)
    saves.save(_state(3), second)
    saves.poll(wait=True)
    assert is_complete(second)


def test_what_comes_before_a_commit_fails_it_on_every_rank(tmp_path: Path) -> None:
    """If a part is not written, no rank commits, and all know; otherwise nobody has to poll."""
    for rank, found in enumerate(run_ranks(2, "adapters:before_commit", tmp_path)):
        assert "cannot write beside it" in found["message"]
        assert found["committed"] == ["second", "third", "fourth", "fifth"]
        assert found["calls"] == (0 if rank else 4)
        assert found["calls though a rank failed"] == 0
        assert not found["on the training thread"]
