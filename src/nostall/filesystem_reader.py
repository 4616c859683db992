"""A reader for ``dcp.load`` that is limited by memory and disk, not by ``torch.load`` per item."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from nostall import _torch
from nostall._commit.metadata import extents_of, load_metadata
from nostall._commit.metadata_pickle import no_collection
from nostall._read.plan import Wanted
from nostall._read.tensors import read_items
from nostall._storage.destination import require_file_system
from nostall._storage.port import Source
from nostall._storage.posix_files import PosixFiles
from nostall._storage.reading import as_stream, read_metadata
from nostall.errors import OptionError
from nostall.options import require_integer

__all__ = ["FileSystemReader"]

Verify = Literal["none", "crc"]


class FileSystemReader(dcp.FileSystemReader):
    """Reads checkpoints of nostall and of stock DCP for ``dcp.load``, with any planner.

    Metadata is read through an allow-list. The planner is called on the caller's thread, item by
    item in the order of the files; reads happen on other threads. Small items are read together;
    large tensors straight into their target, if it is contiguous memory of the CPU with the stored
    dtype. Of a slice only the rows from its first to its last are read. At most 256 MiB are read
    ahead of the planner, and twice 4 KiB per large tensor; a single slice or object may be larger.
    What has another form, such as a quantised tensor, is loaded by
    ``torch.load(weights_only=True)``, as by stock's reader; items with stream transforms by stock's
    reader itself.

    Args:
        path: Checkpoint directory.
        verify: ``"crc"`` compares the values of each tensor with the CRC-32 in the file before the
            planner gets it; then of a slice the whole stored tensor is read. Objects are not
            compared, nor tensors saved without checksums; :func:`nostall.verify` reads every byte.
        threads: Number of reads at a time.

    Raises:
        OptionError: An argument is not possible, or the path is in an object store.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, verify: Verify = "none", threads: int = 4
    ) -> None:
        require_file_system(path)
        if verify not in ("none", "crc"):
            raise OptionError(f"verify={verify!r} is not possible", hint='use "none" or "crc"')
        super().__init__(path)
        self._verify = verify == "crc"
        self._threads = require_integer("threads", threads, at_least=1)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata.

        Raises:
            FileNotFoundError: There is no committed checkpoint.
            ReadError: It is not a regular file, or is larger than 2 GiB.
            UnknownMetadataError: It has parts that DCP metadata does not have, such as a planner's
                own class, or required parts that only a newer torch knows.
            UntrustedMetadataError: It is damaged, or names files outside the checkpoint directory.
        """
        metadata = self._own_metadata(kwargs.get("rank"))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def shared_metadata(self, rank: int | None = None) -> Metadata:
        """The same for reading only: other readers may share it.

        Args:
            rank: The rank of a checkpoint that each rank has saved alone.
        """
        name = _torch.METADATA_NAME if rank is None else f"__{rank}{_torch.METADATA_NAME}"
        path = os.path.realpath(os.path.join(self.path, name))
        directory, name = os.path.split(path)
        with closing(PosixFiles(directory).open(name)) as source:
            return self._metadata_in(source, path)

    def _own_metadata(self, rank: int | None) -> Metadata:
        return self.shared_metadata(rank)

    def _metadata_in(self, source: Source, path: str) -> Metadata:
        metadata = load_metadata(read_metadata(as_stream(source), path), path=path)
        extents_of(metadata, path=path)  # refuses files outside the directory
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan names, and hand it to the planner; done when this returns.

        Raises:
            DamagedCheckpointError: A file is missing, is shorter than expected, or holds something
                else. Targets may hold some of the values then.
            OSError: A file cannot be read.
        """
        wanted, transformed = [], []
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            if getattr(place, "transform_descriptors", None):
                transformed.append(item)
                continue
            wanted.append(
                Wanted(
                    item=item, file=place.relative_path, offset=place.offset, nbytes=place.length
                )
            )
        files = PosixFiles(os.fspath(self.path))
        with no_collection():
            read_items(wanted, planner, files, threads=self._threads, verify=self._verify)
        if transformed:
            super().read_data(replace(plan, items=transformed), planner).wait()
        done: Future[None] = Future()
        done.set_result(None)
        return done
