"""The manager in one process: what it saves, finds, restores and removes."""

from __future__ import annotations

import json
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
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
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
from nostall._manager.steps import held
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
from support import loaded
from support.faults import Hold, inject
from support.processes import resident_nbytes
from support.training import Job, disturb

NAMES = "step-%09d"


def numbered(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step))}


def saved(manager: CheckpointManager, *steps: int, **arguments: Any) -> None:
    for step in steps:
        manager.save(step, numbered(step), **arguments).result()


def is_step(state: dict[str, Any], step: int) -> bool:
    return torch.equal(state["weight"], torch.full((100,), float(step)))


def restored_step(manager: CheckpointManager, step: int | None = None, **options: Any) -> int:
    """The step that a manager restores, once its values have been looked at."""
    state = numbered(-1)
    restored = manager.restore(state, step, **options)
    assert restored is not None
    assert is_step(state, restored.step)
    return restored.step


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


def test_the_snapshot_is_taken_in_the_call(tmp_path: Path) -> None:
    """Changes after it are not saved; a job that has trained on returns to what it was then."""
    job = Job()
    job.train(2)
    extra = {"seen": [1]}
    with CheckpointManager(tmp_path) as manager, stopped() as hold:
        manager.save(2, job.state, extra=extra)
        hold.wait_reached()
        expected = job.train(3)
        extra["seen"].append(2)
        hold.release()
        restored = manager.restore(job.state)
        assert restored is not None
        assert restored.extra == {"seen": [1]}
        assert job.train(3) == expected


def test_dictionaries_and_lists_get_what_they_held(tmp_path: Path) -> None:
    """Empty ones, too; those of the caller are filled. What replaces a value is returned."""
    saved_state = {
        "best": {"loss": 0.5, "at": {"step": 3}, "none": {}},
        "average": {"a": torch.ones(3), "b": torch.ones(2)},
        "parts": [torch.ones(1), torch.full((1,), 2.0)],
        "history": [1, 2],
        "unchanged": {},
        "seen": 7,
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
        "seen": 0,
    }
    restored = CheckpointManager(tmp_path).restore(state)
    assert best == saved_state["best"]
    assert state["best"] is best
    assert state["average"]["a"] is present
    assert (present.tolist(), state["average"]["b"].tolist()) == ([1, 1, 1], [1, 1])
    assert state["parts"] == [1, 2]
    assert (state["history"], state["unchanged"]) == ([1, 2], {})
    assert restored is not None
    assert restored.state["seen"] == 7
    assert "tensor" not in repr(restored)


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
        manager.save(2, {**numbered(2), "settings": {"value": value}}, extra="plain").result()
        define(monkeypatch)
        first, second = (manager.restore(numbered(0), step) for step in (1, 2))
        assert first is not None
        assert second is not None
        assert is_step(dict(first.state), 1)
        assert is_step(dict(second.state), 2)
        assert second.extra == "plain"
        with pytest.raises(OptionError, match=r"extra of step 1 needs a class.*script"):
            print(first.extra)
        with pytest.raises(OptionError, match=r"object 'settings' of step 2 needs a class.*script"):
            manager.restore({**numbered(0), "settings": {}}, 2)


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
    moments = job.optimizer.state_dict()["state"][0]["exp_avg"]
    found: dict[str, Any] = {
        "model": Job().model.state_dict(),
        "optimizer": {"state": {"0": {"exp_avg": torch.zeros_like(moments)}}},
    }
    dcp.load(found, checkpoint_id=path)
    assert torch.equal(found["model"]["0.weight"], job.model.state_dict()["0.weight"])
    assert torch.equal(found["optimizer"]["state"]["0"]["exp_avg"], moments)


# --- into another job -----------------------------------------------------------------------------


def plain(state: dict[str, Any]) -> str:
    """All that is in a state, as text."""
    return str(
        [each.state_dict() if hasattr(each, "state_dict") else each for each in state.values()]
    )


def with_model(*layers: nn.Module) -> dict[str, Any]:
    return {"model": nn.Sequential(*layers)}


def on_meta(job: Job) -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW(job.model.to("meta").parameters())}


UNFIT: dict[str, tuple[Callable[[Job], dict[str, Any]], str]] = {
    "more layers": (
        lambda job: with_model(*job.model, *(nn.Linear(1, 1) for _ in "abc")),
        "model.3.weight, model.3.bias, model.4.weight, model.4.bias, model.5.weight and 1 more",
    ),
    "other width": (
        lambda job: with_model(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1)),
        "Size mismatch between saved torch.Size([16, 4]) and current: torch.Size([8, 4])",
    ),
    "other groups": (
        lambda job: {"optimizer": torch.optim.AdamW([{"params": [*job.model.parameters()][:1]}])},
        "the object 'optimizer' does not fit step 1: ValueError: loaded state dict",
    ),
    "new object": (lambda job: {"new": job.scheduler}, "Missing key in checkpoint state_dict: new"),
    "new value": (lambda job: {"new": 3}, "Missing key in checkpoint state_dict: new"),
    "meta": (on_meta, "on the meta device, without memory to load into"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_state_that_does_not_fit_is_refused(tmp_path: Path, what: str) -> None:
    """The error names what differs, and nothing has changed, generators neither."""
    make, message = UNFIT[what]
    job = Job()
    job.train(1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": job.model, "optimizer": job.optimizer})
        state = make(job)
        before = plain(state), torch.get_rng_state().tolist()
        with pytest.raises(OptionError) as raised:
            manager.restore(state)
    assert (plain(state), torch.get_rng_state().tolist()) == before
    assert raised.value.cause is not None
    assert raised.value.path == manager.path(1)
    error = str(raised.value)
    assert " does not fit step 1: " in error
    assert message in error
    assert "restore another step" in error


@pytest.mark.parametrize("key", ["model", "optimizer", "nested", "number"])
def test_a_part_of_the_state_is_restored(tmp_path: Path, key: str) -> None:
    """A model without its optimizer, for example; also if it shares a tensor with another part."""

    def fresh(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model, shared = nn.Linear(3, 3), torch.rand(2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        own = {"nested": {"x": [shared]}, "another": {"x": shared}, "number": seed}
        return {"model": model, "optimizer": optimizer, **own}

    trained = fresh(1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, trained)
        part = {key: fresh(2)[key]}
        assert manager.restore(part) is not None
    assert plain(part) == plain({key: trained[key]})


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
        manager.save(1, {"model": job.model.state_dict(), "all": [{}]}).result()
        with pytest.raises(OptionError, match=rf"'all\.0' is the state dict of an? {what}.*object"):
            manager.save(2, state) if call == "save" else manager.restore(state)
        assert manager.all_steps() == [1]


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
    assert restored_step(manager) == 20
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
    """A named one is an error; so is it if all are damaged: a job must not start from scratch."""
    manager = CheckpointManager(tmp_path)
    (tmp_path / (NAMES % 4)).mkdir()
    assert manager.restore(numbered(0), verify=verify) is None
    saved(manager, 1, 2)
    damage(tmp_path / (NAMES % 2), flips=verify)
    assert restored_step(manager, verify=verify) == 1
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


def test_damaged_steps_alone_are_an_error(tmp_path: Path) -> None:
    """A job must not start from scratch."""
    (tmp_path / (NAMES % 1) / ".metadata").mkdir(parents=True)
    (tmp_path / (NAMES % 2)).mkdir()
    (tmp_path / (NAMES % 2) / ".metadata").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match=r"step of \[1, 2\] can be"):
        CheckpointManager(tmp_path).restore(numbered(0))


def test_a_damaged_step_is_replaced(tmp_path: Path) -> None:
    """Also by the first save after a resume, which reuses the plan of the step that was loaded."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1, 2)
    damage(tmp_path / (NAMES % 2), flips=False)
    with CheckpointManager(tmp_path) as resumed:
        assert restored_step(resumed) == 1
        saved(resumed, 2)
        assert resumed._cache.verified_loaded
        assert restored_step(resumed) == 2


def test_a_renamed_or_copied_step_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning that says why; alone in its root it is not taken for none."""
    manager = CheckpointManager(tmp_path)
    saved(manager, 1, 2)
    shutil.copytree(tmp_path / (NAMES % 2), tmp_path / (NAMES % 7))
    damage(tmp_path / (NAMES % 2), flips=False)
    assert restored_step(manager) == 1
    why = "the directory was renamed or copied: it holds step 2"
    assert caplog.text.count(f"skipped {manager.path(7)}: {why}") == 1
    shutil.rmtree(tmp_path / (NAMES % 1))
    shutil.rmtree(tmp_path / (NAMES % 2))
    for step in (7, None):
        with pytest.raises(DamagedCheckpointError, match=why) as raised:
            manager.restore(numbered(0), step)
        assert "rename it to step-000000002" in str(raised.value.hint)
    (tmp_path / (NAMES % 7)).rename(tmp_path / (NAMES % 2))
    assert restored_step(manager) == 2
    manager.close()


def by_another_planner(path: Path) -> None:
    path.mkdir()
    metadata = Metadata({}, planner_data=SimpleNamespace(), storage_data={})
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def by_a_newer_nostall(path: Path) -> None:
    newer = json.dumps({"format": 4, "what": "nobody knows"}).encode().ljust(4096)
    state = {"nostall.about": torch.frombuffer(bytearray(newer), dtype=torch.uint8)}
    dcp.save({**state, **numbered(2)}, storage_writer=FileSystemWriterAsync(path), no_dist=True)


def by_another_program(path: Path) -> None:
    dcp.save(numbered(2), storage_writer=FileSystemWriterAsync(path), no_dist=True)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (by_another_planner, UnknownMetadataError, "SimpleNamespace"),
        (by_a_newer_nostall, UnknownMetadataError, "a description of format 4, not 3"),
        (by_another_program, DamagedCheckpointError, r"load it with .*checkpoint\.load"),
    ],
)
def test_a_step_that_is_not_understood_is_not_taken_for_none(
    tmp_path: Path, make: Callable[[Path], None], kind: type[NostallError], message: str
) -> None:
    """A job must not start from scratch: the error says what it is, or an older one is restored."""
    make(tmp_path / (NAMES % 2))
    with CheckpointManager(tmp_path) as manager:
        for step in (None, 2):
            with pytest.raises(kind, match=message):
                manager.restore(numbered(0), step)
        saved(manager, 1)
        assert restored_step(manager) == 1


def test_best_step(tmp_path: Path) -> None:
    """By the metrics that were committed with each step, in a new process, too."""
    with CheckpointManager(tmp_path) as manager:
        for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75), (4, float("nan"))):
            saved(
                manager,
                step,
                metrics={"loss": torch.tensor(loss, requires_grad=True), "steps": step},
            )
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


# --- saving ---------------------------------------------------------------------------------------


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


def test_each_save_that_fails_during_a_wait_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first is the error that is raised, the others are logged."""
    with CheckpointManager(tmp_path) as manager:
        with stopped() as hold:
            for step in (1, 2):
                manager.save(step, numbered(step))
            hold.wait_reached()
            for step in (1, 2):
                shutil.rmtree(manager.path(step))
                Path(manager.path(step)).write_text("a file where the step belongs")
            hold.release()
        with pytest.raises(CheckpointException, match=NAMES % 1):
            manager.wait()
        saved(manager, 3)
        assert manager.all_steps() == [3]
    assert "another save has failed, too" in caplog.text
    assert manager.path(2) in caplog.text


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
        saved(manager, 2)
        with pytest.raises(SaveAbortedError):
            handle.result()
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
    assert restored_step(CheckpointManager(tmp_path)) == 2


# --- what is refused ------------------------------------------------------------------------------


def test_what_cannot_be_pickled_is_refused_with_its_step(tmp_path: Path) -> None:
    """With the step and its key; the next save is made."""
    own: Any = SimpleNamespace(state_dict=lambda: {"f": lambda: None}, load_state_dict=dict)
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointException, match=r"step 7: extra cannot be pickled"):
            manager.save(7, {"weight": torch.ones(1)}, extra=lambda: None)
        for value in ({"f": [lambda: None]}, PerRank(own)):
            state = {"weight": torch.ones(1), "plain": {"a": 1}, "config": value}
            with pytest.raises(CheckpointException, match="the state of 'config' cannot be pickl"):
                manager.save(7, state)
        saved(manager, 8, extra="plain")


@pytest.mark.parametrize(
    "arguments",
    [
        (-1, {}),
        ({"model": nn.Sequential(*(nn.Linear(1, 1) for _ in range(100)))}, 1),
        (1, [1]),
        (1, {"nostall.x": 1}),
        (1, {"data": DataLoader([1])}),  # type: ignore[arg-type]  # as examples of torch's do
        (1, {}, {"loss": "low"}),
        (1, {}, {"n": 10**400}),
    ],
    ids=["step", "swapped", "state", "reserved key", "data loader", "metric", "large metric"],
)
def test_impossible_arguments_are_refused(tmp_path: Path, arguments: tuple[Any, ...]) -> None:
    """In the caller's frame, before anything is written; in few words, however large a model is."""
    with pytest.raises(OptionError) as raised:
        CheckpointManager(tmp_path / "root").save(*arguments)
    assert len(str(raised.value)) < 400
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("argument", "values", "hint"),
    [
        ("keep", [3, [3], "latest", KeepLatest, [KeepLatest]], "KeepLatest(3)"),
        ("save_every", [0, -1, 1.5, "10", timedelta(0)], "at least 1"),
        ("save_every", ["10m"], "timedelta(minutes=10)"),
        ("on_error", ["ignore", None], '"raise" or "warn"'),
        ("on_commit", [3, "print"], "a function of the directory and the step"),
        ("metrics", [["loss"], "loss", 3], '{"loss": "min"}'),
        ("mode", [{"loss": "least"}, {"loss": 1}], '"min" or "max"'),
        ("writer", ["x", FileSystemWriterAsync("checkpoint")], "partial(FileSystemWriterAsync"),
        ("root", [None, b"root", 3], "pathlib.Path"),
        ("root", [""], "empty"),
        ("root", ["nowhere://bucket/root"], "are not supported"),
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
        assert repr(shown).strip("[]'") in str(raised.value)


def test_wrong_arguments_of_restore_are_refused(tmp_path: Path) -> None:
    """A step that is no number, a state that is no dictionary, an object that has no state."""
    wrong: Any = "2"
    manager = CheckpointManager(tmp_path)
    with pytest.raises(OptionError, match="step='2'"):
        manager.restore({}, wrong)
    for wrong in (None, torch.nn.Linear(1, 1)):
        with pytest.raises(OptionError, match="the state is an object of type"):
            manager.restore(wrong)
    wrong = 3
    with pytest.raises(OptionError, match="PerRank got an object of type int"):
        PerRank(wrong)


def test_the_root_is_a_directory_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step as root would have a job start from scratch; a tilde is the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for root in ("~/runs", Path("~") / "runs"):
        assert CheckpointManager(root).path(1) == str(tmp_path / "runs" / (NAMES % 1))
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1)
        with pytest.raises(OptionError, match=r"is a step itself.*the directory that holds"):
            CheckpointManager(manager.path(1))


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
        manager._retention.run_pass()
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


def test_policies_apply_to_what_a_run_saves_after_a_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Later steps of the abandoned run do not take the places of its own; a warning names them."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 10, 20, 30)
        assert restored_step(manager, 30) == 30
    assert not warnings_in(caplog)
    with CheckpointManager(tmp_path, keep=KeepLatest(3)) as manager:
        assert restored_step(manager, 10) == 10
        saved(manager, 12, 14, 16, 18)
        manager.wait()
        assert manager.all_steps() == [14, 16, 18, 20, 30]
        saved(manager, 31)
    assert manager.all_steps() == [20, 30, 31]
    (warning,) = warnings_in(caplog)
    assert "later steps: [20, 30]. A restart resumes from step 30" in warning
    assert "discard_after(10)" in warning


def test_later_steps_are_discarded_after_a_return(tmp_path: Path) -> None:
    """Unfinished ones and the manager's own, too; not by mistake, nor under a reader."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 10, 20, 30)
    (tmp_path / (NAMES % 40)).mkdir()
    with CheckpointManager(tmp_path) as manager:
        assert restored_step(manager, 10) == 10
        with pytest.raises(OptionError, match="step 5 is not committed"):
            manager.discard_after(5)
        with held(manager.path(30)), pytest.raises(WriteError, match="step 30 is being read"):
            manager.discard_after(10)
        assert manager.all_steps() == [10, 20, 30]
        manager.save(50, numbered(50))
        manager.discard_after(10)
        assert os.listdir(tmp_path / (NAMES % 10))
        assert sorted(os.listdir(tmp_path)) == [".nostall.lock", NAMES % 10]
        saved(manager, 12, 14)
    assert manager.all_steps() == [10, 12, 14]


def test_what_a_crash_has_left_is_removed_by_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not by a restore; other files stay, as the log says, and what ranks have saved alone."""
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1)
    half, others = tmp_path / (NAMES % 2), tmp_path / (NAMES % 3)
    for path, name in ((half, "__0_0.distcp"), (others, "notes.txt")):
        path.mkdir()
        (path / name).write_bytes(b"half")
    writer = FileSystemWriterAsync(tmp_path / (NAMES % 5))
    dcp.save(numbered(5), storage_writer=writer, use_collectives=False)
    with CheckpointManager(tmp_path) as manager:
        assert restored_step(manager) == 1
        assert half.exists()
        saved(manager, 4)
    assert not half.exists()
    assert (others / "notes.txt").exists()
    assert f"removing the files of an unfinished save: {others}" in caplog.text
    assert manager.all_steps() == [1, 4]
    state = numbered(0)
    nostall.load(state, manager.path(5), use_collectives=False)
    assert is_step(state, 5)


def test_a_copied_root_keeps_the_times_of_its_steps(tmp_path: Path) -> None:
    """By the manifests, as ``nostall ls`` shows them: a copy is new as a file."""
    began_s = 1_700_000_000.0
    with CheckpointManager(tmp_path / "root") as manager:
        for step in range(4):
            with patch("nostall._save.decide.time.time", lambda hour=step: began_s + 3600 * hour):
                saved(manager, step)
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    with CheckpointManager(tmp_path / "copy", keep=KeepEvery(seconds=7000)) as manager:
        saved(manager, 4)
        manager.wait()
        assert manager.all_steps() == [0, 2, 4]


def test_a_metric_that_no_step_has_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, when the first step is removed; it names the metrics that there are."""
    with CheckpointManager(tmp_path, keep=[KeepLatest(1), KeepBest(1, "loss")]) as manager:
        for step in (1, 2, 3):
            assert ("KeepBest" in caplog.text) == (step == 3)
            saved(manager, step, metrics={"other": 0.5})
            manager.wait()
    (warning,) = warnings_in(caplog)
    assert "has the metrics ['loss'] that KeepBest needs" in warning
    assert "(found: ['other'])" in warning


# --- size -----------------------------------------------------------------------------------------


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
    many = {str(number): number for number in range(7)}
    with patch("nostall.manager._MANY", 10), CheckpointManager(tmp_path) as manager:
        saved(manager, 1, extra=many)
        manager.save(2, {**numbered(2), "first": many, "history": [*many, *many]}).result()
        assert not warnings_in(caplog)
        for step in (3, 4):
            manager.save(step, {"first": {"a": 1, **many}, "history": many, "epoch": 3}).result()
    (warning,) = warnings_in(caplog)
    assert "the state has 16 plain values, 8 of them in 'first'" in warning
    assert "extra" in warning
    assert "one list of plain values" in warning


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
