"""The manager in one process: what it saves, finds, restores and removes."""

from __future__ import annotations

import errno
import math
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils.data import DataLoader

import nostall
from nostall import CheckpointManager, KeepBest, KeepEvery, KeepLatest, PerRank
from nostall._engine import default_engine
from nostall._manager.contents import About, read_about
from nostall._manager.steps import StepDirectories, held
from nostall.core import abort_all
from nostall.errors import (
    DamagedCheckpointError,
    NostallError,
    OptionError,
    SaveAbortedError,
    SaveTimeoutError,
    UnknownMetadataError,
    WriteError,
)
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.integrity import Verification
from nostall.options import EngineOptions
from support import loaded
from support.faults import Fault, Hold, inject
from support.processes import resident_nbytes
from support.training import Job, disturb
from support.waiting import wait_until

NAMES = "step-%09d"


class OfAnotherPlanner:
    """A class of a foreign planner, unknown to nostall."""


class OfItsOwn:
    """Its state cannot be pickled."""

    def state_dict(self) -> dict[str, Any]:
        return {"f": lambda: None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def numbered(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step))}


def saved(manager: CheckpointManager, *steps: int, **arguments: Any) -> None:
    for step in steps:
        manager.save(step, numbered(step), **arguments).result()


def is_step(state: dict[str, Any], step: int) -> bool:
    return torch.equal(state["weight"], torch.full((100,), float(step)))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


@contextmanager
def stopped() -> Iterator[Hold]:
    """The save that is scheduled in the block stops before it writes."""
    with Hold() as hold, inject(hold.fault):
        yield hold


# --- resuming -------------------------------------------------------------------------------------


def test_a_resumed_run_continues_as_if_it_had_not_ended(tmp_path: Path) -> None:
    """Losses are equal bit by bit: model, optimizer, schedule, data, and all generators."""
    job = Job()
    job.train(4)
    with CheckpointManager(tmp_path) as manager:
        manager.save(4, job.state, metrics={"loss": 0.5}, extra={"note": [1, (2, 3)]})
        expected = job.train(5)
    disturb()
    resumed = Job()
    restored = CheckpointManager(tmp_path).restore(resumed.state)
    assert restored is not None
    assert (restored.step, restored.metrics) == (4, {"loss": 0.5})
    assert restored.extra == {"note": [1, (2, 3)]}
    assert resumed.state["epoch"] == 4
    assert resumed.train(5) == expected
    assert resumed.scheduler.state_dict() == job.scheduler.state_dict()


def test_restoring_into_a_job_that_has_trained_on(tmp_path: Path) -> None:
    """A return to an earlier step in the same process: present tensors take the saved values."""
    job = Job()
    manager = CheckpointManager(tmp_path)
    job.train(2)
    manager.save(2, job.state)
    expected = job.train(3)
    manager.save(5, job.state)
    assert manager.restore(job.state, step=2) is not None
    assert job.train(3) == expected
    manager.close()


def test_the_first_save_after_a_resume_reuses_its_plan(tmp_path: Path) -> None:
    """After a restore, a save of an equal structure reuses the plan of the loaded checkpoint."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1)
    with CheckpointManager(tmp_path) as resumed:
        resumed.restore(numbered(0))
        saved(resumed, 2)
        assert resumed._cache.verified_loaded
        assert nostall.verify(resumed.path(2)).ok


def test_dictionaries_and_lists_get_what_they_held(tmp_path: Path) -> None:
    """Also if they are still empty in the new process; those of the caller are filled."""
    saved_state = {
        "best": {"loss": 0.5, "at": {"step": 3}, "none": {}},
        "average": {"a": torch.ones(3), "b": torch.ones(2)},
        "parts": [torch.ones(1), torch.full((1,), 2.0)],
        "history": [1, 2],
        "unchanged": {},
    }
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, saved_state)
    present = torch.zeros(3)
    best: dict[str, Any] = {}
    state: dict[str, Any] = {
        "best": best,
        "average": {"a": present},
        "parts": [torch.zeros(1)],
        "history": [],
        "unchanged": {"of": "another step"},
    }
    CheckpointManager(tmp_path).restore(state)
    assert best == saved_state["best"]
    assert state["best"] is best
    assert state["average"]["a"] is present
    assert (present.tolist(), state["average"]["b"].tolist()) == ([1, 1, 1], [1, 1])
    assert state["parts"] == [1, 2]
    assert (state["history"], state["unchanged"]) == ([1, 2], {})


def define(monkeypatch: pytest.MonkeyPatch, **classes: type) -> None:
    """Put classes into a module, as if the script that runs were another one."""
    module = ModuleType("script")
    for name, each in classes.items():
        each.__module__, each.__qualname__ = "script", name
        setattr(module, name, each)
    monkeypatch.setitem(sys.modules, "script", module)


class _Config:
    def __init__(self, width: int) -> None:
        self.width = width


class _Table(dict[str, int]):
    """Filled by its pickle, item by item."""


@pytest.mark.parametrize("value", [_Config(3), [_Table(a=1)], {"kind": _Config}, {_Table: 1}])
def test_a_class_that_is_gone_concerns_only_what_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    """A program that evaluates wants the model; the script's own objects are no loss to it."""
    define(monkeypatch, Config=_Config, Table=_Table)
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1, extra=value)
        state = {**numbered(2), "settings": {"value": value}}
        manager.save(2, state, extra="plain").result()
        define(monkeypatch)
        for step in (1, 2):
            restored = manager.restore(state := numbered(0), step)
            assert restored is not None
            assert is_step(state, step)
            if step == 2:
                assert restored.extra == "plain"
                continue
            assert repr(restored).startswith("Restored(step=1")
            with pytest.raises(OptionError, match=r"extra of step 1 needs a class.*script"):
                print(restored.extra)
        with pytest.raises(OptionError, match=r"object 'settings' of step 2 needs a class.*script"):
            manager.restore({**numbered(0), "settings": {}}, 2)


class _Scaled(nn.Linear):
    """Has an extra state that is empty at first, as modules with recipes of low precision."""

    amax: dict[str, int]

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.amax = {}

    def get_extra_state(self) -> dict[str, int]:
        return self.amax

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.amax = state


def test_what_has_no_place_in_an_empty_dictionary_is_not_lost_silently(tmp_path: Path) -> None:
    """Saved entries without a place to load into are an error; an empty saved dictionary is not."""
    with CheckpointManager(tmp_path) as manager:
        model = _Scaled()
        manager.save(1, {"model": model}).result()
        model.amax["weight"] = 7
        manager.save(2, {"model": model}).result()
        assert manager.restore({"model": _Scaled()}, 1) is not None
        with pytest.raises(OptionError, match=r"has model\._extra_state\.weight, for which"):
            manager.restore({"model": _Scaled()}, 2)
        filled = _Scaled()
        filled.amax["weight"] = 0
        assert manager.restore({"model": filled}, 2) is not None
        assert filled.amax == {"weight": 7}


def test_generators_can_be_left_alone(tmp_path: Path) -> None:
    """An evaluation restores weights without another sequence of random numbers."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1)
        before = torch.get_rng_state()
        torch.rand(1)
        manager.restore(numbered(0), rng=False)
        assert not torch.equal(torch.get_rng_state(), before)
        manager.restore(numbered(0))
        assert torch.equal(torch.get_rng_state(), before)


def test_an_optimizer_without_a_step_stays_so(tmp_path: Path) -> None:
    """Saving and restoring do not begin its state, and replace one that has begun."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, Job().state).result()
        job = Job()
        job.train(1)
        manager.restore(job.state)
    assert job.optimizer.state_dict()["state"] == {}


def test_stock_loads_what_a_manager_has_saved(tmp_path: Path) -> None:
    """Tensors have the names that ``dcp.save`` gives them."""
    job = Job()
    job.train(2)
    with CheckpointManager(tmp_path) as manager:
        path = manager.save(2, job.state).result()
    assert path == str(tmp_path / (NAMES % 2))
    assert nostall.verify(path).ok
    loaded = {"model": Job().model.state_dict(), "optimizer": Job().optimizer.state_dict()}
    loaded["optimizer"]["state"] = {
        "0": {"exp_avg": torch.zeros_like(next(job.model.parameters()))}
    }
    dcp.load(loaded, checkpoint_id=path)
    assert torch.equal(loaded["model"]["0.weight"], job.model.state_dict()["0.weight"])
    moments = job.optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(loaded["optimizer"]["state"]["0"]["exp_avg"], moments)


def test_the_snapshot_is_taken_in_the_call(tmp_path: Path) -> None:
    """Changes after the call are not saved, whether to tensors, objects, extra or generators."""
    job = Job()
    extra = {"seen": [1]}
    with CheckpointManager(tmp_path) as manager:
        with stopped() as hold:
            handle = manager.save(1, job.state, extra=extra)
            hold.wait_reached()
            expected = job.train(3)
            extra["seen"].append(2)
            hold.release()
            handle.result()
        resumed = Job()
        restored = manager.restore(resumed.state)
        assert restored is not None
        assert restored.extra == {"seen": [1]}
        assert resumed.train(3) == expected


# --- into another job -----------------------------------------------------------------------------


def restore_into(tmp_path: Path, state: dict[str, Any]) -> str:
    """The error of restoring a job that has saved step 1 into this state."""
    job = Job()
    job.train(1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": job.model, "optimizer": job.optimizer})
        before = torch.get_rng_state()
        with pytest.raises(OptionError) as raised:
            manager.restore(state)
    assert raised.value.cause is not None
    assert raised.value.path == manager.path(1)
    assert torch.equal(torch.get_rng_state(), before)
    return str(raised.value)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            [nn.Linear(4, 16), nn.Dropout(), nn.Linear(16, 1), *(nn.Linear(1, 1) for _ in "abc")],
            "model.3.weight, model.3.bias, model.4.weight, model.4.bias, model.5.weight and 1 more",
        ),
        (
            [nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1)],
            "Size mismatch between saved torch.Size([16, 4]) and current: torch.Size([8, 4])",
        ),
        (
            [nn.Linear(4, 16), nn.Linear(16, 1)],
            "Missing key in checkpoint state_dict: model.1.weight, model.1.bias",
        ),
    ],
    ids=["more layers", "other width", "other names"],
)
def test_another_model_is_refused(tmp_path: Path, layers: list[nn.Module], message: str) -> None:
    """The error names what differs, and nothing has changed."""
    model = nn.Sequential(*layers)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    error = restore_into(tmp_path, {"model": model})
    assert "the state does not fit step 1: " in error
    assert message in error
    assert "restore another step" in error
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("keys", [["model"], ["number"], ["optimizer"], ["nested"]])
def test_a_part_of_the_state_is_restored(tmp_path: Path, keys: list[str]) -> None:
    """A model without its optimizer, for example, to evaluate it."""

    def fresh(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        nested = {"x": [torch.rand(2)]}
        return {"model": model, "optimizer": optimizer, "nested": nested, "number": seed}

    trained = fresh(1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, trained)
        some = {key: value for key, value in fresh(2).items() if key in keys}
        assert manager.restore(some) is not None
    wanted = {key: trained[key] for key in keys}
    assert _plain(some) == _plain(wanted)


def test_a_part_that_shares_a_tensor_with_another_is_restored_alone(tmp_path: Path) -> None:
    """Each has its own item."""
    shared = torch.rand(3)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": {"w": shared}, "b": {"w": shared}})
        alone = {"a": {"w": torch.zeros(3)}}
        assert manager.restore(alone) is not None
    assert torch.equal(alone["a"]["w"], shared)


def _plain(state: dict[str, Any]) -> str:
    """All that is in a state, as text."""
    each = (
        value.state_dict() if hasattr(value, "state_dict") else value for value in state.values()
    )
    return str(list(each))


def test_an_optimizer_with_other_groups_is_refused(tmp_path: Path) -> None:
    """By the optimizer, whose words are in the error."""
    job = Job()
    groups = [{"params": [parameter]} for parameter in job.model.parameters()]
    optimizer = torch.optim.AdamW(groups)
    error = restore_into(tmp_path, {"model": job.model, "optimizer": optimizer})
    assert "the object 'optimizer' does not fit step 1: ValueError: loaded state dict has" in error
    assert optimizer.state_dict()["state"] == {}


def test_an_object_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    """A tensor and a plain value, too."""
    job = Job()
    for value in (job.scheduler, torch.ones(3), 3):
        error = restore_into(tmp_path, {"model": job.model, "new": value})
        assert "the state does not fit step 1: Missing key in checkpoint state_dict: new" in error


@pytest.mark.parametrize("call", ["save", "restore"])
@pytest.mark.parametrize("what", ["optimizer", "learning rate scheduler", "gradient scaler"])
def test_state_dicts_in_place_of_objects_are_refused(tmp_path: Path, what: str, call: str) -> None:
    """Restoring would fill the dictionary, and the object would keep its old values."""
    job = Job()
    job.train(1)
    objects: dict[str, Any] = {
        "optimizer": job.optimizer,
        "learning rate scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer),
        "gradient scaler": torch.amp.GradScaler("cpu"),
    }
    state = {"model": job.model.state_dict(), "all": [objects[what].state_dict()]}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": job.model.state_dict(), "all": [{}]})
        manager.wait()
        with pytest.raises(OptionError, match=rf"'all\.0' is the state dict of an? {what}.*object"):
            manager.save(2, state) if call == "save" else manager.restore(state)
        with pytest.raises(OptionError, match="'s' is the state dict of a learning rate scheduler"):
            manager.restore({"s": job.scheduler.state_dict()})
        assert manager.all_steps() == [1]


def test_what_was_restored_has_the_values_that_replace_others(tmp_path: Path) -> None:
    """A plain value can only be replaced in the dictionary, which may be nobody's."""
    job = Job()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": job.model, "seen": 7, "note": {"a": 1}})
        manager.wait()
        restored = manager.restore({"model": job.model, "seen": 0, "note": {}})
    assert restored is not None
    assert (restored.state["seen"], restored.state["note"]) == (7, {"a": 1})
    assert "Linear" not in repr(restored)


@pytest.mark.parametrize("kind", ["module", "dictionary", "optimizer"])
def test_what_is_on_the_meta_device_is_refused(tmp_path: Path, kind: str) -> None:
    """It has no memory to load into; an optimizer of such parameters neither."""
    job = Job()
    job.train(1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": job.model, "dictionary": {"a": torch.ones(3)}, **job.state})
        manager.wait()
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(), nn.Linear(16, 1)).to("meta")
        states: dict[str, dict[str, Any]] = {
            "module": {"model": model},
            "dictionary": {"dictionary": {"a": torch.ones(3, device="meta")}},
            "optimizer": {"optimizer": torch.optim.AdamW(model.parameters())},
        }
        with pytest.raises(OptionError, match="on the meta device, without memory to load into"):
            manager.restore(states[kind])
        assert manager.restore({"model": model.to_empty(device="cpu")}) is not None


# --- which step -----------------------------------------------------------------------------------


def test_only_committed_steps_count(tmp_path: Path) -> None:
    """A directory without metadata, a failed save and a foreign name are not steps."""
    manager = CheckpointManager(tmp_path)
    assert (manager.latest_step(), manager.all_steps()) == (None, [])
    assert manager.restore(numbered(0)) is None
    saved(manager, 10, 20)
    (tmp_path / (NAMES % 30)).mkdir()
    (tmp_path / (NAMES % 30) / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step-40").mkdir()
    assert (manager.latest_step(), manager.all_steps()) == (20, [10, 20])
    state = numbered(0)
    restored = manager.restore(state)
    assert restored is not None
    assert restored.step == 20
    assert is_step(state, 20)
    manager.close()


def damage(path: Path, *, flips: bool) -> None:
    """Flip a bit of a file, which no size tells of; or truncate it."""
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if flips else content[:10])


@pytest.mark.parametrize("verify", [False, True], ids=["sizes", "bytes"])
def test_a_damaged_newest_step_is_skipped_and_a_named_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, verify: bool
) -> None:
    """Resuming falls back with a warning; an explicit step fails, and says what there is.

    If all are damaged, a job must not start from scratch; without a committed step it does.
    """
    manager = CheckpointManager(tmp_path)
    (tmp_path / (NAMES % 4)).mkdir()
    assert manager.restore(numbered(0), verify=verify) is None
    saved(manager, 1, 2)
    damage(tmp_path / (NAMES % 2), flips=verify)
    state = numbered(0)
    restored = manager.restore(state, verify=verify)
    assert restored is not None
    assert restored.step == 1
    assert is_step(state, 1)
    why = "the step is damaged: __0_0.distcp"
    assert f"skipped {manager.path(2)}: {why}" in caplog.text
    for step, message, hint in (
        (2, why, f"`nostall verify {manager.path(2)}`"),
        (3, "step 3 is not committed", "committed steps: [1, 2]"),
    ):
        with pytest.raises(NostallError, match=message) as raised:
            manager.restore(numbered(0), step=step, verify=verify)
        assert raised.value.path == manager.path(step)
        assert hint in str(raised.value.hint)
    damage(tmp_path / (NAMES % 1), flips=verify)
    with pytest.raises(DamagedCheckpointError, match=r"step of \[1, 2\] can be") as all_damaged:
        manager.restore(numbered(0), verify=verify)
    assert all_damaged.value.path == str(tmp_path)
    manager.close()


def test_a_damaged_step_is_replaced(tmp_path: Path) -> None:
    """Also by the first save of the job that has passed over it; then it can be restored."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1, 2)
    os.truncate(tmp_path / (NAMES % 2) / "__0_0.distcp", 10)
    with CheckpointManager(tmp_path) as resumed:
        restored = resumed.restore(numbered(0))
        assert restored is not None
        assert restored.step == 1
        saved(resumed, 2)
        restored = resumed.restore(numbered(0))
        assert restored is not None
        assert restored.step == 2


@pytest.mark.parametrize("verify", [False, True], ids=["sizes", "bytes"])
def test_a_renamed_or_copied_step_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, verify: bool
) -> None:
    """A warning names the directory and why; damage of the step that it holds changes nothing.

    Nothing in the root that was renamed is restored as another step.
    """
    manager = CheckpointManager(tmp_path)
    saved(manager, 1, 2)
    shutil.copytree(tmp_path / (NAMES % 2), tmp_path / (NAMES % 7))
    os.truncate(tmp_path / (NAMES % 2) / "__0_0.distcp", 10)
    state = numbered(0)
    restored = manager.restore(state, verify=verify)
    assert restored is not None
    assert restored.step == 1
    assert is_step(state, 1)
    why = "the directory was renamed or copied: it holds step 2"
    assert caplog.text.count(f"skipped {manager.path(7)}: {why}") == 1
    shutil.rmtree(tmp_path / (NAMES % 1))
    shutil.rmtree(tmp_path / (NAMES % 2))
    for step in (7, None):  # alone in the root, it is not taken for none
        with pytest.raises(DamagedCheckpointError, match=why) as raised:
            manager.restore(numbered(0), step, verify=verify)
        assert "rename it to step-000000002" in str(raised.value.hint)
    (tmp_path / (NAMES % 7)).rename(tmp_path / (NAMES % 2))
    assert manager.restore(numbered(0), verify=verify) is not None
    manager.close()


def test_verification_has_no_deadline_of_storage(tmp_path: Path) -> None:
    """It reads for as long as the files are; undamaged steps are restored."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1)
    read = nostall.verify

    def slow(*arguments: Any, **options: Any) -> Verification:
        Event().wait(0.5)
        return read(*arguments, **options)

    nostall.configure(EngineOptions(save_timeout_s=0.4))
    try:
        with patch("nostall.integrity.verify", slow):
            state = numbered(0)
            assert CheckpointManager(tmp_path).restore(state, verify=True) is not None
    finally:
        nostall.configure(EngineOptions())
    assert is_step(state, 1)


def test_a_step_that_is_not_understood_is_not_taken_for_none(tmp_path: Path) -> None:
    """A job must not start from scratch because a newer torch wrote its only checkpoint."""
    (tmp_path / (NAMES % 1)).mkdir(parents=True)
    metadata = Metadata({}, planner_data=OfAnotherPlanner(), storage_data={})
    (tmp_path / (NAMES % 1) / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnknownMetadataError):
        CheckpointManager(tmp_path).restore(numbered(0))


def test_a_step_is_no_root(tmp_path: Path) -> None:
    """A job that is given the step to resume from would start from scratch, and save inside it."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1)
        with pytest.raises(OptionError, match=r"is a step itself.*the directory that holds"):
            CheckpointManager(manager.path(1))


def test_a_step_of_another_program_is_named(tmp_path: Path) -> None:
    """It has no description, and the error says how to load it; a step below it is restored."""
    dcp.save(numbered(2), storage_writer=FileSystemWriterAsync(tmp_path / (NAMES % 2)))
    for step in (None, 2):
        with pytest.raises(DamagedCheckpointError, match=r"checkpoint\.load"):
            CheckpointManager(tmp_path).restore(numbered(0), step)
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1)
        restored = manager.restore(numbered(0))
    assert restored is not None
    assert restored.step == 1


def test_best_step(tmp_path: Path) -> None:
    """By the metrics that were committed with each step, in a new process, too."""
    with CheckpointManager(tmp_path) as manager:
        for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75), (4, float("nan"))):
            saved(manager, step, metrics={"loss": torch.tensor(loss), "steps": step})
        saved(manager, 5)
    looking = CheckpointManager(tmp_path, metrics={"loss": "min", "steps": "max"})
    assert (looking.best_step("loss"), looking.best_step("steps")) == (2, 4)
    restored = looking.restore(numbered(0), 4)
    assert restored is not None
    assert math.isnan(restored.metrics["loss"])
    assert CheckpointManager(tmp_path, keep=KeepBest(1, "loss", "max")).best_step() == 3
    for metric in (None, "accuracy"):
        with pytest.raises(OptionError):
            looking.best_step(metric)


def test_a_copied_root_keeps_the_times_of_its_steps(tmp_path: Path) -> None:
    """By the manifests, as ``nostall ls`` shows them: a copy is new as a file."""
    began_s = 1_700_000_000.0
    with CheckpointManager(tmp_path / "root") as manager:
        for step in range(4):
            with patch("nostall._save.commit.time.time", lambda hour=step: began_s + 3600 * hour):
                manager.save(step, numbered(step)).result()
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    with CheckpointManager(tmp_path / "copy", keep=KeepEvery(seconds=7000)) as manager:
        manager.save(4, numbered(4))
        manager.wait()
        assert manager.all_steps() == [0, 2, 4]


def test_no_step_is_removed_while_storage_does_not_tell_its_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong time would let a policy remove what has to stay; the next commit looks again."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1, 2)
    with CheckpointManager(tmp_path, keep=KeepEvery(seconds=7000)) as manager:
        away = OSError(errno.EIO, os.strerror(errno.EIO))
        with patch("nostall._commit.committed.open_to_read", side_effect=away):
            manager.save(3, numbered(3))
            manager.wait()
        assert manager.all_steps() == [1, 2, 3]
        assert "steps were not removed" in caplog.text
        manager.save(4, numbered(4))
        manager.wait()
        assert manager.all_steps() == [1, 4]


def test_a_checkpoint_of_ranks_that_saved_alone_is_not_removed(tmp_path: Path) -> None:
    """Below the root, where a step would be: it is whole, though no step of the manager's."""
    manager = CheckpointManager(tmp_path)
    writer = FileSystemWriterAsync(manager.path(5))
    dcp.save(numbered(5), storage_writer=writer, use_collectives=False)
    manager.save(6, numbered(6))
    manager.close()
    state = numbered(0)
    nostall.load(state, manager.path(5), use_collectives=False)
    assert is_step(state, 5)


# --- saving ---------------------------------------------------------------------------------------


def test_damaged_steps_alone_are_an_error(tmp_path: Path) -> None:
    """A job must not start from scratch."""
    (tmp_path / (NAMES % 1) / ".metadata").mkdir(parents=True)
    (tmp_path / (NAMES % 2)).mkdir()
    (tmp_path / (NAMES % 2) / ".metadata").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match=r"step of \[1, 2\] can be"):
        CheckpointManager(tmp_path).restore(numbered(0))


def test_should_save_after_steps_or_seconds(tmp_path: Path) -> None:
    """And it commits what is done, so that a loop needs no other call."""
    manager = CheckpointManager(tmp_path, save_every=10)
    assert [step for step in range(31) if manager.should_save(step)] == [10, 20, 30]
    handle = manager.save(30, numbered(30))
    step = 30
    while not handle.done:
        step += 1
        manager.should_save(step)
    assert manager.all_steps() == [30]
    manager.close()
    timed = CheckpointManager(tmp_path, save_every=timedelta(seconds=50))
    with patch("nostall.manager.time.monotonic", return_value=1e12):
        assert timed.should_save(1)
        saved(timed, 1)
        assert not timed.should_save(2)
    with pytest.raises(OptionError):
        CheckpointManager(tmp_path).should_save(1)
    timed.close()


def test_a_handle_tells_how_its_save_goes(tmp_path: Path) -> None:
    """Its state, its directory, its figures; a wait has a deadline."""
    with CheckpointManager(tmp_path) as manager:
        with stopped() as hold:
            handle = manager.save(7, numbered(7))
            handle.wait_staged()
            hold.wait_reached()
            assert not handle.done
            assert (handle.step, handle.path) == (7, manager.path(7))
            with pytest.raises(SaveTimeoutError):
                handle.result(timeout=0.01)
            assert manager.all_steps() == []
            hold.release()
            assert handle.result(timeout=60) == handle.path
        assert handle.done
        assert handle.stats is not None
        assert handle.stats.nbytes > 400
        assert "committed" in repr(handle)


def test_a_failed_save_is_raised_and_costs_nothing_else(tmp_path: Path) -> None:
    """Its error is raised once by the loop, and by its handle; saves before and after it stay."""
    manager = CheckpointManager(tmp_path, keep=KeepLatest(1))
    saved(manager, 1)
    with inject(Fault.errno("chunk", errno.ENOSPC)):
        failing = manager.save(2, numbered(2))
        with pytest.raises(CheckpointException, match="No space"):
            manager.wait()
    with pytest.raises(CheckpointException, match="No space"):
        failing.result()
    assert failing.done
    assert manager.all_steps() == [1]
    saved(manager, 3)
    manager.close()
    assert manager.all_steps() == [3]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_the_save_after_a_failed_one_is_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, on_error: Literal["raise", "warn"]
) -> None:
    """Whether the loop catches the error, or asked for a warning; the handle has it, too."""
    manager = CheckpointManager(tmp_path, save_every=1, on_error=on_error)
    with inject(Fault.errno("chunk", errno.ENOSPC)):
        failing = manager.save(1, numbered(1))
        wait_until(manager._queue._caller._calls[0].outcome.done)
    reported = []
    for step in (2, 3):
        try:
            if manager.should_save(step):
                manager.save(step, numbered(step))
        except CheckpointException as error:
            reported.append(str(error))
    manager.close()
    assert manager.all_steps() == [2, 3]
    assert ["No space" in each for each in reported] == [True] * (on_error == "raise")
    assert ("a save has failed" in caplog.text) == (on_error == "warn")
    with pytest.raises(CheckpointException, match="No space"):
        failing.result()


def test_a_save_that_cannot_begin_is_a_warning_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its handle has the error; wrong arguments are errors as before."""
    (tmp_path / (NAMES % 1)).write_text("a file where the step belongs")
    with CheckpointManager(tmp_path, on_error="warn") as manager:
        failing = manager.save(1, numbered(1))
        saved(manager, 2)
        with pytest.raises(OptionError):
            manager.save(-1, numbered(1))
    assert "a save has failed" in caplog.text
    with pytest.raises(CheckpointException, match="cannot make the checkpoint directory"):
        failing.result()
    assert manager.all_steps() == [2]


def test_an_object_that_cannot_be_saved_is_an_error_of_the_save(tmp_path: Path) -> None:
    """On every rank, with its cause; the manager goes on."""

    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise ZeroDivisionError("broken")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointException, match="ZeroDivisionError: broken"):
            manager.save(1, {"broken": Broken()})
        saved(manager, 2)
        assert manager.all_steps() == [2]


def test_a_step_saved_twice_is_the_second_one(tmp_path: Path) -> None:
    """It is replaced at one instant: until then, the first is there."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1, metrics={"loss": 1.0})
        with stopped() as hold:
            again = manager.save(1, {"weight": torch.zeros(100)}, metrics={"loss": 2.0})
            hold.wait_reached()
            state = numbered(0)
            reader = CheckpointManager(tmp_path)
            first = reader.restore(state)
            assert first is not None
            assert (first.metrics, is_step(state, 1)) == ({"loss": 1.0}, True)
            hold.release()
            again.result()
        second = manager.restore(state)
        assert second is not None
        assert (second.metrics, is_step(state, 0)) == ({"loss": 2.0}, True)


def test_leaving_the_block_commits(tmp_path: Path) -> None:
    """Also with an exception, which is the one that is raised."""
    with suppress(ZeroDivisionError), CheckpointManager(tmp_path) as manager:
        manager.save(1, numbered(1))
        raise ZeroDivisionError
    assert CheckpointManager(tmp_path).all_steps() == [1]


def test_closing_gives_snapshot_memory_back(tmp_path: Path) -> None:
    """To the system; a later save of the process reserves it again."""
    state = {"weight": torch.ones(16 << 20)}
    for step in (1, 2):
        manager = CheckpointManager(tmp_path)
        manager.save(step, state).result()
        held = resident_nbytes()
        manager.close()
        assert resident_nbytes() < held - state["weight"].nbytes // 2
    assert default_engine().arena.reserved_nbytes == 0


@pytest.mark.usefixtures("given_up_soon")
def test_an_abort_from_elsewhere_fails_the_save(tmp_path: Path) -> None:
    """And not a later one."""
    with CheckpointManager(tmp_path) as manager:
        with stopped() as hold:
            handle = manager.save(1, numbered(1))
            hold.wait_reached()
            abort_all()
            hold.release()
        later = manager.save(2, numbered(2))
        with pytest.raises(SaveAbortedError):
            handle.result()
        assert later.result() == manager.path(2)
        assert manager.all_steps() == [2]


# Training goes on after the poll: SIGTERM's handler interrupts the sleep within a second.
@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("os.kill(os.getpid(), signal.SIGTERM); manager.poll(); time.sleep(60)", 143)],
    ids=["the interpreter ends", "SIGTERM"],
)
def test_pending_saves_are_committed_at_the_end(tmp_path: Path, ending: str, status: int) -> None:
    """Without ``close()``; with ``drain_on_sigterm`` after SIGTERM, too."""
    program = f"""
import os, signal, time, torch, nostall
nostall.drain_on_sigterm()
manager = nostall.CheckpointManager({str(tmp_path)!r}, keep=nostall.KeepLatest(1))
for step in (1, 2):
    manager.save(step, {{"weight": torch.full((100,), float(step))}})
{ending}
"""
    run = subprocess.run([*loaded.python(), "-c", program], timeout=100, check=False)
    assert run.returncode == status
    state = numbered(0)
    restored = CheckpointManager(tmp_path).restore(state)
    assert restored is not None
    assert is_step(state, restored.step)
    assert restored.step == 2


# Each `type: ignore` is an argument of a wrong type, which is an error at run time, too.
REFUSED: dict[str, Callable[[Path], object]] = {
    "empty root": lambda root: CheckpointManager(""),
    "object store": lambda root: CheckpointManager("nowhere://bucket/root"),
    "step": lambda root: CheckpointManager(root).save(-1, {}),
    "state": lambda root: CheckpointManager(root).save(1, [1]),  # type: ignore[arg-type]
    "reserved key": lambda root: CheckpointManager(root).save(1, {"nostall.x": 1}),
    "metric": lambda root: CheckpointManager(root).save(1, {}, metrics={"loss": "low"}),  # type: ignore[dict-item]
    "large metric": lambda root: CheckpointManager(root).save(1, {}, metrics={"n": 10**400}),
    "per rank": lambda root: PerRank(3),  # type: ignore[arg-type]
    "data loader": lambda root: CheckpointManager(root).save(1, {"data": DataLoader([1])}),  # type: ignore[arg-type]  # as examples of torch's do
}


def test_what_cannot_be_pickled_is_refused_with_its_step(tmp_path: Path) -> None:
    """With the step, its key, and what to leave out."""
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointException, match=r"step 7: extra cannot be pickled"):
            manager.save(7, {"weight": torch.ones(1)}, extra=lambda: None)
        for value in ({"f": [lambda: None]}, PerRank(OfItsOwn())):
            state = {"weight": torch.ones(1), "plain": {"a": 1}, "config": value}
            with pytest.raises(CheckpointException, match="the state of 'config' cannot be pickl"):
                manager.save(7, state)
        manager.save(8, {"weight": torch.ones(1)}, extra="plain").result()


@pytest.mark.parametrize("what", REFUSED)
def test_impossible_arguments_are_refused(tmp_path: Path, what: str) -> None:
    """In the caller's frame, before anything is written."""
    with pytest.raises(OptionError):
        REFUSED[what](tmp_path / "root")
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("argument", "values", "hint"),
    [
        ("keep", [3, [3], "latest", KeepLatest, [KeepLatest]], "KeepLatest(3)"),
        ("save_every", [0, -1, 1.5, "10", timedelta(0)], "at least 1"),
        ("save_every", ["10m"], "timedelta(minutes=10)"),
        ("on_error", ["ignore", None], '"raise" or "warn"'),
        ("metrics", [["loss"], "loss", 3], '{"loss": "min"}'),
        ("mode", [{"loss": "least"}, {"loss": 1}], '"min" or "max"'),
        ("writer", ["x", FileSystemWriterAsync("checkpoint")], "partial(FileSystemWriterAsync"),
        ("root", [None, b"root", 3], "pathlib.Path"),
    ],
)
def test_a_wrong_argument_of_a_manager_is_named(
    tmp_path: Path, argument: str, values: list[Any], hint: str
) -> None:
    """With what was given and what is possible."""
    keyword = {"mode": "metrics"}.get(argument, argument)
    for value in values:
        arguments: dict[str, Any] = {"root": tmp_path / "root", keyword: value}
        with pytest.raises(OptionError) as raised:
            CheckpointManager(**arguments)
        assert hint in str(raised.value)
        shown = next(iter(value.values())) if argument == "mode" else value
        assert repr(shown).strip("[]") in str(raised.value)


def test_swapped_arguments_do_not_print_the_state(tmp_path: Path) -> None:
    """A message is short, however large a model is."""
    wrong: Any = {"model": nn.Sequential(*(nn.Linear(1, 1) for _ in range(100)))}
    with pytest.raises(OptionError, match=r"step=\{'model'") as raised:
        CheckpointManager(tmp_path).save(wrong, 1)  # type: ignore[arg-type]
    assert len(str(raised.value)) < 400


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody wants a directory of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for root in ("~/runs", Path("~") / "runs"):
        assert CheckpointManager(root).path(1) == str(tmp_path / "runs" / (NAMES % 1))


def test_wrong_arguments_of_restore_are_refused(tmp_path: Path) -> None:
    """A step that is no number, or a state that is no dictionary, raises ``OptionError``."""
    wrong: Any = "2"
    manager = CheckpointManager(tmp_path)
    with pytest.raises(OptionError, match="step='2'"):
        manager.restore({}, wrong)
    for wrong in (None, torch.nn.Linear(1, 1)):
        with pytest.raises(OptionError, match="the state is an object of type"):
            manager.restore(wrong)


# --- removal --------------------------------------------------------------------------------------


def test_steps_that_no_policy_keeps_are_removed(tmp_path: Path) -> None:
    """Any policy keeps a step; files are gone, too."""
    keep = (KeepLatest(2), KeepBest(1, "loss"), KeepEvery(steps=4))
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step, loss in enumerate((0.9, 0.1, 0.5, 0.4, 0.3, 0.2, 0.3, 0.4, 0.5), start=1):
            saved(manager, step, metrics={"loss": loss})
    assert manager.all_steps() == [2, 4, 8, 9]
    left = sorted(os.listdir(tmp_path))
    assert left == [".nostall.lock", *(NAMES % step for step in (2, 4, 8, 9))]


def test_two_steps_stay_while_a_save_is_under_way(tmp_path: Path) -> None:
    """Even if a pass runs in that moment; nothing is removed before the next commit."""
    with CheckpointManager(tmp_path) as keeping:
        saved(keeping, 1, 2, 3)
    manager = CheckpointManager(tmp_path, keep=KeepLatest(1))
    with stopped() as hold:
        manager.save(4, numbered(4))
        hold.wait_reached()
        assert manager.all_steps() == [1, 2, 3]
        assert manager._retention.run_pass() == [1]
        assert manager.all_steps() == [2, 3]
        hold.release()
        manager.close()
    assert manager.all_steps() == [4]


def test_a_step_that_is_being_read_stays(tmp_path: Path) -> None:
    """A reader in another process holds it; a later pass removes it."""
    manager = CheckpointManager(tmp_path, keep=KeepLatest(1))
    saved(manager, 1)
    with held(manager.path(1)) as is_held:
        assert is_held
        saved(manager, 2)
        manager._retention.wait(60)
        assert manager.all_steps() == [1, 2]
    saved(manager, 3)
    manager.close()
    assert manager.all_steps() == [3]


def test_the_last_committed_step_stays_after_a_return_to_an_earlier_one(tmp_path: Path) -> None:
    """It is not the highest one, not even of this manager, and no policy keeps it."""
    with CheckpointManager(tmp_path, keep=KeepEvery(steps=10)) as manager:
        saved(manager, 10, 20, 30)
        manager.restore(numbered(0), step=10)
        saved(manager, 11)
    assert manager.all_steps() == [10, 11, 20, 30]


def test_policies_apply_to_what_a_run_saves_after_a_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Later steps of the abandoned run do not take the places of its own; a warning names them."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 10, 20, 30)
        manager.restore(numbered(0), step=30)
    assert not warnings_in(caplog)
    with CheckpointManager(tmp_path, keep=KeepLatest(3)) as manager:
        manager.restore(numbered(0), step=10)
        saved(manager, 12, 14, 16, 18)
        manager.wait()
        assert manager.all_steps() == [14, 16, 18, 20, 30]
        saved(manager, 31)
    assert manager.all_steps() == [20, 30, 31]
    (warning,) = warnings_in(caplog)
    assert "later steps: [20, 30]. A restart resumes from step 30" in warning
    assert "discard_after(10)" in warning


def test_later_steps_are_discarded_after_a_return(tmp_path: Path) -> None:
    """Unfinished ones and the manager's own, too; a restart resumes from what stays."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 10, 20, 30)
    (tmp_path / (NAMES % 40)).mkdir()
    with CheckpointManager(tmp_path) as manager:
        manager.restore(numbered(0), step=10)
        manager.save(50, numbered(50))
        manager.discard_after(10)
        assert os.listdir(tmp_path / (NAMES % 10))
        assert sorted(os.listdir(tmp_path)) == [".nostall.lock", NAMES % 10]
        saved(manager, 12, 14)
    assert manager.all_steps() == [10, 12, 14]
    with pytest.raises(OptionError, match="the manager is closed"):
        manager.discard_after(12)


def test_steps_are_not_discarded_by_mistake(tmp_path: Path) -> None:
    """Not above a step that is not there, nor under a reader, which the error names."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 10, 20)
        with pytest.raises(OptionError, match="step 5 is not committed"):
            manager.discard_after(5)
        with held(manager.path(20)), pytest.raises(WriteError, match="step 20 is being read"):
            manager.discard_after(10)
        assert manager.all_steps() == [10, 20]


def test_what_a_crash_has_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    """Unfinished steps and removals; a manager that only reads removes nothing."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1)
    half = tmp_path / (NAMES % 2)
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / (NAMES % 3)).mkdir()
    (tmp_path / (NAMES % 3) / "notes.txt").write_text("not of a checkpoint")
    with CheckpointManager(tmp_path) as manager:
        manager.restore(numbered(0))
        assert half.exists()
        saved(manager, 4)
    assert not half.exists()
    assert (tmp_path / (NAMES % 3) / "notes.txt").exists()
    assert manager.all_steps() == [1, 4]


# --- size -----------------------------------------------------------------------------------------


def test_listing_opens_no_file(tmp_path: Path) -> None:
    """Listing a thousand steps reads only names and the status of metadata files."""
    for step in range(1000):
        path = tmp_path / (NAMES % step)
        path.mkdir()
        (path / ".metadata").touch()
    manager = CheckpointManager(tmp_path)
    with patch("builtins.open", side_effect=AssertionError), patch("os.open", side_effect=OSError):
        assert manager.all_steps() == list(range(1000))
        assert manager.latest_step() == 999


def test_many_keys_are_restored_in_linear_time(tmp_path: Path) -> None:
    """Ten times as many take about ten times as long, not a hundred."""

    def cost_s(keys: int) -> float:
        state: dict[str, Any] = {f"key {each}": {"number": each} for each in range(keys)}
        with CheckpointManager(tmp_path / str(keys)) as manager:
            manager.save(1, state).result()
            state["key 0"]["number"] = -1
            begun_s = time.process_time()
            manager.restore(state)
            assert state["key 0"] == {"number": 0}
            return time.process_time() - begun_s

    assert cost_s(3000) < 25 * cost_s(300)


def test_many_plain_values_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One per manager, with the key that holds the most; not where a list or ``extra`` has them."""
    many = {str(number): number for number in range(7_000)}
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1, extra=many)
        manager.save(2, {**numbered(2), "first": many, "history": [*many, *many]}).result()
        assert not warnings_in(caplog)
        for step in (3, 4):
            manager.save(step, {"first": {"a": 1, **many}, "history": many, "epoch": 3}).result()
    (warning,) = warnings_in(caplog)
    assert "the state has 14002 plain values, 7001 of them in 'first'" in warning
    assert "extra" in warning
    assert "one list of plain values" in warning


def test_a_writer_of_ones_own(tmp_path: Path) -> None:
    """Its options are those of every save."""
    writer = partial(FileSystemWriterAsync, thread_count=3, staging="overlapped")
    with CheckpointManager(tmp_path, writer=writer) as manager:
        path = manager.save(1, {f"w{each}": torch.ones(9) for each in range(9)}).result()
    assert len([name for name in os.listdir(path) if name.endswith(".distcp")]) == 3


# --- what is said about removal -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metrics", "known"),
    [({"other": 0.5}, "['other']"), ({"loss": math.nan}, "['loss=nan']"), ({}, "none")],
    ids=["misspelt", "NaN", "no metrics"],
)
def test_a_metric_that_no_step_has_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, metrics: dict[str, float], known: str
) -> None:
    """Once, when the first step is removed."""
    with CheckpointManager(tmp_path, keep=[KeepLatest(1), KeepBest(1, "loss")]) as manager:
        for step in (1, 2, 3):
            assert ("KeepBest" in caplog.text) == (step == 3)
            saved(manager, step, metrics=metrics)
            manager.wait()
    assert "has the metrics ['loss'], by which KeepBest keeps" in caplog.text
    assert f"they have {known}" in caplog.text
    assert caplog.text.count("by which KeepBest keeps") == 1


def test_a_wait_also_waits_for_removal(tmp_path: Path) -> None:
    """After ``wait`` only the kept steps are listed, even if removing the others is slow."""
    remove = StepDirectories.remove

    def slow(steps: StepDirectories, step: int) -> bool:
        Event().wait(0.3)
        return remove(steps, step)

    with (
        patch.object(StepDirectories, "remove", slow),
        CheckpointManager(tmp_path, keep=KeepLatest(1)) as manager,
    ):
        for step in (1, 2, 3):
            manager.save(step, numbered(step))
        manager.wait()
        assert manager.all_steps() == [3]


def test_a_step_that_is_removed_meanwhile_is_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 may remove a step while another rank looks for the best one."""
    with CheckpointManager(tmp_path, metrics={"loss": "min"}) as manager:
        saved(manager, 1, metrics={"loss": 0.5})
        saved(manager, 2, metrics={"loss": 0.75})

    def removed(path: str) -> About | None:
        if path.endswith("1"):
            shutil.rmtree(path)
        return read_about(path)

    with patch("nostall._manager.retention.read_about", removed):
        assert CheckpointManager(tmp_path, metrics={"loss": "min"}).best_step() == 2
    assert "cannot be read" not in caplog.text


def test_an_unfinished_step_with_other_files_is_said_to_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log does not claim that it was removed."""
    notes = tmp_path / (NAMES % 1) / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("of the user")
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 2)
    assert notes.read_text() == "of the user"
    assert f"{notes.parent} was not finished: removing it, except files" in caplog.text


# --- processes of a launcher ----------------------------------------------------------------------


def test_processes_of_a_launcher_need_a_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that take themselves for the only one would remove each other's steps."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    manager = CheckpointManager(tmp_path)  # init_process_group may follow
    for call in (
        lambda: manager.save(1, numbered(1)),
        lambda: manager.restore(numbered(0)),
    ):
        with pytest.raises(OptionError, match="no process group is initialised") as raised:
            call()
        assert "init_process_group" in str(raised.value)
    assert list(tmp_path.iterdir()) == []
    with CheckpointManager(tmp_path / "of rank 1", alone=True) as own:
        saved(own, 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    saved(manager, 2)
    manager.close()
