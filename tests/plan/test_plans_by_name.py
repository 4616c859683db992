"""``nostall.SavePlanner``: what is planned and sent, and that no save differs from stock's plan."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.planner import SavePlan

import nostall
from nostall._save import decide
from nostall._save.plans_by_name import GroupPlans
from nostall.errors import SaveError
from programs.plans_by_name import Rebuilding, plannings
from support.ranks import on_ranks
from support.states import blobs, read_metadata, save_now, small_state

SENT_NBYTES = 1024


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nostall._save.plans_by_name._alone", GroupPlans())


@on_ranks("plans_by_name:steady", ranks=(2, 4))
def test_a_structure_is_planned_once(found: list[Any]) -> None:
    """After that ranks send its name; ``dcp.save`` returns the metadata on all of them."""
    for rank, (first, *later) in enumerate(found):
        assert first["planned"] == (2 if rank == 0 else 1)
        assert first["sent"] > 10 * SENT_NBYTES
        for each in later:
            assert each["planned"] == 0
            assert each["sent"] < SENT_NBYTES
        for each in (first, *later):
            assert each["said"] == first["said"]
            assert each["returned"]
            assert each["is right"]


@on_ranks("plans_by_name:changes")
def test_a_change_on_any_rank_is_noticed_by_all(found: list[Any]) -> None:
    """In the save in which it happens."""
    for each in found:
        assert [name for name, is_right in each.items() if not is_right] == []


@on_ranks("plans_by_name:alternating all", "plans_by_name:alternating one")
def test_structures_may_take_turns(found: list[Any]) -> None:
    """Each combination of those of all ranks is planned once, if one rank's alternates, too."""
    for rank, each in enumerate(found):
        assert each["right"] == [True] * 9
        assert each["planned"][3:] == [0] * 6, rank


@on_ranks("plans_by_name:failing")
def test_a_failure_is_raised_on_all_ranks_and_spoils_no_later_save(found: list[Any]) -> None:
    """If it cannot be published, all ranks' files are removed, though only referred to."""
    assert found == [{"errors": [True] * 4, "left": [], "right": [True] * 6}] * 2


@on_ranks(*(f"plans_by_name:forgetting {most_items}" for most_items in (400_000, 20)))
def test_ranks_forget_together(found: list[Any]) -> None:
    """No rank asks for a plan that the coordinator has forgotten; long plans are fewer."""
    assert found == [[True] * 5] * 2


@on_ranks("plans_by_name:other_groups told", ranks=3)
def test_groups_are_kept_apart(found: list[Any]) -> None:
    """A planner that is told its group."""
    for each in found:
        assert each == {"errors": [], "right": True}


@on_ranks("plans_by_name:other_groups not-told", ranks=3)
def test_a_planner_of_another_group_fails_clearly(found: list[Any]) -> None:
    """With the next step, on all ranks of the group; no save is wrong."""
    first, *others = found
    assert first == {"errors": [], "right": True}
    for each in others:
        assert each["right"]
        assert each["errors"]
        assert all(each["errors"])


@on_ranks("plans_by_name:replaced")
def test_a_checkpoint_may_be_replaced(found: list[Any]) -> None:
    """Files have new names then; metadata that nobody has looked at goes with its checkpoint."""
    coordinator, other = found
    assert coordinator["right"] == other["right"] == [True] * 4
    assert coordinator["first"] == coordinator["last"] == other["last"]
    assert other["first"] == (
        "the checkpoint whose metadata dcp.save returned was replaced by a later save"
    )


@on_ranks(*(f"plans_by_name:in_background {staging}" for staging in ("blocking", "overlapped")))
def test_saves_in_the_background_plan_once(found: list[Any]) -> None:
    """With one planner for all of them, which keeps no copy alive."""
    for rank, each in enumerate(found):
        assert each["right"] == [True] * 4
        assert each["planned"][1:] == [0] * 3, rank


@on_ranks("plans_by_name:with_other_writers")
def test_other_writers_get_whole_plans(found: list[Any]) -> None:
    """To change or copy; its items are those of stock's planner, stock's metadata is stock's."""
    for each in found:
        assert len(each) == 5
        assert list(each.values()) == [[True, True]] * 5, each


@on_ranks(
    "plans_by_name:without_collectives",
    "plans_by_name:one_object_grows",
    "plans_by_name:through_a_tier",
    "plans_by_name:groups_come_and_go",
)
def test_every_save_is_right(found: list[Any]) -> None:
    """Between saves of each rank alone, of longer objects, through a tier, and in new groups."""
    assert len(found[0]) >= 5
    assert found == [[True] * len(found[0])] * 2


@on_ranks("plans_by_name:other_planners")
def test_another_planner_on_the_coordinator_fails_clearly(found: list[Any]) -> None:
    """And no rank's items are left out of a checkpoint."""
    assert found == [{"errors": [True], "right": [True] * 5}] * 2


@on_ranks("plans_by_name:returned")
def test_returned_metadata_can_be_copied_compared_and_pickled(found: list[Any]) -> None:
    """On all ranks, whether or not somebody has looked at it."""
    for each in found:
        assert all(each.values()), each


# --- one process ----------------------------------------------------------------------------------


def test_other_options_of_the_writer_are_followed(tmp_path: Path) -> None:
    """From save to save of one structure: each has the files of a save that was planned anew."""
    everything: list[dict[str, Any]] = [
        {},
        {"thread_count": 3},
        {"serialization_format": SerializationFormat.SAFETENSORS},
        {"single_file_per_rank": False},
        {"separation_hint": "w1", "thread_count": 2},
        {"serialization_format": SerializationFormat.SAFETENSORS, "thread_count": 2},
        {"sync_files": False},
    ]
    for number, options in enumerate(everything):
        state = {f"w{n}": torch.full((n, 3), float(number)) for n in range(5)}
        save_now(tmp_path / f"{number}", state, planner=nostall.SavePlanner(), **options)
        save_now(tmp_path / f"{number}p", state, planner=dcp.DefaultSavePlanner(), **options)
        one, other = tmp_path / f"{number}", tmp_path / f"{number}p"
        assert blobs(one) == blobs(other)
        assert read_metadata(one).storage_data == read_metadata(other).storage_data
        assert nostall.verify(one).ok


def test_a_first_commit_that_fails_costs_no_later_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank may ask for the plan of that save, though others were made since."""
    one, other = {"w": torch.ones(3)}, {"v": torch.ones(3)}
    with monkeypatch.context() as patched:
        refuse = Mock(side_effect=RuntimeError("elsewhere"))
        patched.setattr(decide, "_require_written_here", refuse)
        with pytest.raises(CheckpointException, match="elsewhere"):
            save_now(tmp_path / "failed", one, planner=nostall.SavePlanner())
    for name, state in (("other", other), ("another", {"u": torch.ones(3)}), ("one", one)):
        save_now(tmp_path / name, state, planner=nostall.SavePlanner())
        assert nostall.verify(tmp_path / name).ok


def test_a_writer_that_is_used_twice_follows_each_planner(tmp_path: Path) -> None:
    """A writer's named plan is never used for the next save, whose planner may be another one."""
    writer = nostall.FileSystemWriterAsync(tmp_path)
    for planner in (nostall.SavePlanner(), nostall.SavePlanner(), dcp.DefaultSavePlanner()):
        state = {"w": torch.ones(3)}
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        is_named = isinstance(planner, nostall.SavePlanner)
        assert (writer._rank_save.named_plan is not None) is is_named
        assert nostall.verify(tmp_path).ok


class _Halved(nostall.SavePlanner):
    """A planner that changes what is written."""

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002  # DCP's
        found = super().transform_object(write_item, object)
        return found / 2 if isinstance(found, torch.Tensor) else found


def test_a_subclass_plans_every_save(tmp_path: Path) -> None:
    """Its plan may depend on more than the structure, so every save calls its planning methods."""
    for number in range(3):
        with plannings() as made:
            save_now(tmp_path / f"{number}", {"w": torch.full((3,), 4.0)}, planner=_Halved())
        assert made() == 2
        found = {"w": torch.zeros(3)}
        nostall.load(found, tmp_path / f"{number}")
        assert found["w"].tolist() == [2.0] * 3


def test_a_writer_that_makes_new_plans_of_known_ones_saves_all_items(tmp_path: Path) -> None:
    """An answer to a question has no items; taken literally, the checkpoint would be empty."""
    nostalls, planner = nostall.FileSystemWriterAsync, nostall.SavePlanner()
    kinds: list[type[dcp.FileSystemWriter]] = [nostalls, Rebuilding, nostalls]
    for number, kind in enumerate(kinds):
        path = tmp_path / f"{number}"
        save_now(path, small_state(), planner=planner, kind=kind)
        assert blobs(path) == blobs(tmp_path / "0")
        places = [read_metadata(each).storage_data.keys() for each in (path, tmp_path / "0")]
        assert places[0] == places[1]
    planner.set_up_planner(small_state(), is_coordinator=True)
    planner._recognised["another plan"] = next(iter(planner._recognised.values()))
    with pytest.raises(SaveError, match="prepare_global_plan has made a new plan"):
        planner.finish_plan(SavePlan([]))


class _Copying(nostall.FileSystemWriterAsync):
    """A writer that makes a new plan of the local one."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        plan = super().prepare_local_plan(plan)
        return SavePlan([*plan.items], plan.storage_data, plan.planner_data)


def test_a_writer_that_loses_a_question_fails_clearly(tmp_path: Path) -> None:
    """Without its items the plan of the second save would be committed as an empty checkpoint."""
    state = small_state()
    save_now(tmp_path / "0", state, planner=nostall.SavePlanner())
    with pytest.raises(CheckpointException, match="prepare_local_plan has made a new plan"):
        save_now(tmp_path / "1", state, planner=nostall.SavePlanner(), kind=_Copying)
    assert not nostall.is_complete(tmp_path / "1")
    save_now(tmp_path / "2", state, planner=nostall.SavePlanner())
    assert blobs(tmp_path / "2") == blobs(tmp_path / "0")


class _Noting(nostall.FileSystemWriterAsync):
    """A writer that adds to the metadata."""

    def finish(self, metadata: Any, results: Any) -> None:
        metadata.planner_data["note"] = Path(self.path).name
        super().finish(metadata, results)


def test_what_a_writer_adds_to_the_metadata_is_published(tmp_path: Path) -> None:
    """In each save anew."""
    for number in range(4):
        path, state = tmp_path / f"{number}", {"w": torch.ones(3)}
        save_now(path, state, planner=nostall.SavePlanner(), kind=_Noting)
        assert read_metadata(path).planner_data["note"] == f"{number}"


def test_a_kept_planner_keeps_no_tensor(tmp_path: Path) -> None:
    """Neither of a recognised state dict nor of a planned one, after a failure, or in a pickle."""
    planner = nostall.SavePlanner(dedup_save_to_lowest_rank=True)
    state = {**small_state(), "w": torch.ones(100_000)}
    for number in range(3):
        save_now(tmp_path / f"{number}", state, planner=planner)
        assert "state_dict" not in vars(planner)
        assert planner._given is None
        assert planner._recognised == {}
        assert len(pickle.dumps(planner)) < 10_000
    save_now(tmp_path / "other", state, planner=pickle.loads(pickle.dumps(planner)))
    assert blobs(tmp_path / "other") == blobs(tmp_path / "0")
    options: dict[str, Any] = {"serialization_format": SerializationFormat.SAFETENSORS}
    # Though the structure is known:
    with pytest.raises(CheckpointException, match="a safetensors file cannot hold"):
        save_now(tmp_path / "failed", state, planner=planner, **options)
    assert not nostall.is_complete(tmp_path / "failed")
    assert "state_dict" not in vars(planner)
