"""Planning: what ranks exchange, and that a plan which is used again is never a wrong one."""

from __future__ import annotations

import pickle
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan

from nostall._commit.columns import Results
from nostall._commit.metadata import PLANS_KEY, local_plans_in
from nostall._commit.publication import KnownResults, publication_of
from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from nostall.state_dict_saver import CheckpointMetadataCache
from programs import planning
from programs.entry_points import differing, loaded_wrong
from support.ranks import run_ranks
from support.states import small_state

Found = dict[str, Any]

EXCHANGE = {"all_reduce": 2, "gather": 1, "scatter": 1}
"""All ranks plan together."""
FIRST = {**EXCHANGE, "all_reduce": 3}
"""Joint planning, after finding out that not all ranks have loaded plans that fit."""
VERIFIED = {"all_reduce": 1}
"""All of them have, and plan alone."""
NOTHING: dict[str, int] = {}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """The findings of ``planning.two_ranks`` on each rank."""
    return run_ranks(2, "planning:two_ranks", tmp_path_factory.mktemp("planning"))


# --- communication --------------------------------------------------------------------------------


def test_planning_says_nothing_once_the_cache_is_valid(found: list[Found]) -> None:
    """Nor do polls without requests; messages follow if a save is not committed early."""
    messages = {"gather": 1, "broadcast": 1}
    for facts in found:
        said = facts["steady_state"]
        assert said["plan"] == [FIRST, EXCHANGE, *[NOTHING] * 5]
        assert said["uncached plan"] == EXCHANGE
        assert said["content"]
        assert said["poll and finalize"] in ({"all_reduce": 1}, {"all_reduce": 3, **messages})
        assert said["idle poll"] == NOTHING
        assert said["status"] == [[False, False], *[[True, False]] * 6]


# --- changes of structure -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", planning.CHANGES)
def test_a_changed_structure_is_saved_as_it_is(kind: str, found: list[Found]) -> None:
    """A key added, removed, reshaped or made an object, on one rank or all; then planned anew."""
    for facts in found:
        for where in planning.WHERE:
            assert facts["structure_changes"][f"{kind} on {where}"] == {
                "plan": [NOTHING, FIRST, EXCHANGE, NOTHING],
                "content": [True, True, True],
                "status": [False, False, True, True],
            }


def test_no_save_shows_what_was_saved_before_it(found: list[Found]) -> None:
    """State, planner and options change and return: byte for byte what no cache would give."""
    for facts in found:
        assert facts["matrix"]["wrong"] == []
        assert facts["matrix"]["said with other options"] == [NOTHING] * 30


def test_a_rank_may_drop_a_copy_of_what_another_one_writes(found: list[Found]) -> None:
    """If it was to write it itself, all ranks fail, and the next save has it from the other."""
    for facts in found:
        for case in facts["replicated_on_one_rank_less"].values():
            assert case["fourth"]["plan"] == NOTHING
        case = facts["replicated_on_one_rank_less"]["another wrote it"]
        assert case["fourth"]["ranks"] == []
        assert case["committed"]
        case = facts["replicated_on_one_rank_less"]["it wrote it"]
        assert case["fourth"]["ranks"] == [0]
        assert "not written by any rank" in case["fourth"]["text"]
        assert "'shared'" in case["fourth"]["text"]
        assert not case["committed"]
        assert case["fifth"] == FIRST


def test_a_rank_may_begin_to_hold_what_another_one_writes(found: list[Found]) -> None:
    """A tensor that is private to one rank and then replicated is saved right."""
    for facts in found:
        assert facts["joined"] == NOTHING


def test_saves_in_flight_over_a_change_rest_on_their_own_plans(found: list[Found]) -> None:
    """Planned before an earlier structure is finalised, and finalised after a later one."""
    for facts in found:
        assert facts["in_flight_over_a_change"] == [NOTHING, NOTHING, FIRST, FIRST]


# --- after a resume -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reader", ["caching reader", "stock reader", "rebuilt by a newer torch", "default cache"]
)
def test_the_first_save_after_a_resume_exchanges_no_plans(reader: str, found: list[Found]) -> None:
    """One reduction replaces that, then silence; the loaded object is not changed."""
    for facts in found:
        resumed = facts["resumed"][reader]
        assert resumed["plan"] == [VERIFIED, NOTHING]
        assert resumed["untouched"]
        assert resumed["status"] == [True, True]


@pytest.mark.parametrize("case", ["on one rank only", "changed since", "other world size"])
def test_loaded_plans_that_some_ranks_lack_are_not_used(case: str, found: list[Found]) -> None:
    """Plans that one rank alone has loaded, or of other structures or sizes, are put aside."""
    for facts in found:
        resumed = facts["resumed"][case]
        assert resumed["plan"] == [FIRST, EXCHANGE]
        assert resumed["status"] == [False, False]
        assert resumed["untouched"]


def test_metadata_is_copied_and_prepared_metadata_serves_another_run(found: list[Found]) -> None:
    """With NVRx's arguments of planning and finalising; a copy that fails costs no checkpoint."""
    for facts in (each["prepared_metadata"] for each in found):
        assert facts["equal"]
        assert facts["plan"] == VERIFIED
        assert facts["returned"] is None
        assert facts["failure"]["ranks"] == [0]
        assert "1/.metadata" in facts["failure"]["text"]
        assert "the checkpoint is committed" in facts["failure"]["text"]


def test_reuse_is_verified_by_all_ranks(found: list[Found]) -> None:
    """By one reduction in any case: what one rank has not loaded, another one may have."""
    for facts in found:
        assert facts["verified"] == {
            "equal": [True, {"all_reduce": 1}],
            "one differs": [False, {"all_reduce": 1}],
            "none": [False, {"all_reduce": 1}],
        }


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "rank", "raised_when", "cause"),
    [
        ("no cache", 1, "plan", "no luck in create_local_plan"),
        ("valid cache", 1, "finalize", "no luck in create_local_plan"),
        ("global plan", 0, "plan", "no luck in create_global_plan"),
        ("lookup with valid cache", 1, "finalize", "no luck in lookup_object"),
        ("valid cache, DCP's error", 0, "finalize", "no luck in create_local_plan"),
        ("lookup, DCP's error", 1, "finalize", "no luck in lookup_object"),
    ],
)
def test_every_rank_learns_which_rank_could_not_plan(
    case: str, rank: int, raised_when: str, cause: str, found: list[Found]
) -> None:
    """With the cause; nothing is left on storage, and the next save is planned anew and right."""
    for here, facts in enumerate(found):
        failed = facts["planning_failures"][case]
        assert failed["ranks"] == [rank]
        assert failed["raised when"] == raised_when
        assert cause in failed["text"]
        path = r" path=/.+/failed" if case.startswith("lookup") and "DCP" not in case else ""
        assert re.search(rf"\[rank={rank} phase=plan{path}\]", failed["text"])
        assert ("Worker failure" in failed["text"]) == (here == 0)
        assert failed["left"] == []
        assert failed["next"]["gather"] == 1


# --- planners and coordinators --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planner", "plan", "shared_is_in"),
    [
        ("alone", [FIRST, EXCHANGE, NOTHING, NOTHING, NOTHING, FIRST], "__0_0.distcp"),
        ("alone, vouched for", [FIRST, EXCHANGE, NOTHING, NOTHING, NOTHING, FIRST], "__0_0.distcp"),
        ("alone, everything", [FIRST, EXCHANGE, NOTHING, NOTHING, NOTHING, FIRST], None),
        ("torch's cache", [FIRST, EXCHANGE, EXCHANGE, NOTHING, NOTHING, FIRST], None),
    ],
)
def test_other_planners_save_right(
    planner: str, plan: list[dict[str, int]], shared_is_in: str | None, found: list[Found]
) -> None:
    """One that makes final plans alone, and one with torch's plan cache; all follow a change."""
    for facts in found:
        said = facts["other_planners"][planner]
        assert said["plan"] == plan
        assert shared_is_in in (None, said["shared is in"])


def test_any_rank_can_coordinate(found: list[Found]) -> None:
    """With ``coordinator_rank=1``, rank 1 publishes the metadata and reports failures."""
    for here, facts in enumerate(found):
        said = facts["another_coordinator"]
        assert said["plan"] == [FIRST, EXCHANGE, NOTHING]
        assert said["metadata"] == [here == 1] * 3
        assert said["failure"]["ranks"] == [0]
        assert ("Worker failure" in said["failure"]["text"]) == (here == 1)


def test_a_coordinator_that_is_not_in_the_group_is_refused_on_every_rank(
    found: list[Found],
) -> None:
    """At once, before ranks talk; also a global rank, and a group without the calling rank."""
    for here, facts in enumerate(found):
        said = facts["impossible_coordinators"]
        assert "coordinator_rank=2 is not a rank of the group of size 2" in said["beyond"]
        assert "use a rank within the group, 0 to 1" in said["beyond"]
        assert "coordinator_rank=-1" in said["negative"]
        assert "coordinator_rank='0'" in said["not a number"]
        assert ("rank 0 is not in process_group", "coordinator_rank=1")[here] in said["global rank"]


def test_some_of_the_ranks_save_in_a_group_of_their_own(tmp_path: Path) -> None:
    """Ranks 1 and 2 of three plan, save, fail and resume alone; ranks are the group's."""
    bystander, *members = run_ranks(
        3, "planning:some_of_the_ranks_save_in_a_group_of_their_own", tmp_path
    )
    assert bystander is None
    for here, facts in enumerate(members):
        assert facts["plan"] == [FIRST, EXCHANGE, NOTHING, NOTHING]
        assert facts["files"] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
        assert facts["failure"]["ranks"] == [1]
        assert "'sabotage'" in facts["failure"]["text"]
        assert ("Worker failure" in facts["failure"]["text"]) == (here == 0)
        assert facts["resumed plan"] == VERIFIED


# --- one process ----------------------------------------------------------------------------------


def test_one_process_plans_with_a_cache(tmp_path: Path) -> None:
    """Without a process group the cache becomes valid as well, and a new key is not lost."""
    cache = CheckpointMetadataCache()
    status = []
    for number in range(1, 4):
        planning.save(tmp_path / str(number), small_state(number), cache)
        status.append(cache.get_metadata_caching_status())
    assert status == [(False, False), (True, False), (True, False)]
    planning.save(tmp_path / "4", {**small_state(4), "new": torch.full((3,), 4.0)}, cache)
    assert cache.get_metadata_caching_status() == (False, False)


def test_metadata_made_of_other_objects_is_not_taken_for_what_was_published_last() -> None:
    """Also if the new objects lie where the old ones, which are gone, lay in memory."""
    known = KnownResults()
    written = Results(items={}, files=(), token="token")
    first = Metadata(state_dict_metadata={"first": BytesStorageMetadata()}, storage_data={})
    known.note_published([written], first, publication_of(first))
    item: Any = BytesStorageMetadata()
    del first
    entries = [{"other": item} for _ in range(1000)]  # nothing else takes the place meanwhile
    others = [Metadata(state_dict_metadata=each, storage_data={}) for each in entries]
    assert all(known.publication([written], other) is None for other in others)


def test_a_checkpoint_with_plans_in_it_is_an_ordinary_one(tmp_path: Path) -> None:
    """The plans kept in the metadata do no harm: torch's own converter reads the checkpoint."""
    planning.save(tmp_path / "1", small_state(1), CheckpointMetadataCache())
    metadata = FileSystemReader(tmp_path / "1").read_metadata()
    assert len(metadata.planner_data[PLANS_KEY]) == 1
    dcp_to_torch_save(tmp_path / "1", tmp_path / "1.pt")
    assert differing(torch.load(tmp_path / "1.pt"), small_state(1)) == []


def test_plans_are_kept_though_a_planner_does_not_flatten(tmp_path: Path) -> None:
    """Plans are stored and read without planner data to hold them, as in Megatron's saves."""
    state = {"a": torch.ones(4), "b": torch.zeros(2)}
    cache = CheckpointMetadataCache()
    for number in range(3):
        planner = DefaultSavePlanner(flatten_state_dict=False)
        planning.save(tmp_path / f"{number}", state, cache, planner)
    metadata = CachedMetadataFileSystemReader(tmp_path / "2").read_metadata()
    assert metadata.planner_data is None
    (plan,) = local_plans_in(metadata) or ()
    assert [each.index.fqn for each in plan.items] == ["a", "b"]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))  # by a user
    again = CachedMetadataFileSystemReader(tmp_path).read_metadata()
    assert again.storage_data == metadata.storage_data
    assert local_plans_in(again) == [plan]
    resumed = CheckpointMetadataCache()
    resumed.set_cached_global_metadata(metadata)
    planning.save(tmp_path / "3", state, resumed, DefaultSavePlanner(flatten_state_dict=False))
    assert resumed.get_metadata_caching_status() == (True, True)


def test_frameworks_can_drive_a_cache_by_hand(tmp_path: Path) -> None:
    """The second equal central plan in a row makes a cache valid; metadata is filled in."""
    planned = planning.plan(tmp_path, small_state(1)).arguments
    writer, metadata, wrapper = planned
    assert metadata is not None
    cache = CheckpointMetadataCache()
    planner = DefaultSavePlanner()
    planner.set_up_planner(small_state(1), is_coordinator=True)
    local = planner.create_local_plan()
    assert cache.get_cache_metadata() == (None, None, False, None)
    cache.set_cache_metadata(local, local, global_md_verify_reuse=False)
    assert cache.get_metadata_caching_status() == (False, False)
    cache.set_cache_metadata(local, local, global_md_verify_reuse=True)
    assert cache.get_metadata_caching_status() == (True, True)
    assert cache.get_cache_metadata() == (local, local, True, None)
    assert cache.prepare_save_state_dict_ret(0, 0, planned) == planned
    _, filled_in, _ = cache.prepare_save_state_dict_ret(0, 0, (writer, None, wrapper))
    assert filled_in.state_dict_metadata == metadata.state_dict_metadata
    assert cache.prepare_save_state_dict_ret(1, 0, (writer, None, wrapper))[1] is None


class OneTooFew(DefaultSavePlanner):
    """Leaves out the last rank."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans[:-1], metadata


def test_a_rank_whose_share_is_missing_still_plans_alone(tmp_path: Path) -> None:
    """All have agreed on loaded plans: a rank that fails then must not wait for the others."""
    planning.save(tmp_path / "a", small_state(1), CheckpointMetadataCache())
    cache = CheckpointMetadataCache()
    loaded = CachedMetadataFileSystemReader(tmp_path / "a").read_metadata()
    cache.set_cached_global_metadata(loaded)
    failed = planning.plan(tmp_path / "b", small_state(2), cache, OneTooFew())
    assert cache.get_metadata_caching_status() == (True, True)
    with pytest.raises(CheckpointException, match="IndexError"):
        failed.finish()


def test_a_frameworks_own_metadata_is_not_changed(tmp_path: Path) -> None:
    """Metadata lent to a cache, or to another save, still describes its own checkpoint."""
    planning.save(tmp_path / "a", small_state(1))
    loaded = FileSystemReader(tmp_path / "a").read_metadata()
    before = deepcopy(loaded)
    cache = CheckpointMetadataCache()
    cache.set_cached_global_metadata(loaded)
    writer, _, wrapper = planning.plan(tmp_path / "b", small_state(2)).arguments
    _, filled_in, _ = cache.prepare_save_state_dict_ret(0, 0, (writer, None, wrapper))
    assert filled_in is not loaded
    assert filled_in.storage_data is None
    planning.Planned((writer, loaded, wrapper), {}).finish()
    assert loaded == before
    assert loaded_wrong(tmp_path / "a", small_state(1), small_state(0)) == []
    assert loaded_wrong(tmp_path / "b", small_state(2), small_state(0)) == []
