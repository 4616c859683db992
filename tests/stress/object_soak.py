"""Soak as soak.py does, with checkpoints in a store on loopback, in objects of several parts.

After every kill whatever has metadata verifies and holds the values of one save, and every save
that was reported is there. At the end no object is empty. Whole files that no metadata names are
counted: a save removes them when they are old. Uploads that a kill interrupted stay.

    python tests/stress/object_soak.py --kills 200 --store seaweedfs

Stores are ``moto``, ``swift``, ``seaweedfs``, ``google`` and ``microsoft``, the last two emulators.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import nostall
from nostall._storage.locations import storage_at
from nostall.core import AsyncCallsQueue
from nostall.state_dict_saver import CheckpointMetadataCache
from stress.soak import (
    KEPT,
    PATIENCE_S,
    RANKS,
    Campaign,
    Violation,
    begin,
    main,
    name_of,
    require_promised,
    save_in,
    tensors,
    told,
)
from support import emulators
from support.faults import writer_pids
from support.object_store import SERVERS, S3Server, s3_server
from support.ranks import run_script
from support.states import schedule
from support.waiting import wait_until

LENGTH = 3 << 19
"""Elements of a tensor of 6 MiB; with a file per rank, each file has two parts."""
EMULATORS = {"google": emulators.google, "microsoft": emulators.microsoft}
ROUNDED_S = 3.0
"""The store rounds times to seconds, which a save allows for."""


def train(address: str, rank: int, root: Path, store: Path, first: int, tell: int) -> None:
    """Save for ever, in turns to a new address and over the same one."""
    del root
    say = begin(rank, store, tell, chunk_nbytes=5 << 20)
    queue, cache = AsyncCallsQueue(), CheckpointMetadataCache()
    save = first
    while True:
        place = f"{address}/{name_of(save)}"
        say(writers=writer_pids())
        with told(say, save):
            schedule(queue, place, tensors(rank, save, LENGTH), cache=cache)
            queue.wait(PATIENCE_S)
        if rank == 0 and save % 2 == 0:
            nostall.remove_checkpoint(f"{address}/save-{save - 2 * KEPT}")
        save += 1


def save_at(place: str) -> int | None:
    """The save that a place holds, whole and unmixed; ``None`` if nothing is committed there."""
    try:
        names = storage_at(place).list()
    except FileNotFoundError:
        return None
    if ".metadata" not in names:
        return None
    return save_in(place, nostall.FileSystemReader(place), LENGTH)


def check(address: str, committed: set[int], newest: int) -> int:
    """Look at all that is there; the number of checkpoints found."""
    saves = {name: save_at(f"{address}/{name}") for name in storage_at(address).list()}
    found = {name: save for name, save in saves.items() if save is not None}
    return require_promised(found, committed, newest)


def apart(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call in another process: a fork of one that has used a store cannot use one."""
    other = _other_process()
    other.send((call, arguments))
    if not other.poll(20 * PATIENCE_S):
        raise Violation(f"{call.__name__}{arguments} does not return")
    found = other.recv()  # EOFError if the process has ended
    if isinstance(found, BaseException):
        raise found
    return found


@cache
def _other_process() -> Connection:
    """The connection to a process that answers calls; it takes seconds to start."""
    spawning = get_context("spawn")
    here, there = spawning.Pipe()
    spawning.Process(target=_answer, args=(there,), daemon=True).start()
    there.close()
    return here


def _answer(calls: Connection) -> None:
    while True:
        call, arguments = calls.recv()
        try:
            calls.send(call(*arguments))
        except Exception as error:  # raised where the call came from
            calls.send(error)


def remove_saves(address: str, upto: int) -> None:
    for save in range(upto):
        nostall.remove_checkpoint(f"{address}/save-{save}")


def names_at(place: str) -> list[str]:
    return storage_at(place).list()


def newest_at(place: str) -> float:
    """When the last file there was written."""
    storage = storage_at(place)
    return max((storage.stat(name).changed_s for name in storage.list()), default=0.0)


def empty_files(address: str) -> list[str]:
    """Files without content, of all checkpoints."""
    places = [storage_at(f"{address}/{name}") for name in storage_at(address).list()]
    return [
        place.where(name)
        for place in places
        for name in place.list()
        if not place.stat(name).nbytes
    ]


@contextmanager
def bucket_of(store: str) -> Iterator[tuple[str, S3Server | None]]:
    """The address of a bucket, and its server of S3, which a client of its own asks."""
    if store in EMULATORS:
        with EMULATORS[store]() as bucket:
            yield bucket, None
    else:
        with s3_server(store) as server:
            yield f"s3://{server.new_bucket()}", server


def save_once_more(root: Path, place: str) -> None:
    """A job that begins after all others ended saves once."""
    newest_s = apart(newest_at, place)
    wait_until(lambda: time.time() > newest_s + ROUNDED_S)
    done = run_script("programs/save_once.py", place, "1", cwd=root, timeout_s=PATIENCE_S)
    if done.returncode:
        raise Violation(f"the last save: {done.stderr}")


def soak(bucket: str, server: S3Server | None, kills: int, seed: int, root: Path) -> dict[str, Any]:
    address = f"{bucket}/run"
    found = Campaign(kills, seed, root, partial(train, address))
    totals = found.totals

    def look() -> None:
        names = apart(names_at, f"{address}/overwritten")
        totals["whole files left over"] += max(0, len(names) - RANKS - 1)
        totals["checkpoints checked"] += apart(check, address, found.committed, found.newest)

    for _ in found.lives("trainer", "writer", every_s=0.3):
        look()
    with found.life(found.newest + 1) as last:
        last.wait_for(4 * KEPT)  # what was interrupted is saved to again, or removed
    look()
    apart(remove_saves, address, found.newest - 2 * KEPT)  # numbers that no life has come to
    save_once_more(root, f"{address}/overwritten")
    left = apart(empty_files, address)
    if server is not None:
        name = bucket.removeprefix("s3://")
        totals["uploads interrupted"] = len(server.unfinished(name))
        left += [key for key, nbytes in server.sizes(name).items() if not nbytes]
    if left:
        raise Violation(f"empty: {left}")
    return dict(totals)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--store", choices=[*SERVERS, *EMULATORS], default="moto")
    asked, others = parser.parse_known_args()
    with bucket_of(asked.store) as (place, started):
        sys.exit(main(partial(soak, place, started), __doc__ or "", others))
