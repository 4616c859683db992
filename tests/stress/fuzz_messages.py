"""What trainer and writer process say to each other, from either side."""

from __future__ import annotations

import gc
import json
import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from random import Random

from nostall._model.jobs import Failure, RankReport
from nostall._storage.posix import close_all
from nostall._storage.posix_files import PosixFiles
from nostall._writer.child import _Waiting
from nostall._writer.chunks import _FileTask
from nostall._writer.faults import Faults
from nostall._writer.framing import Message, Receiver, encode
from nostall._writer.handle import WriterProcess
from nostall._writer.main import _Writer
from nostall._writer.messages import created_to_message, progress_to_message
from nostall._writer.position import Position
from nostall._writer.seals import plan_chunks
from nostall.errors import ProtocolError
from stress.fuzz_inputs import NUMBERS, VALUES, changed_bytes, changed_json
from support.messages import example_messages, example_table

_MOST_SENT_NBYTES = 1 << 17


class _Trainer(WriterProcess):
    """The trainer's end, with one job unanswered and no process at the other end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: Future[None] = Future()
        self._on_progress = lambda _job, _nbytes: None
        self._created = {"j/0/0": lambda _name: None}
        future: Future[RankReport] = Future()
        self._waiting = {"j": _Waiting(future=future, on_death=_nobody_dies, holds=None)}


def _nobody_dies(failure: Failure) -> RankReport:
    raise AssertionError(failure)


class MessagesTarget:
    """What arrives on a socket: at a writer, whose jobs are not done, or at a trainer."""

    def __init__(self, root: str) -> None:
        self._block = os.memfd_create("block")
        os.ftruncate(self._block, 1 << 16)
        self._pair: tuple[socket.socket, socket.socket] | None = None

    def make(self, chance: Random) -> bytes:
        side = chance.randrange(2)
        stream = b"".join(_framed(side, chance) for _ in range(chance.choice((1, 1, 2, 3))))
        if chance.random() < 0.15:
            stream = changed_bytes(stream, chance, (stream,))
        return bytes([side, chance.choice((0, 1, 1, 1, 2, 4, 9))]) + stream[:_MOST_SENT_NBYTES]

    def prepare(self, content: bytes) -> None:
        ours, theirs = self._pair = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _MOST_SENT_NBYTES)
        ours.setblocking(False)
        socket.send_fds(ours, [content[2:14] or b"n"], [self._block] * content[1])
        ours.sendall(content[14:])
        ours.shutdown(socket.SHUT_WR)
        theirs.settimeout(5)

    def run(self, content: bytes) -> str:
        assert self._pair is not None
        ours, theirs = self._pair
        with ours, theirs:
            before = os.listdir("/proc/self/fd")
            outcome = _at_writer(theirs) if content[0] == 0 else _at_trainer(theirs)
            if sys.version_info >= (3, 13):
                gc.collect()  # contextlib leaves errors there in cycles, with the writer's frames
            assert os.listdir("/proc/self/fd") == before, "descriptors are left"
        return outcome


def _at_writer(sock: socket.socket) -> str:
    writer = _Writer(sock)
    # As if these had come before.
    writer._blocks[1] = mmap.mmap(-1, 1 << 16)
    writer._seals[3] = (example_table(),)
    outcomes = _hear(Receiver(sock), writer.take)
    while not writer._jobs.empty():
        job, _ = writer._jobs.get()
        try:
            images = writer._images(job)
            for image in job.files:
                at = Position(
                    job.directory,
                    cancelled=threading.Event(),
                    on_progress=lambda _: None,
                    on_created=lambda _: None,
                )
                content = images[image.name]
                files, checksums = PosixFiles(job.directory), threading.Semaphore()
                _FileTask(job, files, image, content, Faults(()), at, plan_chunks, checksums)
        except ProtocolError:
            outcomes.append("job in no memory")
        except (IndexError, ValueError):  # which the writer answers as a failed job
            outcomes.append("job with impossible seals")
        else:
            outcomes.append("job")
    return f"writer: {', '.join(dict.fromkeys(outcomes))}"


def _at_trainer(sock: socket.socket) -> str:
    trainer = _Trainer()
    outcomes = _hear(Receiver(sock, descriptors=0), lambda message, _: trainer._take(message))
    return f"trainer: {', '.join(dict.fromkeys(outcomes))}"


def _hear(receiver: Receiver, take: Callable[[Message, list[int]], None]) -> list[str]:
    outcomes = []
    try:
        while (received := receiver.receive()) is not None:
            take(*received)
            outcomes.append("taken")
    except ProtocolError as error:
        return [*outcomes, f"ProtocolError, {error.message.split(':')[0][:24]}"]
    finally:
        for _, descriptors in receiver._descriptors:
            close_all(descriptors)
    return [*outcomes, "end"]


@lru_cache(maxsize=1)
def _good_messages() -> tuple[list[Message], list[Message]]:
    """What a writer process gets, and what a trainer does."""
    job, written, failed, seals = example_messages()
    to_writer: list[Message] = [
        *(job, job, seals),
        {"type": "map", "block": 1, "nbytes": 1 << 16, "descriptors": 1},
        *({"type": "unmap", "block": 1}, {"type": "forget_seals", "number": 3}),
        {"type": "cancel", "job": "j"},
    ]
    progress = progress_to_message("j/0/0", 4096)
    created = created_to_message("j/0/0", "__0_0.distcp")
    return to_writer, [written, written, failed, progress, created, {"type": "ready", "pid": 1}]


def _framed(side: int, chance: Random) -> bytes:
    """One message, its JSON changed or not, its header true or not."""
    plain = chance.choice(_good_messages()[side])
    if chance.random() < 0.2:
        plain = {**plain, "descriptors": chance.choice(VALUES)}
    text = json.dumps(plain) if chance.random() < 0.2 else changed_json(plain, chance)
    body = text.encode("utf-8", "surrogatepass")
    header = encode({})[:4] + struct.pack("<Q", len(body))
    if chance.random() < 0.05:
        announced = chance.choice(NUMBERS) & (2**64 - 1)
        header = encode({})[:4] + struct.pack("<Q", announced)
    return header + body
