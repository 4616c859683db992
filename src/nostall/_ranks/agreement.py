"""What ranks have to agree on before they finalise a request, and what they tell each other when they cannot.

A rank that talks when another one does not would wait for it; so every wait here has a deadline, and who is missing is
looked up where every rank has left word of how many requests it has scheduled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch.distributed.checkpoint.api import CheckpointException

from nostall._ranks.failures import failure_of, raise_everywhere
from nostall._ranks.group import Coordination
from nostall.errors import RankLostError, RankMismatchError, SaveTimeoutError

PATIENCE_S = 60.0
"""How much later than this one another rank may begin to wait."""
_LOOK_AGAIN_S = 0.02
_SCHEDULED = "scheduled"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What one rank, or all of them together, see of the request that is to be finalised next."""

    alive: bool
    """It is unfinished."""
    failed: bool
    """It has failed."""
    hurry: bool
    """The process was asked to end."""
    index: int
    """Which request it is, counted from when the queue was made or aborted."""
    last: int
    """The last one that is scheduled."""


class Scheduled:
    """How many requests this process has scheduled with others, or is scheduling, over all of its queues."""

    def __init__(self) -> None:
        self._count = 0
        self._times_left = 0

    @contextmanager
    def one_more(self, coordination: Coordination) -> Iterator[None]:
        """Count a request that is scheduled inside, unless that fails.

        Word of it is left first: once its copy has begun, whose threads take the cores, that takes a millisecond.
        """
        before = self._count
        try:
            self._count = before + 1
            coordination.announce(_SCHEDULED, self._count)
            yield
        except BaseException:
            self._count = before
            coordination.announce(_SCHEDULED, before)
            raise

    def forget_after_fork(self) -> None:
        """In a forked child, which has scheduled nothing."""
        self._count = 0

    def all_leave(self, coordination: Coordination, timeout_s: float) -> str:
        """Why ranks cannot finish together what is scheduled, as this one leaves with an exception; empty if all of them do.

        Others may be anywhere, so that a collective of ours could meet one of theirs. Each that leaves says so, and looks for
        ``timeout_s`` seconds whether the others do.
        """
        self._times_left += 1
        topic = f"leaving/{self._count}/{self._times_left}"
        coordination.announce(topic, 1)
        deadline = time.monotonic() + timeout_s
        while True:
            left = coordination.announced(topic)
            others = [rank for rank in range(coordination.world_size) if not left.get(rank)]
            if not others:
                return ""
            if time.monotonic() > deadline:
                return f"ranks {others} have not left with an exception as this one has, so they do not take part"
            time.sleep(_LOOK_AGAIN_S)

    def others_missing(self, coordination: Coordination, waited_s: float) -> SaveTimeoutError:
        """Say which ranks have not come to a poll, as far as that can be told."""
        announced = coordination.announced(_SCHEDULED)
        behind = {rank: count for rank, count in announced.items() if count < self._count}
        who = (
            f"ranks {sorted(behind)} have scheduled fewer requests ({behind})"
            if behind
            else "all ranks have scheduled as many requests, so some of them do not poll, are still scheduling, or have ended"
        )
        return SaveTimeoutError(
            f"other ranks did not poll within {waited_s:.1f} s; this one has scheduled {self._count} requests; {who}",
            rank=coordination.rank,
            phase="write",
            hint="every rank has to schedule and poll the same number of times; the process group cannot be used any more",
        )


def agree(
    mine: View, coordination: Coordination, scheduled: Scheduled, *, timeout_s: float
) -> View:
    """What holds on any rank. Collective.

    Args:
        mine: What this rank sees.
        coordination: The ranks.
        scheduled: Says who is missing.
        timeout_s: How long another rank may wait for its own files before it comes here.

    Raises:
        SaveTimeoutError: Other ranks do not come.
        RankMismatchError: They look at another request, or have scheduled another number of them.
    """
    index, last = mine.index, mine.last
    numbers = [mine.alive, mine.failed, mine.hurry, index, last, -index, -last]
    began_s = time.monotonic()
    try:
        alive, failed, hurry, *highest = coordination.maximum(
            numbers, timeout_s=timeout_s + PATIENCE_S
        )
    except TimeoutError as error:
        raise scheduled.others_missing(coordination, time.monotonic() - began_s) from error
    if highest != [index, last, -index, -last]:
        raise RankMismatchError(
            f"ranks have scheduled different requests: rank {coordination.rank} looks at number {index} and has"
            f" scheduled up to {last}; over all ranks these are {-highest[2]} to {highest[0]} and {-highest[3]} to"
            f" {highest[1]}, counted from when the queue was made or aborted",
            rank=coordination.rank,
            phase="write",
            hint="every rank has to schedule and poll the same number of times",
        )
    return replace(mine, alive=bool(alive), failed=bool(failed), hurry=bool(hurry))


def most_unfinished(
    unfinished: int, coordination: Coordination, scheduled: Scheduled, *, timeout_s: float
) -> int:
    """The largest number of unfinished requests on any rank, all of which have waited for ``timeout_s``. Collective.

    Raises:
        SaveTimeoutError: Other ranks do not come.
    """
    began_s = time.monotonic()
    try:
        (most,) = coordination.maximum([unfinished], timeout_s=timeout_s + PATIENCE_S)
    except TimeoutError as error:
        raise scheduled.others_missing(coordination, time.monotonic() - began_s) from error
    return most


def share_failure(
    error: BaseException | None, coordination: Coordination, *, timeout_s: float
) -> None:
    """Raise what the finalize functions of one rank have raised on all ranks: there as it is, elsewhere as DCP does.

    Collective, but for a rank that has lost the others.

    Args:
        error: What they have raised here.
        coordination: The ranks.
        timeout_s: How long those of other ranks may take.

    Raises:
        CheckpointException: They have failed on another rank.
        SaveTimeoutError: Those of another rank have not come to an end.
        BaseException: What they have raised on this one.
    """
    if isinstance(error, RankLostError):
        raise error
    told_everywhere = isinstance(error, CheckpointException)
    mine = [error is not None, not told_everywhere]
    try:
        some_failed, some_untold = coordination.maximum(mine, timeout_s=timeout_s)
    except (RankLostError, TimeoutError) as lost:
        if error is not None:
            raise error from lost
        if isinstance(lost, RankLostError):
            raise
        raise SaveTimeoutError(
            f"the finalize functions of other ranks have not come to an end within {timeout_s:g} s",
            rank=coordination.rank,
            phase="finalize",
            hint="every rank has to finalise the same requests",
        ) from lost
    if error is not None and not (some_untold and coordination.world_size > 1):
        raise error
    if not some_failed:
        return
    failure = None if error is None else failure_of(error, phase="finalize")
    try:
        raise_everywhere(failure, coordination)
    except CheckpointException:
        if error is None:
            raise
    raise error
