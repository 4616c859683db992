"""Communication between ranks, as a small port with two adapters.

All calls run on the caller's thread, on the caller's group. ``maximum`` is cheap (a few integers);
``gather`` and ``broadcast`` carry objects. A single process needs no group.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from nostall import _torch
from nostall._model.threads import no_collection
from nostall._model.values import SaveId
from nostall._ranks.records import GroupStore, LocalRecords, Records, StoredRecords
from nostall._ranks.reduction import Known, PendingMaximum, Reduction
from nostall.errors import OptionError, RankLostError

T = TypeVar("T")

_log = logging.getLogger("nostall")

_KEY = "nostall/"


class Coordination(Protocol):
    """Communication between the ranks of one save.

    Raises:
        RankLostError: From every collective: another rank has ended, or the group is unusable.
    """

    rank: int
    world_size: int
    coordinator: int
    """The coordinator's rank within the group."""

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank publishes the metadata."""

    def maximum(self, values: Sequence[int], *, timeout_s: float | None = None) -> list[int]:
        """Element-wise maximum over all ranks. Collective: call on every rank.

        Raises:
            TimeoutError: Not all ranks have called it within ``timeout_s`` seconds; the group is
                no longer usable.
        """

    def begin_maximum(self, values: Sequence[int]) -> PendingMaximum:
        """As :meth:`maximum`, without waiting for other ranks. Collective."""

    def records(self, save: SaveId) -> Records | None:
        """The records of the ranks about a save; ``None`` if they have no store in common."""

    def announce(self, topic: str, number: int) -> None:
        """Publish a number that other ranks can look up; does not wait for them."""

    def announced(self, topic: str) -> dict[int, int]:
        """Each rank's announced number, 0 if it has none. Empty if numbers are not available."""

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value, in rank order, on the coordinator; ``None`` elsewhere. Collective."""

    def broadcast(self, value: T | None) -> T:
        """The coordinator's value on every rank. Collective."""

    def scatter(self, values: list[T] | None) -> T:
        """This rank's element of the coordinator's list. Collective."""

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank. Collective."""


class SingleProcess:
    """One process that is its own coordinator."""

    rank = 0
    world_size = 1
    coordinator = 0
    is_coordinator = True

    def maximum(self, values: Sequence[int], *, timeout_s: float | None = None) -> list[int]:
        """The values themselves."""
        del timeout_s
        return list(values)

    def begin_maximum(self, values: Sequence[int]) -> PendingMaximum:
        """The values themselves."""
        return Known(list(values))

    def records(self, save: SaveId) -> Records | None:
        """Of this process, in its memory."""
        del save
        return LocalRecords()

    def announce(self, topic: str, number: int) -> None:
        """Do nothing."""

    def announced(self, topic: str) -> dict[int, int]:
        """No numbers."""
        del topic
        return {}

    def gather(self, value: T) -> list[T] | None:
        """The value, in a list."""
        return [value]

    def broadcast(self, value: T | None) -> T:
        """The value itself."""
        return value  # type: ignore[return-value]  # None only where T includes it

    def scatter(self, values: list[T] | None) -> T:
        """The only element."""
        assert values is not None
        return values[0]

    def all_gather(self, value: T) -> list[T]:
        """The value, in a list."""
        return [value]


class TorchGroup:
    """Ranks of a ``torch.distributed`` process group; ranks here are those within the group."""

    def __init__(self, group: dist.ProcessGroup | None, coordinator: int) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.coordinator = coordinator
        self._coordinator_global = (
            coordinator if group is None else dist.get_global_rank(group, coordinator)
        )

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank publishes the metadata."""
        return self.rank == self.coordinator

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that communicates: the backend's untyped errors become ``RankLostError``."""
        try:
            yield
        except NotImplementedError:  # the backend does not have this collective
            raise
        except RuntimeError as error:
            raise RankLostError(
                f"ranks can no longer communicate: {error}",
                rank=self.rank,
                hint="another rank exited or stopped participating; see its log. Collective calls,"
                " such as save, are made on every rank, not on rank 0 alone",
            ) from error

    def maximum(self, values: Sequence[int], *, timeout_s: float | None = None) -> list[int]:
        """One all_reduce of a few 64-bit integers."""
        return self.begin_maximum(values).wait(timeout_s)

    def begin_maximum(self, values: Sequence[int]) -> PendingMaximum:
        """The same all_reduce."""
        device = _torch.device_for_collectives(self._group)
        tensor = torch.tensor(list(values), dtype=torch.int64, device=device)
        with self.together():
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return Reduction(work, tensor, self.together)

    def records(self, save: SaveId) -> Records | None:
        """Entries in the store of the ranks' rendezvous."""
        if _torch.default_store() is None:
            return None
        return StoredRecords(save, self.rank, self.world_size)

    def announce(self, topic: str, number: int) -> None:
        """One entry in the process group's store; dropped if the store is unreachable."""
        store = _torch.default_store()
        if store is None:
            return
        try:
            store.set(f"{_KEY}{topic}/{dist.get_rank()}", str(number))
        except RuntimeError:
            _log.debug("cannot announce progress to other ranks", exc_info=True)

    def announced(self, topic: str) -> dict[int, int]:
        """The entries in that store."""
        store = _torch.default_store()
        if store is None:
            return {}
        found = {}
        for rank in range(self.world_size):
            everywhere = rank if self._group is None else dist.get_global_rank(self._group, rank)
            key = f"{_KEY}{topic}/{everywhere}"
            found[rank] = int(store.get(key)) if store.check([key]) else 0
        return found

    def gather(self, value: T) -> list[T] | None:
        """One reduction of lengths, then one gather."""
        (mine,) = self._messages([value])
        rows = [
            torch.empty_like(mine) for _ in range(self.world_size if self.is_coordinator else 0)
        ]
        with self.together():
            dist.gather(mine, rows or None, dst=self._coordinator_global, group=self._group)
        return _values(rows) if self.is_coordinator else None

    def broadcast(self, value: T | None) -> T:
        """One reduction of lengths, then one broadcast."""
        (message,) = self._messages([value if self.is_coordinator else None])
        with self.together():
            dist.broadcast(message, src=self._coordinator_global, group=self._group)
        if self.is_coordinator:  # pickling loses the causes of errors
            return value  # type: ignore[return-value]  # None only where T includes it
        (received,) = _values([message])
        return received  # type: ignore[no-any-return]  # of type T

    def scatter(self, values: list[T] | None) -> T:
        """One reduction of lengths, then one scatter."""
        messages = self._messages(values or [None])
        mine = torch.empty_like(messages[0])
        with self.together():
            dist.scatter(
                mine,
                messages if self.is_coordinator else None,
                src=self._coordinator_global,
                group=self._group,
            )
        (value,) = _values([mine])
        return value  # type: ignore[no-any-return]  # of type T

    def all_gather(self, value: T) -> list[T]:
        """One reduction of lengths, then one all_gather."""
        (mine,) = self._messages([value])
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self.together():
            dist.all_gather(rows, mine, group=self._group)
        return _values(rows)

    def _messages(self, values: Sequence[object]) -> list[torch.Tensor]:
        """A message for each value, padded to the longest of all ranks. Collective.

        torch's object collectives need NumPy, which may not be installed.
        """
        with no_collection():
            pickled = [pickle.dumps(each) for each in values]
        (nbytes,) = self.maximum([max(map(len, pickled))])
        device = _torch.device_for_collectives(self._group)
        return [
            torch.frombuffer(bytearray(each.ljust(nbytes, b"\0")), dtype=torch.uint8).to(device)
            for each in pickled
        ]


@no_collection()
def _values(messages: Sequence[torch.Tensor]) -> list[Any]:
    """The values in messages; a pickle says where it ends."""
    values = []
    for message in messages:
        content = bytearray(len(message))
        torch.frombuffer(content, dtype=torch.uint8).copy_(message)
        values.append(pickle.loads(content))
    return values


def require_members(group: dist.ProcessGroup | None, coordinator: int) -> None:
    """Require that this rank and the coordinator belong to the group; otherwise ranks would hang.

    Raises:
        OptionError: One of them does not.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    if dist.get_rank(group) < 0:
        raise OptionError(
            f"rank {dist.get_rank()} is not in process_group",
            hint="call this on the ranks of the group only",
        )
    world_size = dist.get_world_size(group)
    if coordinator not in range(world_size):
        raise OptionError(
            f"coordinator_rank={coordinator!r} is not a rank of the group of size {world_size}",
            hint=f"use a rank within the group, 0 to {world_size - 1}",
        )
    if world_size > 1:
        _look_for_numpy()


@cache
def _look_for_numpy() -> None:
    """Warn once if it is not installed: a job could save, and would fail when it resumes."""
    if not _torch.has_numpy():
        _log.warning(
            "torch cannot use NumPy, without which dcp.load and dcp.save fail on more than one"
            " rank: install numpy before you resume"
        )


def require_numpy() -> None:
    """Require NumPy where there is a process group: ``dcp.load`` sends objects with it.

    Raises:
        OptionError: torch cannot use it.
    """
    if dist.is_available() and dist.is_initialized() and not _torch.has_numpy():
        raise OptionError(
            "torch cannot use NumPy, without which no step can be restored with a process group",
            hint="pip install numpy",
        )


def are_same_ranks(one: dist.ProcessGroup | None, other: dist.ProcessGroup | None) -> bool:
    """Whether two groups have the same ranks; ``None`` is the default group."""
    if one is other or not (dist.is_available() and dist.is_initialized()):
        return True
    return sorted(_ranks_of(one)) == sorted(_ranks_of(other))


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    if group is None:
        return list(range(dist.get_world_size()))
    return dist.get_process_group_ranks(group)


class Membership:
    """The ranks of a process group, which may be destroyed while a save is under way.

    Args:
        ranks: The port to them, which this does not keep.
    """

    def __init__(self, ranks: Coordination) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._store = GroupStore()

    def is_of(self, wrapper: _torch.DistWrapper) -> bool:
        """Whether a wrapper's group still is the one of these ranks."""
        try:
            return not self.are_gone() and coordination_of(wrapper).world_size == self.world_size
        except ValueError:  # a group of some ranks that is destroyed
            return False

    def are_gone(self) -> bool:
        """Whether the default process group was destroyed, by which these ranks communicate."""
        if self.world_size == 1:
            return False
        try:
            self._store.present()
        except RuntimeError:
            return True
        return not dist.is_initialized()

    def lost(self, path: str, hint: str) -> RankLostError:
        """The error of a save whose ranks cannot communicate any longer."""
        return RankLostError(
            f"the process group of {self.world_size} ranks that saved together is gone",
            rank=self.rank,
            phase="collect",
            path=path,
            hint=hint,
        )


def coordination_of(wrapper: _torch.DistWrapper) -> Coordination:
    """The port for DCP's wrapper."""
    if not wrapper.use_dist:
        return SingleProcess()
    return coordination_for(wrapper.group, wrapper.coordinator_rank)


def coordination_for(group: dist.ProcessGroup | None, coordinator: int = 0) -> Coordination:
    """The port for a process group; for one process if there is no group, or nobody else in it."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return SingleProcess()
    return TorchGroup(group, coordinator)
