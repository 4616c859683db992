"""Trainers in unusual surroundings, one process each, that tell a test what comes of a save.

python tests/programs/surroundings.py FUNCTION [ARGUMENT]...
"""

from __future__ import annotations

import ctypes
import errno
import json
import multiprocessing
import os
import platform
import struct
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._memory.arena import Block, available_nbytes
from nostall.errors import ReservationError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from support.faults import Hold, inject

MIB = 1 << 20
_NUMBERS = {
    "x86_64": {"memfd_create": 319, "pidfd_open": 434, "fallocate": 285, "socketpair": 53},
    "aarch64": {"memfd_create": 279, "pidfd_open": 434, "fallocate": 47, "socketpair": 199},
}
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_MODE_FILTER = 2
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18


def refuse(call: str, number: int) -> None:
    """Let the system refuse a call with this errno, in this process and those that it starts."""
    steps = [
        (_LOAD, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 1, _NUMBERS[platform.machine()][call]),
        (_RETURN, 0, 0, _ERRNO | number),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, program))


def hide_proc() -> None:
    """Put an empty directory over ``/proc`` for this process and its children; only root may."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS))
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(libc.mount(b"none", b"/proc", b"tmpfs", 0, None))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def state() -> dict[str, Any]:
    """Not random: where torch does not know the processor, those would be others."""
    return {"weight": torch.arange(3000.0), "nested": {"name": "state"}}


def outcome(path: str) -> dict[str, Any]:
    """How an asynchronous save failed; nothing if it did not."""
    writer = FileSystemWriterAsync(path)
    try:
        future: Any = dcp.async_save(state(), storage_writer=writer, no_dist=True)
        future.result(60)
    except BaseException as error:  # CheckpointException is no Exception
        failed = error.failures[0][0] if isinstance(error, CheckpointException) else error
        return {"kind": type(failed).__name__, "text": str(failed)}
    return {}


def saves(path: str, lack: str = "") -> None:
    """Save where something is missing, or the system refuses a call."""
    match lack:
        case "os.memfd_create":
            del os.memfd_create, os.MFD_CLOEXEC
        case "/proc":
            hide_proc()
        case call if call:
            refuse(call, errno.EPERM)
    say(**outcome(path))


def saves_as(path: str, executable: str, kind: str, interpreter: str = "") -> None:
    """Save in an application whose ``sys.executable`` is a program."""
    with Path(os.environ["STARTS"]).open("a") as starts:
        starts.write("started\n")
    sys.executable = executable
    if kind == "frozen":
        sys.frozen = True  # type: ignore[attr-defined]  # set by tools that freeze programs
    multiprocessing.set_executable(interpreter or executable)
    say(**outcome(path))


def is_suspended(path: str) -> None:
    """Save while a test suspends this process for longer than the deadline."""
    nostall.configure(EngineOptions(save_timeout_s=1.0))
    nostall.warmup()
    with Hold("chunk") as hold, inject(hold.fault):
        future: Any = dcp.async_save(
            state(), storage_writer=FileSystemWriterAsync(path), no_dist=True
        )
        hold.wait_reached()
        say(trainer=os.getpid(), go=hold.fault.plain["go"])
        failed = future.exception(60)
    say(failed=None if failed is None else str(failed))


def reserves(group: str, nbytes: str) -> None:
    """Reserve memory in a limited group whenever told to, and free it when told again."""
    Path(group).write_text(str(os.getpid()))
    say(available=available_nbytes())
    while sys.stdin.readline():
        block = None
        try:
            block = Block(int(nbytes))
            say(reserved=block.nbytes)
        except ReservationError as error:
            say(error=str(error))
        sys.stdin.readline()
        del block
        say()


def reserves_all_but(group: str, nbytes: str) -> None:
    """Reserve memory up to a distance from the limit of a group."""
    Path(group).write_text(str(os.getpid()))
    try:
        Block(available_nbytes() - int(nbytes))
    except ReservationError as error:
        say(error=str(error))
    else:
        say()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
