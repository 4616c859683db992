"""Plan a split save: with all ranks, alone, or not at all if the structure is known.

If ranks communicate while they plan, a failure on one is raised on all. If not, it is kept and
reported to the others when the save is finalised.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from typing_extensions import assert_never

from nostall import _torch
from nostall._commit.local_plans import CompactPlan
from nostall._model.values import SaveId
from nostall._plan.cache import Changed, Reuse, Route, Together, choose_route, plans_alone
from nostall._plan.planner import (
    as_save_error,
    planner_failures,
    planner_key,
    vouched,
    without_state,
)
from nostall._plan.together import (
    PlanningWriter,
    group_identity,
    local_plan,
    plan_together,
    set_up_writer,
)
from nostall._ranks.group import Coordination, Membership, coordination_of
from nostall._save.by_name.planner import for_split_saves
from nostall._save.metadata_cache import CheckpointMetadataCache, Counted
from nostall._save.rank_save import RankSave

_log = logging.getLogger("nostall")


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
        use_dist: bool,  # noqa: FBT001  # DCP's
        coordinator: int,
    ) -> None:
        super().__init__(group, use_dist, coordinator)
        self.ranks = Membership(coordination_of(self))
        """Those that save together; their group may be gone when the save is finalised."""
        self.cache: CheckpointMetadataCache | None = None
        self.planner: SavePlanner | None = None
        self.save: SaveId | None = None
        """What identifies it; ``None`` if this rank may count otherwise than others."""
        self.save_here: SaveId | None = None
        """What identifies it among those to its directory; ``None`` if it was not counted."""
        self.changed_plan: SavePlan | None = None
        self.reused_plans: list[CompactPlan] | None = None
        """On the coordinator, the plans of all ranks that this save reuses; when it is finalised,
        the cache may already hold those of a later save."""


def session_of(wrapper: _torch.DistWrapper) -> SaveSession:
    """The session behind a wrapper; without planning results if it is the caller's own."""
    if isinstance(wrapper, SaveSession):
        return wrapper
    return SaveSession(wrapper.group, wrapper.use_dist, wrapper.coordinator_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SaveArguments:
    """The arguments of one save, on this rank."""

    state_dict: dict[str, Any]
    planner: SavePlanner
    configuration: Hashable
    """Identifies the planner's settings."""
    group: Hashable
    """Identifies the ranks that save together, and this rank."""
    coordination: Coordination
    writer: SplitWriter

    def fail_later(self, error: BaseException) -> None:
        """Report an error to all ranks when the save is finalised."""
        self.writer._rank_save.fail_later(as_save_error(error, self.coordination.rank))

    def reusable(self, cache: CheckpointMetadataCache | None) -> Metadata | None:
        """On the coordinator, the metadata of the last save of the structure."""
        if cache is None or not self.coordination.is_coordinator:
            return None
        return cache.reusable_metadata()


def plan_save(
    state_dict: dict[str, Any],
    writer: SplitWriter,
    process_group: dist.ProcessGroup | None,
    coordinator_rank: int,
    planner: SavePlanner,
    cache: CheckpointMetadataCache | None,
) -> tuple[Metadata | None, SaveSession]:
    """Plan a save, and prepare the writer's part of it. Collective.

    Counts it before anything can go wrong on this rank alone.

    Returns:
        The metadata (``None`` except on the coordinator), and the session to finalise it with.

    Raises:
        CheckpointException: A rank could not plan; raised on every rank.
    """
    directory = writer._rank_save.settings.directory
    counted = Counted() if cache is None else cache.count(directory)
    use_dist = dist.is_available() and dist.is_initialized()
    session = SaveSession(process_group, use_dist, coordinator_rank)
    session.cache = cache
    planner = for_split_saves(planner)
    coordination = coordination_of(session)
    group = (
        group_identity(process_group, use_dist=use_dist),
        coordinator_rank,
        coordination.rank,
        coordination.world_size,
    )
    arguments = _SaveArguments(
        state_dict=state_dict,
        planner=planner,
        configuration=planner_key(planner),
        group=group,
        coordination=coordination,
        writer=writer,
    )
    if coordination.is_coordinator:
        _log.info("saving: path=%s ranks=%d", directory, coordination.world_size)
    alone = cache is not None and plans_alone(cache.plans, group=group)
    if cache is not None and alone:
        session.save, session.save_here = counted.save, counted.save_here
        session.reused_plans = cache.all_plans
        metadata = arguments.reusable(cache)
        if not _prepare_known(arguments, cache, session):
            metadata = _plan(arguments, session, alone=True)
    else:
        metadata = _plan(arguments, session, alone=False)
    if cache is not None and writer._rank_save.split is not None:
        cache.begin(writer._rank_save.split)
    return metadata, session


def _prepare_known(
    arguments: _SaveArguments,
    cache: CheckpointMetadataCache,
    session: SaveSession,
) -> bool:
    """Prepare a save without planning, if the last one had the same planner settings and structure.

    Args:
        arguments: The save.
        cache: The cache, with the last save.
        session: The save's session; its planner is set.

    Returns:
        Whether the save is prepared, or has failed; if not, it must be planned.
    """
    known, plans, writer = cache.known, cache.plans, arguments.writer
    if known is None or plans is None or plans.planner != arguments.configuration:
        return False
    if (voucher := vouched(arguments.planner)) is None:
        return False
    if known.structure is None or not known.fits(writer._rank_save.settings):
        return False
    session.planner = arguments.planner
    try:
        sources = known.structure.find(arguments.state_dict, voucher.serialize)
        if sources is None:
            return False
        set_up_writer(writer, known.share.plan, session)
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
        return arguments.reusable(cache)
    route: Route = Together()
    if cache is not None and isinstance(local, SavePlan):
        route = choose_route(
            cache.plans, group=arguments.group, planner=arguments.configuration, local=local
        )
    metadata: Metadata | None = None
    try:
        match route:
            case Together():
                identity = (arguments.group, arguments.configuration)
                final, metadata, session.save = plan_together(
                    local, writer, planner, arguments.coordination, cache, identity
                )
                session.save_here = session.save
            case Reuse(final):
                metadata = arguments.reusable(cache)
            case Changed(final, local_plan_now):
                metadata = arguments.reusable(cache)
                session.changed_plan = local_plan_now
            case _:
                assert_never(route)
        with planner_failures():
            writer.prepare_write_data(planner.finish_plan(final), planner)
        if cache is not None and isinstance(route, Reuse):
            cache.known = writer._rank_save.learn(arguments.state_dict, planner, cache.known)
    except Exception as error:  # finalising reports it to every rank
        arguments.fail_later(error)
    session.planner = without_state(planner)
    return metadata
