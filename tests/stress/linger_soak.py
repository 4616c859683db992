"""As soak.py, with saves that outlive their trainers, and are recovered after each death.

In addition to what soak.py looks at, after the death of the trainers:

* every save whose snapshot both ranks had taken is committed by ``nostall.recover``, if no writer
  process was killed since, or a later save to the same directory is there;
* writer processes end by themselves, and recovered directories hold nothing but their checkpoint.

    python tests/stress/linger_soak.py --kills 200
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._model.completion import record_name_in
from nostall.core import AsyncCallsQueue
from nostall.options import EngineOptions
from nostall.recovery import RecoveryState
from nostall.state_dict_saver import CheckpointMetadataCache
from nostall.testing import writer_pids
from stress.soak import KEPT, PATIENCE_S, RANKS, Life, Violation, check, main, tensors
from support.states import schedule

LINGER_S = 20.0


def train(rank: int, root: Path, store: Path, first: int, tell: int) -> None:
    """Save for ever, up to two saves at a time; tell when snapshots are taken, too."""

    def say(**what: Any) -> None:
        os.write(tell, (json.dumps(what) + "\n").encode())

    torch.set_num_threads(1)
    nostall.configure(EngineOptions(chunk_nbytes=64 << 10, io_threads=2))
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS
    )
    queue, cache = AsyncCallsQueue(), CheckpointMetadataCache()
    save = first
    while True:
        path = root / ("overwritten" if save % 2 else f"save-{save}")
        say(writers=writer_pids(), rank=rank)
        try:
            state = tensors(rank, save)
            schedule(queue, path, state, cache=cache, linger_s=LINGER_S, thread_count=1 + save % 4)
            say(staged=save, rank=rank)
            queue.wait(PATIENCE_S)
        except CheckpointException as error:
            say(failed=save, rank=rank, why=str(error)[-300:])
        else:
            say(committed=save, rank=rank)
        if rank == 0 and save % 2 == 0:
            nostall.remove_checkpoint(root / f"save-{save - 2 * KEPT}")
        save += 1


@dataclass
class LingeringLife(Life):
    """Also hears which snapshots were taken."""

    staged: dict[int, int] = field(default_factory=dict)
    """The last save of each rank whose snapshot was taken."""
    failed: set[int] = field(default_factory=set)

    def _hear(self, told: dict[str, Any]) -> None:
        if "staged" in told:
            self.staged[told["rank"]] = told["staged"]
            return
        if "failed" in told:
            self.failed.add(told["failed"])
        super()._hear(told)


def recover_all(root: Path) -> Counter[str]:
    """Recover every directory, twice; what was found."""
    found: Counter[str] = Counter()
    for path in sorted(root.iterdir()):
        state = nostall.recover(path).state
        found[f"recoveries: {state.value}"] += state is not RecoveryState.NOTHING
        if state is RecoveryState.COMMITTED:
            again = nostall.recover(path).state
            # A writer that was killed may leave an unfinished record, and others without it.
            left = [name for name in os.listdir(path) if record_name_in(name) is not None]
            is_clean = again is RecoveryState.INCOMPLETE or not left
            if again is RecoveryState.COMMITTED or not is_clean:
                raise Violation(f"{path} is recovered, and has {left} still; again: {again}")
    return found


def require_recovered(root: Path, life: LingeringLife) -> bool:
    """Whether a save was staged by both ranks and not reported; it must be committed."""
    last = min((life.staged.get(rank, -1) for rank in range(RANKS)), default=-1)
    if last < 0 or last in life.committed or last in life.failed:
        return False
    path = root / ("overwritten" if last % 2 else f"save-{last}")
    state = {name: torch.zeros_like(each) for name, each in tensors(0, last).items()}
    nostall.load(state, path)
    found = int(state["small0"][0])
    if found < last or (last % 2 == 0 and found != last):
        raise Violation(f"save {last} was staged by both ranks; {path} holds {found}")
    return True


def soak(kills: int, seed: int, root: Path) -> dict[str, Any]:
    """Kill so many times; what was counted."""
    chance = random.Random(seed)
    totals: Counter[str] = Counter()
    committed: set[int] = set()
    newest, killed = -1, 0
    started = time.monotonic()
    while killed < kills:
        life = LingeringLife(root, first=newest + 1, program=train)
        life.start()
        try:
            life.wait_for(2)
            struck = life.attack(
                chance, ["trainer", "trainer", "writer"], every_s=0.04, most=kills - killed
            )
        finally:
            life.end()
        totals += struck
        killed += struck.total()
        newest = max(newest, life.newest, *life.staged.values())
        committed |= life.committed
        totals.update({name: count for name, count in life.counts.items() if "of" not in name})
        totals["lives"] += 1
        totals += recover_all(root)
        totals["staged, not reported, recovered"] += require_recovered(root, life)
        totals["checkpoints checked"] += check(root, committed, newest + 1)
        newest += 1
        if sys.stderr.isatty():
            print(f"\r{killed} kills", end="", file=sys.stderr)
    return {
        **totals,
        "kills": killed,
        "seconds": round(time.monotonic() - started),
        "violations": 0,
    }


if __name__ == "__main__":
    sys.exit(main(soak, __doc__ or ""))
