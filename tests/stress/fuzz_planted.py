"""Targets that do what no input may do, to test the fuzzer; prints its findings as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from torch.distributed.checkpoint.metadata import MetadataIndex

from stress import fuzz
from stress.fuzz_reads import ReadsTarget
from stress.fuzz_targets import Target

PLANTED = "planted"


def connection() -> None:
    with socket.socket() as sock:
        sock.connect_ex(("127.0.0.1", 9))


BUGS: dict[str, tuple[Callable[[], object], str]] = {
    "crash": (lambda: signal.raise_signal(signal.SIGSEGV), "crash"),
    "silent end": (lambda: os._exit(0), "crash"),
    "hang in Python": (lambda: all(True for _ in iter(int, 1)), "hang"),
    "hang in C": (lambda: re.match("(a+)+$", "a" * 60 + "b"), "hang"),
    "reservation": (lambda: bytearray(8 << 30), "memory"),
    "growth": (lambda: bytearray(b"x") * (120 << 20), "memory"),
    "writing": (lambda: Path("fuzz planted this").write_text(""), "side effect"),
    "reading elsewhere": (lambda: Path("/etc/hostname").read_bytes(), "side effect"),
    "importing": (lambda: __import__("wave"), "side effect"),
    "command": (lambda: os.system("true"), "side effect"),
    "process": (lambda: subprocess.run(["true"], check=False), "side effect"),
    "connection": (connection, "side effect"),
    "changed class": (lambda: setattr(MetadataIndex, "planted", 1), "side effect"),
    "undocumented error": (lambda: os.environ["PLANTED"], "exception"),
}
"""Planted bugs, each with the kind of finding that it has to be reported as."""


class Planted:
    """Harmless but for every fourth input."""

    runs_pickles = False

    def __init__(self, bug: Callable[[], object], root: str) -> None:
        self._bug = bug

    def make(self, chance: Random) -> bytes:
        return b"hostile" if chance.random() < 1 / 4 else b"harmless"

    def prepare(self, content: bytes) -> None:
        pass

    def run(self, content: bytes) -> str:
        if content == b"hostile":
            self._bug()
        return "accepted"


class WrongValue(ReadsTarget):
    """A reader that changes a tensor whose archive is whole."""

    def load(self, how: int) -> object:
        loaded = super().load(how)
        self.targets.state["w"].neg_()
        return loaded


class BesideTargets(ReadsTarget):
    """A reader that writes a byte more than a tensor has."""

    def load(self, how: int) -> object:
        loaded = super().load(how)
        scalar = self.targets.state["scalar"]
        ctypes.memset(scalar.data_ptr() + scalar.nbytes, 0, 1)
        return loaded


class Unverified(ReadsTarget):
    """A reader that compares no checksums."""

    def load(self, how: int) -> object:
        return super().load(how - how % 2)


READERS: dict[str, type[ReadsTarget]] = {
    "wrong value": WrongValue,
    "beside targets": BesideTargets,
    "unverified": Unverified,
}
"""Broken readers; each has to be reported as an exception of the target's own."""


def found(
    maker: Callable[[str], Target], kind: str, directory: Path, *, inputs: int = 12
) -> list[str]:
    """The kind of the first finding, and what replaying it finds."""
    makers: dict[str, Callable[[str], Target]] = {PLANTED: maker}
    deadline_s = 1.0 if kind == "hang" else 60.0  # a busy machine must not make a hang of it
    driver = fuzz.Driver(findings=directory, deadline_s=deadline_s, most_findings=1, makers=makers)
    (path, *_) = driver.run(PLANTED, 1, inputs).findings
    again = driver.replay(path)
    return [json.loads(path.read_bytes().split(b"\n")[0])["kind"], again.kind if again else ""]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        os.chdir(root)
        seen = {
            name: found(partial(Planted, bug), kind, Path(root) / name)
            for name, (bug, kind) in BUGS.items()
        }
        for name, reader in READERS.items():
            seen[name] = found(reader, "exception", Path(root) / name, inputs=1000)
        print(json.dumps(seen))
