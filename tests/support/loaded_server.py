"""A process that has loaded torch, and forks for each program: see ``loaded.py``."""

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
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

# What programs, steps of optimizers, sharded models and torchrun import, and what counts coverage.
MODULES = (
    *("torch.distributed.checkpoint", "torch._dynamo", "torch.distributed.fsdp"),
    *("torch.distributed.launcher.api", "coverage"),
)

TESTS = str(Path(__file__).parents[1])
"""Where programs find ``support`` and ``programs``."""


class Request(NamedTuple):
    """A client's request to run a program."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str


@dataclass
class Program:
    """A fork that has become a program."""

    pid: int
    ended: int
    """A descriptor that is ready when it has ended."""
    channel: socket.socket
    """To the client in its place."""
    has_client: bool = True

    @property
    def watched(self) -> list[Any]:
        return [self.ended, self.channel] if self.has_client else [self.ended]

    def pass_on(self) -> None:
        """Pass on a signal of the client, or end the program if the client has been killed."""
        number = b""
        with suppress(ConnectionError):
            number = self.channel.recv(1)
        self.has_client = bool(number)
        os.kill(self.pid, number[0] if number else signal.SIGKILL)

    def report_end(self) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with suppress(OSError):
            self.channel.sendall(str(status).encode())
        self.close()

    def close(self) -> None:
        """Let go of it, here or in the fork of another program."""
        self.channel.close()
        os.close(self.ended)


def await_request(address: str, owner: str, *more_modules: str) -> Request:
    """Return each program's request in a fork; end with the owner, or if the address is taken."""
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
        sources = [listening, owner_ended, *(each for one in running for each in one.watched)]
        ready, _, _ = select.select(sources, [], [])
        if owner_ended in ready:
            for program in running:
                os.kill(program.pid, signal.SIGKILL)
            os._exit(0)
        for program in [*running]:
            if program.ended in ready:
                running.remove(program)
                program.report_end()
            elif program.channel in ready:
                program.pass_on()
        if listening in ready and (received := receive(listening.accept()[0])):
            request, streams, channel = received
            pid = os.fork()
            if pid == 0:
                listening.close()
                channel.close()
                os.close(owner_ended)
                for program in running:
                    program.close()
                os.setsid()
                for number, descriptor in enumerate(streams):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                return request
            for descriptor in streams:
                os.close(descriptor)
            running.append(Program(pid, os.pidfd_open(pid), channel))


def receive(channel: socket.socket) -> tuple[Request, list[int], socket.socket] | None:
    """A client's request, streams and channel; ``None`` if it was killed or is another user's."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    streams: list[int] = []
    if int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid():
        head, streams, _, _ = socket.recv_fds(channel, 8, 3)
        nbytes = int.from_bytes(head, "little")
        # No byte more: signals follow.
        content = channel.recv(nbytes, socket.MSG_WAITALL)
        if head and len(content) == nbytes:
            return Request(*marshal.loads(content)), streams, channel
    for descriptor in (*streams, channel.detach()):
        os.close(descriptor)
    return None


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
