"""The report of a rank whose files are written: DCP's results, and the files."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._commit.columns import Results, ResultsReference
from nostall._commit.commit import require_one_result_each
from nostall._model.jobs import FileReceipt, RankFailed, RankReport
from nostall._model.names import AS_SAFETENSORS
from nostall._model.values import Layout, RankFiles, Share, WrittenFile
from nostall._ranks.failures import error_of
from nostall._storage.deadlines import call_with_deadline
from nostall._storage.locations import storage_at
from nostall._storage.port import require_file
from nostall.errors import IncompleteSaveError, SaveTimeoutError, WriteError

if TYPE_CHECKING:
    from nostall._save.prepared import PreparedSave, SaveTarget

_log = logging.getLogger("nostall")


def require_written(prepared: PreparedSave, report: RankReport) -> list[FileReceipt]:
    """A rank's receipts, in layout order; ``prepared`` is the save :func:`as_written`.

    ``SaveError`` if the rank failed (the subclass says how); ``IncompleteSaveError`` if a file has
    no receipt; ``WriteError`` if the first file, unless a user's stream wrote it, is missing or
    changed.
    """
    if isinstance(report, RankFailed):
        raise error_of(report, job=prepared.target.job)
    found = {receipt.name: receipt for receipt in report.receipts}
    missing = [file.name for file in prepared.layout.files if file.name not in found]
    if missing:
        raise IncompleteSaveError(
            f"the writer reported no result for the files {missing}",
            rank=report.rank,
            phase="collect",
            job=prepared.target.job,
        )
    receipts = [found[file.name] for file in prepared.layout.files]
    if prepared.target.settings.stream is None and receipts:
        _require_file(prepared.target, receipts[0])
    for receipt in receipts:
        if receipt.failed_attempts:
            _log.warning(
                "written after retries=%d path=%s rank=%d last_failure=%r",
                len(receipt.failed_attempts),
                os.path.join(prepared.target.settings.directory, receipt.name),
                prepared.target.settings.rank,
                receipt.failed_attempts[-1],
            )
    return receipts


def as_written(prepared: PreparedSave, report: RankReport) -> PreparedSave:
    """The save with the names under which its files were created."""
    if isinstance(report, RankFailed):
        return prepared
    names = {each.planned_name: each.name for each in report.receipts}
    if all(planned == name for planned, name in names.items()):
        return prepared
    files = [replace(file, name=names.get(file.name, file.name)) for file in prepared.layout.files]
    return replace(prepared, layout=replace(prepared.layout, files=tuple(files)))


def write_results(prepared: PreparedSave, report: RankReport) -> list[WriteResult]:
    """DCP's results for a rank's report; ``prepared`` is the save :func:`as_written`.

    Exactly one per planned item, or ``IncompleteSaveError``; other errors as
    :func:`require_written`.
    """
    receipts = require_written(prepared, report)
    extents = [receipt.extents for receipt in receipts]
    if prepared.known is not None and prepared.layout is prepared.known.layout:
        return list(prepared.known.results)
    descriptors = prepared.target.settings.transform_descriptors
    results = expected_results(prepared.planned.share, prepared.layout, extents, descriptors)
    require_one_result_each(
        (item.index for item in prepared.planned.share.plan.items),
        (result.index for result in results),
        rank=prepared.target.settings.rank,
    )
    return results


def _require_file(target: SaveTarget, receipt: FileReceipt) -> None:
    """Check that one file still exists: the directory may have been removed since it was written.

    One file is enough to detect that, and the trainer waits.
    """
    files = storage_at(target.settings.directory)
    path = files.where(receipt.name)
    try:
        call_with_deadline(
            lambda: require_file(files, receipt.name, receipt.nbytes),
            timeout_s=target.timeout_s,
            doing="looking for a written file",
            phase="collect",
            path=path,
        )
    except SaveTimeoutError:
        raise
    except OSError as error:
        raise WriteError(
            f"the written file is missing or changed: {error.strerror}",
            errno=error.errno,
            phase="collect",
            path=path,
            job=target.job,
            hint="something else removes or changes files in the checkpoint directory",
        ) from error


class WrittenItems(list[WriteResult]):
    """DCP's results of one rank, sent to the coordinator with its files.

    Without results if there is an ``outcome``: those that a later save may refer to.
    """

    # The coordinator gets thousands: without dictionaries there is less to collect.
    __slots__ = ("outcome", "written")

    def __init__(
        self,
        results: Sequence[WriteResult] = (),
        written: RankFiles | None = None,
        outcome: Results | ResultsReference | None = None,
    ) -> None:
        super().__init__(results)
        self.written = written
        self.outcome = outcome

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.outcome, ResultsReference):  # one per rank, in each save
            return _referring, (self.written, *self.outcome)
        return WrittenItems, ([*self], self.written, self.outcome)


def _referring(written: RankFiles | None, token: str, files: tuple[str, ...]) -> WrittenItems:
    return WrittenItems((), written, ResultsReference(token=token, files=files))


def written_files(prepared: PreparedSave, report: RankReport | None) -> RankFiles:
    """The files of a rank, by its report; none without a report."""
    target = prepared.target
    files: tuple[WrittenFile, ...] | None = ()
    if target.settings.stream is not None or isinstance(report, RankFailed):
        files = None
    elif report is not None:
        files = tuple(
            WrittenFile(name=each.name, nbytes=each.nbytes, crc32=each.crc32_of_file)
            for each in report.receipts
        )
    return RankFiles(
        directory=target.settings.directory,
        files=files,
        left=target.visit.left_before(),
        final_path=target.settings.final_path,
    )


_Extents = tuple[tuple[int, int], ...] | None


def expected_results(
    share: Share,
    layout: Layout,
    extents: Sequence[_Extents] | None = None,
    descriptors: tuple[str, ...] | None = None,
) -> list[WriteResult]:
    """DCP's results for files with this layout, apart from extents decided by streams."""
    results = []
    for number, file in enumerate(layout.files):
        decided = extents[number] if extents else None
        transforms = AS_SAFETENSORS if file.header else descriptors
        for position, slot in enumerate(file.slots):
            offset, length = decided[position] if decided else (slot.offset, slot.length)
            info = _torch.StorageInfo(
                file.name, offset, length, None if transforms is None else list(transforms)
            )
            index = share.plan.items[slot.item].index
            results.append(WriteResult(index=index, size_in_bytes=length, storage_data=info))
    return results
