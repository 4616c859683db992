"""Programs of tests in processes that have torch already: ``loaded.python()``.

Importing torch takes seconds, longer than most programs run. One process does only that; two more
do it for ranks. Each program runs in a fork. It imports nostall itself, except on ranks: their two
processes have imported it already, unless coverage is measured. A small client in its place passes
on arguments, environment, standard streams, SIGTERM and SIGINT, ends as the program ends, and takes
it along when it is killed.

Not for programs that measure memory, or whose environment torch reads when it is imported.
"""

from __future__ import annotations

import atexit
import os
import re
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
_LEAKS_OF_TRITON = re.compile(r"nanobind: leaked .*?refleaks\.html\n?", re.DOTALL)
_OF_RANKS = ("nostall.core", "nostall.filesystem_async", "nostall.state_dict_saver")
"""Modules that nearly all ranks import, which takes 0.1 s."""


def python(*, ranks: bool = False) -> tuple[str, ...]:
    """A command to use instead of ``sys.executable``; takes ``-c``, ``-m``, ``-u`` and ``-W``.

    For ``ranks`` of torchrun, strings have other hashes on odd ranks than on even ones, as in
    interpreters of their own, so that sets come in another order.
    """
    addresses = [_address("0", *_OF_RANKS), _address("1", *_OF_RANKS)] if ranks else [_address("")]
    return sys.executable, "-I", "-S", str(CLIENT), ",".join(addresses)


def errors_of(program: subprocess.CompletedProcess[str]) -> str:
    """Its standard error, but for what triton, which comes with CUDA, says when a fork ends."""
    return _LEAKS_OF_TRITON.sub("", program.stderr)


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
def _address(name: str, *modules: str) -> str:
    """The address of a process that loads torch, and ``modules``; a test run's workers share it.

    No modules under coverage, which would miss what runs during the import.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    owner = os.getpid() if run is None else os.getppid()
    address = f"loaded-{owner}-{run or os.urandom(8).hex()}-{name}"
    modules = () if "COVERAGE_PROCESS_CONFIG" in os.environ else modules
    # Each program measures its own coverage; torch loads faster without.
    environment = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    subprocess.run(
        [sys.executable, "-W", "ignore", str(SERVER), address, str(owner), *modules],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**environment, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        check=True,
    )
    return address
