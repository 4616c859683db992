"""A reader for ``dcp.load`` that is limited by memory and disk, not by ``torch.load`` per item."""

from __future__ import annotations

import copy
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as DCPLoadPlanner
from torch.futures import Future

from nostall import _torch
from nostall._commit.commit import why_no_checkpoint
from nostall._commit.description import Description, describe
from nostall._model.names import AS_SAFETENSORS, counted
from nostall._model.progress import ReadCounter, listed
from nostall._model.threads import gc_paused, interruptible, uninterrupted
from nostall._ranks.group import TorchGroup, coordination_for, require_members
from nostall._read import sharing
from nostall._read.plan import FileSpan, Form, Wanted, chunk_of, nbytes_by_archive
from nostall._read.planner import LoadPlanner
from nostall._read.reading import read_items
from nostall._storage.locations import identity, is_address, is_place, place_of, storage_at
from nostall._storage.port import ReadableFiles, Source
from nostall._storage.posix import PosixStorage
from nostall._storage.uncached import UncachedFiles
from nostall.errors import DamagedCheckpointError, OptionError, ReadError
from nostall.options import require_integer
from nostall.prefetching import running, with_prefetched

__all__ = ["FileSystemReader"]

_log = logging.getLogger("nostall")

Verify = Literal["none", "crc"]


class FileSystemReader(dcp.FileSystemReader):
    """Reads checkpoints of nostall and of stock DCP for ``dcp.load``, with any planner.

    Metadata is read through an allow-list. The planner is called on the caller's thread; reads
    happen on other threads. Stock's planner, and others that do not change how it resolves and
    commits tensors, are asked for all tensors before the first read; then files are read in the
    order of their offsets, and each rank begins with another one. With any other planner, and into
    tensors that share memory, tensors are loaded one after the other, in stock's order. Small items
    are read together; large tensors straight into their target, if it is contiguous memory with the
    stored dtype: on the CPU, or through at most 128 MiB of pinned memory on an accelerator, where
    other dtypes and layouts are converted. Of a slice only the rows from its first to its last are
    read. At most 256 MiB are read ahead of the planner; a single slice or object may be larger.
    What is not in the page cache is read past it, with 4 to 6 MiB per thread, unless other ranks
    may need the same: in a job of several, without a ``process_group``. What has another form, such
    as a quantised tensor, is loaded by ``torch.load(weights_only=True)``, as by stock's reader;
    items with stream transforms by stock's reader itself.

    Args:
        path: Checkpoint directory, or an address in an object store. A link is followed once in a
            load, by each rank for itself, when metadata are read; errors name the directory that it
            led to.
        verify: ``"crc"`` compares the values of each tensor with the CRC-32 in the file before the
            planner gets it; then of a slice the whole stored tensor is read. Objects are not
            compared, nor tensors saved without checksums; :func:`nostall.verify` reads every byte.
        threads: Number of reads at a time.
        process_group: The group that ``dcp.load`` has, or one of the same ranks, with a backend for
            the CPU; ``torch.distributed.group.WORLD`` is the default group. What several of its
            ranks need is read once: each of them reads a part of it, and they send the parts to
            each other, 128 MiB per rank at a time, or a single larger tensor. With ``None`` each
            rank reads what it needs. Give it to the readers of all ranks, or of none.
        progress: Called during a load with bytes read and bytes to read by this rank, from any
            thread; an error of its ends the load. :func:`nostall.status` shows the same.
        storage_options: As of :class:`nostall.FileSystemWriterAsync`.

    Raises:
        OptionError: An argument is not possible, or the client of an object store is missing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "none",
        threads: int = 4,
        process_group: dist.ProcessGroup | None = None,
        progress: Callable[[int, int], object] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        place_of(path, storage_options)  # refuses what cannot be one
        if verify not in ("none", "crc"):
            raise OptionError(f"invalid verify={verify!r}", hint='use "none" or "crc"')
        super().__init__(path)
        self._follow(path)
        self._verify = verify == "crc"
        self._threads = require_integer("threads", threads, at_least=1)
        self._peers = None if process_group is None else GroupPeers(process_group)
        self._progress = progress
        self._stored: dict[str, Any] = {}
        self._directory: str | None = None
        """Where metadata and files are read: the path may be a link that is switched meanwhile."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin with another load, or another checkpoint."""
        super().reset(checkpoint_id)
        if checkpoint_id is not None:
            self._follow(checkpoint_id)
        self._directory = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a reader can be made for the id, as the client of its store is installed."""
        return is_place(checkpoint_id)

    def _follow(self, path: str | os.PathLike[str]) -> None:
        """Stock takes every path for one of a file system."""
        if is_address(path):
            place = place_of(path)
            self.path = place if is_address(place) else Path(place)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata.

        Raises:
            FileNotFoundError: There is no committed checkpoint.
            DamagedCheckpointError: The index of its items, or its manifest, is damaged.
            ReadError: It is not a regular file, or is larger than 2 GiB.
            UnknownMetadataError: It has parts that DCP metadata does not have, such as a planner's
                own class, or required parts that only a newer torch knows.
            UntrustedMetadataError: It is damaged, or names files outside the checkpoint directory.
        """
        try:
            with self._opened(kwargs.get("rank")) as (source, path):
                description = self._description_in(source, path)
                return description.private(source, load_id=self.load_id)
        except (FileNotFoundError, NotADirectoryError) as error:
            place = self._resolved()
            why = f"{why_no_checkpoint(place)} (`nostall ls ROOT` lists checkpoints)"
            raise type(error)(error.errno, why, place) from None

    def shared_metadata(self, rank: int | None = None) -> Metadata:
        """The items alone, for reading only: other readers may share it.

        Args:
            rank: The rank of a checkpoint that each rank has saved alone.
        """
        with self._opened(rank) as (source, path):
            return self._description_in(source, path).shared

    @contextmanager
    def _opened(self, rank: int | None) -> Iterator[tuple[Source, str]]:
        """The metadata file, and its path."""
        self._directory = identity(str(self.path))
        name = _torch.METADATA_NAME if rank is None else f"__{rank}{_torch.METADATA_NAME}"
        path = identity(os.path.join(self._directory, name))
        directory, name = os.path.split(path)
        with ExitStack() as opened:
            with uninterrupted(patience=2):
                with interruptible():  # a second Ctrl-C leaves storage that hangs
                    source = storage_at(directory).open(name)
                opened.enter_context(closing(source))
            yield source, path

    def _resolved(self) -> str:
        """The directory that metadata was read from, if it was."""
        if self._directory is None:
            self._directory = identity(str(self.path))
        return self._directory

    def _description_in(self, source: Source, path: str) -> Description:
        return describe(source, path)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata of the checkpoint to load."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._stored = metadata.state_dict_metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan; it says whether this rank shares."""
        if self._peers is None:
            return plan
        mine = sharing.Member(rank=self._peers.rank, world_size=self._peers.world_size)
        return replace(plan, storage_data=mine)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, with what each rank gets from others, if all ranks share.

        Raises:
            OptionError: Some ranks share and others do not, or not in this group.
        """
        members = [plan.storage_data for plan in plans]
        shares: list[sharing.ReadShare] | None = None
        if sharing.all_want_to_share(members):
            shares = sharing.share_reads([self._nbytes_of(self._wanted(plan)[0]) for plan in plans])
        elif not any(isinstance(each, sharing.Member) for each in members):
            return plans
        return [
            replace(plan, storage_data=None if shares is None else shares[rank])
            for rank, plan in enumerate(plans)
        ]

    def _nbytes_of(self, wanted: Sequence[Wanted]) -> dict[FileSpan, int]:
        """How many bytes of which archives are read; all of those that are verified."""
        return nbytes_by_archive(wanted, {} if self._verify else self._stored)

    def read_data(self, plan: LoadPlan, planner: DCPLoadPlanner) -> Future[None]:
        """Read what the plan names, and hand it to the planner; done when this returns.

        Collective if ranks share.

        Raises:
            DamagedCheckpointError: A file is missing, is shorter than expected, or holds something
                else. Targets may hold some of the values then.
            OSError: A file cannot be read.
            RankFailedError: Another rank could not read what ranks share, or its planner failed.
            RankLostError: Ranks that share can no longer communicate.
        """
        wanted, transformed = self._wanted(plan)
        if isinstance(planner, LoadPlanner):
            casts, planner.path = planner.casts, self._resolved()
        else:
            casts = self._casts(plan, getattr(planner, "state_dict", None))
        if casts and coordination_for(None).rank == 0:
            what, kinds = counted(len(casts), "tensor"), sorted(set(casts.values()))
            level = logging.WARNING if any(map(_loses_fractions, kinds)) else logging.INFO
            _log.log(level, "casting %s, %s: path=%s", what, ", ".join(kinds), self._resolved())
        # Training on another thread cannot do without the collector for so long.
        is_main = threading.current_thread() is threading.main_thread()
        with gc_paused() if is_main else nullcontext():
            self._read(wanted, planner, plan.storage_data)
        if transformed:
            stock = copy.copy(self)
            stock.path = self._resolved()
            super(FileSystemReader, stock).read_data(
                replace(plan, items=transformed), planner
            ).wait()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _casts(self, plan: LoadPlan, state: object) -> dict[str, str]:
        """Dtypes of the tensors in a planner's state that differ from the saved ones, by name."""
        found: dict[str, str] = {}
        if not isinstance(state, Mapping):  # a planner of the user's own may have none
            return found
        for item in plan.items:
            entry = self._stored.get(item.storage_index.fqn)
            target = state.get(item.dest_index.fqn)
            if isinstance(entry, TensorStorageMetadata) and isinstance(target, torch.Tensor):
                saved = entry.properties.dtype
                if target.dtype != saved:
                    found[item.dest_index.fqn] = f"{saved} to {target.dtype}"
        return found

    def _read(self, wanted: list[Wanted], planner: DCPLoadPlanner, shared: object) -> None:
        path = self._resolved()
        ranks = coordination_for(None)  # of the whole job, also if they load without a group
        # Other ranks of this host may need the same; with a group each byte is read by one of them.
        is_read_once = ranks.world_size == 1 or self._peers is not None
        files: ReadableFiles
        if is_address(path):
            files = storage_at(path)
        else:
            files = UncachedFiles(path) if is_read_once else PosixStorage(path)
        total = sum(self._nbytes_of(wanted).values())
        if running:
            files = with_prefetched(files, path, total)
        counter = ReadCounter(total, self._progress)
        read = partial(
            read_items,
            planner=planner,
            threads=self._threads,
            verify=self._verify,
            counter=counter,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        with listed(path, ranks.rank, counter):
            if isinstance(shared, sharing.ReadShare):
                assert self._peers is not None  # all_want_to_share
                sharing.read_shared(shared, wanted, files, self._peers, read, threads=self._threads)
            else:
                read(wanted, files)
            counter.finish()

    def _wanted(self, plan: LoadPlan) -> tuple[list[Wanted], list[ReadItem]]:
        """The items and their places; and items that only stock's reader can read."""
        wanted, transformed = [], []
        for item in plan.items:
            try:
                place = self.storage_data[item.storage_index]
            except KeyError:
                what = f"the metadata names no file for {item.storage_index.fqn}"
                raise self._damaged(what) from None
            transforms = getattr(place, "transform_descriptors", None)
            if transforms and tuple(transforms) != AS_SAFETENSORS:
                transformed.append(item)
                continue
            form = self._bare_form(item, place.length) if transforms else None
            wanted.append(Wanted(item, place.relative_path, place.offset, place.length, form))
        return wanted, transformed

    def _bare_form(self, item: ReadItem, nbytes: int) -> Form:
        """The form of an item in a file of safetensors, which the metadata knows."""
        entry = self._stored.get(item.storage_index.fqn)
        chunk = chunk_of(entry, item.storage_index)
        if entry is not None and chunk is not None:
            dtype, shape = entry.properties.dtype, tuple(chunk.sizes)
            if _torch.can_be_viewed(dtype):
                if math.prod(shape) * dtype.itemsize == nbytes:
                    return Form(
                        prefix=b"", dtype=dtype, shape=shape, nbytes=nbytes, has_checksum=False
                    )
            elif dtype is torch.float4_e2m1fn_x2:
                raise ReadError(
                    f"torch {torch.__version__} cannot copy {item.storage_index.fqn}, which is"
                    f" {dtype}",
                    phase="read",
                    hint="load it with a later torch",
                )
        name = item.storage_index.fqn
        raise self._damaged(f"{name} has {nbytes} bytes, not those of its dtype and shape")

    def _damaged(self, what: str) -> DamagedCheckpointError:
        path = os.path.join(self._resolved(), _torch.METADATA_NAME)
        hint = "load another checkpoint"
        return DamagedCheckpointError(what, phase="read", path=path, hint=hint)


def _loses_fractions(cast: str) -> bool:
    """Whether a cast, ``saved to target``, is one to integers."""
    saved, target = (
        any(kind in each for kind in ("float", "complex")) for each in cast.split(" to ")
    )
    return saved and not target


# --- ranks that send each other what they have read; the port is in ``_read/sharing.py`` ----------

_BLOCK_NBYTES = 8 << 20
"""How much is sent at a time: the group's deadline is for a block, however long the message."""


def sends_from_cpu(group: dist.ProcessGroup) -> bool:
    """Whether a group has a backend for the CPU."""
    return _torch.device_for_collectives(group).type == "cpu"


class GroupPeers(TorchGroup):
    """The ranks of a process group with a backend for the CPU, such as gloo.

    Raises ``OptionError`` unless this rank is in the group, and the group sends CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        require_members(group, 0)
        if not sends_from_cpu(group):
            raise OptionError(
                f"process_group has the backend {dist.get_backend(group)}, which cannot send bytes"
                " that are on the CPU",
                hint='use a group that can: torch.distributed.new_group(backend="gloo")',
            )
        super().__init__(group, 0)

    def first_failed(self, *, failed: bool) -> int | None:
        """One all_reduce of an integer."""
        mine = self.world_size - self.rank if failed else 0
        (highest,) = self.maximum([mine])
        return self.world_size - highest if highest else None

    def exchange(self, sent: sharing.Messages, received: sharing.Messages) -> None:
        """Sends and receives all at once: no order can make two ranks wait for each other."""
        group = self._group
        with self.together():
            works = [
                dist.irecv(each, group=group, group_src=rank) for rank, each in _blocks(received)
            ]
            works += [dist.isend(each, group=group, group_dst=rank) for rank, each in _blocks(sent)]
            for work in works:
                assert work is not None  # this rank is in the group
                work.wait()


def _blocks(messages: sharing.Messages) -> Iterator[tuple[int, torch.Tensor]]:
    for rank, content in messages:
        for block in content.split(_BLOCK_NBYTES):
            yield rank, block
