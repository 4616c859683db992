"""A control group with a limit of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.waiting import wait_until

_TOP = Path("/sys/fs/cgroup")


@contextmanager
def memory_limit(nbytes: int) -> Iterator[Path]:
    """The file to which a process writes its id to be limited; skips where no group can be made."""
    entries = dict(line.split(":")[1:] for line in _lines(Path("/proc/self/cgroup")))
    if "memory" in entries:
        parent, name = _TOP / "memory" / entries["memory"][1:], "memory.limit_in_bytes"
    else:
        parent, name = _TOP, "memory.max"
    group = parent / f"nostall-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        if not (group / name).exists():
            pytest.skip("control groups do not limit memory here")
        (group / name).write_text(str(nbytes))
        yield group / "cgroup.procs"
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())  # they end
        group.rmdir()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
