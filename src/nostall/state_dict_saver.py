"""Split saves: plan now, write in the background, finalise when all ranks are done.

:func:`save_state_dict_async_plan` and :func:`save_state_dict_async_finalize` are collective: call
them on every rank of the group, in the same order. Between them a rank acts alone.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from typing import Any, overload

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from nostall import _torch
from nostall._commit.columns import (
    RankOutcome,
    Results,
    ResultsReference,
    in_columns,
    matches_loaded,
    token_of,
)
from nostall._commit.metadata import load_metadata
from nostall._commit.publication import KnownResults
from nostall._engine import default_engine
from nostall._plan.planner import vouch_for
from nostall._queue.callers import commits
from nostall._queue.sigterm import preemption
from nostall._ranks.failures import exception_for, sendable
from nostall._ranks.group import coordination_of, require_members
from nostall._save.decide import Ending, RankMessage, commit_split_save, decoded
from nostall._save.early_commit import EarlyCommit
from nostall._save.prepared import require_written
from nostall._save.rank_save import RankSave
from nostall._save.split_plan import CheckpointMetadataCache, SaveSession, plan_save
from nostall._storage.directories import busy_in
from nostall._storage.locations import is_address, storage_at
from nostall._storage.port import open_to_read, reason
from nostall._storage.posix import PosixStorage, make_directory
from nostall.errors import OptionError, SaveAbortedError, SaveTimeoutError, WriteError
from nostall.filesystem_async import FileSystemWriterAsync

__all__ = [
    "CheckpointMetadataCache",
    "SaveSession",
    "get_metadata_caching_status",
    "init_checkpoint_metadata_cache",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
    "verify_global_md_reuse",
    "vouch_for",
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


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
    *,
    reuse_metadata_obj: Metadata | None = None,
) -> tuple[FileSystemWriterAsync, Metadata | None, _torch.DistWrapper]:
    """Plan a save. Collective: call on every rank of the group.

    With ``enable_cache`` the second save of an unchanged structure validates the cache; from the
    third on, planning communicates nothing. The first save after a resume needs one small reduction
    only, if ``metadata_cache`` has the loaded checkpoint's metadata and all ranks' plans equal
    those in it.

    Args:
        state_dict: The state dict to save.
        storage_writer: A new writer for this checkpoint.
        process_group: The ranks that save together; the default group if ``None``.
        coordinator_rank: Rank within that group that publishes the metadata.
        planner: DCP's default planner if ``None``.
        enable_cache: Whether to use and fill ``metadata_cache``.
        metadata_cache: The cache; the process-wide default one if ``None``.
        reuse_metadata_obj: Metadata of an earlier checkpoint. A new cache may reuse its plans; no
            effect without ``enable_cache``, or if the cache already has plans.

    Returns:
        The writer, the metadata (``None`` except on the coordinator) and the group's wrapper: the
        arguments of :func:`save_state_dict_async_finalize`.

    Raises:
        CheckpointException: A rank could not plan; raised on every rank. If nothing is
            communicated, the failure is raised on every rank when the save is finalised.
        OptionError: The writer has a scheduled save that is not finalised yet, or is not nostall's;
            or this rank or ``coordinator_rank`` is not in the group.
    """
    if not isinstance(storage_writer, FileSystemWriterAsync):
        raise OptionError(
            f"an object of type {type(storage_writer).__name__} does not write in the background",
            hint="use a FileSystemWriterAsync",
        )
    require_members(process_group, coordinator_rank)
    storage_writer._rank_save.require_over()
    cache = _default_cache if metadata_cache is None else metadata_cache
    if reuse_metadata_obj is not None:
        cache.set_cached_global_metadata(reuse_metadata_obj)
    with preemption.deferred(then_end=False), storage_writer._rank_save.timeline.measure("plan"):
        metadata, session = plan_save(
            state_dict,
            storage_writer,
            process_group,
            coordinator_rank,
            DefaultSavePlanner() if planner is None else planner,
            cache if enable_cache else None,
        )
        _prepare_to_commit_early(storage_writer, metadata, session)
    return storage_writer, metadata, session


def _prepare_to_commit_early(
    writer: FileSystemWriterAsync, metadata: Metadata | None, session: SaveSession
) -> None:
    """Let the save be committed early, if the coordinator already has its results."""
    save, cache, coordination = writer._rank_save, session.cache, coordination_of(session)
    split, identity = save.split, session.save
    if cache is None or split is None or identity is None or session.changed_plan is not None:
        return
    token = split.prepared.token
    if token is None or token != cache.sent_token or save.settings.is_elsewhere:
        return
    records = coordination.records(identity)
    if records is None:
        return
    known, storage_meta = cache.known_results, writer.storage_meta()
    saving = weakref.ref(save)  # otherwise a plan that is dropped would stay until it is collected

    def message() -> bytes | None:
        save = saving()
        split = None if save is None else save.split
        if save is None or split is None:
            return None
        if busy_in(split.prepared.target.settings.directory) - {split.visit}:
            return None  # of two saves to a directory, the later one has to win
        report = split.checked_report()  # has the names of the files
        require_written(split.prepared, report)
        outcome = ResultsReference(token=token, files=split.prepared.files)
        return _message(save, outcome, session).encoded()

    def commit(messages: Sequence[bytes]) -> Ending:
        save = saving()
        if save is None:
            raise SaveAbortedError("the save was given up", phase="commit")
        with save.timeline.measure("commit"):
            return commit_split_save(save, messages, metadata, session, lambda: storage_meta, known)

    split.early = EarlyCommit(
        identity,
        records,
        coordination.rank,
        cache.retired,
        message=message,
        commit=commit if coordination.is_coordinator else None,
        timeout_s=default_engine().options.save_timeout_s,
    )


def _message(save: RankSave, outcome: RankOutcome, session: SaveSession) -> RankMessage:
    return RankMessage(
        outcome=outcome,
        written=save.written_files,
        changed_plan=session.changed_plan,
        save_here=session.save_here,
        counts_alike=session.save is not None,
        duration_s=save.timeline.duration_s(save.state.receipts),
    )


@overload
def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync,
    global_metadata: Metadata | None,
    dist_wrapper: _torch.DistWrapper,
    *,
    reuse_metadata_obj: Metadata | None = None,
) -> None: ...


@overload
def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync,
    global_metadata: Metadata | None,
    dist_wrapper: _torch.DistWrapper,
    *,
    reuse_metadata_obj: Metadata | None = None,
    create_metadata_path: str | os.PathLike[str] | None,
) -> Metadata | None: ...


@commits
def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync,
    global_metadata: Metadata | None,
    dist_wrapper: _torch.DistWrapper,
    *,
    reuse_metadata_obj: Metadata | None = None,  # an established signature
    create_metadata_path: str | os.PathLike[str] | None = None,
) -> Metadata | None:
    """Commit a save, or fail it on every rank. Collective: call on every rank of the group.

    Waits for this rank's files if they are not written yet.

    Args:
        storage_writer: What :func:`save_state_dict_async_plan` has returned first.
        global_metadata: What it has returned second.
        dist_wrapper: What it has returned third.
        reuse_metadata_obj: Accepted for compatibility, without effect.
        create_metadata_path: A file for a copy of the metadata, which the coordinator makes.

    Returns:
        The metadata on all ranks if ``create_metadata_path`` is given, else ``None``.

    Raises:
        CheckpointException: A rank could not write, or the metadata could not be published; raised
            on every rank, with rank, file and cause. Nothing is published then. Or the checkpoint
            is committed, and its metadata could not be copied.
        OptionError: ``create_metadata_path`` is an address.
    """
    session = dist_wrapper
    if not isinstance(session, SaveSession):  # the caller's own: without planning results
        session = SaveSession(session.group, session.use_dist, session.coordinator_rank)
    if create_metadata_path is not None and is_address(create_metadata_path):
        raise OptionError(
            f"create_metadata_path={create_metadata_path!r:.200} is in an object store",
            hint="pass a path of a file system",
        )
    with preemption.deferred(then_end=False):
        _commit_save(storage_writer, global_metadata, session)
        if create_metadata_path is None:
            return None
        save, path = storage_writer._rank_save, os.path.abspath(create_metadata_path)
        if not session.ranks.is_of(session):
            raise session.ranks.lost(path, hint="the checkpoint is committed")
        return _copy_metadata(save, session, path)


def _copy_metadata(save: RankSave, session: SaveSession, path: str) -> Metadata:
    """The committed metadata, on all ranks, once the coordinator has copied it to a file."""
    settings, coordination = save.settings, coordination_of(session)
    content, failures = b"", {}
    if session.is_coordinator:
        where, name = os.path.split(path)
        try:
            with open_to_read(storage_at(settings.directory), settings.metadata_name) as stream:
                content = stream.read()
            make_directory(where)
            PosixStorage(where).publish(name, [content])
        except Exception as error:  # raised on every rank
            failure = WriteError(
                f"cannot copy the metadata: {reason(error)}",
                rank=settings.rank,
                phase="commit",
                path=path,
                hint="the checkpoint is committed; pass another create_metadata_path",
            )
            failures = {settings.rank: sendable(_torch.wrap_exception(failure))}
    content, failures = coordination.broadcast((content, failures))
    if failures:
        raise exception_for(failures, step="write", on_coordinator=session.is_coordinator)
    return load_metadata(content, path=path)


def _commit_save(
    writer: FileSystemWriterAsync, metadata: Metadata | None, session: SaveSession
) -> None:
    save, early = writer._rank_save, writer._rank_save.early
    if early is not None and early.agreed is not None:
        _end(save, session, early.agreed)
        return
    if not session.ranks.is_of(session):
        _end_without_the_others(save, session)
        return
    outcome = _outcome_of(writer, session.cache)
    try:
        ending = _commit_together(writer, metadata, session, outcome)
    except BaseException:  # passed on; other ranks may be lost
        save.end(committed=False)
        raise
    _end(save, session, ending)


def _end_without_the_others(save: RankSave, session: SaveSession) -> None:
    """End a save whose process group is gone: it is not committed, unless that was done early.

    Raises:
        RankLostError: It is not committed, or may be.
        SaveTimeoutError: Storage does not say whether it is.
    """
    has_failed = isinstance(save.retrieve(require_written), tuple)
    early = save.early
    ending = None if early is None else early.finish()  # known on the coordinator
    try:
        if ending is None and not has_failed and save.is_named():
            ending = Ending(failures={}, published=True, changed=True)
    except SaveTimeoutError:  # passed on; the files may be those of a checkpoint
        save.end(committed=False)
        raise
    if ending is not None:
        _end(save, session, ending)
        return
    if save.split is not None:
        save.split.discard()
    raise session.ranks.lost(
        save.settings.directory,
        hint="close the queue or manager, or finalise saves, before destroy_process_group()",
    )


def _end(save: RankSave, session: SaveSession, ending: Ending) -> None:
    """End a save as the coordinator says; raises its failures."""
    cache, split = session.cache, save.split
    try:
        if cache is not None:
            cache.note_finalised(split)
            if ending.changed:
                cache.forget()
            elif ending.series is not None:
                cache.begin_series(ending.series)
        if split is not None and ending.failures and not ending.published:
            split.discard(is_certain=True)
    finally:
        save.end(committed=not ending.failures)
    save.slowest_rank = ending.slowest_rank
    if ending.failures:
        raise exception_for(ending.failures, step="write", on_coordinator=session.is_coordinator)
    stats = save.stats if session.is_coordinator and _log.isEnabledFor(logging.INFO) else None
    if stats is not None:
        _log.info(
            "committed: path=%s rank=%d bytes=%d files=%d"
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


def _commit_together(
    writer: FileSystemWriterAsync,
    metadata: Metadata | None,
    session: SaveSession,
    outcome: RankOutcome,
) -> Ending:
    """Commit with the messages of all ranks, unless it was tried early."""
    save, cache, coordination = writer._rank_save, session.cache, coordination_of(session)
    message, ending = _message(save, outcome, session), None
    with save.timeline.measure("commit"):
        is_alone = coordination.world_size == 1  # its message keeps the causes of errors
        messages = coordination.gather(message if is_alone else message.encoded())
        if messages is not None:
            early = save.early
            ending = None if early is None else early.finish()
            known = KnownResults() if cache is None else cache.known_results
            if ending is None:
                ending = commit_split_save(
                    save, messages, metadata, session, writer.storage_meta, known
                )
            else:
                known.fill_in([each.outcome for each in decoded(messages)])
        ending = coordination.broadcast(ending)
    if cache is not None:
        cache.sent_token = token_of(outcome)
    return ending


def _outcome_of(
    writer: FileSystemWriterAsync, cache: CheckpointMetadataCache | None
) -> RankOutcome:
    """This rank's outcome; results that the coordinator already has are not sent again."""
    split = writer._rank_save.split
    token = None if split is None else split.prepared.token
    if split is not None and cache is not None and token is not None and token == cache.sent_token:
        failure = writer._rank_save.retrieve(require_written)
        if isinstance(failure, tuple):
            return sendable(failure)
        return ResultsReference(token=token, files=split.prepared.files)
    results = writer.retrieve_write_results()
    if isinstance(results, list):
        files = () if split is None else split.prepared.files
        try:
            return Results(items=in_columns(results), files=files, token=token)
        except Exception as error:  # of any kind: a subclass may return anything
            results = _torch.wrap_exception(error)
    return sendable(results)


def verify_global_md_reuse(
    loaded_all_plans: Sequence[SavePlan] | None,
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
