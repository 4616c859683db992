"""Plan a split save: with all ranks, alone, or not at all if the structure is known.

If ranks communicate while they plan, a failure on one is raised on all. If not, it is kept and
reported to the others when the save is finalised. What one save knows of the next is in a
:class:`CheckpointMetadataCache`: plans, the last structure, and the results already sent.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from typing_extensions import assert_never

from nostall import _torch
from nostall._commit.columns import CompactPlan, same_plan
from nostall._commit.publication import KnownResults
from nostall._model.values import SaveId
from nostall._model.wording import also_named
from nostall._plan.agree import (
    CachedPlans,
    Changed,
    GlobalPlan,
    PlanMemory,
    PlanningWriter,
    Reuse,
    Route,
    Together,
    choose_route,
    local_plan,
    plan_together,
    plans_alone,
)
from nostall._plan.planner import PlannerKey, as_save_error, planner_failures, planner_key, vouched
from nostall._ranks.group import Coordination, Membership, Records, coordination_of
from nostall._save.planner_by_name import SavePlanner as PlannerByName
from nostall._save.prepared import KnownSave
from nostall._save.rank_save import RankSave
from nostall._save.split_save import SplitSave

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


class CheckpointMetadataCache(PlanMemory):
    """The plans of one sequence of saves. Make one per kind of checkpoint and keep it.

    The methods that frameworks call are a view of :class:`~nostall._plan.agree.PlanMemory`.
    Metadata passed in or out is never changed.
    """

    def __init__(self) -> None:
        super().__init__()
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
        """Adopt a loaded checkpoint's metadata: the first save after it may reuse its plan."""
        self.adopt_loaded(metadata)

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
        """Remember a plan that all ranks made together."""
        super().keep(plans, made)
        self._central, self._local = plans.final, plans.local
        self._validated = plans.validated  # as agreed by all ranks, not as this rank sees it
        self.known = self.sent_token = None
        self.known_results = KnownResults()
        self._begun.clear()
        self._saves_to.clear()

    def forget(self) -> None:
        """Plan the next save together."""
        super().forget()
        self._central = self._local = self.known = self.sent_token = None
        self.known_results = KnownResults()
        self._validated = False


# --- plan one save --------------------------------------------------------------------------------


class SplitWriter(PlanningWriter, Protocol):
    """The methods of a storage writer that a split save uses."""

    @property
    def _rank_save(self) -> RankSave:
        """The writer's save."""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Resolve and lay out this rank's final plan."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _SaveArguments:
    """The arguments of one save, on this rank."""

    state_dict: dict[str, Any]
    planner: SavePlanner
    configuration: PlannerKey
    group: Hashable
    """Identifies the ranks that save together, and this rank."""
    coordination: Coordination
    writer: SplitWriter
    reused: Metadata | None
    """On the coordinator of a save that is not planned together, the metadata of the last one."""

    def fail_later(self, error: BaseException) -> None:
        """Report an error to all ranks when the save is finalised."""
        self.writer._rank_save.fail_later(as_save_error(error, self.coordination.rank))


def plan_save(
    state_dict: dict[str, Any],
    writer: SplitWriter,
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
    directory = writer._rank_save.settings.directory
    counted = Counted() if cache is None else cache.count(directory)
    use_dist = dist.is_available() and dist.is_initialized()
    session = SaveSession(process_group, use_dist, coordinator_rank)
    session.cache = cache
    if type(planner) is PlannerByName:  # split saves have a cache of their own
        planner = DefaultSavePlanner(
            planner.flatten_state_dict,
            planner.flatten_sharded_tensors,
            dedup_save_to_lowest_rank=planner.dedup_save_to_lowest_rank,
        )
    coordination = coordination_of(session)
    group = (
        # Differs, on all ranks alike, once a group is destroyed and made again.
        weakref.ref(process_group or dist.group.WORLD) if use_dist else None,
        coordinator_rank,
        coordination.rank,
        coordination.world_size,
    )
    alone = cache if cache is not None and plans_alone(cache.plans, group=group) else None
    arguments = _SaveArguments(
        state_dict=state_dict,
        planner=planner,
        configuration=planner_key(planner),
        group=group,
        coordination=coordination,
        writer=writer,
        reused=alone.reusable_metadata() if alone and coordination.is_coordinator else None,
    )
    if coordination.is_coordinator:
        _log.info("saving: path=%s ranks=%d", directory, coordination.world_size)
    if alone is not None:
        session.save, session.save_here = counted.save, counted.save_here
        session.reused_plans = alone.all_plans
        metadata = arguments.reused
        if not _prepare_known(arguments, alone, session):
            metadata = _plan(arguments, session, alone=True)
    else:
        metadata = _plan(arguments, session, alone=False)
    if cache is not None and writer._rank_save.split is not None:
        cache._begun.append(weakref.ref(writer._rank_save.split))
    return metadata, session


def _prepare_known(
    arguments: _SaveArguments,
    cache: CheckpointMetadataCache,
    session: SaveSession,
) -> bool:
    """Prepare a save without planning, if the last one had the same planner settings and structure.

    Returns whether the save is prepared, or has failed; if not, it must be planned. The session's
    planner is set.
    """
    known, plans, writer = cache.known, cache.plans, arguments.writer
    if known is None or plans is None or plans.planner != arguments.configuration:
        return False
    if (voucher := vouched(arguments.planner)) is None:
        return False
    settings = writer._rank_save.settings
    if known.structure is None or known.naming.file_format is not settings.file_format:
        return False
    session.planner = arguments.planner
    try:
        sources = known.structure.find(arguments.state_dict, voucher.serialize)
        if sources is None:
            return False
        # As local_plan() does.
        writer.set_up_storage_writer(
            session.is_coordinator, rank=session.rank, use_collectives=True
        )
        writer.prepare_local_plan(known.share.plan)
        writer._rank_save.prepare_known(known, sources)
    except Exception as error:  # finalising reports it to every rank
        arguments.fail_later(error)
    return True


def _plan(arguments: _SaveArguments, session: SaveSession, *, alone: bool) -> Metadata | None:
    """Plan a save, alone if all ranks agreed to be ``alone``; returns its metadata, if any."""
    cache, planner, writer = session.cache, arguments.planner, arguments.writer
    local: SavePlan | _torch.WrappedException
    try:
        local = local_plan(arguments.state_dict, writer, planner, session)
    except Exception as error:  # reported to every rank, now or when finalising
        local = _torch.wrap_exception(error)
    if alone and not isinstance(local, SavePlan):
        arguments.fail_later(local[0])
        return arguments.reused
    route: Route = Together()
    if cache is not None and isinstance(local, SavePlan):
        route = choose_route(
            cache.plans, group=arguments.group, planner=arguments.configuration, local=local
        )
    metadata = arguments.reused
    try:
        match route:
            case Together():
                identity = (arguments.group, arguments.configuration)
                final, metadata, session.save = plan_together(
                    local, writer, planner, arguments.coordination, cache, identity
                )
                session.save_here = session.save
            case Reuse(final):
                pass
            case Changed(final, local_plan_now):
                session.changed_plan = local_plan_now
            case _:
                assert_never(route)
        with planner_failures():
            writer.prepare_write_data(planner.finish_plan(final), planner)
        if cache is not None and isinstance(route, Reuse):
            cache.known = writer._rank_save.learn(arguments.state_dict, planner, cache.known)
    except Exception as error:  # finalising reports it to every rank
        arguments.fail_later(error)
    session.planner = copy(planner)
    vars(session.planner).pop("state_dict", None)  # keeps no tensor of this save alive
    return metadata
