"""Effects that no hostile input may have, and how each of them is detected.

Inputs run in a child process. The child sees wrong exceptions, memory, side effects and changed
classes; the parent sees a child that died and one that does not get on.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.serialization import _get_layout

ROOM_NBYTES = 1 << 30
"""Addresses that a child may use, beyond those that it has when it begins."""
GROWTH_NBYTES = 96 << 20
"""Memory that one input may use, beyond what it may need by its own length."""
GROWTH_PER_BYTE = 1000

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EFFECTS = (
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"),
    "os.startfile",
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.chown", "os.kill", "os.killpg", "os.putenv", "os.unsetenv", "os.utime"),
    *("os.setxattr", "os.removexattr", "os.chdir", "pty.spawn", "shutil", "subprocess.Popen"),
    *("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "urllib.Request"),
    *("ctypes.dlopen", "code.__new__", "exec", "compile", "marshal.loads", "tempfile"),
)
_HARMLESS_IMPORTS = ("encodings",)
"""A codec that a zip record's name asks for; a package of Python's that only translates text."""

_ONLY_PARSED = "<unknown>"
"""File name that ``ast.parse`` gives its input; tracebacks ask it where in a line an error is.
Python 3.13 looks for a file of this name when there is a mistake in the line.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An input that did what none may do."""

    kind: str
    """``crash``, ``hang``, ``memory``, ``side effect``, or ``exception``."""
    what: str


class Effects:
    """An audit hook, which cannot be removed, hence one per process; records while armed."""

    def __init__(self) -> None:
        self._armed = False
        self._allowed = ""
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    @contextmanager
    def watched(self, root: str) -> Iterator[None]:
        """Take note of whatever is changed, and of whatever is opened outside of ``root``."""
        self._allowed = os.path.join(root, "")
        self.seen.clear()
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._armed:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING:
                self.seen.append(f"opens {path!r:.200} for writing")
            elif path == _ONLY_PARSED or isinstance(path, int):
                return
            elif not os.fsdecode(path).startswith(self._allowed):
                self.seen.append(f"opens {path!r:.200}")
        elif event == "import":
            name = str(arguments[0])
            if name.partition(".")[0] not in _HARMLESS_IMPORTS and name not in sys.modules:
                self.seen.append(f"imports {name}")
        elif event == "compile" and arguments[1] == _ONLY_PARSED:
            return
        elif event.startswith(_EFFECTS):
            self.seen.append(f"does {event}{arguments!r:.200}")


def _shared() -> list[Any]:
    """Objects that pickled metadata names and all checkpoints share."""
    found: list[Any] = [_get_layout]
    for module in (metadata, planner, filesystem):
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                found.append(value)
                if issubclass(value, Enum):
                    found += list(value)
    return found


def _attributes(shared: list[Any]) -> list[dict[str, Any]]:
    return [dict(vars(each)) for each in shared]


class Judge:
    """Runs inputs one by one and says what is wrong with one, if anything is."""

    def __init__(self, root: str, *, may_waste: bool = False) -> None:
        self.root = root
        self._may_waste = may_waste
        self.outcomes: Counter[str] = Counter()
        self._effects = Effects()
        self._shared = _shared()
        self._before = _attributes(self._shared)
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[0])
        limit = pages * resource.getpagesize() + ROOM_NBYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def judge(self, run: Callable[[bytes], str], content: bytes) -> Finding | None:
        """Run one input; ``run`` returns its counted outcome, or raises what is not allowed."""
        before = _peak_nbytes()
        try:
            with self._effects.watched(self.root):
                outcome = run(content)
        except MemoryError as error:
            return Finding(kind="memory", what=f"{type(error).__name__}: {error}")
        except BaseException as error:
            return Finding(kind="exception", what=f"{type(error).__name__}: {error!s:.300}")
        if "MemoryError" in outcome and not self._may_waste:
            return Finding(kind="memory", what=outcome)
        grown = _peak_nbytes() - before
        if not self._may_waste and grown > GROWTH_NBYTES + GROWTH_PER_BYTE * len(content):
            return Finding(kind="memory", what=f"{grown} bytes for {len(content)}")
        if self._effects.seen:
            return Finding(kind="side effect", what="; ".join(self._effects.seen[:3]))
        if _attributes(self._shared) != self._before:
            return Finding(kind="side effect", what="a class, enum member or function has changed")
        if not gc.isenabled():
            return Finding(kind="side effect", what="garbage is no longer collected")
        self.outcomes[outcome] += 1
        return None


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
