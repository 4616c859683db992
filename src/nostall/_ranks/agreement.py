"""Agreement of ranks on the request to finalise, and the errors when they do not agree.

A collective waits for ranks that do not join it, so the waits here have deadlines; only errors that
all ranks have agreed to exchange wait as long as the process group does. Each rank announces the
number of requests that it has scheduled; an error names the ranks that are behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch.distributed.checkpoint.api import CheckpointException

from nostall._model.names import counted
from nostall._ranks.failures import failure_of, raise_everywhere
from nostall._ranks.group import Coordination
from nostall.errors import RankLostError, RankMismatchError, SaveTimeoutError

PATIENCE_S = 60.0
"""Longest time by which another rank may begin its wait later than this one."""
_LOOK_AGAIN_S = 0.02
_SCHEDULED = "scheduled"
_LEAVING = "leaving"
_STAYS, _ASKS, _KNOWS = range(3)
"""Announced: this rank exits with no exception; it exits with one; it knows that all ranks do."""


class View(NamedTuple):
    """State of the next request to finalise, on one rank or over all ranks."""

    alive: bool
    """The request is unfinished."""
    failed: bool
    hurry: bool
    """The process was asked to end."""
    committing: bool
    """The request's save is being committed early. On the coordinator only."""
    committed: int
    """0; of a committed save, one more than its slowest rank. On the coordinator only."""
    save: int
    """Identifies a save that is committed early; 0 for none."""
    shares: bool
    """Errors of its finalize functions are to be shared."""
    waits: bool
    """The rank waits until the request is finalised."""
    number: int
    """Number of the request since the queue was created or aborted."""
    last: int
    """Number of the last scheduled request."""

    @property
    def is_done(self) -> bool:
        """Whether the request is to be finalised now: a rank that waits does not poll again."""
        return not self.alive and (self.waits or not self.committing)


class Scheduled:
    """The requests that this process schedules with other ranks, over all its queues."""

    def __init__(self) -> None:
        self.unanswered: list[Question] = []
        """Questions about requests that this process has since given up."""
        self._count = 0

    @contextmanager
    def one_more(self, coordination: Coordination) -> Iterator[None]:
        """Count the request that the block schedules, unless the block raises.

        The count is announced first: while the copy's threads occupy the cores, it takes 1 ms.
        """
        if coordination.world_size == 1:
            yield
            return
        before = self._count
        try:
            self._count = before + 1
            coordination.announce(_SCHEDULED, self._count)
            yield
        except BaseException:  # whatever prevents the request, it is not counted
            self._count = before
            coordination.announce(_SCHEDULED, before)
            raise

    def forget_after_fork(self) -> None:
        """In a forked child, which has scheduled and asked nothing."""
        self._count = 0
        self.unanswered.clear()

    def others_missing(self, coordination: Coordination, limit: str) -> SaveTimeoutError:
        """The error when other ranks do not poll; it names those that are behind."""
        announced = coordination.announced(_SCHEDULED)
        behind = {rank: count for rank, count in announced.items() if count < self._count}
        who = (
            f"ranks {sorted(behind)} have scheduled fewer requests ({behind})"
            if behind
            else "all ranks have scheduled that many; a rank does not poll, is still"
            " scheduling, or has ended"
        )
        return SaveTimeoutError(
            f"other ranks did not poll within {limit}; this one has scheduled"
            f" {counted(self._count, 'request')}; {who}",
            rank=coordination.rank,
            phase="write",
            hint="schedule and poll the same number of times on every rank; the process group is"
            " no longer usable",
        )


@contextmanager
def leaving(coordination: Coordination, timeout_s: float) -> Iterator[str]:
    """Why the ranks cannot finish the scheduled requests; empty if they can, in the block.

    Used when this rank exits with an exception. The other ranks may be in a collective of their
    own, so they join only if they exit the same way: each rank announces that it does, and waits up
    to ``timeout_s`` seconds for the announcements of the others; after the block as long for slower
    ranks to see its own, which is then withdrawn.
    """

    def wait_for(is_fine: Callable[[int], bool]) -> list[int]:
        deadline_s = time.monotonic() + timeout_s
        others = [rank for rank in range(coordination.world_size) if rank != coordination.rank]
        while True:
            announced = coordination.announced(_LEAVING)
            late = [rank for rank in others if not is_fine(announced.get(rank, _STAYS))]
            if not late or time.monotonic() > deadline_s:
                return late
            time.sleep(_LOOK_AGAIN_S)

    wait_for(lambda number: number != _KNOWS)  # a slower rank may still be in an earlier block
    coordination.announce(_LEAVING, _ASKS)
    try:
        if late := wait_for(lambda number: number != _STAYS):
            yield (
                f"ranks {late} did not exit with an exception as this one did; they may have been"
                " killed: see their logs"
            )
        else:
            coordination.announce(_LEAVING, _KNOWS)
            yield ""
            wait_for(lambda number: number != _ASKS)  # a slower rank has still to see this one
    finally:
        coordination.announce(_LEAVING, _STAYS)


class Question:
    """The view over all ranks, which are asked without waiting for them. Collective."""

    def __init__(self, mine: View, coordination: Coordination) -> None:
        self._mine = mine
        self._coordination = coordination
        # The maximum of a negative number is the minimum.
        negative = [-mine.save, -mine.number, -mine.last]
        self._pending = coordination.begin_maximum([*mine, *negative])

    def is_answered(self) -> bool:
        """Whether it no longer waits for any rank."""
        return self._pending.is_done()

    def answer(self, scheduled: Scheduled, *, timeout_s: float) -> View:
        """A flag is set if it was set on any rank when that was asked. Waits for all ranks.

        Another rank may wait ``timeout_s`` for its own files before it asks. ``scheduled`` names
        missing ranks, and remembers a question whose wait is interrupted. Raises ``RankLostError``;
        ``SaveTimeoutError`` if other ranks do not ask; ``RankMismatchError`` if they poll another
        request, or have scheduled another number of requests.
        """
        mine, coordination = self._mine, self._coordination
        began_s, timeout_s = time.monotonic(), timeout_s + PATIENCE_S
        try:
            values = self._pending.wait(timeout_s)
        except KeyboardInterrupt:  # torch would wait for it at the end of the process
            scheduled.unanswered.append(self)
            raise
        except TimeoutError as error:
            # The group's own limit may be shorter.
            is_own = time.monotonic() - began_s >= timeout_s
            limit = f"{timeout_s:.1f} s" if is_own else "the time limit of the process group"
            raise scheduled.others_missing(coordination, limit) from error
        *values, save, number, last = values
        highest = View._make(type(own)(each) for own, each in zip(mine, values, strict=True))
        if (highest.number, highest.last, -number, -last) != 2 * (mine.number, mine.last):
            raise RankMismatchError(
                f"ranks have scheduled different requests: rank {coordination.rank} polls number"
                f" {mine.number} and has scheduled up to {mine.last}; over all ranks, polled:"
                f" {-number} to {highest.number}, scheduled up to: {-last} to {highest.last},"
                " counted since the queue was created or aborted",
                rank=coordination.rank,
                phase="write",
                hint="schedule and poll the same number of times on every rank",
            )
        # Otherwise the coordinator waits in vain, or has committed another save.
        is_same = highest.save == -save
        return highest._replace(
            committing=highest.committing and is_same and not highest.failed,
            committed=highest.committed if is_same else 0,
        )


def share_failure(
    error: BaseException | None, coordination: Coordination, *, timeout_s: float
) -> None:
    """Raise an error of one rank's finalize functions on all ranks.

    Collective, except on a rank whose error is a ``RankLostError``. A rank with an error raises its
    own; the others raise ``CheckpointException``, or ``SaveTimeoutError`` if the functions of a
    rank take longer than ``timeout_s``.
    """
    if isinstance(error, RankLostError):
        raise error
    is_known_everywhere = isinstance(error, CheckpointException)
    mine = [error is not None, not is_known_everywhere]
    try:
        some_failed, some_unknown = coordination.maximum(mine, timeout_s=timeout_s)
    except (RankLostError, TimeoutError) as lost:
        if error is not None:
            raise error from lost
        if isinstance(lost, RankLostError):
            raise
        raise SaveTimeoutError(
            f"the finalize functions of other ranks did not return within {timeout_s:g} s",
            rank=coordination.rank,
            phase="finalize",
            hint="finalise the same requests on every rank",
        ) from lost
    if error is not None and not (some_unknown and coordination.world_size > 1):
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
