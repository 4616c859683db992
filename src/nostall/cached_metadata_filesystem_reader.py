"""The fast reader, with the metadata cached while the file on disk is unchanged."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch.distributed as dist

from nostall._commit.description import Description
from nostall._storage.locations import identity, is_address, place_of
from nostall._storage.port import Source, Version
from nostall.filesystem_reader import FileSystemReader, Verify

__all__ = ["CachedMetadataFileSystemReader"]

_MOST_CACHED = 4


class CachedMetadataFileSystemReader(FileSystemReader):
    """A :class:`nostall.FileSystemReader` that reads metadata once per checkpoint.

    Each process caches the metadata of the last four checkpoints. An entry is used only while the
    file is unchanged (inode, modification time, size). Callers get copies, which share only the
    ranks' plans (``all_local_plans``).

    Args:
        path: Checkpoint directory.
        cache_metadata: Whether to cache metadata.
        verify: As of :class:`nostall.FileSystemReader`.
        threads: The same.
        process_group: The same.
        progress: The same.
        storage_options: The same.
    """

    _cache: ClassVar[dict[str, tuple[Version, Description]]] = {}
    """By path, the last used at the end. Threads share it: each access to it is atomic."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        cache_metadata: bool = True,
        *,
        verify: Verify = "none",
        threads: int = 4,
        process_group: dist.ProcessGroup | None = None,
        progress: Callable[[int, int], object] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            path,
            verify=verify,
            threads=threads,
            process_group=process_group,
            progress=progress,
            storage_options=storage_options,
        )
        self._cache_metadata = cache_metadata

    def _description_in(self, source: Source, path: str) -> Description:
        if not self._cache_metadata:
            return super()._description_in(source, path)
        version = source.stat.version
        known_version, description = self._cache.pop(path, (None, None))
        if description is None or known_version != version:
            description = super()._description_in(source, path)
        self._cache[path] = version, description
        for oldest in list(self._cache)[:-_MOST_CACHED]:
            self._cache.pop(oldest, None)
        return description

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Drop the cached metadata of one checkpoint, or of all."""
        if path is None:
            cls._cache.clear()
            return
        directory = identity(place_of(path) if is_address(path) else os.fspath(path))
        for cached in list(cls._cache):
            if os.path.dirname(cached) == directory:
                cls._cache.pop(cached, None)
