"""Programs of tests in processes that have torch already: ``loaded.python()``.

Importing torch takes seconds, longer than most programs run. One process does it, and nothing else,
or two, where there are ranks. Each program runs in a fork of it, and imports nostall itself. A
small client in its place passes on arguments, environment, standard streams, SIGTERM and SIGINT,
ends as the program ends, and takes it along when it is killed.

Not for programs that measure memory, or whose environment torch reads when it is imported.
"""

from __future__ import annotations

import atexit
import os
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
SERVER = HERE / "loaded_server.py"
CLIENT = HERE / "loaded_client.py"
EXECUTABLE = "LOADED_EXECUTABLE"


def python(*, ranks: bool = False) -> tuple[str, ...]:
    """What to write instead of ``sys.executable``; takes ``-c``, ``-m``, ``-u`` and ``-W``.

    Args:
        ranks: Whether torchrun starts it. Strings then have other hashes on odd ranks than on even
            ones, as in interpreters of their own, so that sets come in another order.
    """
    addresses = [_address(number) for number in range(1 + ranks)]
    return sys.executable, "-I", "-S", str(CLIENT), ",".join(addresses)


@cache
def executable() -> str:
    """A program that takes the place of ``sys.executable`` for what a program starts itself.

    A program in a fork has it as its ``sys.executable`` if ``EXECUTABLE`` in its environment says
    so. Isolated interpreters, such as the writer process, are started as always.
    """
    real, own = shlex.quote(sys.executable), shlex.join(python())
    with tempfile.NamedTemporaryFile("w", prefix="python-", delete=False) as file:
        atexit.register(os.unlink, file.name)
        file.write(f'#!/bin/sh\n[ "$1" = -I ] && exec {real} "$@"\nexec {own} "$@"\n')
    os.chmod(file.name, 0o700)
    return file.name


@cache
def _address(number: int) -> str:
    """The address of a process that has loaded torch, which ends with this one."""
    address = f"loaded-{os.getpid()}-{number}-{os.urandom(4).hex()}"
    # Each program measures its own coverage; torch loads faster without.
    environment = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(SERVER), address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environment, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    atexit.register(process.wait)
    atexit.register(process.stdin.close)
    with process.stdout:
        assert process.stdout.readline() == b"ready\n"
    return address
