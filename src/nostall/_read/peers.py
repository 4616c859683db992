"""The port for the ranks that a rank shares reads with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class Message(NamedTuple):
    """Bytes that are sent to another rank, or received from it."""

    rank: int
    content: torch.Tensor
    """Contiguous bytes on the CPU."""


class Peers(Protocol):
    """Ranks that share reads.

    Raises:
        RankLostError: From both methods: another rank has ended, or the group is unusable.
    """

    rank: int

    def first_failed(self, *, failed: bool) -> int | None:
        """The first rank that says it has failed. Collective: call on every rank."""

    def exchange(self, sent: Sequence[Message], received: Sequence[Message]) -> None:
        """Send and receive; returns when all is sent and received.

        Between two ranks, messages are received in the order in which they are sent, with the same
        lengths. Other ranks need not call this.
        """
