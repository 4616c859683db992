"""Trainers in processes of their own, which a test can hear and tell to go on."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import loaded
from support.ranks import TESTS

DEADLINE_S = 60.0
PROGRAM = TESTS / "programs" / "surroundings.py"


class Program:
    """A function of ``programs.surroundings``, or another one, in a process of its own."""

    def __init__(
        self,
        *arguments: str | bytes,
        program: Path = PROGRAM,
        python: tuple[str, ...] = (),
        **environment: str,
    ) -> None:
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [*(python or loaded.python()), "-W", "ignore", str(program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        )

    def hear(self) -> Any:
        """The next thing that it says."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], DEADLINE_S)[0]
        return json.loads(self.process.stdout.readline())

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextmanager
def running(*arguments: str | bytes, **options: Any) -> Iterator[Program]:
    program = Program(*arguments, **options)
    try:
        yield program
    finally:
        for stream in (program.process.stdin, program.process.stdout):
            assert stream is not None
            stream.close()
        program.process.kill()
        program.process.wait(DEADLINE_S)


def told(*arguments: str | bytes, **options: Any) -> Any:
    with running(*arguments, **options) as program:
        return program.hear()
