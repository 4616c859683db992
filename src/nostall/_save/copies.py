"""Files of frozen items that an object store copies while the others are written.

Where there are no hard links, a file of the last save with the same content is copied by the store:
nothing is copied here, checksummed or sent. That the file is still there is looked at before the
snapshot is taken; a store that refuses later fails the save, as its tensors may have changed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from nostall._engine import Engine
from nostall._model.jobs import FileReceipt, RankReport, RankWritten, WriteWork
from nostall._model.values import FileLayout, KeptFile
from nostall._ranks.reports import joined
from nostall._save.session import PreparedSave
from nostall._save.write import in_thread, wait_for
from nostall._storage.deadlines import in_time
from nostall._storage.places import is_address, object_storage_at
from nostall._storage.port import reason
from nostall.errors import SaveAbortedError, WriteError

_log = logging.getLogger("nostall")


def possible_copies(
    prepared: PreparedSave, kept: Sequence[KeptFile | None], engine: Engine
) -> list[KeptFile | None]:
    """The kept files that the store can copy, and still has.

    Raises:
        SaveTimeoutError: The store did not answer within ``save_timeout_s`` seconds.
    """
    target = prepared.target
    # A trainer that dies would take the copies with it.
    is_possible = engine.may_copy and not target.settings.options.linger_s
    if not (is_possible and any(kept)):
        return [None] * len(kept)
    here = target.settings.directory
    return in_time(
        lambda: [each if each is not None and _is_there(here, each) else None for each in kept],
        timeout_s=target.timeout_s,
        doing="looking at files of the last save",
        phase="write",
        path=here,
        rank=prepared.rank,
    )


def _is_there(here: str, kept: KeptFile) -> bool:
    if not is_address(kept.place):
        return False
    there = object_storage_at(kept.place)
    if not object_storage_at(here).can_copy_from(there):
        return False
    try:
        return there.stat(kept.receipt.name).version == kept.version
    except OSError:
        return False


def start_copies(
    prepared: PreparedSave, files: Sequence[tuple[FileLayout, KeptFile]], engine: Engine
) -> Future[RankReport]:
    """Let the store copy files, in a thread that waits for it; the report has their receipts."""

    def copy(cancelled: threading.Event) -> RankReport:
        receipts = tuple(_copied(prepared, *each, cancelled, engine) for each in files)
        return RankWritten(rank=prepared.rank, receipts=receipts)

    return in_thread(copy, prepared.target, engine)


def _copied(
    prepared: PreparedSave,
    file: FileLayout,
    kept: KeptFile,
    cancelled: threading.Event,
    engine: Engine,
) -> FileReceipt:
    place, began_s = prepared.target.settings.directory, time.monotonic()
    here, there = object_storage_at(place), object_storage_at(kept.place)
    created = prepared.target.progress.created
    try:
        name = here.copy_from(
            there,
            kept.receipt.name,
            file.name,
            expected=kept.version,
            on_created=lambda name: created.add(here.where(name)),
        )
    except OSError as error:
        engine.may_copy = False
        _log.warning(
            "the store does not copy files; frozen ones are written from now on: %s", error
        )
        raise WriteError(
            f"the store did not copy a frozen file of the last save: {reason(error)}",
            errno=error.errno,
            phase="write",
            path=there.where(kept.receipt.name),
            rank=prepared.rank,
            hint="save again: frozen files are written from now on",
        ) from error
    if cancelled.is_set():
        here.discard([name])
        raise SaveAbortedError("the save was aborted", phase="write", path=place)
    return replace(
        kept.receipt,
        name=name,
        planned_name=file.name,
        started_s=began_s,
        finished_s=time.monotonic(),
        work=WriteWork(),
        failed_attempts=(),
        is_linked=True,
    )


def with_copied(prepared: PreparedSave, report: RankReport, engine: Engine) -> RankReport:
    """The report of a rank with the files that the store has copied; waits for them."""
    if prepared.copies is None:
        return report
    return joined([report, wait_for(prepared.copies, prepared.target, engine)])
