"""In place of a program that runs elsewhere: ``loaded_client.py ADDRESS[,ADDRESS] ARGUMENT...``.

Imports as little as possible, as it starts some thousand times in a test run: ``socket``,
``signal``, ``json`` and ``contextlib`` would triple its time.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # has no stub
import _socket
import marshal
import os
import sys

channel = _socket.socket(_socket.AF_UNIX)
addresses = sys.argv[1].split(",")
channel.connect("\0" + addresses[int(os.environ.get("RANK", "0")) % len(addresses)])


def pass_on(number: int, _: object) -> None:
    """Send a signal to the program, unless it has ended."""
    try:  # noqa: SIM105  # contextlib is not imported
        channel.sendall(bytes([number]))
    except ConnectionError:
        pass


content = marshal.dumps((sys.argv[2:], dict(os.environ), os.getcwd()))
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
head = len(content).to_bytes(8, "little")
channel.sendmsg([head], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
channel.sendall(content)
for passed in (_signal.SIGTERM, _signal.SIGINT):
    _signal.signal(passed, pass_on)
answer = b""
try:
    while part := channel.recv(16):
        answer += part
except ConnectionError:  # a signal came when the program had ended
    pass
if not answer:
    sys.exit(f"no status of {sys.argv[2:]}: its server is gone, or a signal came too late")
status = int(answer)
if status < 0:
    if status != -_signal.SIGKILL:  # which has no other
        _signal.signal(-status, _signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
