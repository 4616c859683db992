"""How a save ends: the results of all ranks become one published checkpoint, or failures.

Runs on the coordinator. Every refusal comes before the commit, and nothing is published then. Saves
by the split functions have more to decide: see ``split_commit``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._commit.collect import collect, require_one_directory
from nostall._commit.known_results import KnownResults, RankOutcome
from nostall._commit.publication import Publication
from nostall._commit.result_columns import RankResults, StorageData
from nostall._engine import default_engine
from nostall._model.collection import no_collection
from nostall._model.values import Abort, RankFiles
from nostall._save import finalize
from nostall._save.by_name.metadata import send_as_note
from nostall._save.by_name.plans import NamedGlobalPlan
from nostall._save.finalize import (
    FinishedMetadata,
    finish_metadata,
    is_unpublished,
    publication_of_results,
)
from nostall._save.leftovers import remove_unpublished
from nostall._save.rank_save import RankSave
from nostall._save.written import WrittenItems
from nostall._storage.deadlines import in_time
from nostall._storage.places import is_same
from nostall.errors import SaveError


@no_collection()
def publication_of_outcomes(
    metadata: Metadata,
    outcomes: Sequence[RankOutcome],
    results: Sequence[RankResults],
    known: KnownResults,
) -> Publication:
    """A publication made anew, which later saves of the same results use again.

    Args:
        metadata: The planned metadata.
        outcomes: Of all ranks.
        results: Those that the outcomes are or refer to.
        known: Where the publication is kept.
    """
    everything = known.under_new_names(outcomes, results)
    publication = publication_of_results(metadata, everything)
    known.note_published(outcomes, metadata, publication)
    return publication


def commit_results(
    save: RankSave,
    metadata: Metadata,
    results: list[list[WriteResult]],
    storage_meta: Callable[[], StorageMeta | None],
) -> None:
    """Commit a save whose results DCP has collected.

    If certainly nothing was published, the files of all ranks are removed.

    Raises:
        IncompleteSaveError: No rank wrote an item of the metadata; nothing is published.
        RankMismatchError: A rank wrote to another directory; nothing is published.
        WriteError: The metadata could not be published.
    """
    written = [getattr(of_rank, "written", None) for of_rank in results]
    plan = save.named_plan
    is_published = is_committed = False
    _require_files(save)
    try:
        require_written_here(save, written)
        publication = _publication_by_dcp(metadata, results, plan)
        finished = finish_metadata(publication, written, storage_meta())
        is_published = True  # assumed until an error rules it out
        publish(save, publication, metadata, finished)
        is_committed = True
    except Exception as error:  # passed on; files that nothing refers to go
        if not is_published or is_unpublished(error):
            if save.visit is not None:
                save.visit.is_removed = True
            names = [_files_in(of_rank) for of_rank in results]
            remove_unpublished(save.settings.metadata_path, names, written)
        raise
    finally:
        save.end(committed=is_committed)
        if plan is not None:
            plan.is_committed |= is_committed
            plan.has_failed = not is_committed
    if isinstance(places := metadata.storage_data, StorageData):  # the caller may change it
        metadata.storage_data = places.in_full if plan is None else places.as_made()
    if plan is not None and len(results) > 1:
        _send_as_note(metadata, save)


def _files_in(results: list[WriteResult]) -> set[str]:
    """Names of the files of a rank's results."""
    named = results.files if isinstance(results, WrittenItems) else ()
    # Results of a user's writer may not say: then its files stay, and the first error is raised.
    return {*named, *(getattr(each.storage_data, "relative_path", "") for each in results)}


@no_collection()
def _publication_by_dcp(
    planned: Metadata, results: Sequence[list[WriteResult]], plan: NamedGlobalPlan | None
) -> Publication:
    """The publication of results that DCP has collected; ranks may refer to earlier ones."""
    items = [of_rank for of_rank in results if isinstance(of_rank, WrittenItems)]
    if plan is None or len(items) != len(results):
        everyone = [each.items if isinstance(each, WrittenItems) else each for each in results]
        return publication_of_results(planned, everyone)
    outcomes, planned = [each.outcome for each in items], plan.as_planned(planned)
    with plan.lock:
        publication = plan.results.publication(outcomes, planned)
        if publication is None:
            verdict = collect(plan.results.fill_in(outcomes))
            if isinstance(verdict, Abort):
                raise next(iter(verdict.failures.values()))[0]
            publication = publication_of_outcomes(planned, outcomes, verdict.results, plan.results)
    return publication


def _send_as_note(metadata: Metadata, save: RankSave) -> None:
    """Let ``dcp.save`` send a note of where the metadata is, if other ranks can read it there."""
    settings, storage_meta = save.settings, metadata.storage_meta
    if not settings.is_elsewhere and storage_meta is not None and storage_meta.save_id is not None:
        name = os.path.basename(settings.metadata_path)
        send_as_note(metadata, settings.directory, name, storage_meta.save_id)


def _require_files(save: RankSave) -> None:
    if save.visit is not None and save.visit.is_removed:
        raise SaveError(
            "the files of this save were removed: its commit failed, or a later save to the"
            " directory replaced it",
            rank=save.settings.rank,
            phase="commit",
            path=save.settings.directory,
            hint="save again, with a new writer",
        )


def require_written_here(save: RankSave, written: Sequence[RankFiles | None]) -> None:
    """Refuse to commit files in another directory.

    Raises:
        RankMismatchError: A rank wrote to another directory than this rank.
        WriteError: To another disk of the same path.
    """
    here, rank = save.settings.belongs_at, save.settings.rank

    def is_same_in_time(one: str, other: str) -> bool:
        return in_time(
            lambda: is_same(one, other),
            timeout_s=default_engine().options.save_timeout_s,
            doing="comparing the directories that ranks wrote to",
            phase="collect",
            path=one,
            rank=rank,
        )

    directories = [None if each is None else each.belongs_at or each.directory for each in written]
    require_one_directory(directories, here, rank=rank, is_same=is_same_in_time)
    save.before_commit(written)


def publish(
    save: RankSave, publication: Publication, metadata: Metadata, finished: FinishedMetadata
) -> None:
    """Publish finished metadata.

    The metadata object that stock ``dcp.save`` passes is completed, as by stock.

    Args:
        save: The save of this rank.
        publication: The publication.
        metadata: The object that it was made from.
        finished: The content of the metadata file.

    Raises:
        WriteError: The metadata could not be published.
        SaveTimeoutError: Another save was committing to the same directory all the time.
    """
    fresh, settings = metadata.storage_data is None, save.settings
    mine = save.receipts[:1] if settings.stream is None else ()
    written_here = next((each.name for each in mine), None)
    with save.timeline.measure("publish"):
        finalize.publish(
            settings.metadata_path,
            publication,
            finished,
            default_engine(),
            sync=settings.options.sync_files,
            written_here=written_here,
            visit=save.visit,
        )
    save.after_commit()
    if fresh:
        metadata.version = _torch.DCP_VERSION
        metadata.storage_data = publication.storage_data
        metadata.storage_meta = finished.storage_meta
