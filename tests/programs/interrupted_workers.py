"""Ctrl-C at the entry of the method that ends threads: none of them is told to end."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from nostall._read.inflight import Workers


def look(frame: FrameType, event: str, _argument: object) -> None:
    if event == "call" and frame.f_code is Workers.__exit__.__code__:
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)


signal.signal(signal.SIGINT, signal.default_int_handler)
sys.setprofile(look)
try:
    with Workers(2) as workers:
        workers.wait(workers.submit(lambda: None))
except KeyboardInterrupt:
    sys.stdout.write("interrupted\n")
