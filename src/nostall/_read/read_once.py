"""Load what several ranks need: each rank reads a part of it, and they exchange the parts.

In each round, every rank reads its pieces. Then all ranks agree that none has failed, *before* any
of them waits for another one's bytes: so no rank waits for a rank that has given up. Then
pieces are exchanged, and the items of the round are loaded from memory, as from a file. Meanwhile
the pieces of the next round are read. A planner's error counts in the next agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from torch.distributed.checkpoint.planner import LoadPlanner

from nostall._model.reads import ReadCounter
from nostall._read.counted import CountedFiles
from nostall._read.items.load import read_items
from nostall._read.peers import Peers
from nostall._read.plan import Wanted
from nostall._read.round_memory import Buffers, RoundMemory, by_round
from nostall._read.sharing import Share
from nostall._storage.port import ReadableFiles
from nostall.errors import RankFailedError, RankLostError

T = TypeVar("T")


def read_shared(
    share: Share,
    wanted: Sequence[Wanted],
    planner: LoadPlanner,
    files: ReadableFiles,
    peers: Peers,
    *,
    threads: int,
    verify: bool,
    counter: ReadCounter,
) -> list[Wanted]:
    """Read items with other ranks, and hand them to the planner. Collective.

    Args:
        share: What this rank gets.
        wanted: All items of this rank, in any order.
        planner: Called on this thread only.
        files: The checkpoint's files.
        peers: The ranks that have the other shares.
        threads: Number of reads at a time.
        verify: As of :func:`read_items`.
        counter: Counts what this rank has got, whoever has read it.

    Returns:
        The items that are not shared, which were not read.

    Raises:
        RankFailedError: Another rank could not read, or its planner has raised an error.
        RankLostError: Ranks can no longer communicate.
        DamagedCheckpointError: As of :func:`read_items`.
        OSError: A file cannot be read.
    """
    items, rest = by_round(share, wanted)
    buffers = Buffers(share)
    pool = ThreadPoolExecutor(threads, "nostall-read")

    def begin(number: int) -> RoundMemory:
        content = share.rounds[number]
        memory = RoundMemory(content, buffers.for_round(number, content), items[number], files)
        memory.begin_reads(peers.rank, pool)
        return memory

    mine = _Attempts()
    try:
        following = mine.attempt(partial(begin, 0))
        for number in range(len(share.rounds)):
            if following is not None:
                mine.attempt(following.wait_read)
            _agree(peers, mine.failure)
            ready, following = following, None
            assert ready is not None
            if number + 1 < len(share.rounds):
                following = mine.attempt(partial(begin, number + 1))
            peers.exchange(*ready.messages(peers.rank))
            load = partial(read_items, ready.items, planner, CountedFiles(ready, counter))
            mine.attempt(partial(load, threads=threads, verify=verify))
        _agree(peers, mine.failure)
    finally:
        mine.failure = None  # its traceback refers to this frame, which refers to the memory
        # Nothing writes to the memory after this.
        pool.shutdown(wait=True, cancel_futures=True)
    return rest


class _Attempts:
    """What this rank does between two agreements; nothing more once something has failed."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None

    def attempt(self, stage: Callable[[], T]) -> T | None:
        if self.failure is None:
            try:
                return stage()
            except BaseException as error:  # other ranks learn of it first, even of Ctrl-C
                self.failure = error
        return None


def _agree(peers: Peers, failure: BaseException | None) -> None:
    """Go on if no rank has failed. Collective."""
    try:
        failed = peers.first_failed(failed=failure is not None)
    except RankLostError as lost:
        if failure is not None:
            raise failure from lost
        raise
    if failure is not None:
        raise failure
    if failed is not None:
        raise RankFailedError(
            f"rank {failed} failed while ranks read the checkpoint together",
            rank=failed,
            phase="read",
            hint="the error of that rank says why",
        )
