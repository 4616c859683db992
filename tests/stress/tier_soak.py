"""Soak like soak.py, through local tiers, to directories and to an S3 server on loopback in turns.

Of four turns, two go through a disk that both ranks share, two through one of each rank. After
every kill, of a trainer, a writer process or the process that copies, each destination has nothing
or one whole checkpoint that is not older than before, and every save that was reported is there or
on the shared disk. After one more save to each destination all of them are there, and on shared
disks and at their destinations nothing else is.

    python tests/stress/tier_soak.py --kills 200
"""

from __future__ import annotations

import math
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from torch.distributed.checkpoint.api import CheckpointException

from nostall.core import AsyncCallsQueue
from nostall.state_dict_saver import CheckpointMetadataCache
from stress.object_soak import LENGTH, apart, save_at
from stress.soak import PATIENCE_S, Campaign, Violation, begin, main, tensors, told
from support.faults import writer_pids
from support.object_store import S3Server, s3_server
from support.states import schedule
from support.waiting import wait_until

TURNS = 4
LIMIT = 3
SHARED = range(TURNS // 2)


def destination_of(root: Path, bucket: str, save: int) -> str:
    """Saves overwrite earlier ones, in turns: two directories, two addresses."""
    turn = save % TURNS
    return f"{root}/far/turn-{turn}" if turn % 2 else f"s3://{bucket}/far/turn-{turn}"


def tier_of(root: Path, save: int, rank: int) -> Path:
    """The local root of a rank."""
    return root / (f"tier-{save % TURNS}" + f"-{rank}" * is_by_rank(save))


def is_by_rank(save: int) -> bool:
    return save % TURNS >= TURNS // 2


def train(
    bucket: str, saves: float, rank: int, root: Path, store: Path, first: int, tell: int
) -> None:
    """Save so many times, and stay."""
    say = begin(rank, store, tell, chunk_nbytes=5 << 20)
    queue, cache = AsyncCallsQueue(), CheckpointMetadataCache()
    save = first
    while save < first + saves:
        writer_pids()
        say(writers=[each.pid for each in psutil.Process().children()])
        with told(say, save):
            path, state = destination_of(root, bucket, save), tensors(rank, save, LENGTH)
            options = {"local_staging_limit": LIMIT, "local_staging_shared": not is_by_rank(save)}
            tier = tier_of(root, save, rank)
            schedule(queue, path, state, cache=cache, local_staging_dir=tier, **options)
            queue.wait(PATIENCE_S)
        save += 1
    threading.Event().wait()


def _save_at(place: str) -> int:
    save = save_at(place)
    return -1 if save is None else save


def _is_promoted(place: str, after: int) -> bool:
    """Whether a place has a later save; one that is replaced while it is read may have."""
    try:
        return _save_at(place) > after
    except CheckpointException as error:
        if "another process has published meanwhile" not in str(error):
            raise
        return False


def soak(server: S3Server, kills: int, seed: int, root: Path) -> dict[str, Any]:
    bucket = server.new_bucket()
    lives = Campaign(kills, seed, root, partial(train, bucket, math.inf))
    seen = dict.fromkeys((destination_of(root, bucket, turn) for turn in range(TURNS)), -1)

    def due_at(place: str) -> int:
        there = (save for save in lives.committed if destination_of(root, bucket, save) == place)
        return max(there, default=-1)

    for _ in lives.lives("trainer", "writer", every_s=0.3):
        for turn, (place, before) in enumerate(seen.items()):
            found = apart(_save_at, place)
            if found < before:
                raise Violation(f"{place} had save {before}, and has {found}")
            seen[place] = found
            near = _save_at(f"{tier_of(root, turn, 0)}/turn-{turn}") if turn in SHARED else -1
            if not is_by_rank(turn) and max(found, near) < due_at(place):
                due = due_at(place)
                raise Violation(f"{place}: save {due} is gone; {found}, {near} are there")
            lives.totals["checkpoints checked"] += (found >= 0) + (near >= 0)
            lives.totals["promotions interrupted"] += near > found
    newest, lives.program = lives.newest, partial(train, bucket, TURNS)
    with lives.life(newest + 1) as last:
        last.wait_for(TURNS)
        wait_until(lambda: all(_is_promoted(place, newest) for place in seen))
    for place in seen:
        found = apart(_save_at, place)
        if found < due_at(place):
            raise Violation(f"{place}: save {due_at(place)} was committed; {found} was promoted")
    return dict(lives.totals)


if __name__ == "__main__":
    with s3_server() as running:
        sys.exit(main(partial(soak, running), __doc__ or ""))
