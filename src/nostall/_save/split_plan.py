"""Plan a split save: with all ranks, alone, or not at all if the structure is known.

If ranks communicate while they plan, a failure on one is raised on all. If not, it is kept and
reported to the others when the save is finalised. What one save knows of the next is in a
:class:`CheckpointMetadataCache`: plans, the last structure, and the results already sent.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from nostall import _torch
from nostall._commit.columns import CompactPlan, same_plan
from nostall._commit.metadata import local_plans_in
from nostall._commit.publication import KnownResults
from nostall._model.names import also_named
from nostall._model.values import SaveId
from nostall._plan.agree import (
    CachedPlans,
    GlobalPlan,
    local_plan,
    plan_together,
    reusable_metadata,
)
from nostall._plan.planner import as_save_error, planner_failures, planner_key, vouched
from nostall._ranks.group import Membership, Records, coordination_of
from nostall._save.planner_by_name import SavePlanner as PlannerByName
from nostall._save.prepared import KnownSave
from nostall._save.rank_save import Failed
from nostall._save.split_save import SplitSave

if TYPE_CHECKING:
    from nostall.filesystem_async import FileSystemWriterAsync

_log = logging.getLogger("nostall")

_MOST_DIRECTORIES = 10_000
"""Ranks agree to count anew when they have saved to so many."""


# --- from one save to the next --------------------------------------------------------------------


class Counted(NamedTuple):
    """Identities of a save by the counts of this rank; none before ranks agree on a start."""

    save: SaveId | None = None
    """Among all saves; ``None`` if this rank has begun one that will not be finalised, or may never
    be scheduled: another rank may not have begun that, and would count otherwise."""
    save_here: SaveId | None = None
    """Among the saves to its directory."""


class CheckpointMetadataCache:
    """The plans of one sequence of saves. Make one per kind of checkpoint and keep it.

    On the coordinator also the metadata, without the parts of a single checkpoint. Metadata passed
    in or out is never changed.
    """

    def __init__(self) -> None:
        self.plans: CachedPlans | None = None
        """The plans of the last save that all ranks planned together."""
        self.loaded_all_plans: Sequence[SavePlan] | None = None
        """All ranks' plans from a loaded checkpoint, until they are compared."""
        self.verified_loaded = False
        """Whether those plans equal the plans of all ranks."""
        self.all_plans: list[CompactPlan] | None = None
        """All ranks' plans of the last save planned together; on the coordinator only."""
        self._metadata: Metadata | None = None
        # What frameworks see of the plans, and may set.
        self._central: SavePlan | None = None
        self._local: SavePlan | None = None
        self._validated = False
        self.known: KnownSave | None = None
        """The reusable part of the last save that reused a plan."""
        self.sent_token: str | None = None
        """Token of the results that the coordinator has from this rank."""
        self.known_results = KnownResults()
        """On the coordinator, the results of all ranks."""
        self.retired: deque[Records] = deque()
        """Records that saves which are over have left in the store."""
        self.last_save: SaveId | None = None
        """The identity of the last save, as long as ranks are known to count alike."""
        self._begun: list[weakref.ref[SplitSave]] = []
        """Saves of the present series that are not finalised."""
        self._saves_to: Counter[str] = Counter()
        """How many saves of the present series went to each directory."""

    def count(self, directory: str) -> Counted:
        """Count a save, before it is planned; forgotten when ranks have planned it together."""
        if self.last_save is None:
            return Counted()
        begun = [reference() for reference in self._begun]
        # A save that is lost, or may never be scheduled, is counted on some ranks only.
        alike = all(each and each.was_started and not each.progress.is_over for each in begun)
        series, number = self.last_save
        self.last_save = SaveId(series, number + 1)
        self._saves_to[directory] += 1
        alike &= len(self._saves_to) < _MOST_DIRECTORIES
        return Counted(self.last_save if alike else None, SaveId(series, self._saves_to[directory]))

    def begin_series(self, series: int) -> None:
        """Count anew from here on, which all ranks do together."""
        self.last_save = SaveId(series, 0)
        self._begun.clear()
        self._saves_to.clear()

    def note_finalised(self, save: SplitSave | None) -> None:
        """Note that all ranks have finalised a save."""
        self._begun = [each for each in self._begun if each() is not save]

    @also_named(metadata="cached_global_metadata")
    def set_cached_global_metadata(self, metadata: Metadata | None) -> None:
        """Adopt a loaded checkpoint's metadata: the first save after it may reuse its plan.

        No effect while plans of an earlier save are kept: later saves rest on the plans that all
        ranks made together, and a rank with other plans would write items that its metadata lacks.
        """
        if self.plans is None:
            self._metadata = metadata
            self.loaded_all_plans = local_plans_in(metadata)

    def set_cache_metadata(
        self, central_plan: SavePlan, local_plan: SavePlan, global_md_verify_reuse: bool
    ) -> None:
        """Remember a plan; the second equal one in a row makes the cache valid on this rank."""
        self._validated = self._central is not None and same_plan(self._central, central_plan)
        self._central, self._local = central_plan, local_plan
        self.verified_loaded = global_md_verify_reuse

    def prepare_save_state_dict_ret(
        self, rank: int, coordinator: int, save_state_dict_ret: tuple[Any, Any, Any]
    ) -> tuple[Any, Any, Any]:
        """The tuple, with metadata filled in on the coordinator if planning was skipped."""
        writer, metadata, wrapper = save_state_dict_ret
        if rank == coordinator:
            if metadata is None:
                metadata = self.reusable_metadata()
            else:
                self._metadata = metadata
        return writer, metadata, wrapper

    def get_cache_metadata(
        self,
    ) -> tuple[SavePlan | None, SavePlan | None, bool, Sequence[SavePlan] | None]:
        """``(central_plan, local_plan, validated_cache_reuse, loaded_all_plans)``."""
        return self._central, self._local, self._validated, self.loaded_all_plans

    def get_metadata_caching_status(self) -> tuple[bool, bool]:
        """``(validated_cache_reuse, validated_loaded_metadata_reuse)``."""
        return self._validated, self.verified_loaded

    def keep(self, plans: CachedPlans, made: GlobalPlan | None) -> None:
        """Keep a plan that all ranks made together; ``made`` is given on the coordinator only."""
        verified_loaded = self.verified_loaded
        self.forget()
        self.plans, self.verified_loaded = plans, verified_loaded
        if made is not None:
            self.all_plans, self._metadata = made.local, made.metadata
        self._central, self._local = plans.final, plans.local
        self._validated = plans.validated  # as agreed by all ranks, not as this rank sees it
        self._begun.clear()
        self._saves_to.clear()

    def forget(self) -> None:
        """Plan the next save together: a rank's structure has changed, or a commit failed."""
        self.plans = self.loaded_all_plans = self.all_plans = None
        self._central = self._local = self.known = self.sent_token = None
        self.known_results = KnownResults()
        self._validated = self.verified_loaded = False

    def reusable_metadata(self) -> Metadata | None:
        """Metadata for one more save of the same structure: without parts of one checkpoint."""
        return None if self._metadata is None else reusable_metadata(self._metadata)


# --- plan one save --------------------------------------------------------------------------------


class SaveSession(_torch.DistWrapper):
    """DCP's wrapper around the group, plus the planning results that finalising needs."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        use_dist: bool,  # DCP's
        coordinator: int,
    ) -> None:
        super().__init__(group, use_dist, coordinator)
        self.ranks = Membership(coordination_of(self))
        """Ranks that save together; their group may be destroyed before the save is finalised."""
        self.cache: CheckpointMetadataCache | None = None
        self.planner: SavePlanner | None = None
        self.save: SaveId | None = None
        """Its identity; ``None`` if this rank may count otherwise than others."""
        self.save_here: SaveId | None = None
        """Its identity among the saves to its directory; ``None`` if it was not counted."""
        self.changed_plan: SavePlan | None = None
        self.reused_plans: list[CompactPlan] | None = None
        """On the coordinator, the plans of all ranks that this save reuses; when it is finalised,
        the cache may already hold a later save's.
        """


def plan_save(
    state_dict: dict[str, Any],
    writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None,
    coordinator_rank: int,
    planner: SavePlanner,
    cache: CheckpointMetadataCache | None,
) -> tuple[Metadata | None, SaveSession]:
    """Plan a save, and prepare the writer's part of it. Collective.

    Counts the save before anything can go wrong on this rank alone. Returns the metadata (``None``
    except on the coordinator), and the session to finalise the save with. ``CheckpointException``
    on every rank if a rank could not plan.
    """
    save, metadata = writer._rank_save, None
    counted = Counted() if cache is None else cache.count(save.settings.directory)
    use_dist = dist.is_available() and dist.is_initialized()
    session = SaveSession(process_group, use_dist, coordinator_rank)
    session.cache = cache
    if type(planner) is PlannerByName:  # split saves have a cache of their own
        planner = DefaultSavePlanner(
            planner.flatten_state_dict,
            planner.flatten_sharded_tensors,
            dedup_save_to_lowest_rank=planner.dedup_save_to_lowest_rank,
        )
    key, coordination = planner_key(planner), coordination_of(session)
    group = (
        # Differs, on all ranks alike, once a group is destroyed and made again.
        weakref.ref(process_group or dist.group.WORLD) if use_dist else None,
        coordinator_rank,
        coordination.rank,
        coordination.world_size,
    )
    plans = None if cache is None else cache.plans
    if coordination.is_coordinator:
        _log.info("saving: path=%s ranks=%d", save.settings.directory, coordination.world_size)
    try:
        if cache is None or plans is None or not plans.are_agreed_in(group):
            final, metadata, session.save = plan_together(
                state_dict, writer, planner, session, cache, (group, key)
            )
            session.save_here = session.save
            _prepare(writer, planner, final, session)
        else:
            session.save, session.save_here = counted
            session.reused_plans = cache.all_plans
            metadata = cache.reusable_metadata() if coordination.is_coordinator else None
            is_known = plans.planner == key and _prepare_known(
                state_dict, writer, planner, session, cache.known
            )
            if not is_known:
                local = local_plan(state_dict, writer, planner, session)
                final = plans.final_for(local, key)
                session.changed_plan = None if final is plans.final else local
                _prepare(writer, planner, final, session)
                if final is plans.final:
                    cache.known = save.learn(state_dict, planner, cache.known)
    except Exception as error:  # finalising reports it to every rank
        save.state = Failed(as_save_error(error, coordination.rank))
    if cache is not None and save.split is not None:
        cache._begun.append(weakref.ref(save.split))
    return metadata, session


def _prepare_known(
    state_dict: dict[str, Any],
    writer: FileSystemWriterAsync,
    planner: SavePlanner,
    session: SaveSession,
    known: KnownSave | None,
) -> bool:
    """Prepare a save without planning, if the last one had the same structure; whether it has."""
    if known is None or known.structure is None or (voucher := vouched(planner)) is None:
        return False
    if known.naming.file_format is not writer._rank_save.settings.file_format:
        return False
    sources = known.structure.find(state_dict, voucher.serialize)
    if sources is None:
        return False
    session.planner = planner
    # As local_plan() does.
    writer.set_up_storage_writer(session.is_coordinator, rank=session.rank, use_collectives=True)
    writer.prepare_local_plan(known.share.plan)
    writer._rank_save.prepare_known(known, sources)
    return True


def _prepare(
    writer: FileSystemWriterAsync, planner: SavePlanner, final: SavePlan, session: SaveSession
) -> None:
    """Prepare a save by this rank's final plan."""
    with planner_failures():
        writer.prepare_write_data(planner.finish_plan(final), planner)
    session.planner = copy(planner)
    vars(session.planner).pop("state_dict", None)  # keeps no tensor of this save alive
