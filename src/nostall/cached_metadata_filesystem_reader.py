"""A reader that keeps the metadata it has read, for as long as it is that of the checkpoint on disk."""

from __future__ import annotations

import os
from copy import copy
from threading import Lock
from typing import Any, ClassVar

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from nostall import _torch
from nostall._metadata import extents_of, load_metadata

_Stamp = tuple[int, int, int]


class CachedMetadataFileSystemReader(FileSystemReader):
    """A ``FileSystemReader`` whose metadata is read once per checkpoint and process, through an allow-list.

    A cached entry is used only while the file is the same one (inode, time of change, size). Callers get copies.

    Args:
        path: Checkpoint directory.
        cache_metadata: Whether to keep what was read.
    """

    _cache: ClassVar[dict[str, tuple[_Stamp, Metadata]]] = {}
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path)
        self._cache_metadata = cache_metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata.

        Raises:
            FileNotFoundError: There is no committed checkpoint.
            UntrustedMetadataError: The file names something that DCP metadata does not consist of, or places outside the
                checkpoint directory.
        """
        rank = kwargs.get("rank")
        name = _torch.METADATA_NAME if rank is None else f"__{rank}{_torch.METADATA_NAME}"
        path = os.path.realpath(os.path.join(self.path, name))
        with open(path, "rb") as stream:
            status = os.fstat(stream.fileno())
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            with self._lock:
                known = self._cache.get(path)
            if not self._cache_metadata or known is None or known[0] != stamp:
                metadata = load_metadata(stream.read(), path=path)
                extents_of(metadata, path=path)  # refuses what would make a reader look elsewhere
                known = (stamp, metadata)
        if self._cache_metadata:
            with self._lock:
                self._cache[path] = known
        metadata = _private(known[1])
        assert metadata.storage_meta is not None  # _private sees to it
        metadata.storage_meta.load_id = self.load_id
        return metadata

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Forget one checkpoint's metadata, or all of it."""
        with cls._lock:
            if path is None:
                cls._cache.clear()
                return
            directory = os.path.realpath(path)
            for known in [known for known in cls._cache if os.path.dirname(known) == directory]:
                del cls._cache[known]


def _private(metadata: Metadata) -> Metadata:
    """A copy whose containers the caller may change without changing the cached object."""
    twin = copy(metadata)
    twin.state_dict_metadata = dict(metadata.state_dict_metadata)
    twin.storage_data = copy(metadata.storage_data)
    twin.planner_data = copy(metadata.planner_data)
    twin.storage_meta = copy(metadata.storage_meta) or StorageMeta()
    return twin


def _after_fork_in_child() -> None:
    # Another thread may have held it when this process was made.
    CachedMetadataFileSystemReader._lock = Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
