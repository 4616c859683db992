"""How a split save ends: the messages of all ranks become one published checkpoint, or failures.

Runs on the coordinator. Every refusal comes before the commit, and nothing is published then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from nostall import _torch
from nostall._commit.collect import collect, require_one_save
from nostall._commit.known_results import KnownResults
from nostall._commit.publication import Publication
from nostall._model.collection import no_collection
from nostall._model.values import Abort
from nostall._plan.together import new_series, replanned_metadata
from nostall._ranks.failures import sendable
from nostall._save.coordinator import publication_of_outcomes, publish, require_written_here
from nostall._save.finalize import FinishedMetadata, finish_metadata, is_unpublished
from nostall._save.messages import Ending, RankMessage, decoded
from nostall._save.rank_save import RankSave
from nostall._save.split_plan import SaveSession
from nostall.errors import SaveError


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadySave:
    """A save that only has to be published."""

    publication: Publication
    metadata: Metadata
    finished: FinishedMetadata
    ending: Ending


def commit_split_save(
    save: RankSave,
    messages: Sequence[RankMessage | bytes],
    planned: Metadata | None,
    session: SaveSession,
    storage_meta: Callable[[], StorageMeta | None],
    known: KnownResults,
) -> Ending:
    """Commit a split save if every rank wrote all its files.

    Args:
        save: The save of this rank.
        messages: Those of all ranks of the group, in rank order, as :func:`decoded` takes them.
        planned: The metadata that they have planned.
        session: The planning results that remain on this rank.
        storage_meta: Returns DCP's part of the metadata that is specific to this save.
        known: What this rank knows of earlier results.
    """
    is_published = False
    try:
        ready = _decide(save, messages, planned, session, storage_meta, known)
        if isinstance(ready, Abort):
            return Ending(failures=ready.failures, published=False, changed=True)
        is_published = True  # assumed until an error rules it out
        publish(save, ready.publication, ready.metadata, ready.finished)
    except Exception as error:  # sent to every rank
        return Ending(
            failures={session.rank: sendable(_torch.wrap_exception(error))},
            published=is_published and not is_unpublished(error),
            changed=True,
        )
    return ready.ending


# The collector would visit each message several times. In here storage is waited for only where
# ranks name the directory differently, and with local_staging_dir.
@no_collection()
def _decide(
    save: RankSave,
    messages: Sequence[RankMessage | bytes],
    planned: Metadata | None,
    session: SaveSession,
    storage_meta: Callable[[], StorageMeta | None],
    known: KnownResults,
) -> _ReadySave | Abort:
    """The save to publish, or the failures of ranks."""
    of_ranks = decoded(messages)
    outcomes = [each.outcome for each in of_ranks]
    verdict = collect(known.fill_in(outcomes))
    if isinstance(verdict, Abort):
        return verdict
    written = [each.written for each in of_ranks]
    require_written_here(save, written)
    require_one_save(
        [each.save_here for each in of_ranks], rank=session.rank, path=save.settings.directory
    )
    changed = {
        rank: each.changed_plan
        for rank, each in enumerate(of_ranks)
        if each.changed_plan is not None
    }
    metadata = _metadata_to_publish(planned, session, changed)
    publication = None if changed else known.publication(outcomes, metadata)
    if publication is None:
        publication = publication_of_outcomes(metadata, outcomes, verdict.results, known)
    ending = Ending(
        failures={},
        published=True,
        changed=bool(changed),
        series=None if all(each.counts_alike for each in of_ranks) else new_series(),
        slowest_rank=max(range(len(of_ranks)), key=lambda rank: of_ranks[rank].took_s),
    )
    finished = finish_metadata(publication, written, storage_meta())
    return _ReadySave(publication=publication, metadata=metadata, finished=finished, ending=ending)


def _metadata_to_publish(
    planned: Metadata | None, session: SaveSession, changed: dict[int, SavePlan]
) -> Metadata:
    if changed:
        return replanned_metadata(changed, session.reused_plans, session.planner)
    if planned is None:
        raise SaveError("the coordinator has no metadata to publish", phase="commit")
    return planned
