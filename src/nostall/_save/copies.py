"""Files of frozen items that an object store copies while the others are written.

Where there are no hard links, the store copies the last save's file of the same content: nothing is
copied here, checksummed or sent. Whether that file is still there is looked at before the snapshot
is taken. If the store refuses later, the save fails: the trainer may have changed the tensors by
then, so the file cannot be written instead. A request that nobody waits for any more may still
arrive, so no other save uses the name of a copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from nostall._engine import Engine
from nostall._model.interrupts import on_done
from nostall._model.jobs import FileReceipt, RankFailed, RankReport, RankWritten, WriteWork
from nostall._model.values import FileLayout, KeptFile
from nostall._ranks.reports import joined, when_done
from nostall._save.session import PreparedSave
from nostall._save.write import in_thread, wait_for
from nostall._storage.deadlines import in_time
from nostall._storage.places import is_address, object_storage_at
from nostall._storage.port import Conflict, may_pass, reason
from nostall.errors import SaveAbortedError, WriteError


def possible_copies(
    prepared: PreparedSave, kept: Sequence[KeptFile | None], engine: Engine
) -> list[KeptFile | None]:
    """The kept files that the store can copy, and still has.

    Raises:
        SaveTimeoutError: The store did not answer within ``save_timeout_s`` seconds.
    """
    target = prepared.target
    # The copies end with the trainer.
    is_possible = engine.may_copy
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
    """Let the store copy files, in a thread that waits for it and that the engine can stop."""

    def copy(cancelled: threading.Event) -> RankReport:
        def require_wanted() -> None:
            if cancelled.is_set():
                raise SaveAbortedError("the save was aborted", phase="write", rank=prepared.rank)

        receipts = tuple(_copied(prepared, *each, require_wanted, engine) for each in files)
        return RankWritten(rank=prepared.rank, receipts=receipts)

    return in_thread(copy, prepared.target, engine)


def _copied(
    prepared: PreparedSave,
    file: FileLayout,
    kept: KeptFile,
    require_wanted: Callable[[], None],
    engine: Engine,
) -> FileReceipt:
    began_s = time.monotonic()
    here = object_storage_at(prepared.target.settings.directory)
    there = object_storage_at(kept.place)
    created = prepared.target.progress.created
    try:
        here.copy_from(
            there,
            kept.receipt.name,
            file.name,
            expected=kept.version,
            on_created=lambda name: created.add(here.where(name)),
            before_each=require_wanted,
        )
    except OSError as error:
        _forget(kept, engine)
        if isinstance(error, (FileNotFoundError, Conflict)):
            what = "the last save's file of frozen items was removed while the store copied it"
        else:
            what = f"the store did not copy the last save's file of frozen items: {reason(error)}"
            engine.may_copy = engine.may_copy and may_pass(error)
        raise WriteError(
            what,
            errno=error.errno,
            phase="write",
            path=there.where(kept.receipt.name),
            rank=prepared.rank,
            hint="save again: these items are then written",
        ) from error
    try:
        require_wanted()
    except SaveAbortedError:
        here.discard([file.name])
        raise
    return kept_receipt(kept, file.name, file, began_s)


def kept_receipt(kept: KeptFile, name: str, file: FileLayout, began_s: float) -> FileReceipt:
    """The receipt of a file that has taken the place of one that was planned.

    Args:
        kept: The file of the last save.
        name: The name that it has in this one.
        file: The planned file.
        began_s: When that began, by ``time.monotonic()``.
    """
    return kept.receipt._replace(
        name=name,
        planned_name=file.name,
        started_s=began_s,
        finished_s=time.monotonic(),
        work=WriteWork(),
        failed_attempts=(),
        is_linked=True,
    )


def _forget(kept: KeptFile, engine: Engine) -> None:
    for number, each in list(engine.kept.items()):
        if each is kept:
            engine.kept.pop(number, None)


def with_copied(prepared: PreparedSave, report: RankReport, engine: Engine) -> RankReport:
    """The report of a rank with the files that the store has copied; waits for them."""
    if prepared.copied is None:
        return report
    _stop_after(report, prepared, engine)
    return joined([report, wait_for(prepared.copied, prepared.target, engine)])


def when_copied(
    prepared: PreparedSave, written: Future[RankReport], engine: Engine
) -> Future[RankReport]:
    """As :func:`with_copied`, of a report that is pending."""
    if prepared.copied is None:
        return written
    on_done(written, lambda done: _stop_after(done.result(), prepared, engine))
    return when_done([written, prepared.copied], joined)


def _stop_after(report: RankReport, prepared: PreparedSave, engine: Engine) -> None:
    if isinstance(report, RankFailed):
        engine.stop_threads(prepared.target.job)
