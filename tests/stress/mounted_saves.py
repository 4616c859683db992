"""Saves on a mounted file system with caches and faults; ``nox -s mounts``.

Two gloo ranks save to one directory, each through a mount of its own, as two hosts do. In every
cell one host's file system does something wrong during a save. Whatever that is: the old checkpoint
or the new one loads bit by bit, or none in a new directory; a save that is reported as done is the
new one; the calls return within the deadline and ten seconds; when the file system answers again no
descriptor is left, and the next save works.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from stress.mounted import Mount, ask, fault, why_not

RANKS = 2
SAVE_TIMEOUT_S = 4.0
GRACE_S = 10.0
STUCK_S = 45.0
START_S = 180.0
HOWS = ("dcp.save", "dcp.async_save", "split", "split, known")
CACHES_S = (0.0, 1.0, 60.0)
OLD, NEW, NEXT = 1, 2, 3
SHARD, METADATA = ".distcp", ".metadata"


def _hangs() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for op in ("create", "fallocate", "write", "truncate", "fsync", "flush", "release", "unlink"):
        yield f"{op} of a shard hangs", [fault(op, "hang", name=SHARD)]
    for op in ("create", "write", "fsync", "flush"):
        yield f"{op} of the metadata hangs", [fault(op, "hang", name=METADATA)]
    for op in ("mkdir", "opendir", "fsyncdir", "getattr", "statfs", "readdir", "rename"):
        yield f"{op} hangs", [fault(op, "hang")]
    for op in ("rename", "unlink", "create"):
        yield f"{op} hangs when it is done", [fault(op, "hang-after")]
    refused = fault("write", "errno", name=SHARD, errno=errno.ENOSPC)
    yield "the disk is full and unlink hangs", [refused, fault("unlink", "hang")]


def _errors() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for op in ("create", "write", "truncate", "fsync", "flush"):
        once = fault(op, "errno", name=SHARD, errno=errno.EIO, times=1)
        yield f"{op} of a shard fails once", [once]
        yield f"{op} of a shard fails", [fault(op, "errno", name=SHARD, errno=errno.EIO)]
        yield f"{op} of the metadata fails", [fault(op, "errno", name=METADATA, errno=errno.EIO)]
    yield "the disk is full", [fault("write", "errno", errno=errno.ENOSPC)]
    for code in ("EIO", "ETIMEDOUT", "ESTALE"):
        number = getattr(errno, code)
        yield f"rename answers {code}", [fault("rename", "errno", errno=number)]
        for op in ("rename", "create", "unlink", "mkdir"):
            after = fault(op, "errno-after", errno=number)
            yield f"{op} is done and answers {code}", [after]
    for op in ("rename", "create", "unlink", "mkdir"):
        once = fault(op, "errno-after", errno=errno.EIO, times=1)
        yield f"{op} is done and answers EIO once", [once]
    for op in ("getattr", "opendir", "fsyncdir", "statfs", "unlink", "mkdir"):
        yield f"{op} fails", [fault(op, "errno", errno=errno.EIO)]
    # The kernel reports it to no process and does not ask again.
    yield "release fails", [fault("release", "errno-after", errno=errno.EIO)]
    yield "nothing", []


@dataclass(frozen=True, slots=True)
class Cell:
    """One save that something happens to."""

    number: int
    how: str
    is_over: bool
    cache_s: float
    what: str
    faults: Sequence[dict[str, Any]]
    host: int

    def __str__(self) -> str:
        where = "over a checkpoint" if self.is_over else "to a new directory"
        host = f"caches {self.cache_s:g} s, host {self.host}"
        return f"{self.number}: {self.how} {where}, {host}: {self.what}"


def _cells(*, all_caches: bool) -> Iterator[Cell]:
    """All cells, or caches in turns where they make no difference; only host 0 publishes."""
    numbers, turns = itertools.count(), itertools.cycle(CACHES_S)
    for (what, faults), host in itertools.product([*_errors(), *_hangs()], range(RANKS)):
        if host and (METADATA in what or what.startswith(("rename", "mkdir", "the metadata"))):
            continue
        next(turns)  # else a way to save would always meet the same caches
        for how, is_over in itertools.product(HOWS, (False, True)):
            every = all_caches or "done and answers EIO" in what or not faults
            for cache_s in CACHES_S if every else (next(turns),):
                yield Cell(next(numbers), how, is_over, cache_s, what, faults, host)


class _StuckError(Exception):
    """A rank does not answer; what it says is where its threads are."""


class Rank:
    """A process that saves on request on a host of its own, with the mount at its usual place."""

    def __init__(
        self, rank: int, meeting: Path, mount: Mount, where: Path, options: dict[str, Any]
    ) -> None:
        self.mount = mount
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # open as long as the process
        bind = 'mount --bind "$0" "$1" && shift && exec "$@"'
        self._process = subprocess.Popen(
            [
                *("unshare", "--mount", "sh", "-c", bind, str(mount.path), str(where)),
                *(sys.executable, "-W", "ignore", str(Path(__file__).with_name("mounted_rank.py"))),
                *(str(rank), str(RANKS), str(meeting), str(where), json.dumps(options)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("MOUNTS_DEBUG") else self._said,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def tell(self, **request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def answer(self, deadline_s: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], deadline_s - time.monotonic())
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise _StuckError(self._where())
        return json.loads(line)

    def _where(self) -> str:
        self._process.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):  # it has ended, or time to say where it is
            self._process.wait(1.0)
        self._said.seek(0)
        return f"exit status {self._process.returncode}\n{self._said.read()[-8000:]}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._said.close()


@dataclass
class Hosts:
    """Two mounts of one directory, and a rank on each."""

    cache_s: float
    o_direct: bool
    root: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="nostall-mounts-")))

    def __post_init__(self) -> None:
        self.backing = self.root / "backing"
        self.backing.mkdir()
        self.where = self.root / "checkpoints"
        self.where.mkdir()
        self.ranks: list[Rank] = []
        self.start()

    def start(self) -> None:
        meeting = Path(tempfile.mkdtemp(dir=self.root)) / "meeting"
        options = {"save_timeout_s": SAVE_TIMEOUT_S, "io_threads": 2, "write_retries": 2}
        options["chunk_nbytes"] = 256 << 10
        for rank in range(RANKS):
            mount = Mount(self.backing, cache_s=self.cache_s, o_direct=self.o_direct)
            self.ranks.append(Rank(rank, meeting, mount, self.where, options))
        deadline_s = time.monotonic() + START_S
        for each in self.ranks:
            each.answer(deadline_s)

    def stop(self) -> None:
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            rank.mount.close()
        for rank in ranks:
            rank.close()

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.root)

    def save(self, how: str, name: str, seed: int) -> list[dict[str, Any]]:
        for rank in self.ranks:
            rank.tell(do="save", how=how, path=str(self.where / name), seed=seed)
        return self._answers()

    def settle(self) -> list[str]:
        """Let the file systems answer, and tell what is left open then."""
        for rank in self.ranks:
            ask(rank.mount.control, faults=[])
            rank.tell(do="settle")
        held = [line for answer in self._answers() for line in answer["held"]]
        deadline_s = time.monotonic() + GRACE_S
        while any(opened := [ask(rank.mount.control)["open"] for rank in self.ranks]):
            if time.monotonic() > deadline_s:
                held += [f"host {host}: {each}" for host, each in enumerate(opened) if each]
                break
            os.sched_yield()
        return held

    def content(self, name: str) -> Any:
        self.ranks[0].tell(do="content", path=str(self.backing / name))
        return self.ranks[0].answer(time.monotonic() + STUCK_S)

    def _answers(self) -> list[Any]:
        deadline_s = time.monotonic() + STUCK_S
        return [rank.answer(deadline_s) for rank in self.ranks]


def run(hosts: Hosts, cell: Cell) -> list[str]:
    """Run one cell, and describe each promise that it broke."""
    name = f"cell-{cell.number}"
    if cell.is_over:
        errors = [each["error"] for each in hosts.save(cell.how, name, OLD) if each["error"]]
        if errors:
            return [f"the save before failed: {errors[0]:.300}"]
    ask(hosts.ranks[cell.host].mount.control, faults=list(cell.faults))
    told = hosts.save(cell.how, name, NEW)
    held = hosts.settle()
    wrong = [f"left open: {held}"] if held else []
    longest_s = max(each["seconds"] for each in told)
    if longest_s > SAVE_TIMEOUT_S + GRACE_S:
        wrong.append(f"returned after {longest_s:.1f} s")
    errors = [each["error"] for each in told]
    found = hosts.content(name)
    # Who was told that it was saved must find it.
    possible = {NEW, OLD if cell.is_over else None} if all(errors) else {NEW}
    if found not in possible:
        said = next((error for error in errors if error), "the save was done")
        wrong.append(f"there is {found!r:.300} after {said:.300}")
    next_errors = [each["error"] for each in hosts.save(cell.how, name, NEXT) if each["error"]]
    if next_errors:
        wrong.append(f"the next save failed: {next_errors[0]:.300}")
    elif (found := hosts.content(name)) != NEXT:
        wrong.append(f"there is {found!r:.300} after the next save")
    shutil.rmtree(hosts.backing / name, ignore_errors=True)
    return wrong


def _work(
    cells: queue.SimpleQueue[Cell], hosts: Hosts, found: list[tuple[Cell, list[str]]]
) -> None:
    try:
        while True:
            try:
                cell = cells.get_nowait()
            except queue.Empty:
                return
            try:
                wrong = run(hosts, cell)
            except (_StuckError, BrokenPipeError) as error:
                wrong = [f"a rank did not answer for {STUCK_S:g} s, or has ended: {error}"]
                hosts.stop()
                hosts.start()
            found.append((cell, wrong))
            for line in wrong:
                print(f"{cell}\n    {line}", flush=True)
    finally:
        hosts.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cells whose description contains this")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of ranks at work at a time")
    parser.add_argument("--all-caches", action="store_true", help="every fault with every cache")
    arguments = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    began_s = time.monotonic()
    cells = [
        cell for cell in _cells(all_caches=arguments.all_caches) if arguments.only in str(cell)
    ]
    found: list[tuple[Cell, list[str]]] = []
    threads = []
    waiting = {cache_s: queue.SimpleQueue[Cell]() for cache_s in CACHES_S}
    for cell in cells:
        waiting[cell.cache_s].put(cell)
    used = [cache_s for cache_s in CACHES_S if not waiting[cache_s].empty()]
    places = itertools.islice(itertools.cycle(used), max(len(used), arguments.pairs))
    for number, cache_s in enumerate(places):
        hosts = Hosts(cache_s, o_direct=bool(number // len(used) % 2))
        work = threading.Thread(target=_work, args=(waiting[cache_s], hosts, found))
        work.start()
        threads.append(work)
    for work in threads:
        work.join()
    bad = sum(bool(wrong) for _, wrong in found)
    took_s = time.monotonic() - began_s
    print(f"{len(found)} of {len(cells)} cells in {took_s:.0f} s, {bad} with violations")
    return 0 if len(found) == len(cells) and not bad else 1


if __name__ == "__main__":
    sys.exit(main())
