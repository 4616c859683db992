"""The process that has loaded torch, and forks for each program: see ``loaded.py``."""

from __future__ import annotations

import errno
import faulthandler
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

# What programs, steps of optimizers, sharded models and torchrun import, and what counts coverage.
MODULES = (
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "coverage",
)

TESTS = str(Path(__file__).parents[1])
"""Where programs find ``support`` and ``programs``."""


def await_request(address: str, owner: str, *more_modules: str) -> dict[str, Any]:
    """Return in a fork for each program, with what it is to run.

    Args:
        address: Where clients connect. If it is taken, another process serves it already.
        owner: Id of the process with which this one ends.
        *more_modules: What to load besides ``MODULES``.
    """
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            listening.bind("\0" + address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            sys.exit()
        listening.listen()
        if os.fork() > 0:  # clients can connect
            os._exit(0)
        owner_ended = os.pidfd_open(int(owner))
        for module in (*MODULES, *more_modules):
            if importlib.util.find_spec(module):
                importlib.import_module(module)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        gc.collect()
        gc.freeze()
        while True:
            sources: list[Any] = [listening, owner_ended]
            ready, _, _ = select.select(sources, [], [])
            if owner_ended in ready:
                os._exit(0)
            channel, _ = listening.accept()
            if is_this_users(channel) and os.fork() == 0:
                break
            channel.close()
    os.close(owner_ended)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return start_and_watch(channel)


def is_this_users(channel: socket.socket) -> bool:
    """Whether the same user is at the other end; such an address is open to everyone."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()


def start_and_watch(channel: socket.socket) -> dict[str, Any]:
    """Return in a fork that becomes the program; tell the client how it has ended."""
    head, streams, _, _ = socket.recv_fds(channel, 8, 3)
    with channel.makefile("rb") as stream:
        request: dict[str, Any] = json.loads(stream.read(int.from_bytes(head, "little")))
    pid = os.fork()
    if pid == 0:
        channel.close()
        os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        return request
    for descriptor in streams:
        os.close(descriptor)
    program: Any = os.pidfd_open(pid)
    while program not in select.select([program, channel], [], [])[0]:
        (number,) = channel.recv(1) or (signal.SIGKILL,)  # the client has been killed
        os.kill(pid, number)
        if number == signal.SIGKILL:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        channel.sendall(str(status).encode())
    os._exit(0)  # which closes the channel: the client ends after this process


def become(directory: str, environment: dict[str, str]) -> None:
    """Take what a new interpreter would have, or read from its environment."""
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = environment.get("LOADED_EXECUTABLE", sys.executable)  # see loaded.EXECUTABLE
    if "PYTHONFAULTHANDLER" in environment:
        faulthandler.enable()
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [TESTS, *(path for path in paths if path and path not in sys.path)]
    if "COVERAGE_PROCESS_CONFIG" in environment:
        sys.modules["coverage"].process_startup()


def run(arguments: list[str]) -> None:
    """Run what the command line says as Python does, up to the end of ``__main__``."""
    warnings.resetwarnings()
    while arguments[0] in ("-u", "-W"):
        if arguments.pop(0) == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # a text stream
        else:
            warnings._setoption(arguments.pop(0))  # type: ignore[attr-defined]  # as Python does
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[0] = ""
        code = compile(arguments[1], "<string>", "exec")
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        main.__file__ = sys.argv[0]
        code = compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec")
    exec(code, vars(main))


if __name__ == "__main__":
    wanted = await_request(*sys.argv[1:])
    become(wanted["directory"], wanted["environment"])
    run(wanted["arguments"])
