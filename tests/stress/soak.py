"""Kill trainers and writers at random moments, again and again, and look at what is left each time.

Two gloo ranks save every few milliseconds, in turns to a new directory and over the same one. At a
random moment one of the two trainers or of their writer processes is killed with SIGKILL. If it was
a writer, both ranks have to hear of it and go on; if it was a trainer, the other one is killed,
too, as torchrun would do it, and both start anew. After every kill:

* whatever has a ``.metadata`` verifies, checksum by checksum, and holds the values of one save, bit
  by bit;
* every save whose finalisation had returned is there, or was replaced by a later one in the same
  directory;
* no writer process is left of trainers that are gone;
* nobody hangs: ranks tell of progress within seconds.

Trainers are forked from a process that has imported torch and done nothing else, so that a life
takes a fraction of a second.

    python tests/stress/soak.py --kills 1000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall.core import AsyncCallsQueue
from nostall.options import EngineOptions
from nostall.state_dict_saver import CheckpointMetadataCache
from support.faults import writer_pids
from support.processes import command_of
from support.states import schedule

RANKS = 2
PATIENCE_S = 30.0
LENGTH = 100_000
KEPT = 4


class Violation(AssertionError):
    """An outcome that must never happen."""


def tensors(rank: int, save: int, length: int = LENGTH) -> dict[str, Any]:
    return {
        f"large{rank}": torch.full((length,), float(save * RANKS + rank)),
        f"small{rank}": torch.arange(7) + save,
    }


def name_of(save: int) -> str:
    """The name of its directory: in turns a new one, and the same one."""
    return "overwritten" if save % 2 else f"save-{save}"


# --- a trainer ------------------------------------------------------------------------------------


def begin(rank: int, store: Path, tell: int, *, chunk_nbytes: int) -> Callable[..., None]:
    """Become a rank; what is returned tells the driver of writers and saves."""
    torch.set_num_threads(1)
    nostall.configure(EngineOptions(chunk_nbytes=chunk_nbytes, io_threads=2))
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS
    )

    def say(**what: Any) -> None:
        os.write(tell, (json.dumps({**what, "rank": rank}) + "\n").encode())

    return say


@contextmanager
def told(say: Callable[..., None], save: int) -> Iterator[None]:
    """A block that makes a save; the driver is told how it has ended."""
    try:
        yield
    except CheckpointException as error:
        say(failed=save, why=str(error)[-300:])
    else:
        say(committed=save)


def train(rank: int, root: Path, store: Path, first: int, tell: int) -> None:
    """Save for ever; tell of writers, every committed save, and every failed one."""
    say = begin(rank, store, tell, chunk_nbytes=64 << 10)
    queue, cache = AsyncCallsQueue(), CheckpointMetadataCache()
    save = first
    while True:
        path = root / name_of(save)
        say(writers=writer_pids())
        with told(say, save):
            staging = "overlapped" if save % 3 == 0 else "blocking"
            state = tensors(rank, save)
            schedule(queue, path, state, cache=cache, staging=staging, thread_count=1 + save % 4)
            nostall.wait_staged()
            queue.wait(PATIENCE_S)
        if rank == 0 and save % 2 == 0:
            nostall.remove_checkpoint(root / f"save-{save - 2 * KEPT}")
        save += 1


# --- the driver -----------------------------------------------------------------------------------


@dataclass
class Life:
    """Two trainers from their start to their end."""

    root: Path
    first: int
    program: Callable[[int, Path, Path, int, int], None] = train
    """Program of each trainer; takes its rank, the root, a store, the first save and a pipe."""
    trainers: list[int] = field(default_factory=list)
    pipes: list[int] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)
    ever: set[int] = field(default_factory=set)
    """All writers that there have been."""
    committed: set[int] = field(default_factory=set)
    newest: int = -1
    buffers: dict[int, bytes] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def start(self) -> None:
        store = Path(tempfile.mkdtemp(dir=self.root.parent)) / "store"
        for rank in range(RANKS):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                _be_trainer(self.program, rank, self.root, store, self.first, writing)
            os.close(writing)
            self.trainers.append(pid)
            self.pipes.append(reading)
            self.buffers[reading] = b""

    def listen(self, seconds: float) -> None:
        """Take in what trainers tell for a while."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._take(left)

    def wait_for(self, saves: int) -> None:
        """Return when that many more saves were finished, well or not, by every rank."""
        before = dict(self.counts)
        deadline = time.monotonic() + PATIENCE_S

        def done(rank: int) -> int:
            return self.counts[f"saves of {rank}"] - before.get(f"saves of {rank}", 0)

        while min(done(rank) for rank in range(RANKS)) < saves:
            if time.monotonic() > deadline:
                raise Violation(f"no progress in {PATIENCE_S:g} s: {dict(self.counts)}")
            self._take(0.5)

    def attack(
        self, chance: random.Random, kinds: Sequence[str], *, every_s: float, most: int
    ) -> Counter[str]:
        """Kill a trainer, or so many writers before; what was killed."""
        killed: Counter[str] = Counter()
        while killed.total() < most and not killed["trainers killed"]:
            self.listen(chance.expovariate(1 / every_s))
            rank = chance.randrange(RANKS)
            kind = chance.choice(kinds)
            killed[f"{kind}s killed"] += 1
            if kind == "trainer":
                os.kill(self.trainers[rank], signal.SIGKILL)
            else:
                for pid in self.writers[rank]:
                    if "nostall" in command_of(pid):
                        os.kill(pid, signal.SIGKILL)
                self.wait_for(3)  # one that may be lost, and two that have to come after it
        return killed

    def _take(self, seconds: float) -> None:
        ready, _, _ = select.select(self.pipes, [], [], seconds)
        for pipe in ready:
            piece = os.read(pipe, 1 << 16)
            if not piece:
                raise Violation("a trainer has ended by itself")
            self._hear_all(pipe, piece)

    def _hear_all(self, pipe: int, piece: bytes) -> None:
        *lines, self.buffers[pipe] = (self.buffers[pipe] + piece).split(b"\n")
        for line in lines:
            self._hear(json.loads(line))

    def _hear(self, told: dict[str, Any]) -> None:
        rank = told["rank"]
        if "writers" in told:
            self.writers[rank] = told["writers"]
            self.ever.update(told["writers"])
            return
        if "died" in told:
            raise Violation(f"rank {rank} has failed: {told['died']}")
        self.counts[f"saves of {rank}"] += 1
        if "committed" in told:
            self.counts["commits"] += rank == 0
            self.newest = max(self.newest, told["committed"])
            if rank == 0:
                self.committed.add(told["committed"])
        else:
            self.counts["failed saves"] += rank == 0
            self.newest = max(self.newest, told["failed"])

    def end(self) -> None:
        """Kill what is left of it, and see that nothing stays."""
        for pid in self.trainers:
            os.kill(pid, signal.SIGKILL)
        for pid in self.trainers:
            os.waitpid(pid, 0)
        for pipe in self.pipes:  # what was told before counts
            while piece := os.read(pipe, 1 << 16):
                self._hear_all(pipe, piece)
            os.close(pipe)
        deadline = time.monotonic() + PATIENCE_S
        while left := [pid for pid in self.ever if "nostall" in command_of(pid)]:
            if time.monotonic() > deadline:
                raise Violation(f"writer processes {left} are left")
            psutil.wait_procs([psutil.Process(pid) for pid in left if psutil.pid_exists(pid)], 0.05)


def _be_trainer(
    program: Callable[[int, Path, Path, int, int], None],
    rank: int,
    root: Path,
    store: Path,
    first: int,
    tell: int,
) -> NoReturn:
    try:
        program(rank, root, store, first, tell)
    except BaseException:
        why = traceback.format_exc()[-2000:]
        os.write(tell, (json.dumps({"died": why, "rank": rank}) + "\n").encode())
    finally:
        os._exit(1)


def save_in(place: Path | str, reader: dcp.StorageReader, length: int = LENGTH) -> int:
    """The save that a checkpoint holds, whole and unmixed."""
    verified = nostall.verify(place)
    if not verified.ok:
        raise Violation(f"{place} is damaged: {[str(each) for each in verified.damages]}")

    def whole(save: int) -> dict[str, Any]:
        states = [tensors(rank, save, length) for rank in range(RANKS)]
        return {name: each for state in states for name, each in state.items()}

    state = {name: torch.zeros_like(each) for name, each in whole(0).items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    save = int(state["small0"][0])
    wrong = [name for name, each in whole(save).items() if not torch.equal(state[name], each)]
    if wrong:
        raise Violation(f"{place} is a mixture: {wrong} are not those of save {save}")
    return save


def check(root: Path, committed: set[int], newest: int) -> int:
    """Look at all that is there; the number of checkpoints found."""
    paths = [path for path in sorted(root.iterdir()) if (path / ".metadata").exists()]
    found = {path.name: save_in(path, dcp.FileSystemReader(path)) for path in paths}
    return require_promised(found, committed, newest)


def require_promised(found_at: dict[str, int], committed: set[int], newest: int) -> int:
    """Each save is in its place, and all that were reported are there; how many there are."""
    for name, save in found_at.items():
        if name != name_of(save):
            raise Violation(f"{name} holds save {save}")
    found = set(found_at.values())
    last_over = max((save for save in committed if save % 2), default=-1)
    if last_over > found_at.get("overwritten", -1):
        raise Violation(f"save {last_over} was committed; {sorted(found)} are there")
    kept = {save for save in committed if save % 2 == 0 and save > newest - 2 * KEPT}
    if not kept <= found:
        raise Violation(f"saves {sorted(kept - found)} were committed and are gone")
    return len(found)


@dataclass
class Campaign:
    """Lives one after the other, until so many processes were killed."""

    kills: int
    seed: int
    root: Path
    program: Callable[[int, Path, Path, int, int], None] = train
    totals: Counter[str] = field(default_factory=Counter)
    committed: set[int] = field(default_factory=set)
    newest: int = -1
    """The last save that may have been committed; the one scheduled last, without a report."""

    def lives(
        self,
        *kinds: str,
        every_s: float,
        first: Callable[[], int] | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> Iterator[Life]:
        """Lives that have ended by kills of these kinds, each to be looked at.

        ``first`` tells the first save of the next life, if it is not the one after the last, and
        ``begun`` is called when two saves of a life are finished.
        """
        chance = random.Random(self.seed)
        while self.totals["kills"] < self.kills:
            with self.life(self.newest + 1 if first is None else first()) as life:
                life.wait_for(2)
                begun()
                most = self.kills - self.totals["kills"]
                struck = life.attack(chance, kinds, every_s=every_s, most=most)
                self.totals += struck
                self.totals["kills"] += struck.total()
            yield life
            if sys.stderr.isatty():
                print(f"\r{self.totals['kills']} kills", end="", file=sys.stderr)

    @contextmanager
    def life(self, first: int) -> Iterator[Life]:
        """Two trainers, killed at the end of the block; what they have told counts."""
        life = Life(self.root, first, self.program)
        life.start()
        try:
            yield life
        finally:
            life.end()
        self.newest = max(self.newest, life.newest) + 1
        self.committed |= life.committed
        counted = {name: count for name, count in life.counts.items() if "of" not in name}
        self.totals.update({**counted, "lives": 1})


def soak(kills: int, seed: int, root: Path) -> dict[str, Any]:
    found = Campaign(kills, seed, root)
    for _ in found.lives("trainer", "writer", "writer", every_s=0.04):
        found.totals["checkpoints checked"] += check(root, found.committed, found.newest)
    return dict(found.totals)


def main(
    soak: Callable[[int, int, Path], dict[str, Any]],
    what: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """Soak, and say what was seen; exit status 1 for a violation."""
    parser = argparse.ArgumentParser(description=what.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=".", prefix="soak-") as directory:
        root = Path(directory).resolve() / "checkpoints"
        root.mkdir()
        started = time.monotonic()
        try:
            counted = soak(options.kills, options.seed, root)
            seconds = round(time.monotonic() - started)
            print(json.dumps({**counted, "seconds": seconds, "violations": 0}))
        except Violation as error:
            print(f"VIOLATION (seed {options.seed}): {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(soak, __doc__ or ""))
