"""How a save ends: the results of all ranks become one published checkpoint, or failures.

For saves by the split functions, whose ranks send a :class:`RankMessage` each, and for those whose
results DCP has collected. The coordinator decides: every refusal comes before the publication, and
nothing is published then.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._commit.columns import RankOutcome, RankPlaces, Results, ResultsReference, in_columns
from nostall._commit.commit import (
    failures_in,
    require_all_present,
    require_one_directory,
    require_one_save,
)
from nostall._commit.description import LazyMetadata, lazy_metadata
from nostall._commit.manifest import with_manifest
from nostall._commit.metadata import load_metadata, planned_indices
from nostall._commit.publication import KnownResults, Publication, complete_metadata, publication_of
from nostall._engine import default_engine
from nostall._model import checksum
from nostall._model.threads import gc_paused
from nostall._model.values import RankFiles, SaveId, WrittenFile
from nostall._plan.agree import new_series, replanned_metadata
from nostall._ranks.failures import sendable
from nostall._save.plans_by_name import NamedGlobalPlan
from nostall._save.prepared import WrittenItems
from nostall._save.publish import FinishedSave, is_unpublished, publish, remove_unpublished
from nostall._storage.deadlines import call_with_deadline
from nostall._storage.locations import is_same, storage_at
from nostall._storage.port import open_to_read, read_metadata
from nostall.errors import ReadError, SaveError

if TYPE_CHECKING:
    from nostall._save.rank_save import RankSave
    from nostall._save.split_plan import SaveSession


class RankMessage(NamedTuple):
    """Sent by each rank to the coordinator when it finalises.

    The coordinator gets thousands per save. So this and its parts are tuples, and they are sent as
    tuples without a class: frozen dataclasses take three times as long to unpickle.
    """

    outcome: RankOutcome
    written: RankFiles
    changed_plan: SavePlan | None
    save_here: SaveId | None
    """Identity of the save among those to its directory; ``None`` if it was not counted."""
    counts_alike: bool
    """Whether all ranks are known to count saves alike."""
    duration_s: float
    """From the start of planning until the files were durable."""

    def encoded(self) -> bytes:
        """The bytes that are sent; :func:`decoded` reads them."""
        outcome, written, save = self.outcome, self.written, self.save_here
        parts = (
            isinstance(outcome, ResultsReference),
            outcome[:] if isinstance(outcome, ResultsReference) else outcome,
            (
                written.directory,
                None if written.files is None else [each[:] for each in written.files],
                written.left,
                written.final_path,
            ),
            self.changed_plan,
            None if save is None else save[:],
            self.counts_alike,
            self.duration_s,
        )
        return pickle.dumps(parts)


@gc_paused()
def decoded(messages: Sequence[RankMessage | bytes]) -> list[RankMessage]:
    """The messages of all ranks; a process that saves alone has not encoded its own. ``SaveError``
    if one cannot be read.
    """
    found: list[RankMessage] = []
    for rank, each in enumerate(messages):
        try:
            if isinstance(each, RankMessage):
                found.append(each)
                continue
            refers, outcome, written, changed_plan, save, alike, duration_s = pickle.loads(each)
            directory, files, left, final_path = written
            # Calls with * would take twice as long, for thousands of ranks.
            if files is not None:
                files = tuple([WrittenFile(name, nbytes, crc32) for name, nbytes, crc32 in files])
            if refers:
                token, names = outcome
                outcome = ResultsReference(token, names)
            if save is not None:
                series, number = save
                save = SaveId(series, number)
            written = RankFiles(directory, files, left, final_path)
            found.append(RankMessage(outcome, written, changed_plan, save, alike, duration_s))
        except Exception as error:  # a pickle can raise anything
            raise SaveError(
                f"the message of a rank cannot be read: {error!r:.200}",
                rank=rank,
                phase="collect",
                hint="run the same versions of nostall and torch on all ranks",
            ) from error
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a save ended; sent by the coordinator to every rank."""

    failures: dict[int, _torch.WrappedException]
    published: bool
    """Whether the metadata is published, or may be; after a failure, too."""
    changed: bool
    """Whether the next save is planned together: a structure changed, or the commit failed."""
    series: int | None = None
    """A new series of identities, if ranks may count their saves differently."""
    slowest_rank: int | None = None


def commit_split_save(
    save: RankSave,
    messages: Sequence[RankMessage | bytes],
    planned: Metadata | None,
    session: SaveSession,
    storage_meta: Callable[[], StorageMeta | None],
    known: KnownResults,
) -> Ending:
    """Commit a split save if every rank wrote all its files; errors are in the :class:`Ending`.

    ``messages`` are from all ranks of the group, in rank order; ``planned`` is the metadata that
    they have planned. ``session`` has the planning results of this rank. ``storage_meta`` returns
    DCP's part of the metadata that is specific to this save.
    """
    is_published = False
    try:
        finished, ending = _decide(save, messages, planned, session, storage_meta, known)
        if finished is not None:
            is_published = True  # assumed until an error rules it out
            publish(save, finished)
    except Exception as error:  # sent to every rank
        return Ending(
            failures={session.rank: sendable(_torch.wrap_exception(error))},
            published=is_published and not is_unpublished(error),
            changed=True,
        )
    return ending


# The collector would visit each message several times. This waits for storage only where ranks name
# the directory differently, with local_staging_dir, and for what adapters write beside.
@gc_paused()
def _decide(
    save: RankSave,
    messages: Sequence[RankMessage | bytes],
    planned: Metadata | None,
    session: SaveSession,
    storage_meta: Callable[[], StorageMeta | None],
    known: KnownResults,
) -> tuple[FinishedSave | None, Ending]:
    """The save to publish, ``None`` if a rank failed; and what the ranks are told then."""
    of_ranks = decoded(messages)
    outcomes = [each.outcome for each in of_ranks]
    results: list[Any] = known.fill_in(outcomes)
    if failures := failures_in(results):
        return None, Ending(failures=failures, published=False, changed=True)
    written = [each.written for each in of_ranks]
    _require_written_here(save, written)
    require_one_save(
        [each.save_here for each in of_ranks], rank=session.rank, path=save.settings.directory
    )
    changed: dict[int, SavePlan] = {
        rank: each.changed_plan
        for rank, each in enumerate(of_ranks)
        if each.changed_plan is not None
    }
    if changed:
        planned = replanned_metadata(changed, session.reused_plans, session.planner)
    if planned is None:
        raise SaveError("the coordinator has no metadata to publish", phase="commit")
    publication = _publication(planned, outcomes, results, known, may_be_known=not changed)
    ending = Ending(
        failures={},
        published=True,
        changed=bool(changed),
        series=None if all(each.counts_alike for each in of_ranks) else new_series(),
        slowest_rank=max(range(len(of_ranks)), key=lambda rank: of_ranks[rank].duration_s),
    )
    return _finished(planned, publication, written, storage_meta()), ending


def commit_results(
    save: RankSave,
    metadata: Metadata,
    results: list[list[WriteResult]],
    storage_meta: Callable[[], StorageMeta | None],
) -> None:
    """Commit a save whose results DCP has collected.

    If certainly nothing was published, the files of all ranks are removed. Nothing is published if
    an item of the metadata was not written (``IncompleteSaveError``), or a rank wrote to another
    directory (``RankMismatchError``). ``WriteError`` if the metadata could not be published.
    """
    written = [getattr(of_rank, "written", None) for of_rank in results]
    plan, settings, visit = save.named_plan, save.settings, save.state.visit
    if visit is not None and visit.is_removed:
        raise SaveError(
            "the files of this save were removed: its commit failed, or a later save to the"
            " directory replaced it",
            rank=settings.rank,
            phase="commit",
            path=settings.directory,
            hint="save again, with a new writer",
        )
    is_published = is_committed = False
    try:
        _require_written_here(save, written)
        publication = _publication_by_dcp(metadata, results, plan)
        finished = _finished(metadata, publication, written, storage_meta())
        is_published = True  # assumed until an error rules it out
        publish(save, finished)
        is_committed = True
    except Exception as error:  # passed on; files that nothing refers to go
        if not is_published or is_unpublished(error):
            if visit is not None:
                visit.is_removed = True
            names = [_files_in(of_rank) for of_rank in results]
            remove_unpublished(settings.directory, names, written)
        raise
    finally:
        save.end(committed=is_committed)
        if plan is not None:
            plan.is_committed |= is_committed
            plan.has_failed = not is_committed
    if plan is None or len(results) == 1 or settings.is_elsewhere:
        return
    described = metadata.storage_meta
    if described is not None and described.save_id is not None:  # others can read it there
        name = settings.metadata_name
        send_as_note(metadata, settings.directory, name, described.save_id)


def _files_in(results: list[WriteResult]) -> set[str]:
    """Names of the files of a rank's results."""
    outcome = results.outcome if isinstance(results, WrittenItems) else None
    # Results of a user's writer may not name files: then they stay, and the first error is raised.
    named = (getattr(each.storage_data, "relative_path", "") for each in results)
    return {*named} if outcome is None else {*outcome.files}


@gc_paused()
def _publication_by_dcp(
    planned: Metadata, results: Sequence[list[WriteResult]], plan: NamedGlobalPlan | None
) -> Publication:
    """The publication of results that DCP has collected; ranks may refer to earlier ones."""
    outcomes: list[RankOutcome] = [
        (each.outcome if isinstance(each, WrittenItems) else None)
        or Results(items=in_columns(each), files=(), token=None)
        for each in results
    ]
    plan_lock, known = (
        (nullcontext(), KnownResults()) if plan is None else (plan.lock, plan.results)
    )
    with plan_lock:
        filled_in: list[Any] = known.fill_in(outcomes)
        if failures := failures_in(filled_in):
            raise next(iter(failures.values()))[0]
        planned = planned if plan is None else plan.as_planned(planned)
        return _publication(planned, outcomes, filled_in, known)


# --- its parts ------------------------------------------------------------------------------------


def _require_written_here(save: RankSave, written: Sequence[RankFiles | None]) -> None:
    """Raise ``RankMismatchError`` if a rank wrote to another directory than this rank;
    ``WriteError`` if to another disk of the same path.
    """
    rank = save.settings.rank

    def is_same_in_time(one: str, other: str) -> bool:
        return call_with_deadline(
            lambda: is_same(one, other),
            timeout_s=default_engine().options.save_timeout_s,
            doing="comparing the directories that ranks wrote to",
            phase="collect",
            path=one,
            rank=rank,
        )

    directories = [None if each is None else each.final_path or each.directory for each in written]
    here = save.settings.final_path
    require_one_directory(directories, here, rank=rank, is_same=is_same_in_time)
    save.before_commit(written)


def _publication(
    planned: Metadata,
    outcomes: Sequence[RankOutcome],
    results: Sequence[RankPlaces],
    known: KnownResults,
    *,
    may_be_known: bool = True,
) -> Publication:
    """The last save's publication if it had these results and metadata; else a new one, kept.

    ``results`` are those that the outcomes are or refer to. ``may_be_known`` is false for new
    metadata. ``IncompleteSaveError`` if an item of the metadata was not written.
    """
    publication = known.publication(outcomes, planned) if may_be_known else None
    if publication is None:
        completed = complete_metadata(planned, known.under_new_names(outcomes, results))
        publication = publication_of(completed)
        if publication.index is None:  # an index has a place of each item, and no other
            require_all_present(planned_indices(completed), completed.storage_data)
        known.note_published(outcomes, planned, publication)
    return publication


@gc_paused()
def _finished(
    metadata: Metadata,
    publication: Publication,
    written: Sequence[RankFiles | None],
    storage_meta: StorageMeta | None,
) -> FinishedSave:
    """The save with its metadata file's content; with a manifest if all files are known."""
    content = publication.content(storage_meta)
    file_lists = [each.files for each in written if each is not None and each.files is not None]
    # With a partial manifest the other files would look like foreign ones.
    if len(file_lists) == len(written):
        last = b"".join(content[len(publication.program) :])
        files = tuple(chain.from_iterable(file_lists))
        index = publication.index
        if index is not None and not index.fits({file.name: file.nbytes for file in files}):
            index = None  # readers would refuse it
        content = with_manifest(
            content,
            files,
            crc32=checksum.crc32(last, publication.crc32),
            index=index,
            committed_at_s=time.time(),
        )
    left = chain.from_iterable(each.left for each in written if each is not None)
    return FinishedSave(
        metadata=metadata,
        publication=publication,
        content=content,
        storage_meta=storage_meta,
        left=frozenset(left),
    )


# --- the metadata that ``dcp.save`` returns on every rank -----------------------------------------

# Stock DCP sends the coordinator's metadata object to all ranks, though few programs look at it.
# This one is sent as a note of where it is published; a rank that looks reads it there.


def send_as_note(metadata: Metadata, directory: str, name: str, save_id: str) -> None:
    """Let published metadata, which ``dcp.save`` sends next, be sent as a note, once."""

    def reduce_once(_protocol: Any) -> Any:
        del metadata.__reduce_ex__
        return _received, (directory, name, save_id)

    # ``pickle`` asks the object before its class.
    metadata.__reduce_ex__ = reduce_once  # type: ignore[method-assign]  # that is the point


def _received(directory: str, name: str, save_id: str) -> LazyMetadata:
    return lazy_metadata(partial(_read, directory, name, save_id))


def _read(directory: str, name: str, save_id: str) -> dict[str, Any]:
    """The attributes of published metadata; ``ReadError`` if they cannot be read, or are those of a
    later save; ``SaveTimeoutError`` if storage hangs.
    """
    storage = storage_at(directory)
    path = storage.where(name)

    def read() -> Metadata:
        with open_to_read(storage, name) as stream:
            return load_metadata(read_metadata(stream, path), path=path)

    try:
        metadata = call_with_deadline(
            read,
            timeout_s=default_engine().options.save_timeout_s,
            doing="reading the metadata that dcp.save returned",
            phase="read",
            path=path,
        )
    except OSError as error:
        raise _gone(f"cannot be read from this rank: {error.strerror or error}", path) from error
    if metadata.storage_meta is None or metadata.storage_meta.save_id != save_id:
        raise _gone("was replaced by a later save", path)
    return vars(metadata)


def _gone(how: str, path: str) -> ReadError:
    return ReadError(
        f"the checkpoint whose metadata dcp.save returned {how}",
        phase="read",
        path=path,
        hint="look at the returned metadata before the checkpoint is replaced or removed",
    )
