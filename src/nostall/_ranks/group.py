"""Communication between ranks, for a process alone or a process group.

Collectives run on the caller's thread, on the caller's group. ``maximum`` is cheap (a few
integers); ``gather`` and ``broadcast`` carry objects. A single process needs no group.

Records about a save are left in a store where all ranks find them, so that no rank waits for
another. torch's stores hold their lock while they wait for a key, so nothing here asks for a
missing one.
"""

from __future__ import annotations

import logging
import pickle
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from nostall import _torch
from nostall._model.threads import gc_paused, interruptible, uninterrupted
from nostall._model.values import SaveId
from nostall.errors import OptionError, RankLostError

T = TypeVar("T")

_log = logging.getLogger("nostall")

_KEY = "nostall/"
_RECORDS_AT_A_TIME = 256
"""Keys in one operation of the store."""
_DECISIONS = 8
"""Keys of a series for decisions: of so many saves in flight each has its own."""
_TIMED_OUT = re.compile(r"time(d )?-?out", re.IGNORECASE)
_SHORTEST_S = 0.001
"""torch takes a shorter wait for one without a limit."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02


class Coordination:
    """Communication between the ranks of one save; this class is for a process alone.

    Every collective raises ``RankLostError`` if another rank has ended, or the group is unusable.
    """

    rank = 0
    world_size = 1
    coordinator = 0
    """The coordinator's rank within the group."""

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank publishes the metadata."""
        return self.rank == self.coordinator

    def maximum(self, values: Sequence[int], *, timeout_s: float | None = None) -> list[int]:
        """Element-wise maximum over all ranks. Collective: call on every rank.

        ``TimeoutError`` if not all ranks have called it within ``timeout_s`` seconds; the group is
        then no longer usable.
        """
        return self.begin_maximum(values).wait(timeout_s)

    def begin_maximum(self, values: Sequence[int]) -> PendingMaximum:
        """Begin a :meth:`maximum`, without waiting for other ranks. Collective."""
        return PendingMaximum(is_done=lambda: True, wait=lambda _: list(values))

    def records(self, save: SaveId) -> Records | None:
        """The records of the ranks about a save; ``None`` if they have no store in common."""
        return Records(save, 0, 1) if dist.is_available() else None

    def announce(self, topic: str, number: int) -> None:
        """Publish a number that other ranks can look up; does not wait for them."""

    def announced(self, topic: str) -> dict[int, int]:  # noqa: ARG002  # a group's has a use for it
        """Each rank's announced number, 0 if it has none. Empty if numbers are not available."""
        return {}

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value, in rank order, on the coordinator; ``None`` elsewhere. Collective."""
        return [value]

    def broadcast(self, value: T | None) -> T:
        """The coordinator's value on every rank. Collective."""
        return value  # type: ignore[return-value]  # None only where T includes it

    def scatter(self, values: list[T] | None) -> T:
        """This rank's element of the coordinator's list. Collective."""
        assert values is not None
        return values[0]


class TorchGroup(Coordination):
    """Ranks of a ``torch.distributed`` process group; ranks here are those within the group."""

    def __init__(self, group: dist.ProcessGroup | None, coordinator: int) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.coordinator = coordinator
        self._coordinator_global = (
            coordinator if group is None else dist.get_global_rank(group, coordinator)
        )

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

    def begin_maximum(self, values: Sequence[int]) -> PendingMaximum:
        """Begin one all_reduce of a few 64-bit integers."""
        device = _torch.device_for_collectives(self._group)
        tensor = torch.tensor(list(values), dtype=torch.int64, device=device)
        with self.together():
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait(timeout_s: float | None) -> list[int]:
            with self.together():
                if timeout_s is None:
                    work.wait()
                else:
                    _wait(work, timeout_s)
                return [int(value) for value in tensor.tolist()]

        return PendingMaximum(work.is_completed, wait)

    def records(self, save: SaveId) -> Records | None:
        """Entries in the store of the ranks' rendezvous."""
        if _torch.default_store() is None:
            return None
        return Records(save, self.rank, self.world_size)

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
        for rank, everywhere in enumerate(dist.get_process_group_ranks(self._group)):
            key = f"{_KEY}{topic}/{everywhere}"
            try:
                found[rank] = int(store.get(key)) if store.check([key]) else 0
            except RuntimeError:
                _log.debug("cannot read what other ranks announce", exc_info=True)
                return {}
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

    def _messages(self, values: Sequence[object]) -> list[torch.Tensor]:
        """A message for each value, padded to the longest of all ranks. Collective.

        torch's object collectives need NumPy, which may not be installed.
        """
        with gc_paused():
            pickled = [pickle.dumps(each) for each in values]
        (nbytes,) = self.maximum([max(map(len, pickled))])
        device = _torch.device_for_collectives(self._group)
        return [
            torch.frombuffer(bytearray(each.ljust(nbytes, b"\0")), dtype=torch.uint8).to(device)
            for each in pickled
        ]


@gc_paused()
def _values(messages: Sequence[torch.Tensor]) -> list[Any]:
    """The values in messages; a pickle says where it ends."""
    values = []
    for message in messages:
        content = bytearray(len(message))
        torch.frombuffer(content, dtype=torch.uint8).copy_(message)
        values.append(pickle.loads(content))
    return values


# --- a maximum that may still wait for some ranks -------------------------------------------------


class PendingMaximum(NamedTuple):
    """A maximum over all ranks that may still wait for some of them."""

    is_done: Callable[[], bool]
    """Whether it no longer waits for any rank."""
    wait: Callable[[float | None], list[int]]
    """The maximum. Call it once, with a limit in seconds or ``None``.

    ``RankLostError`` if another rank has ended, or the group is unusable; ``TimeoutError`` if not
    all ranks have begun it within the limit, after which the group is unusable, too.
    """


def _wait(work: dist.Work, timeout_s: float) -> None:
    """Look again and again: Python handles signals between two looks.

    Torch's own wait with a limit comes last. It handles no signals, and NCCL ends the group when a
    limit is over, counted from the beginning of the reduction.
    """
    ends_s, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not work.is_completed() and time.monotonic() < ends_s:
        with uninterrupted(patience=2), interruptible():
            time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    try:
        work.wait(timedelta(seconds=max(_SHORTEST_S, ends_s - time.monotonic())))
    except RuntimeError as error:
        if work.is_completed() and not _TIMED_OUT.search(str(error)):
            raise  # not a timeout, ours or the group's: a rank has died
        raise TimeoutError(str(error)) from error


# --- records --------------------------------------------------------------------------------------


class GroupStore:
    """The store of the ranks' rendezvous, which this does not keep alive behind its group."""

    def __init__(self) -> None:
        store = _torch.default_store()
        self._store = None if store is None else weakref.ref(store)

    def present(self) -> dist.Store | None:
        """The store; ``None`` if there was none at first.

        ``RuntimeError`` if the group no longer exists: a later group's store lacks its ranks'
        decisions.
        """
        store = None if self._store is None else self._store()
        if store is not _torch.default_store():
            raise RuntimeError("the process group of the save no longer exists")
        return store


class Records:
    """Records of the ranks about one save. Callable from any thread.

    ``rank`` is among the ranks that save, ``world_size`` their number; a single process has a store
    of its own. Every method raises ``RuntimeError`` if the store no longer exists.
    """

    def __init__(self, save: SaveId, rank: int, world_size: int) -> None:
        series = f"{_KEY}save/{save.series:016x}"
        self._key = f"{series}/{save.number}/"
        """Beginning of the keys of records; the rank that left one follows."""
        self._decision = f"{series}/decision-{save.number % _DECISIONS}"
        self._number = save.number
        self._rank = rank
        self._world_size = world_size
        self._group_store = GroupStore() if world_size > 1 else None
        self._own_store = dist.HashStore() if world_size == 1 else None
        self._seen = 0
        """Number of ranks, from the first on, that are known to have left a record."""

    def put(self, record: bytes) -> None:
        """Leave this rank's record, once."""
        self._store().set(f"{self._key}{self._rank}", record)  # type: ignore[arg-type]  # bytes, too

    def are_complete(self) -> bool:
        """Whether all ranks have left a record."""
        store = self._store()
        while self._seen < self._world_size:
            some = range(self._seen, min(self._seen + _RECORDS_AT_A_TIME, self._world_size))
            if not store.check([f"{self._key}{rank}" for rank in some]):
                return False
            self._seen = some.stop
        return True

    def all(self) -> list[bytes]:
        """The records of all ranks, in rank order, once they are complete."""
        store, found = self._store(), list[bytes]()
        for begin in range(0, self._world_size, _RECORDS_AT_A_TIME):
            some = range(begin, min(begin + _RECORDS_AT_A_TIME, self._world_size))
            found += store.multi_get([f"{self._key}{rank}" for rank in some])
        return found

    def claim(self, what: str) -> bool:
        """Decide something about the save; false if something else may be decided."""
        store, number, key = self._store(), self._number, self._decision
        mine = f"{number} {what}"
        before = store.get(key).decode() if store.check([key]) else ""
        if before and int(before.split()[0]) >= number:
            return before == mine
        return store.compare_set(key, before, mine).decode() == mine

    def remove(self) -> None:
        """Remove this rank's record."""
        self._store().delete_key(f"{self._key}{self._rank}")

    def _store(self) -> dist.Store:
        store = self._group_store.present() if self._group_store else self._own_store
        if store is None:
            raise RuntimeError("there is no process group")
        return store


# --- groups ---------------------------------------------------------------------------------------


def require_members(group: dist.ProcessGroup | None, coordinator: int) -> None:
    """Require that this rank and the coordinator are in the group; otherwise ranks would hang."""
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
            "torch cannot use NumPy, which dcp.load, dcp.save and CheckpointManager need on more"
            " than one rank: pip install numpy"
        )


def require_numpy() -> None:
    """Raise ``OptionError`` if a process group lacks NumPy: ``dcp.load`` sends objects with it."""
    if dist.is_available() and dist.is_initialized() and not _torch.has_numpy():
        raise OptionError(
            "torch cannot use NumPy, without which no step can be restored with a process group",
            hint="pip install numpy",
        )


def are_same_ranks(one: dist.ProcessGroup | None, other: dist.ProcessGroup | None) -> bool:
    """Whether two groups have the same ranks; ``None`` is the default group."""
    if one is other or not (dist.is_available() and dist.is_initialized()):
        return True
    one_ranks, other_ranks = map(dist.get_process_group_ranks, (one, other))
    return sorted(one_ranks) == sorted(other_ranks)


class Membership:
    """The ranks of a process group, which may be destroyed while a save is in progress.

    Their :class:`Coordination` is not kept.
    """

    def __init__(self, ranks: Coordination) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._store = GroupStore() if self.world_size > 1 else None

    def is_of(self, wrapper: _torch.DistWrapper) -> bool:
        """Whether a wrapper's group is still the group of these ranks."""
        try:
            return not self.are_gone() and coordination_of(wrapper).world_size == self.world_size
        except ValueError:  # a group of some ranks that is destroyed
            return False

    def are_gone(self) -> bool:
        """Whether the default process group was destroyed, by which these ranks communicate."""
        if self._store is None:
            return False
        try:
            self._store.present()
        except RuntimeError:
            return True
        return not dist.is_initialized()

    def lost(self, path: str, hint: str) -> RankLostError:
        """The error of a save whose ranks can no longer communicate."""
        return RankLostError(
            f"the process group of this save ({self.world_size} ranks) no longer exists",
            rank=self.rank,
            phase="collect",
            path=path,
            hint=hint,
        )


def coordination_of(wrapper: _torch.DistWrapper) -> Coordination:
    """The ranks of DCP's wrapper."""
    if not wrapper.use_dist:
        return Coordination()
    return coordination_for(wrapper.group, wrapper.coordinator_rank)


def coordination_for(group: dist.ProcessGroup | None, coordinator: int = 0) -> Coordination:
    """The ranks of a group; a process alone if there is no group, or nobody else in it."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return Coordination()
    return TorchGroup(group, coordinator)
