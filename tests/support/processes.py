"""Processes that a test has started, and the memory of its own."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def ended(
    *command: str | bytes | Path,
    cwd: Path | None = None,
    timeout_s: float = 100.0,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command without input to its end: output and status, which has to be 0 if ``check``."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def answer_of(module: str, call: str) -> Any:
    """The plain value of a call, which knows ``Path``, of ``programs.NAME`` in a new process."""
    function = call.partition("(")[0]
    program = f"from {module} import {function}; from pathlib import Path; print({call})"
    command = sys.executable, "-W", "ignore", "-c", program
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = ended(*command, timeout_s=200, environment=environment)
    return ast.literal_eval(done.stdout.splitlines()[-1])


def descendants() -> set[int]:
    """Process ids of the children of this process, of their children, and so on.

    The kernel lists those of each thread; psutil looks at all processes there are. It may leave one
    out while another one ends, so this looks twice.
    """
    assert Path("/proc/thread-self/children").exists(), "a kernel without CONFIG_PROC_CHILDREN"
    return _listed() | _listed()


def _listed() -> set[int]:
    found: set[int] = set()
    unseen = _children(os.getpid())
    while unseen:
        found |= unseen
        unseen = {child for pid in unseen for child in _children(pid)}
    return found


def command_of(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


def open_files(pid: int) -> list[str]:
    """Targets of a process's open descriptors."""
    links = []
    with suppress(OSError):  # it has ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return links


def _children(pid: int) -> set[int]:
    """Child processes of all threads of a process."""
    found: set[int] = set()
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found.update(map(int, (thread / "children").read_text().split()))
    return found


def resident_nbytes() -> int:
    """Memory of this process, snapshots among it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (rss,) = [line.split()[1] for line in lines if line.startswith("Rss:")]
    return int(rss) * 1024
