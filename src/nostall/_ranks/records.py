"""Records of ranks about one save: left where all ranks find them, so that no rank waits.

torch's stores hold their lock while they wait for a key, so nothing here asks for a missing one.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch.distributed as dist

from nostall import _torch
from nostall._model.values import SaveId

_KEY = "nostall/save/"
_AT_A_TIME = 256
"""Keys in one operation of the store."""
_DECISIONS = 8
"""Keys of a series for decisions: of so many saves in flight each has its own."""


class GroupStore:
    """The store of the ranks' rendezvous, which this does not keep alive behind its group."""

    def __init__(self) -> None:
        store = _torch.default_store()
        self._store = None if store is None else weakref.ref(store)

    def present(self) -> dist.Store | None:
        """The store; ``None`` if there was none.

        Raises:
            RuntimeError: The group is gone. What its ranks have decided is not in a later one's.
        """
        store = None if self._store is None else self._store()
        if store is not _torch.default_store():
            raise RuntimeError("the process group of the save is gone")
        return store


class Records(Protocol):
    """The records of the ranks about one save. Callable from any thread.

    Raises:
        RuntimeError: From every method: the store is gone, or cannot do it.
    """

    def put(self, record: bytes) -> None:
        """Leave this rank's record, once."""

    def are_complete(self) -> bool:
        """Whether all ranks have left theirs."""

    def all(self) -> list[bytes]:
        """Those of all ranks, in rank order, once they are complete."""

    def claim(self, what: str) -> bool:
        """Decide something about the save; false if something else may be decided."""

    def remove(self) -> None:
        """Remove this rank's."""


class LocalRecords:
    """Those of a process that saves alone."""

    def __init__(self) -> None:
        self._records: list[bytes] = []

    def put(self, record: bytes) -> None:
        self._records.append(record)

    def are_complete(self) -> bool:
        return bool(self._records)

    def all(self) -> list[bytes]:
        return self._records

    def claim(self, what: str) -> bool:
        del what
        return True

    def remove(self) -> None:
        """Nothing is left."""


class StoredRecords:
    """Those in the store of the ranks' rendezvous.

    Args:
        save: Identifies the save.
        rank: This rank, within those that save.
        world_size: How many they are.
    """

    def __init__(self, save: SaveId, rank: int, world_size: int) -> None:
        self._save = save
        self._rank = rank
        self._world_size = world_size
        self._group_store = GroupStore()
        self._seen = 0
        """How many ranks, from the first on, are known to have left theirs."""

    def put(self, record: bytes) -> None:
        self._store().set(self._key(self._rank), record)  # type: ignore[arg-type]  # bytes, too

    def are_complete(self) -> bool:
        store = self._store()
        while self._seen < self._world_size:
            some = range(self._seen, min(self._seen + _AT_A_TIME, self._world_size))
            if not store.check([self._key(rank) for rank in some]):
                return False
            self._seen = some.stop
        return True

    def all(self) -> list[bytes]:
        store, found = self._store(), list[bytes]()
        for begin in range(0, self._world_size, _AT_A_TIME):
            some = range(begin, min(begin + _AT_A_TIME, self._world_size))
            found += store.multi_get([self._key(rank) for rank in some])
        return found

    def claim(self, what: str) -> bool:
        store, number = self._store(), self._save.number
        key = f"{_KEY}{self._save.series:016x}/decision-{number % _DECISIONS}"
        mine = f"{number} {what}"
        before = store.get(key).decode() if store.check([key]) else ""
        if before and int(before.split()[0]) >= number:
            return before == mine
        return store.compare_set(key, before, mine).decode() == mine

    def remove(self) -> None:
        self._store().delete_key(self._key(self._rank))

    def _key(self, rank: int) -> str:
        return f"{_KEY}{self._save.series:016x}/{self._save.number}/{rank}"

    def _store(self) -> dist.Store:
        store = self._group_store.present()
        if store is None:
            raise RuntimeError("there is no process group")
        return store
