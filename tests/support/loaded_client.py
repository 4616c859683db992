"""In place of a program that runs elsewhere: ``loaded_client.py ADDRESS[,ADDRESS] ARGUMENT...``."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

with socket.socket(socket.AF_UNIX) as channel:
    addresses = sys.argv[1].split(",")
    channel.connect("\0" + addresses[int(os.environ.get("RANK", "0")) % len(addresses)])

    def pass_on(number: int, _: Any) -> None:
        channel.sendall(bytes([number]))

    request = {"arguments": sys.argv[2:], "environment": dict(os.environ), "directory": os.getcwd()}
    content = json.dumps(request).encode()
    socket.send_fds(channel, [len(content).to_bytes(8, "little")], [0, 1, 2])
    channel.sendall(content)
    for passed in (signal.SIGTERM, signal.SIGINT):
        signal.signal(passed, pass_on)
    with channel.makefile() as answer:
        status = int(answer.read())
if status < 0:
    with suppress(OSError):  # SIGKILL has no other
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
