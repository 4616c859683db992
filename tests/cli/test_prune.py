"""``prune`` removes what no policy keeps, and never the checkpoint to resume from."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import nostall
from cli.conftest import Run
from nostall._cli import listing
from nostall._cli.listing import Listed, ListedState, parse_policies, reasons, why_kept
from support.permissions import without_permission
from support.states import save_now, save_stock_way


def save(root: Path, *steps: int) -> None:
    for step in steps:
        save_now(root / f"step-{step}", {"x": torch.zeros(3)}, sync_files=False)


def there(root: Path) -> set[str]:
    return {path.parent.name for path in root.glob("*/.metadata")}


def test_a_dry_run_removes_nothing(tmp_path: Path, run: Run) -> None:
    """It says what would go, what stays and why; ``--delete`` does exactly this."""
    save(tmp_path, 1000, 1500, 2000, 2500, 2600)
    before = there(tmp_path)
    keep = ("--keep", "latest=2,every=1000")
    status, shown, _ = run("prune", tmp_path, *keep)
    assert status == 0
    assert there(tmp_path) == before
    assert "would remove 1 checkpoint" in shown
    assert "--delete" in shown
    assert re.search(r" remove +step-1500$", shown, re.MULTILINE)
    assert re.search(r" keep +every=1000 +step-2000$", shown, re.MULTILINE)
    plain = json.loads(run("prune", tmp_path, *keep, "--json")[1])
    assert plain["would_remove"] == [str(tmp_path / "step-1500")]
    assert "removed" not in plain
    status, shown, _ = run("prune", tmp_path, *keep, "--delete")
    assert (status, "removed 1 checkpoint" in shown) == (0, True)
    assert before - there(tmp_path) == {"step-1500"}
    assert not (tmp_path / "step-1500").exists()


def test_a_damaged_newest_checkpoint_is_not_what_stays(tmp_path: Path, run: Run) -> None:
    """With ``--deep`` the last one that is as it was written is kept."""
    save(tmp_path, 1, 2, 3)
    file = next((tmp_path / "step-3").glob("*.distcp"))
    file.write_bytes(bytes(file.stat().st_size))
    kept = json.loads(run("prune", tmp_path, "--json", "--keep", "latest=1")[1])["kept"]
    assert list(kept) == [str(tmp_path / "step-3")]
    kept = json.loads(run("prune", tmp_path, "--json", "--deep", "--keep", "latest=1")[1])["kept"]
    assert kept == {
        str(tmp_path / "step-2"): "latest=1",
        str(tmp_path / "step-3"): "damaged",
    }


def test_the_best_steps_stay(tmp_path: Path, run: Run) -> None:
    """By a metric of the manager that saved them; a metric that none has is an error."""
    with nostall.CheckpointManager(tmp_path) as manager:
        for step, loss in enumerate((3.0, 1.0, 2.0, 4.0), start=1):
            manager.save(step, {"x": torch.zeros(3)}, metrics={"loss": loss})
    for keep, kept in (("best=2:loss", {2, 3, 4}), ("best=1:loss:max", {4})):
        plain = json.loads(run("prune", tmp_path, "--json", "--keep", keep)[1])
        assert {int(path[-9:]) for path in plain["kept"]} == kept
    status, _, error = run("prune", tmp_path, "--keep", "best=1:accuracy", "--delete")
    assert status == 2
    assert "no checkpoint has a metric named accuracy (metrics found: loss)" in error
    assert parse_policies("best=2:eval:loss:max") == {
        "best=2:eval:loss:max": nostall.KeepBest(2, "eval:loss", "max")
    }
    assert manager.all_steps() == [1, 2, 3, 4]
    for file in (tmp_path / "step-000000001").glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    assert run("prune", tmp_path, "--keep", "every=1h")[0] == 0  # times are in the manifests


def test_what_is_not_complete_is_left(tmp_path: Path, run: Run) -> None:
    """So are links, what they lead to, names without a step, and what another program put there."""
    save_stock_way(tmp_path / "step-1", {"x": torch.zeros(3)})
    (tmp_path / "step-1" / "config.json").write_text("{}")
    save(tmp_path, 2, 3, 4, 5)
    next((tmp_path / "step-5").glob("*.distcp")).unlink()
    (tmp_path / "step-2").rename(tmp_path / "best")
    (tmp_path / "pinned").symlink_to("step-3")
    for step, name in ((9, "__0_0.distcp"), (10, "notes.txt")):  # in progress; not a checkpoint
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / name).touch()
    status, shown, _ = run("prune", tmp_path, "--keep", "latest=1", "--delete")
    assert status == 0, shown
    assert there(tmp_path) == {"best", "step-3", "step-4", "step-5", "pinned"}
    assert (tmp_path / "step-9" / "__0_0.distcp").exists()
    assert (tmp_path / "step-10" / "notes.txt").exists()
    assert os.listdir(tmp_path / "step-1") == ["config.json"]


def test_checkpoints_in_a_local_tier_stay(tmp_path: Path, run: Run) -> None:
    """The saves that follow remove them, once they are promoted."""
    tier = tmp_path / "tier"
    for step in (1, 2, 3):
        destination = tmp_path / "far" / f"step-{step}"
        writer = nostall.FileSystemWriterAsync(destination, local_staging_dir=tier)
        dcp.save({"x": torch.zeros(3)}, storage_writer=writer, no_dist=True)
        assert writer.promotion is not None
        writer.promotion.result(60)
    assert [each["step"] for each in json.loads(run("ls", tier, "--json")[1])] == [2, 3]
    status, shown, _ = run("prune", tier, "--keep", "every=1000", "--delete")
    assert (status, shown.count("in a local_staging_dir")) == (0, 2)
    assert {"step-2", "step-3"} <= there(tier)


def test_what_cannot_be_read_is_not_damage(tmp_path: Path, run: Run) -> None:
    """A directory without permission stays, and whoever converts a file of it learns why."""
    save(tmp_path, 1, 2)
    with without_permission(tmp_path / "step-1"):
        shown = run("prune", tmp_path, "--keep", "latest=1", "--delete")[1]
        assert re.search(r"keep +unreadable +step-1", shown)
        assert "unreadable" in run("ls", tmp_path)[1]
    (shard,) = (tmp_path / "step-1").glob("*.distcp")
    with without_permission(shard):
        status, _, error = run("convert", tmp_path / "step-1", tmp_path / "new.pt")
    assert (status, "cannot be read" in error, "damaged" in error) == (1, True, False)
    assert there(tmp_path) == {"step-1", "step-2"}


def test_the_checkpoint_that_latest_prints_stays(tmp_path: Path, run: Run) -> None:
    """Among equally old ones 10, not 9, last by name. A step's parts are no steps of the root."""
    root = tmp_path / "root"
    elsewhere, newest = tmp_path / "elsewhere" / "step-99", root / "step-10"
    for path in (root / "step-8", root / "step-9", newest, elsewhere):
        save_stock_way(path, {"x": torch.zeros(3)})
        os.utime(path / ".metadata", (1e9, 1e9))
    (root / "best").symlink_to("step-8")
    (root / "other").symlink_to(elsewhere)
    save(root / "step-7", 1)  # a part, committed later
    assert run("latest", root)[1] == f"{newest}\n"
    status, shown, _ = run("prune", root, "--keep", "every=9", "--delete")
    assert status == 0, shown
    assert there(root) == {"step-8", "step-9", "step-10", "best", "other"}
    assert (root / "step-7" / "step-1" / ".metadata").exists()
    assert shown.count("inside of another directory") == 1
    assert re.search(r" keep +the last complete one +step-10$", shown, re.MULTILINE)
    assert run("latest", root)[1] == f"{newest}\n"


Remove = Callable[[Path | str], object]


def replace(root: Path, path: str, remove: Remove) -> None:
    """A job that has returned to an earlier step commits it."""
    remove(path)
    save(root, 2)


def refuse_the_first(_: Path, path: str, remove: Remove) -> None:
    """Storage refuses, and the rest is removed."""
    if path.endswith("step-1"):
        raise nostall.errors.WriteError("the checkpoint could not be removed: busy", path=path)
    remove(path)


def remove_the_last(root: Path, path: str, remove: Remove) -> None:
    """Another program does, after the list was made: nothing else is removed."""
    remove(path)
    remove(root / "step-3")


@pytest.mark.parametrize(
    ("happens", "keep", "said", "left"),
    [
        (replace, "latest=1", [], {"step-2", "step-3"}),
        (refuse_the_first, "latest=1", ["busy", "failed"], {"step-1", "step-3"}),
        (remove_the_last, "every=1000", ["stopped"], {"step-2"}),
    ],
)
def test_what_happens_meanwhile_is_reported_and_costs_no_other_checkpoint(
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[Path, str, Remove], None],
    keep: str,
    said: list[str],
    left: set[str],
) -> None:
    """With status 1; a checkpoint that is replaced stays, and the last one is never risked."""
    save(tmp_path, 1, 2, 3)
    remove = nostall.remove_checkpoint
    monkeypatch.setattr(listing, "remove_checkpoint", lambda path: happens(tmp_path, path, remove))
    status, shown, error = run("prune", tmp_path, "--keep", keep, "--delete")
    assert (status, [word for word in said if word not in shown + error]) == (1, [])
    assert there(tmp_path) == left


@pytest.mark.parametrize(
    "policies", ["", "latest", "latest=0", "latest=-1", "every=0", "every=0h", "best=3", "every=6y"]
)
def test_other_policies_are_refused(tmp_path: Path, run: Run, policies: str) -> None:
    """With status 2 and the grammar, before anything is looked at."""
    status, _, error = run("prune", tmp_path, "--keep", policies, "--delete")
    assert status == 2
    assert "latest=3" in error


CHECKPOINTS = st.lists(
    st.builds(
        lambda name, step, **rest: Listed(
            path=f"/checkpoints/{name}{step}", name=f"{name}{step}", **rest
        ),
        name=st.sampled_from(["step", "save_", "epoch=1-step="]),
        step=st.integers(0, 99),
        state=st.sampled_from(ListedState),
        nbytes=st.just(1),
        files=st.just(1),
        at_s=st.sampled_from([0.0, 1.0, 3600.0, 7200.5, 50_000.0])
        | st.integers(0, 100_000).map(float),
        manifest=st.booleans(),
    ),
    unique_by=lambda each: each.path,
    max_size=12,
).map(lambda listed: sorted(listed, key=lambda each: each.at_s))
POLICIES = st.lists(
    st.one_of(
        st.integers(1, 20).map(lambda n: f"latest={n}"),
        st.integers(1, 20).map(lambda n: f"every={n}"),
        st.integers(1, 20).map(lambda n: f"every={n}h"),
    ),
    min_size=1,
    max_size=3,
).map(",".join)


@given(CHECKPOINTS, POLICIES)
def test_the_newest_complete_one_always_stays(checkpoints: list[Listed], text: str) -> None:
    """The newest complete checkpoint, every promised step, and all incomplete ones are kept."""
    policies = parse_policies(text)
    kept = why_kept(checkpoints, policies, set())
    complete = [each for each in checkpoints if each.state is ListedState.COMPLETE]
    assert not complete or max(complete, key=lambda each: each.order).path in kept
    assert all(each.path in kept for each in checkpoints if each.state is not ListedState.COMPLETE)
    steps = sorted({each.step for each in complete if each.step is not None})
    for kind, _, value in (each.partition("=") for each in policies):
        promised = {
            "latest": steps[-int(value.rstrip("h")) :],
            "every": [] if value.endswith("h") else [s for s in steps if s % int(value) == 0],
        }[kind]
        assert all(each.path in kept for each in complete if each.step in promised)


@given(CHECKPOINTS, st.integers(1, 20))
def test_no_gap_is_longer_than_asked(checkpoints: list[Listed], hours: int) -> None:
    """Kept checkpoints are an interval apart, and each removed one follows a kept one sooner."""
    checkpoints = [
        dataclasses.replace(each, name=f"step{step}") for step, each in enumerate(checkpoints)
    ]
    paths = reasons(checkpoints, parse_policies(f"every={hours}h"))
    kept = [each for each in checkpoints if each.path in paths]
    assert kept[:1] == checkpoints[:1]
    for one, other in pairwise(kept):
        assert other.at_s - one.at_s >= hours * 3600
    for each in checkpoints:
        before = max(other.at_s for other in kept if other.at_s <= each.at_s)
        assert each in kept or each.at_s - before < hours * 3600
