"""Find the completion records in a checkpoint directory, and commit a save from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._commit.manifest import manifest_alone
from nostall._commit.metadata import extents_of, load_metadata
from nostall._engine import Engine
from nostall._model.completion import UNFINISHED, RecordName, SaveId, record_name_in
from nostall._model.values import RankFiles, WrittenFile
from nostall._save.finalize import finish_metadata, publication_of_results, publish
from nostall._save.leftovers import files_named_by, files_of, unreferenced
from nostall._storage.port import Storage, require_file
from nostall._storage.reading import open_to_read, read_metadata
from nostall._writer.completion import CompletionRecord, decoded
from nostall.errors import DamagedCheckpointError

_MOST_NAMED = 100


@dataclass(frozen=True, slots=True)
class Found:
    """The records of one save."""

    save: SaveId
    ranks: int
    """How many ranks have saved together."""
    present: frozenset[int]
    """The ranks that have left their record."""

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have."""
        return len(self.present) == self.ranks

    @property
    def missing(self) -> tuple[int, ...]:
        """The first ranks that have not."""
        ranks = (rank for rank in range(self.ranks) if rank not in self.present)
        return tuple(islice(ranks, _MOST_NAMED))

    def names(self) -> list[str]:
        """The names of the records."""
        return [str(RecordName(self.save, rank, self.ranks)) for rank in sorted(self.present)]


def records_among(names: Iterable[str]) -> list[Found]:
    """The saves that have left records, by the names in a directory."""
    ranks: dict[tuple[SaveId, int], set[int]] = defaultdict(set)
    for found in filter(None, map(record_name_in, names)):
        ranks[found.save, found.ranks].add(found.rank)
    return [Found(save, count, frozenset(present)) for (save, count), present in ranks.items()]


@dataclass(frozen=True, slots=True)
class CompleteSave:
    """A save of which every rank has left its record."""

    found: Found
    records: tuple[CompletionRecord, ...]
    """In the order of ranks."""

    @property
    def began_s(self) -> float:
        """When the coordinator planned it, in seconds since the epoch."""
        return max(record.began_s for record in self.records if record.metadata)

    @property
    def files(self) -> set[str]:
        """The names of its files."""
        return {each.name for record in self.records for each in record.report.receipts}


def read_save(storage: Storage, found: Found) -> CompleteSave:
    """The records of a save, of which none is missing.

    Raises:
        DamagedCheckpointError: They are not what was written.
        OSError: Storage refuses.
    """
    records = tuple(_read(storage, name) for name in found.names())
    save = CompleteSave(found, records)
    if sum(bool(record.metadata) for record in records) != 1:
        raise _damaged("no record, or more than one, has the metadata", storage)
    return save


def require_files(storage: Storage, save: CompleteSave) -> None:
    """Require the files of a save.

    Raises:
        DamagedCheckpointError: One is missing, or has another length.
        OSError: Storage refuses.
    """
    for record in save.records:
        for receipt in record.report.receipts:
            try:
                require_file(storage, receipt.name, receipt.nbytes)
            except FileNotFoundError as error:
                raise _damaged(f"{receipt.name} is missing", storage) from error


def _read(storage: Storage, name: str) -> CompletionRecord:
    path = storage.where(name)
    with open_to_read(storage, name) as stream:
        return decoded(read_metadata(stream, path), name, path=path)


def commit(storage: Storage, save: CompleteSave, engine: Engine) -> None:
    """Publish the checkpoint.

    Raises:
        DamagedCheckpointError: A record places an item in a file that its rank has not written.
        UntrustedMetadataError: A record's pickle is not one of metadata.
        IncompleteSaveError: No rank has written an item of the metadata.
        WriteError: The metadata could not be published.
        NotDurableError: The metadata was published, but may not survive a power failure.
    """
    path = storage.where(_torch.METADATA_NAME)
    (planned,) = [record.metadata for record in save.records if record.metadata]
    metadata = load_metadata(planned, path=path)
    results = [_results(record, storage) for record in save.records]
    publication = publication_of_results(metadata, results)
    written = [_written(record, storage) for record in save.records]
    publish(
        path,
        publication,
        finish_metadata(publication, written, metadata.storage_meta),
        engine,
        sync=True,
        ahead=None,
        written_here=min(save.files, default=None),
        visit=None,
    )


def _results(record: CompletionRecord, storage: Storage) -> list[WriteResult]:
    """DCP's results of a rank, under the names that its files have got."""
    path = storage.where()
    places = load_metadata(record.results, path=path)
    names = {each.planned_name: each.name for each in record.report.receipts}
    if not {each.file for each in extents_of(places, path=path)} <= names.keys():
        raise _damaged(f"rank {record.report.rank} has other files than its record says", storage)
    return [
        WriteResult(
            index=index,
            size_in_bytes=info.length,
            storage_data=replace(info, relative_path=names[info.relative_path]),
        )
        for index, info in (places.storage_data or {}).items()
    ]


def _written(record: CompletionRecord, storage: Storage) -> RankFiles:
    files = (
        WrittenFile(name=each.name, nbytes=each.nbytes, crc32=each.crc32_of_file)
        for each in record.report.receipts
    )
    return RankFiles(directory=storage.where(), files=tuple(files))


def is_committed(storage: Storage, save: CompleteSave) -> bool:
    """Whether the committed checkpoint is that of the save; its trainer died right after that."""
    return bool(save.files) and files_of(storage, _torch.METADATA_NAME) == save.files


def is_superseded(storage: Storage, save: CompleteSave) -> bool:
    """Whether a checkpoint was committed since the save was planned, by the coordinators' clocks.

    Raises:
        OSError: Storage refuses.
    """
    try:
        with open_to_read(storage, _torch.METADATA_NAME) as stream:
            manifest = manifest_alone(stream)
        committed_s = storage.stat(_torch.METADATA_NAME).modified_s
    except FileNotFoundError:
        return False
    return save.began_s < (committed_s if manifest is None else manifest.committed_at_s)


def is_of_the_past(storage: Storage, found: Found) -> bool:
    """Whether all records are older than the present checkpoint, or of its files.

    By the clock of storage.

    Raises:
        OSError: Storage refuses.
    """
    try:
        committed_s = storage.stat(_torch.METADATA_NAME).modified_s
        if all(storage.stat(name).modified_s < committed_s for name in found.names()):
            return True
        committed = _committed(storage)
        records = (_read(storage, name) for name in found.names())
        files = {each.name for record in records for each in record.report.receipts}
        return bool(files) and files <= committed
    except (FileNotFoundError, DamagedCheckpointError):
        return False


def discard(storage: Storage, found: Sequence[Found]) -> None:
    """Remove the records of saves, and the files that they name and no metadata does.

    What cannot be removed stays. Without an answer of storage about the metadata, all files do.
    """
    with suppress(OSError):
        removable = _uncommitted(storage)
        for name in (name for each in found for name in each.names()):
            files: set[str] = set()
            with suppress(OSError, DamagedCheckpointError):
                files = {each.name for each in _read(storage, name).report.receipts}
            storage.remove([name, name + UNFINISHED, *(files & removable)])


def is_under_way(storage: Storage) -> bool:
    """Whether there are files of a save that is not committed, apart from unfinished records.

    Raises:
        OSError: Storage refuses.
    """
    return not all(name.endswith(UNFINISHED) for name in _uncommitted(storage))


def _uncommitted(storage: Storage) -> set[str]:
    """Names of shard files and completion records that no metadata refers to.

    Raises:
        OSError: Storage refuses.
    """
    unnamed = unreferenced(storage, storage.list(), _torch.METADATA_NAME)
    return unnamed - _committed(storage)


def _committed(storage: Storage) -> set[str]:
    """Names of the shard files of the committed checkpoint, if there is one.

    Raises:
        OSError: Its metadata cannot be read.
    """
    try:
        return files_named_by(storage, _torch.METADATA_NAME)
    except FileNotFoundError:
        return set()


def _damaged(why: str, storage: Storage) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"a save cannot be recovered: {why}",
        phase="recover",
        path=storage.where(),
        hint="an older checkpoint, if there is one, stays; remove_checkpoint removes the rest",
    )
