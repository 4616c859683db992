"""Split saves: plan now, write in the background, finalise when all ranks are done.

:func:`save_state_dict_async_plan` and :func:`save_state_dict_async_finalize` are collective: call
them on every rank of the group, in the same order. Between them a rank acts alone.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from typing_extensions import assert_never

from nostall import _torch
from nostall._commit.collect import collect
from nostall._commit.known_results import (
    KnownResults,
    RankOutcome,
    Results,
    ResultsReference,
    token_of,
)
from nostall._model.values import Abort, Commit, RankFiles
from nostall._plan.cache import (
    Changed,
    Reuse,
    Route,
    Together,
    choose_route,
    matches_loaded,
    plans_alone,
)
from nostall._queue.preemption import preemption
from nostall._ranks.failures import exception_for, sendable
from nostall._ranks.group import Coordination, coordination_of, require_members
from nostall._save.finalize import finish_metadata, is_unpublished, publication_of_results
from nostall._save.metadata_cache import CheckpointMetadataCache
from nostall._save.plan_together import (
    group_identity,
    local_plan,
    plan_together,
    replanned_metadata,
    set_up_writer,
)
from nostall._save.planner import (
    as_save_error,
    is_stocks_own,
    planner_failures,
    planner_key,
    serialize,
    without_state,
)
from nostall._save.session import KnownSave
from nostall.errors import OptionError, SaveError
from nostall.filesystem_async import FileSystemWriterAsync

__all__ = [
    "CheckpointMetadataCache",
    "SaveSession",
    "get_metadata_caching_status",
    "init_checkpoint_metadata_cache",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
    "verify_global_md_reuse",
]

_log = logging.getLogger("nostall")


_default_cache = CheckpointMetadataCache()


def init_checkpoint_metadata_cache(cached_global_metadata: Metadata | None = None) -> None:
    """Reset the default cache; adopt the metadata of a loaded checkpoint, if given."""
    global _default_cache
    _default_cache = CheckpointMetadataCache()
    _default_cache.set_cached_global_metadata(cached_global_metadata)


def get_metadata_caching_status() -> tuple[bool, bool]:
    """``(validated_cache_reuse, validated_loaded_metadata_reuse)`` of the default cache."""
    return _default_cache.get_metadata_caching_status()


class SaveSession(_torch.DistWrapper):
    """DCP's wrapper around the group, plus the planning results that finalising needs."""

    def __init__(self, group: dist.ProcessGroup | None, use_dist: bool, coordinator: int) -> None:
        super().__init__(group, use_dist, coordinator)
        self.cache: CheckpointMetadataCache | None = None
        self.planner: SavePlanner | None = None
        self.changed_plan: SavePlan | None = None
        self.reused_plans: list[SavePlan] | None = None
        """On the coordinator, the plans of all ranks that this save reuses; when it is finalised,
        the cache may already hold those of a later save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankMessage:
    """Sent by each rank to the coordinator when it finalises."""

    outcome: RankOutcome
    written: RankFiles
    changed_plan: SavePlan | None
    took_s: float
    """From the start of planning until the files were durable."""


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
) -> tuple[FileSystemWriterAsync, Metadata | None, _torch.DistWrapper]:
    """Plan a save. Collective: call on every rank of the group.

    With ``enable_cache`` the second save of an unchanged structure validates the cache; from the
    third on, nothing is communicated. The first save after a resume needs one small reduction only,
    if ``metadata_cache`` has the loaded checkpoint's metadata and all ranks' plans equal those in
    it.

    Args:
        state_dict: The state dict to save.
        storage_writer: A new writer for this checkpoint.
        process_group: The ranks that save together; the default group if ``None``.
        coordinator_rank: Rank within that group that publishes the metadata.
        planner: DCP's default planner if ``None``.
        enable_cache: Whether to use and fill ``metadata_cache``.
        metadata_cache: The cache; the process-wide default one if ``None``.

    Returns:
        The writer, the metadata (``None`` except on the coordinator) and the group's wrapper: the
        arguments of :func:`save_state_dict_async_finalize`.

    Raises:
        CheckpointException: A rank could not plan; raised on every rank. If nothing is
            communicated, the failure is raised on every rank when the save is finalised.
        OptionError: The writer has a save that is not finalised yet, or is not nostall's; or this
            rank or ``coordinator_rank`` is not in the group.
    """
    if not isinstance(storage_writer, FileSystemWriterAsync):
        raise OptionError(
            f"an object of type {type(storage_writer).__name__} does not write in the background",
            hint="use a FileSystemWriterAsync",
        )
    require_members(process_group, coordinator_rank)
    storage_writer.require_free()
    with preemption.deferred(then_end=False), storage_writer.timeline.measure("plan"):
        return _plan_save(
            state_dict,
            storage_writer,
            process_group,
            coordinator_rank,
            DefaultSavePlanner() if planner is None else planner,
            _chosen_cache(metadata_cache) if enable_cache else None,
        )


def _chosen_cache(cache: CheckpointMetadataCache | None) -> CheckpointMetadataCache:
    return _default_cache if cache is None else cache


def _plan_save(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None,
    coordinator_rank: int,
    planner: SavePlanner,
    cache: CheckpointMetadataCache | None,
) -> tuple[FileSystemWriterAsync, Metadata | None, _torch.DistWrapper]:
    use_dist = dist.is_available() and dist.is_initialized()
    session = SaveSession(process_group, use_dist, coordinator_rank)
    session.cache = cache
    coordination = coordination_of(session)
    identity = (
        group_identity(process_group, use_dist=use_dist),
        coordinator_rank,
        coordination.rank,
        coordination.world_size,
    )
    arguments = _SaveArguments(
        state_dict=state_dict,
        planner=planner,
        configuration=planner_key(planner),
        group=identity,
        writer=storage_writer,
    )
    alone = session.cache is not None and plans_alone(session.cache.plans, group=identity)
    if coordination.is_coordinator:
        _log.info("saving path=%s ranks=%d", storage_writer.path, coordination.world_size)
    if session.cache is not None and alone:
        session.reused_plans = session.cache.all_plans
        metadata = _reusable(session.cache, coordination)
        if _prepare_known(arguments, session.cache, metadata, session, coordination):
            return storage_writer, metadata, session
    return storage_writer, _plan(arguments, session, coordination, alone=alone), session


@dataclass(frozen=True, slots=True, kw_only=True)
class _SaveArguments:
    """The arguments of one save."""

    state_dict: dict[str, Any]
    planner: SavePlanner
    configuration: Hashable
    """Identifies the planner's settings."""
    group: Hashable
    """Identifies the ranks that save together, and this rank."""
    writer: FileSystemWriterAsync


def _prepare_known(
    arguments: _SaveArguments,
    cache: CheckpointMetadataCache,
    metadata: Metadata | None,
    session: SaveSession,
    coordination: Coordination,
) -> bool:
    """Prepare a save without planning, if the last one had the same planner settings and structure.

    Args:
        arguments: The arguments of the save.
        cache: The cache, with the last save.
        metadata: On the coordinator, the metadata to publish if nothing has changed.
        session: The save's session; its planner is set.
        coordination: The ranks that save together.

    Returns:
        Whether the save is prepared, or has failed; if not, it must be planned.
    """
    known, plans, writer = cache.known, cache.plans, arguments.writer
    if known is None or plans is None or plans.planner != arguments.configuration:
        return False
    if not is_stocks_own(arguments.planner):
        return False
    session.planner = arguments.planner
    try:
        sources = known.structure.find(arguments.state_dict, serialize)
        if sources is None:
            return False
        set_up_writer(writer, known.share.plan, session)
        expected = None if metadata is None else cache.known_results.expected(metadata)
        writer.prepare_known(known, sources, expected)
    except Exception as error:  # finalising reports it to every rank
        writer.fail_later(as_save_error(error, coordination.rank))
    return True


def _plan(
    arguments: _SaveArguments, session: SaveSession, coordination: Coordination, *, alone: bool
) -> Metadata | None:
    """Plan a save, ``alone`` if all ranks agreed to; returns its metadata, if any."""
    cache, planner, writer = session.cache, arguments.planner, arguments.writer
    local: SavePlan | _torch.WrappedException
    try:
        local = local_plan(arguments.state_dict, writer, planner, session)
    except Exception as error:  # reported to every rank, now or when finalising
        local = _torch.wrap_exception(error)
    if alone and not isinstance(local, SavePlan):
        writer.fail_later(as_save_error(local[0], coordination.rank))
        return _reusable(cache, coordination)
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
                final, metadata = plan_together(
                    local, writer, planner, coordination, cache, identity
                )
            case Reuse(final):
                metadata = _reusable(cache, coordination)
            case Changed(final, local_plan_now):
                metadata = _reusable(cache, coordination)
                session.changed_plan = local_plan_now
            case _:
                assert_never(route)
        with planner_failures():
            writer.prepare_write_data(planner.finish_plan(final), planner)
        if cache is not None and isinstance(route, Reuse) and is_stocks_own(planner):
            cache.known = _learn(writer, arguments.state_dict, planner)
    except Exception as error:  # finalising reports it to every rank
        writer.fail_later(as_save_error(error, coordination.rank))
    session.planner = without_state(planner)
    return metadata


def _learn(
    writer: FileSystemWriterAsync, state_dict: dict[str, Any], planner: SavePlanner
) -> KnownSave | None:
    try:
        return writer.learn(state_dict, vars(planner)["state_dict"])
    except Exception:  # this save is not affected; the next one is planned
        _log.debug("the structure was not learned", exc_info=True)
        return None


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync,
    global_metadata: Metadata | None,
    dist_wrapper: _torch.DistWrapper,
) -> None:
    """Commit a save, or fail it on every rank. Collective: call on every rank of the group.

    Waits for this rank's files if they are not written yet.

    Raises:
        CheckpointException: A rank could not write, or the metadata could not be published; raised
            on every rank, with rank, file and cause. Nothing is published then.
    """
    with preemption.deferred(then_end=False):
        _finalize(storage_writer, global_metadata, dist_wrapper)


def _finalize(
    storage_writer: FileSystemWriterAsync,
    global_metadata: Metadata | None,
    dist_wrapper: _torch.DistWrapper,
) -> None:
    coordination = coordination_of(dist_wrapper)
    session = dist_wrapper if isinstance(dist_wrapper, SaveSession) else None
    cache = session.cache if session is not None else None
    outcome = _outcome_of(storage_writer, cache)
    message = _RankMessage(
        outcome=outcome,
        written=storage_writer.written_files,
        changed_plan=session.changed_plan if session else None,
        took_s=storage_writer.took_s,
    )
    is_committed = False  # assumed if other ranks are lost now
    try:
        with storage_writer.timeline.measure("commit"):
            messages = coordination.gather(message)
            finished = None
            if messages is not None:
                finished = _finish(storage_writer, global_metadata, messages, session, coordination)
            ending = coordination.broadcast(finished)
        if cache is not None:
            cache.sent_token = token_of(outcome)
            if ending.changed or ending.failures:
                cache.forget()
        is_committed = not ending.failures
        if ending.failures and not ending.published:
            storage_writer.discard()
    finally:
        storage_writer.end_save(committed=is_committed)
    storage_writer.note_slowest(ending.slowest_rank)
    if ending.failures:
        raise exception_for(
            ending.failures, step="write", on_coordinator=coordination.is_coordinator
        )
    if coordination.is_coordinator:
        _log_committed(storage_writer)


def _outcome_of(
    writer: FileSystemWriterAsync, cache: CheckpointMetadataCache | None
) -> RankOutcome:
    """This rank's outcome; results that the coordinator already has are not sent again."""
    token = None if cache is None else writer.known_results
    if cache is not None and token is not None and token == cache.sent_token:
        failure = writer.retrieve_failure()
        if failure is not None:
            return sendable(failure)
        return ResultsReference(token=token, files=writer.file_names)
    results = writer.retrieve_write_results()
    if isinstance(results, list):
        return Results(items=results, files=writer.file_names, token=token)
    return sendable(results)


def _log_committed(writer: FileSystemWriterAsync) -> None:
    stats = writer.stats if _log.isEnabledFor(logging.INFO) else None
    if stats is not None:
        _log.info(
            "committed path=%s rank=%d bytes=%d files=%d"
            " staged=%.3fs written=%.3fs commit=%.3fs slowest_rank=%s",
            stats.path,
            stats.rank,
            stats.nbytes,
            stats.files,
            stats.stage_s,
            stats.written_s,
            stats.commit_s,
            stats.slowest_rank,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """How a save ended; sent by the coordinator to every rank."""

    failures: dict[int, _torch.WrappedException]
    published: bool
    """Whether the metadata is published, or may be; after a failure, too."""
    changed: bool
    """Whether a rank's structure has changed; the next save is planned together then."""
    slowest_rank: int | None = None


def _finish(
    writer: FileSystemWriterAsync,
    planned: Metadata | None,
    messages: list[_RankMessage],
    session: SaveSession | None,
    coordination: Coordination,
) -> _Ending:
    """On the coordinator: commit if every rank wrote all its files."""
    changed = any(each.changed_plan is not None for each in messages)
    cache = session.cache if session is not None else None
    known = cache.known_results if cache is not None else KnownResults()
    outcomes = [each.outcome for each in messages]
    match collect(known.fill_in(outcomes)):
        case Abort(failures=failures):
            return _Ending(failures=failures, published=False, changed=changed)
        case Commit(results=results):
            written = [each.written for each in messages]
            try:
                writer.require_written_here(written)
                metadata = _metadata_to_publish(planned, messages, session)
                if metadata is None:
                    raise SaveError("the coordinator has no metadata to publish", phase="commit")
                publication = None if changed else known.publication(outcomes, metadata)
                if publication is None:
                    everything = known.under_new_names(outcomes, results)
                    publication = publication_of_results(metadata, everything)
                    known.note_published(outcomes, metadata, publication)
                finished = finish_metadata(publication, written, writer.storage_meta())
            except Exception as error:  # sent to every rank
                return _Ending(
                    failures=_failures(error, coordination), published=False, changed=changed
                )
            try:
                writer.publish(publication, metadata, finished)
            except Exception as error:  # as above
                return _Ending(
                    failures=_failures(error, coordination),
                    published=not is_unpublished(error),
                    changed=changed,
                )
    slowest = max(range(len(messages)), key=lambda rank: messages[rank].took_s)
    return _Ending(failures={}, published=True, changed=changed, slowest_rank=slowest)


def _failures(error: Exception, coordination: Coordination) -> dict[int, _torch.WrappedException]:
    """An error of the coordinator, for all ranks."""
    return {coordination.rank: sendable(_torch.wrap_exception(error))}


def verify_global_md_reuse(
    loaded_all_plans: list[SavePlan] | None,
    local_plan: SavePlan,
    rank: int,
    dist_wrapper: _torch.DistWrapper,
) -> bool:
    """Whether every rank's plan equals its plan in the loaded checkpoint. Collective."""
    coordination = coordination_of(dist_wrapper)
    same = matches_loaded(
        loaded_all_plans, rank=rank, world_size=coordination.world_size, local=local_plan
    )
    return coordination.maximum([int(not same)]) == [0]


def _reusable(cache: CheckpointMetadataCache | None, coordination: Coordination) -> Metadata | None:
    return cache.reusable_metadata() if cache is not None and coordination.is_coordinator else None


def _metadata_to_publish(
    planned: Metadata | None, messages: list[_RankMessage], session: SaveSession | None
) -> Metadata | None:
    changed = {
        rank: each.changed_plan
        for rank, each in enumerate(messages)
        if each.changed_plan is not None
    }
    if not changed:
        return planned
    plans, planner = (session.reused_plans, session.planner) if session else (None, None)
    return replanned_metadata(changed, plans, planner)
