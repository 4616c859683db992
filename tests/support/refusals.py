"""System calls that are refused, as by the profile of a container, and an empty ``/proc``.

For a process of its own: neither can be undone.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

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
    """Put an empty directory over ``/proc``, for this process and those that it starts.

    Raises:
        PermissionError: Only root may.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS))
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(libc.mount(b"none", b"/proc", b"tmpfs", 0, None))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
