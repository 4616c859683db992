"""The process that has loaded torch, and forks for each program: see ``loaded.py``."""

from __future__ import annotations

import errno
import faulthandler
import gc
import importlib.util
import marshal
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
from typing import Any, NamedTuple

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


class Request(NamedTuple):
    """What a client sends."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str


class Program(NamedTuple):
    """A fork that has become a program."""

    pid: int
    ended: int
    """A descriptor that is ready when it has ended."""
    channel: socket.socket
    """To the client in its place."""


def await_request(address: str, owner: str, *more_modules: str) -> Request:
    """Return in a fork for each program, with what it is to run.

    Args:
        address: Where clients connect. If it is taken, another process serves it already.
        owner: Id of the process with which this one ends.
        *more_modules: What to load besides ``MODULES``.
    """
    listening = socket.socket(socket.AF_UNIX)
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
    gc.collect()
    gc.freeze()
    running: list[Program] = []
    while True:
        told = [each for program in running for each in (program.ended, program.channel)]
        sources: list[Any] = [listening, owner_ended, *told]
        ready, _, _ = select.select(sources, [], [])
        if owner_ended in ready:
            for program in running:
                os.kill(program.pid, signal.SIGKILL)
            os._exit(0)
        for program in [*running]:
            if program.ended in ready:
                running.remove(program)
                report_end(program)
            elif program.channel in ready:
                pass_on(program)
        if listening not in ready:
            continue
        channel, _ = listening.accept()
        head, streams, _, _ = socket.recv_fds(channel, 8, 3)
        if not (is_this_users(channel) and head):
            channel.close()
            continue
        with channel.makefile("rb") as stream:
            request = Request(*marshal.loads(stream.read(int.from_bytes(head, "little"))))
        pid = os.fork()
        if pid == 0:
            for each in (listening, channel, *(program.channel for program in running)):
                each.close()
            for number in (owner_ended, *(program.ended for program in running)):
                os.close(number)
            os.setsid()
        for number, descriptor in enumerate(streams):
            if pid == 0:
                os.dup2(descriptor, number)
            os.close(descriptor)
        if pid == 0:
            return request
        running.append(Program(pid, os.pidfd_open(pid), channel))


def is_this_users(channel: socket.socket) -> bool:
    """Whether the same user is at the other end; such an address is open to everyone."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()


def pass_on(program: Program) -> None:
    """Pass on a signal of the client, or end the program if the client has been killed."""
    number = b""
    with suppress(ConnectionError):
        number = program.channel.recv(1)
    os.kill(program.pid, number[0] if number else signal.SIGKILL)


def report_end(program: Program) -> None:
    """Tell the client how a program has ended."""
    status = os.waitstatus_to_exitcode(os.waitpid(program.pid, 0)[1])
    with suppress(OSError):
        program.channel.sendall(str(status).encode())
    program.channel.close()
    os.close(program.ended)


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
    become(wanted.directory, wanted.environment)
    run(wanted.arguments)
