"""From what all ranks have written to a checkpoint that exists: what stands in its metadata file, and its commit.

Runs on the coordinator. What may fail before the commit, so that the files are certain to be nobody's, is apart from it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _checksum, _directories
from nostall._ahead import WrittenAhead
from nostall._manifest import files_in_manifest, with_manifest
from nostall._metadata import (
    Publication,
    complete_metadata,
    planned_indices,
    publication_of,
    referenced_files,
)
from nostall._names import is_ours_to_remove
from nostall._pipeline.collect import require_all_present
from nostall._pipeline.commit import Begun, commit
from nostall._runtime import Engine
from nostall._storage.reading import open_to_read, read_metadata_file
from nostall._values import RankFiles
from nostall._writer.faults import Faults
from nostall.errors import NotDurableError, SaveTimeoutError, WriteError


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedMetadata:
    """What is going to stand in a metadata file."""

    content: Sequence[bytes]
    """In pieces, those of the publication's program first."""
    storage_meta: StorageMeta | None
    """What DCP says there about this one save."""


def publication_of_results(metadata: Metadata, results: list[list[WriteResult]]) -> Publication:
    """What there is to publish once all ranks have written.

    Raises:
        IncompleteSaveError: An item of the metadata was written by no rank.
    """
    completed = complete_metadata(metadata, results)
    require_all_present(planned_indices(completed), completed.storage_data)
    return publication_of(completed)


def finish_metadata(
    publication: Publication,
    written: Sequence[RankFiles | None],
    storage_meta: StorageMeta | None,
) -> FinishedMetadata:
    """What is going to stand in the metadata file of one checkpoint.

    Args:
        publication: What there is to publish.
        written: What each rank has written, as far as that is known, for the manifest.
        storage_meta: What DCP says about this one save.
    """
    content = publication.content(storage_meta)
    known = [each.files for each in written if each is not None and each.files is not None]
    # A manifest of some of the files would make the others look like strangers.
    if len(known) == len(written):
        last = b"".join(content[len(publication.program) :])
        content = with_manifest(
            content,
            tuple(chain.from_iterable(known)),
            crc32=_checksum.crc32(last, publication.crc32),
            committed_at_s=time.time(),
        )
    return FinishedMetadata(content=content, storage_meta=storage_meta)


def publish(
    path: str,
    publication: Publication,
    finished: FinishedMetadata,
    engine: Engine,
    *,
    sync: bool,
    ahead: WrittenAhead | None,
) -> None:
    """Publish finished metadata.

    Args:
        path: The metadata file, in the checkpoint directory.
        publication: What there is to publish.
        finished: What :func:`finish_metadata` has made of it.
        engine: Whose writer process gives back what a replaced checkpoint held.
        sync: Whether to wait until the device has it.
        ahead: What was written ahead of it, if anything was.

    Raises:
        WriteError: The metadata could not be published.
        SaveTimeoutError: Another save has been committing to the same directory all the time.
    """
    directory, name = os.path.split(path)
    timeout_s = engine.options.save_timeout_s
    with _directories.committing(directory, timeout_s=timeout_s):
        replaced = files_of(path) - publication.files
        file = None if ahead is None else ahead.take(publication, timeout_s=timeout_s)
        commit(
            directory,
            finished.content,
            metadata_name=name,
            replaced_files=replaced,
            sync=sync,
            begun=None if file is None else Begun(file=file, pieces=len(publication.program)),
            remove=engine.remove_files,
            at=Faults(engine.faults).at,
        )


def is_unpublished(error: Exception) -> bool:
    """Whether it is certain that no metadata refers to the files; what a subclass raises may come after the commit."""
    return isinstance(error, WriteError | SaveTimeoutError) and not isinstance(
        error, NotDurableError
    )


def files_of(path: str) -> set[str]:
    """Names of the shard files of the checkpoint whose metadata this is; empty if there is none that can be trusted."""
    try:
        with open_to_read(path) as stream:
            files = files_in_manifest(stream)
        if files is None:  # which takes a fraction of the time that metadata takes
            files = referenced_files(read_metadata_file(path), path=path)
    except OSError:
        return set()
    return set(filter(is_ours_to_remove, files))
