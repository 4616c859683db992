"""Exchanges between ranks that do not exist: the coordinator's side of them, counted."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nostall._ranks.messages import pickled, unpickled

T = TypeVar("T")


@dataclass(slots=True)
class Exchange:
    """The coordinator's exchanges in one save, and the time that it spends."""

    is_ours: bool = False
    """Whether nostall exchanges, or torch does it for stock's calls."""
    collectives: int = 0
    store_operations: int = 0
    """Of the coordinator, in the process group's store."""
    up_nbytes: int = 0
    """Received by the coordinator."""
    down_nbytes: int = 0
    """Sent by it, to each rank what that gets."""
    cpu_s: float = 0.0
    by_step: dict[str, float] = field(default_factory=dict)
    """The same, by step."""
    writer_cpu_s: float = 0.0
    """Of the coordinator's writer process."""

    @contextmanager
    def coordinator(self, step: str) -> Iterator[None]:
        """Count the processor time of a block as the coordinator's."""
        began_s = time.process_time()
        try:
            yield
        finally:
            took_s = time.process_time() - began_s
            self.cpu_s += took_s
            self.by_step[step] = self.by_step.get(step, 0.0) + took_s

    def gather(self, step: str, message_of: Callable[[int], T], ranks: int) -> list[T]:
        """Gather one message of each rank; unpickling them is the coordinator's work."""
        self.collectives += 1
        messages = pickled(message_of(rank) for rank in range(ranks))
        self.up_nbytes += sum(map(len, messages))
        with self.coordinator(step):
            return self._unpickled(messages)

    def scatter(self, step: str, values: Sequence[T]) -> list[T]:
        """Scatter one message to each rank; returns what they get."""
        self.collectives += 1
        with self.coordinator(step):
            messages = self._pickled(values)
        self.down_nbytes += sum(map(len, messages))
        return unpickled(messages)

    def _pickled(self, values: Sequence[object]) -> list[bytes]:
        return pickled(values) if self.is_ours else [pickle.dumps(each) for each in values]

    def _unpickled(self, messages: Sequence[bytes]) -> list[Any]:
        return unpickled(messages) if self.is_ours else [pickle.loads(each) for each in messages]

    def broadcast(self, step: str, message: Any, ranks: int) -> None:
        """Broadcast one message."""
        self.collectives += 1
        with self.coordinator(step):
            nbytes = len(pickle.dumps(message))
        self.down_nbytes += nbytes * ranks

    def reduce(self) -> None:
        """A reduction of a few integers."""
        self.collectives += 1
