"""Split saves: plan now, write in the background, finalise when all ranks are done.

:func:`save_state_dict_async_plan` and :func:`save_state_dict_async_finalize` are collective: call them on every rank of
the group, in the same order. What happens between them on a rank is that rank's business.
"""

from __future__ import annotations

import inspect
import weakref
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._coordination import Coordination, coordination_of
from nostall._failures import exception_for, sendable
from nostall._pipeline.plan_cache import (
    CachedPlans,
    Changed,
    Reuse,
    Together,
    choose_route,
    matches_loaded,
    nobody_talks,
    same_plan,
)
from nostall.errors import NostallError, SaveError
from nostall.filesystem_async import FileSystemWriterAsync


class CheckpointMetadataCache:
    """What one sequence of saves remembers of its plans. Make one per kind of checkpoint and keep it.

    It holds structure only: plans, and on the coordinator the metadata without storage data. Metadata handed in or out
    is never changed.
    """

    def __init__(self) -> None:
        self._plans: CachedPlans | None = None
        self._central: SavePlan | None = None
        self._local: SavePlan | None = None
        self._validated = False
        self._verified_loaded = False
        self._global_metadata: Metadata | None = None
        self._all_plans: list[SavePlan] | None = None
        self._loaded_all_plans: list[SavePlan] | None = None

    def set_cached_global_metadata(self, metadata: Metadata | None) -> None:
        """Adopt the metadata of a loaded checkpoint, so that the first save after a resume need not be planned anew."""
        self._global_metadata = metadata
        self._loaded_all_plans = getattr(metadata, "all_local_plans", None)

    def set_cache_metadata(
        self, central_plan: SavePlan, local_plan: SavePlan, global_md_verify_reuse: bool
    ) -> None:
        """Remember a plan; the second equal one in a row makes the cache valid on this rank."""
        self._validated = self._central is not None and same_plan(self._central, central_plan)
        self._central, self._local = central_plan, local_plan
        self._verified_loaded = global_md_verify_reuse

    def prepare_save_state_dict_ret(
        self, rank: int, coordinator: int, save_state_dict_ret: tuple[Any, Any, Any]
    ) -> tuple[Any, Any, Any]:
        """The tuple with metadata filled in on the coordinator where planning was skipped."""
        writer, metadata, wrapper = save_state_dict_ret
        if rank == coordinator:
            if metadata is None:
                metadata = None if self._global_metadata is None else _unsaved(self._global_metadata)
            else:
                self._global_metadata = metadata
        return writer, metadata, wrapper

    def get_cache_metadata(
        self,
    ) -> tuple[SavePlan | None, SavePlan | None, bool, list[SavePlan] | None]:
        """``(central_plan, local_plan, validated_cache_reuse, loaded_all_plans)``."""
        return self._central, self._local, self._validated, self._loaded_all_plans

    def get_metadata_caching_status(self) -> tuple[bool, bool]:
        """``(validated_cache_reuse, validated_loaded_metadata_reuse)``."""
        return self._validated, self._verified_loaded

    # --- used by the functions below --------------------------------------------------------------------------------

    @property
    def plans(self) -> CachedPlans | None:
        """The plans of the last save that all ranks planned together."""
        return self._plans

    def keep(
        self, plans: CachedPlans, all_plans: list[SavePlan] | None, metadata: Metadata | None
    ) -> None:
        """Remember a plan that all ranks made together."""
        self.set_cache_metadata(plans.final, plans.local, self._verified_loaded)
        self._validated = plans.validated  # what all ranks agreed on, not what this one sees
        self._plans = plans
        self._all_plans = all_plans
        if metadata is not None:
            self._global_metadata = metadata

    def forget(self) -> None:
        """Plan the next save together, because some rank's structure has changed."""
        self._plans = None
        self._central = self._local = None
        self._validated = self._verified_loaded = False
        self._all_plans = self._loaded_all_plans = None

    def plans_with(self, changed: dict[int, SavePlan]) -> list[SavePlan] | None:
        """All ranks' plans with those of changed ranks replaced; ``None`` where they are not known. Coordinator."""
        if self._all_plans is None:
            return None
        return [changed.get(rank, plan) for rank, plan in enumerate(self._all_plans)]

    def reusable_metadata(self) -> Metadata | None:
        """Metadata for one more save of the same structure."""
        return None if self._global_metadata is None else _unsaved(self._global_metadata)

    def verified_loaded(self, *, ok: bool) -> None:
        """Note whether the loaded checkpoint's plans could be reused; they are looked at once."""
        self._verified_loaded = ok
        self._loaded_all_plans = None


_default_cache = CheckpointMetadataCache()


def init_checkpoint_metadata_cache(cached_global_metadata: Metadata | None = None) -> None:
    """Start the default cache anew, with the metadata of a loaded checkpoint if there is one."""
    global _default_cache
    _default_cache = CheckpointMetadataCache()
    _default_cache.set_cached_global_metadata(cached_global_metadata)


def get_metadata_caching_status() -> tuple[bool, bool]:
    """``(validated_cache_reuse, validated_loaded_metadata_reuse)`` of the default cache."""
    return _default_cache.get_metadata_caching_status()


class SaveSession(_torch.DistWrapper):
    """DCP's wrapper around the group, with what finalising needs to know of the planning."""

    def __init__(self, group: dist.ProcessGroup | None, use_dist: bool, coordinator: int) -> None:
        super().__init__(group, use_dist, coordinator)
        self.cache: CheckpointMetadataCache | None = None
        self.planner: SavePlanner | None = None
        self.changed_plan: SavePlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What the coordinator tells a rank after planning together."""

    final: SavePlan | None
    validated: bool
    failures: dict[int, _torch.WrappedException]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What a rank tells the coordinator when it finalises."""

    results: list[WriteResult] | _torch.WrappedException
    changed_plan: SavePlan | None


def save_state_dict_async_plan(
    state_dict: STATE_DICT_TYPE,
    storage_writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
) -> tuple[FileSystemWriterAsync, Metadata | None, _torch.DistWrapper]:
    """Plan a save. Collective: call on every rank of the group.

    With ``enable_cache`` the second save of an unchanged structure validates the cache, and from the third on nothing is
    communicated. Nor is anything on the first save after a resume, if ``metadata_cache`` was given the loaded
    checkpoint's metadata and all ranks' plans equal those in it (one small reduction).

    Args:
        state_dict: What to save.
        storage_writer: A new writer for this checkpoint.
        process_group: The ranks that save together; the default group if ``None``.
        coordinator_rank: Rank within that group that publishes the metadata.
        planner: DCP's default planner if ``None``.
        enable_cache: Whether to use and fill ``metadata_cache``.
        metadata_cache: The cache; the process-wide default one if ``None``.

    Returns:
        The writer, the metadata (``None`` except on the coordinator) and the group's wrapper: the arguments of
        :func:`save_state_dict_async_finalize`.

    Raises:
        CheckpointException: A rank could not plan; raised on every rank. Where nothing is communicated the failure is
            reported on every rank when the save is finalised.
    """
    use_dist = dist.is_available() and dist.is_initialized()
    session = SaveSession(process_group, use_dist, coordinator_rank)
    session.planner = planner = DefaultSavePlanner() if planner is None else planner
    coordination = coordination_of(session)
    cache = (metadata_cache or _default_cache) if enable_cache else None
    session.cache = cache
    group = (_group_identity(process_group, use_dist), coordination.rank, coordination.world_size)
    planner_key = _planner_key(planner)
    local: SavePlan | _torch.WrappedException
    try:
        local = _local_plan(state_dict, storage_writer, planner, session)
    except Exception as error:  # told to every rank, now or when the save is finalised
        local = _torch.wrap_exception(error)
    silent = cache is not None and nobody_talks(cache.plans, group=group)
    if silent and not isinstance(local, SavePlan):
        storage_writer.fail_later(_as_save_error(local[0], coordination.rank))
        return storage_writer, _reusable(cache, coordination), session
    route = (
        choose_route(cache.plans, group=group, planner=planner_key, local=local)
        if cache is not None and isinstance(local, SavePlan)
        else Together()
    )
    metadata: Metadata | None
    match route:
        case Together():
            final, metadata = _plan_together(
                local, storage_writer, planner, coordination, cache, (group, planner_key)
            )
        case Reuse(final):
            metadata = _reusable(cache, coordination)
        case Changed(final):
            metadata = _reusable(cache, coordination)
            session.changed_plan = local  # type: ignore[assignment]  # a wrapped exception never gets this route
    try:
        storage_writer.prepare_write_data(planner.finish_plan(final), planner)
    except Exception as error:  # the other ranks are on their way to finalising; that is where they learn of it
        storage_writer.fail_later(_as_save_error(error, coordination.rank))
    return storage_writer, metadata, session


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync,
    global_metadata: Metadata | None,
    dist_wrapper: _torch.DistWrapper,
) -> None:
    """Commit a save whose files are written, or fail it everywhere. Collective: call on every rank of the group.

    Waits for this rank's files if they are not written yet.

    Raises:
        CheckpointException: A rank could not write, or the metadata could not be published; raised on every rank, with
            rank, file and cause. Nothing is published then.
    """
    coordination = coordination_of(dist_wrapper)
    session = dist_wrapper if isinstance(dist_wrapper, SaveSession) else None
    results = storage_writer.retrieve_write_results()
    if _torch.is_wrapped_exception(results):
        results = sendable(results)  # type: ignore[arg-type]
    outcome = _Outcome(results=results, changed_plan=session.changed_plan if session else None)
    outcomes = coordination.gather(outcome)
    failures: dict[int, _torch.WrappedException] = {}
    changed = False
    if outcomes is not None:
        changed = any(each.changed_plan is not None for each in outcomes)
        failures = {
            rank: each.results
            for rank, each in enumerate(outcomes)
            if _torch.is_wrapped_exception(each.results)
        }
        if not failures:
            try:
                metadata = _replanned(session, outcomes) if changed else global_metadata
                if metadata is None:
                    raise SaveError("the coordinator has no metadata to publish", phase="commit")
                storage_writer.finish(metadata, [each.results for each in outcomes])
            except Exception as error:  # every rank has to hear of it
                failures = {coordination.rank: sendable(_torch.wrap_exception(error))}
    failures, changed = coordination.broadcast((failures, changed))
    if session is not None and session.cache is not None and (changed or failures):
        session.cache.forget()
    if failures:
        raise exception_for(failures, step="write", on_coordinator=coordination.is_coordinator)


def verify_global_md_reuse(
    loaded_all_plans: list[SavePlan] | None,
    local_plan: SavePlan,
    rank: int,
    dist_wrapper: _torch.DistWrapper,
) -> bool:
    """Whether every rank's plan equals the one in a loaded checkpoint. Collective unless there are no loaded plans."""
    if not loaded_all_plans:
        return False
    coordination = coordination_of(dist_wrapper)
    same = matches_loaded(
        loaded_all_plans, rank=rank, world_size=coordination.world_size, local=local_plan
    )
    return coordination.maximum([int(not same)]) == [0]


# --- planning -------------------------------------------------------------------------------------------------------


def _local_plan(
    state_dict: STATE_DICT_TYPE,
    writer: FileSystemWriterAsync,
    planner: SavePlanner,
    session: SaveSession,
) -> SavePlan:
    arguments: dict[str, Any] = {"state_dict": state_dict, "is_coordinator": session.is_coordinator}
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        arguments["storage_meta"] = writer.storage_meta()
    planner.set_up_planner(**arguments)
    writer.set_up_storage_writer(session.is_coordinator, rank=session.rank, use_collectives=True)
    return writer.prepare_local_plan(planner.create_local_plan())


def _plan_together(
    local: SavePlan | _torch.WrappedException,
    writer: FileSystemWriterAsync,
    planner: SavePlanner,
    coordination: Coordination,
    cache: CheckpointMetadataCache | None,
    identity: tuple[Any, Any],
) -> tuple[SavePlan, Metadata | None]:
    if cache is not None and _loaded_plans_hold(local, coordination, cache):
        assert isinstance(local, SavePlan)  # a failed rank does not agree
        all_plans = cache.get_cache_metadata()[-1]
        assert all_plans is not None
        finals, metadata = _global_plan(all_plans, writer, planner)
        cache.verified_loaded(ok=True)
        return _keep(
            cache, identity, local, finals[coordination.rank], True, all_plans, metadata, coordination
        )
    gathered = coordination.gather(local if isinstance(local, SavePlan) else sendable(local))
    told, all_plans, metadata = None, None, None
    if gathered is not None:
        told, all_plans, metadata = _decide_centrally(gathered, writer, planner, coordination, cache)
    mine = coordination.scatter(told)
    if mine.failures:
        raise exception_for(
            mine.failures, step="plan", on_coordinator=coordination.is_coordinator
        )
    assert mine.final is not None and isinstance(local, SavePlan)  # nobody failed
    if cache is None:
        return mine.final, metadata
    return _keep(
        cache, identity, local, mine.final, mine.validated, all_plans, metadata, coordination
    )


def _decide_centrally(
    gathered: list[SavePlan | _torch.WrappedException],
    writer: FileSystemWriterAsync,
    planner: SavePlanner,
    coordination: Coordination,
    cache: CheckpointMetadataCache | None,
) -> tuple[list[_Told], list[SavePlan] | None, Metadata | None]:
    failures = {
        rank: plan for rank, plan in enumerate(gathered) if not isinstance(plan, SavePlan)
    }
    plans = [plan for plan in gathered if isinstance(plan, SavePlan)]
    if not failures:
        try:
            finals, metadata = _global_plan(plans, writer, planner)
        except Exception as error:  # told to every rank
            failures = {coordination.rank: sendable(_torch.wrap_exception(error))}
    if failures:
        refusal = _Told(final=None, validated=False, failures=failures)
        return [refusal] * coordination.world_size, None, None
    before = cache.plans_with({}) if cache is not None else None
    validated = (
        before is not None
        and len(before) == len(plans)
        and all(same_plan(one, other) for one, other in zip(before, plans, strict=True))
    )
    told = [_Told(final=final, validated=validated, failures={}) for final in finals]
    return told, plans, metadata


def _global_plan(
    plans: list[SavePlan], writer: FileSystemWriterAsync, planner: SavePlanner
) -> tuple[list[SavePlan], Metadata]:
    """Every rank's final plan and the metadata; the same on whichever rank it is computed."""
    finals, metadata = planner.create_global_plan(list(plans))
    if getattr(planner, "can_run_decentralized_global_plan", False):
        make = getattr(planner, "create_decentralized_global_plan", lambda plan: plan)
        finals = [make(plan) for plan in plans]
    return writer.prepare_global_plan(finals), metadata


def _loaded_plans_hold(
    local: SavePlan | _torch.WrappedException,
    coordination: Coordination,
    cache: CheckpointMetadataCache,
) -> bool:
    """Agree whether the loaded checkpoint's plans are still everyone's; one reduction, whatever a rank has loaded."""
    if cache.plans is not None:
        return False
    loaded = cache.get_cache_metadata()[-1]
    same = isinstance(local, SavePlan) and matches_loaded(
        loaded, rank=coordination.rank, world_size=coordination.world_size, local=local
    )
    agreed = coordination.maximum([int(not same)]) == [0]
    if not agreed:
        cache.verified_loaded(ok=False)
    return agreed


def _keep(
    cache: CheckpointMetadataCache,
    identity: tuple[Any, Any],
    local: SavePlan,
    final: SavePlan,
    validated: bool,
    all_plans: list[SavePlan] | None,
    metadata: Metadata | None,
    coordination: Coordination,
) -> tuple[SavePlan, Metadata | None]:
    if not coordination.is_coordinator:
        metadata = None
    if metadata is not None:
        metadata.all_local_plans = all_plans  # type: ignore[attr-defined]  # frameworks look for it there
    plans = CachedPlans(
        group=identity[0], planner=identity[1], local=local, final=final, validated=validated
    )
    cache.keep(plans, all_plans, metadata)
    return final, None if metadata is None else _unsaved(metadata)


def _replanned(session: SaveSession | None, outcomes: list[_Outcome]) -> Metadata:
    """Metadata for a save in which some ranks planned alone."""
    changed = {
        rank: each.changed_plan
        for rank, each in enumerate(outcomes)
        if each.changed_plan is not None
    }
    plans = session.cache.plans_with(changed) if session is not None and session.cache else None
    if plans is None or session is None or session.planner is None:
        raise SaveError(
            f"the structure changed on ranks {sorted(changed)} and the other ranks' plans are not known",
            phase="commit",
            hint="the next save plans anew",
        )
    _, metadata = session.planner.create_global_plan(plans)
    metadata.all_local_plans = plans
    return metadata


def _reusable(
    cache: CheckpointMetadataCache | None, coordination: Coordination
) -> Metadata | None:
    return cache.reusable_metadata() if cache is not None and coordination.is_coordinator else None


def _unsaved(metadata: Metadata) -> Metadata:
    """The same structure for another save: a copy without what belongs to one checkpoint."""
    twin = copy(metadata)
    twin.storage_data = None
    twin.storage_meta = None
    return twin


def _group_identity(group: dist.ProcessGroup | None, use_dist: bool) -> Any:
    """Differs, on all ranks alike, once a group is destroyed and made again."""
    return weakref.ref(group or dist.group.WORLD) if use_dist else None


def _planner_key(planner: SavePlanner) -> Any:
    """The planner's class and switches, before it has seen a state dict."""
    switches = {
        name: value
        for name, value in vars(planner).items()
        if isinstance(value, bool | int | str) and name != "is_coordinator"
    }
    return type(planner), tuple(sorted(switches.items()))


def _as_save_error(error: BaseException, rank: int) -> NostallError:
    if isinstance(error, NostallError):
        return error
    return SaveError(f"{type(error).__name__}: {error}", rank=rank, phase="plan")
