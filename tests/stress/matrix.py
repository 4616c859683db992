"""Run the fault matrix: two ranks save while something goes wrong, then all is examined.

For each cell two gloo ranks, forked from a process that has imported torch and done nothing else,
make a save that fails. Then:

* every rank that lives has raised one of nostall's errors in bounded time, naming rank, phase and
  file where there is one;
* the directory holds the old checkpoint, or none, but never a mixture and nothing that was not
  reported;
* the next save works, in the same processes or, if a trainer died, in new ones, and loads bit for
  bit;
* no process, descriptor, mapping or file is left.

    python tests/stress/matrix.py             # every cell
    python tests/stress/matrix.py --covering  # few cells that show every pair of values
    python tests/stress/matrix.py --only 123
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import torch
import torch.distributed.checkpoint as dcp

import nostall
from programs.entry_points import differing
from stress.matrix_cells import DEATHS, STORAGE, WAYS, Cell, all_cells, covering
from stress.matrix_ranks import (
    RANKS,
    Report,
    Stage,
    all_states,
    begin_anew,
    fail_and_go_on,
)
from support.faults import Hold
from support.waiting import wait_until

PATIENCE_S = 40.0
"""No rank may be silent for longer."""
SOON_S = 20.0
"""A failing save may take this long, deadlines of three seconds and of six included."""
GONE_S = 6.0
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
ERRNO = {
    "short write": errno.EFBIG,
    "read-only directory": errno.EACCES,
    "directory removed": errno.ENOENT,
}


class Violation(AssertionError):
    """An outcome that must never happen."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Violation(what)


# --- ranks ----------------------------------------------------------------------------------------


class Rank:
    def __init__(
        self, number: int, cell: Cell, root: Path, play: Callable[[Stage, int], None]
    ) -> None:
        self.number = number
        hear_fd, tell_fd = os.pipe()
        go_fd, self._go_fd = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(hear_fd)
            os.close(self._go_fd)
            store = root / f"store of {play.__name__}"
            stage = Stage(cell, root / "saved", store, tell_fd, go_fd)
            _play(lambda: play(stage, number))
        os.close(tell_fd)
        os.close(go_fd)
        self._hear_fd = hear_fd
        self._heard = b""

    def hear(self) -> Report | None:
        """Its next report; ``None`` if it has ended."""
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._hear_fd], [], [], PATIENCE_S)
            require(ready, f"rank {self.number} says nothing")
            piece = os.read(self._hear_fd, 1 << 16)
            if not piece:
                return None
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        report: Report = json.loads(line)
        return report

    def go(self) -> None:
        os.write(self._go_fd, b"1")

    def background(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.pid).children()]

    def end(self, *, kill: bool) -> None:
        if kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        for fd in (self._hear_fd, self._go_fd):
            os.close(fd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _play(play: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        play()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


# --- what goes wrong ------------------------------------------------------------------------------


def hold_for(cell: Cell) -> Hold | None:
    """Where the victim is to stop for :func:`act`; ``None`` if the fault needs no process."""
    from_outside = ("short write", "read-only directory", "directory removed", "OOM")
    if cell.place == "trainer" and cell.fault in ("SIGKILL", "SIGSTOP", "OOM"):
        return Hold("stage" if cell.way == "overlapped" else "chunk")
    if cell.fault not in from_outside:
        return None
    if cell.place == "commit":
        return Hold("commit")
    return Hold("start" if cell.fault in ("read-only directory", "OOM") else "chunk")


def act(cell: Cell, victim: Rank, path: Path) -> None:
    """Let it go wrong, while the victim stands still."""
    background = victim.background()
    here = cell.way == "sync" or cell.place != "writer"
    match cell.fault:
        case "short write":
            most = 64 if cell.place == "commit" else 100 << 10
            for pid in [victim.pid] if here else background:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        case "read-only directory":
            wait_until(path.exists)  # the other rank may be the one that makes it
            path.chmod(0o555)
        case "directory removed":
            while path.exists():  # the other rank may be making files in it
                shutil.rmtree(path, ignore_errors=True)
        case "OOM":
            for pid in [victim.pid, *background] if cell.place != "writer" else background:
                os.kill(pid, signal.SIGKILL)
        case name:
            os.kill(victim.pid, getattr(signal, name))


def mend(cell: Cell, victim: Rank, path: Path) -> None:
    """Undo what would be in the next save's way."""
    match cell.fault:
        case "short write":
            for pid in [victim.pid, *victim.background()]:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, UNLIMITED)
        case "read-only directory":
            path.chmod(0o755)


# --- what is looked at ----------------------------------------------------------------------------


def seed_on_storage(path: Path) -> int | None:
    """Which of the saves a directory holds; ``None`` if it claims to hold none."""
    claimed = (path / ".metadata").exists()
    require(nostall.is_complete(path) == claimed, "is_complete and the metadata disagree")
    if not claimed:
        return None
    seen = nostall.verify(path)
    require(seen.ok, f"what claims to be a checkpoint is damaged: {seen.damages}")
    loaded = all_states(0)
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    for seed in (1, 2, 3):
        if not differing(all_states(seed), loaded):
            return seed
    raise Violation("what claims to be a checkpoint is a mixture")


def check_report(cell: Cell, rank: int, report: Report, path: Path) -> None:
    text = report["text"]
    require(text != "it succeeded", f"rank {rank} was told that it succeeded")
    require(report["seconds"] < SOON_S, f"rank {rank} heard of it after {report['seconds']:.0f} s")
    # Of dead peers stock's own collectives tell; and what is unexpected has no type of ours where
    # DCP passes it on.
    stocks_own = cell.way == "sync" and (cell.ends_trainer or cell.fault == "exception")
    require(report["typed"] or stocks_own, f"rank {rank} got no error of ours: {text}")
    if cell.ends_trainer:
        return
    failure = report.get("failures", {}).get(str(cell.rank))
    require(failure, f"rank {rank} was not told that rank {cell.rank} failed: {text}")
    if cell.fault in STORAGE:
        expected = ERRNO.get(cell.fault) or getattr(errno, cell.fault)
        require(failure["errno"] == expected, f"errno is {failure['errno']}: {text}")
        require((failure["path"] or "").startswith(str(path)), f"no path: {text}")
        require(failure["phase"], f"no phase: {text}")


def check_directory(cell: Cell, path: Path) -> None:
    """Whether nothing is there but the last checkpoint."""
    referenced = {".metadata"}
    referenced |= {
        info.relative_path
        for info in dcp.FileSystemReader(path).read_metadata().storage_data.values()
    }
    strangers = set(os.listdir(path)) - referenced
    if cell.ends_trainer:
        # What a dead trainer had made may be another process's that lives, for all that the next
        # save knows, until it is old.
        strangers = {name for name in strangers if not name.endswith(".distcp")}
    require(not strangers, f"files are left: {sorted(strangers)}")


def check_processes() -> None:
    """Whether all children are gone, those that were orphaned among them."""
    left = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(left, timeout=GONE_S)
    for process in alive:
        process.kill()
    require(not alive, f"processes are left: {alive}")


# --- a cell ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(cell: Cell, root: Path, play: Callable[[Stage, int], None]) -> Iterator[list[Rank]]:
    """Ranks that are gone afterwards, whatever happens."""
    ranks = [Rank(number, cell, root, play) for number in range(RANKS)]
    kill = True
    try:
        yield ranks
        kill = False
    finally:
        for rank in ranks:
            rank.end(kill=kill)


def run_cell(cell: Cell, root: Path) -> None:
    """Let a save fail and look at everything; what is wrong is a :class:`Violation`."""
    path = root / "saved"
    with contextlib.ExitStack() as stack:
        hold = hold_for(cell)
        if hold is not None:
            stack.enter_context(hold)

        def fail(stage: Stage, rank: int) -> None:
            fail_and_go_on(stage, rank, hold)

        ranks = stack.enter_context(running(cell, root, fail))
        victim = ranks[cell.rank]
        if hold is not None:
            hold.wait_reached()
            act(cell, victim, path)
            hold.release()
        living = [rank for rank in ranks if rank is not victim or not cell.ends_trainer]
        for rank in living:
            report = rank.hear()
            require(report, f"rank {rank.number} has ended")
            assert report is not None
            check_report(cell, rank.number, report, path)
        if cell.ends_trainer:
            with contextlib.suppress(ProcessLookupError):  # one that was stopped is still there
                os.kill(victim.pid, signal.SIGKILL)
        else:
            mend(cell, victim, path)
        removed = cell.fault == "directory removed"
        expected = 1 if cell.overwrite and not removed else None
        found = seed_on_storage(path)
        require(found == expected, f"the directory holds save {found} instead of {expected}")
        for rank in living:
            rank.go()
        if not cell.ends_trainer:
            check_next(ranks)
    if cell.ends_trainer:
        with running(cell, root, begin_anew) as ranks:
            check_next(ranks)
    require(seed_on_storage(path) == 3, "the next save is not there")
    check_directory(cell, path)
    check_processes()


def check_next(ranks: list[Rank]) -> None:
    for rank in ranks:
        report = rank.hear()
        require(report, f"the next save failed on rank {rank.number}")
        assert report is not None
        require(not report["left"], f"rank {rank.number} still has {report['left']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--covering", action="store_true", help="few cells: every pair of values")
    parser.add_argument("--only", type=int, help="the cell of this number")
    parser.add_argument("--way", choices=WAYS, help="the cells of one kind of save")
    parser.add_argument("--seed", type=int, default=1, help="of the order, and of what is covering")
    parser.add_argument("--cells", type=int, help="stop after this many")
    asked = parser.parse_args()
    numbers = {cell: number for number, cell in enumerate(all_cells())}
    cells = [cell for cell in numbers if asked.only in (None, numbers[cell])]
    cells = [cell for cell in cells if asked.way in (None, cell.way)]
    if asked.covering:
        cells = covering(cells, asked.seed)
    random.Random(asked.seed).shuffle(cells)
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become ours
    torch.set_num_threads(1)
    began_s = time.monotonic()
    counts: Counter[str] = Counter()
    violations = []
    for cell in cells[: asked.cells]:
        with tempfile.TemporaryDirectory(prefix="matrix-") as root:
            try:
                run_cell(cell, Path(root))
            except (Violation, TimeoutError) as error:
                violations.append(f"cell {numbers[cell]}, {cell}: {error}")
                print(violations[-1], file=sys.stderr, flush=True)
                with contextlib.suppress(Violation):
                    check_processes()
        counts[cell.place] += 1
        counts["died" if cell.fault in DEATHS else "refused"] += 1
    cell_count = sum(counts[place] for place in ("writer", "trainer", "commit"))
    # Whatever is imported is tested, be it this checkout's or not: a result says of what it is.
    tested = {"nostall": str(Path(nostall.__file__).parent), "torch": torch.__version__}
    seconds = round(time.monotonic() - began_s)
    found = {"cells": cell_count, "seconds": seconds, **counts}
    print(json.dumps({**found, **tested, "violations": violations}))
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
