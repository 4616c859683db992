"""A small process that watches the memory of another one and its children, started as a script.

It imports neither torch nor nostall, so it weighs nothing and holds no lock of the trainer. Memory
is the sum of the anonymous and shared parts of PSS (``/proc/<pid>/smaps_rollup``): a page that
several processes map counts once in the sum. Pages of mapped files, program code above all, do not
count: their share falls and rises with every stranger that runs the same libraries.

Usage: ``sampler.py PID INTERVAL_S [EXCLUDED_PID ...]``. A line on standard input is answered with
``NOW PEAK``, bytes at this moment and the most since the last answer; the end of input ends the
process.
"""

from __future__ import annotations

import os
import select
import sys


def children_by_parent() -> dict[int, list[int]]:
    """Process ids by their parent's, of all that can be seen."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stream:
                    # The name in parentheses may hold anything, blanks and parentheses included.
                    parent = int(stream.read().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it ended meanwhile
            children.setdefault(parent, []).append(int(entry))
    return children


def tree(root: int, excluded: set[int]) -> list[int]:
    """A process and all its descendants, without the excluded ones and theirs."""
    children = children_by_parent()
    found, left = [], [root]
    while left:
        pid = left.pop()
        if pid not in excluded:
            found.append(pid)
            left.extend(children.get(pid, ()))
    return found


def pss_nbytes(pid: int) -> int:
    """Anonymous and shared proportional set size of a process in bytes; 0 if it has ended."""
    nbytes = 0
    try:
        with open(f"/proc/{pid}/smaps_rollup") as stream:
            for line in stream:
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    nbytes += int(line.split()[1]) * 1024
    except OSError:
        return 0
    return nbytes


def total_nbytes(pids: list[int]) -> int:
    """Memory of several processes, at one moment as it were.

    Reading takes milliseconds per GiB, in which a process may map what another one has, and so take
    over half of its share. They are read in one order and then in the opposite one: the means of
    both readings belong together.
    """
    return sum(pss_nbytes(pid) for pid in (*pids, *reversed(pids))) // 2


def main(root: int, interval_s: float, excluded: set[int]) -> None:
    """Sample until standard input ends."""
    peak = 0
    while True:
        now = total_nbytes(tree(root, excluded))
        peak = max(peak, now)
        ready, _, _ = select.select([sys.stdin], [], [], interval_s)
        if ready:
            if not sys.stdin.readline():
                return
            now = total_nbytes(tree(root, excluded))
            print(now, max(peak, now), flush=True)
            peak = 0


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        float(sys.argv[2]),
        {os.getpid(), *(int(pid) for pid in sys.argv[3:])},
    )
