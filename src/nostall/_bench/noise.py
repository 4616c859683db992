"""A noisy neighbour, run as a script: it writes files with fsync and computes until stopped.

Usage: ``noise.py DIRECTORY``. The end of standard input ends it, so it cannot outlive the
benchmark.
"""

from __future__ import annotations

import os
import sys
import threading

_FILE_NBYTES = 64 << 20


def write_files(directory: str, stop: threading.Event) -> None:
    """Write and fsync a file over and over; the last one is removed."""
    path = os.path.join(directory, f"noise-{os.getpid()}")
    piece = os.urandom(1 << 20)
    while not stop.is_set():
        with open(path, "wb") as stream:
            stream.writelines(piece for _ in range(_FILE_NBYTES // len(piece)))
            stream.flush()
            os.fsync(stream.fileno())
    os.unlink(path)


def compute(stop: threading.Event) -> None:
    """Keep one core busy."""
    number = 1
    while not stop.is_set():
        for _ in range(10_000):
            number = number * 6364136223846793005 % (1 << 64)


def main(directory: str) -> None:
    """Run both until standard input ends."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=write_files, args=(directory, stop)),
        threading.Thread(target=compute, args=(stop,)),
    ]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1])
