"""Messages between trainer and background processes arrive as they were sent."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from nostall._model.jobs import Failure, FileImage, SealTable, WriteJob
from nostall._writer.main import _Writer
from nostall._writer.messages import (
    MAX_MESSAGE_NBYTES,
    Answer,
    Call,
    Cancel,
    MapBlock,
    Message,
    Ready,
    Receiver,
    Wrote,
    send,
)
from nostall._writer.trainer_side import ChildProcess
from nostall.errors import ProtocolError

Wire = tuple[socket.socket, socket.socket]
NO_UTF8 = os.fsdecode(b"/d\xff\xfe")
IMAGE = FileImage(
    name="__0_0.distcp",
    nbytes=0,
    block=1,
    block_offset=4096,
    seals=SealTable(templates=((0, 9, None),), blob_offsets=(0,), template_of_slot=(0,)),
)
JOB = WriteJob(
    job="j/0/0",
    rank=3,
    directory="/nowhere",
    files=(IMAGE,),
    sync_files=True,
    io_threads=2,
    chunk_nbytes=4096,
    direct=True,
)


@pytest.fixture
def wire() -> Iterator[Wire]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(30)
    with ours, theirs:
        yield ours, theirs


MAGIC = b"nst2"


def header(magic: bytes, nbytes: int, descriptors: int = 0) -> bytes:
    return struct.pack("<4sIQ", magic, descriptors, nbytes)


def encode(message: Message, descriptors: int = 0) -> bytes:
    """The bytes that are sent for a message, without its descriptors."""
    body = pickle.dumps(message)
    return header(MAGIC, len(body), descriptors) + body


GARBAGE = {
    "foreign magic": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(64),
    "a longer message than any": header(MAGIC, MAX_MESSAGE_NBYTES + 1),
    "an absurd length": header(MAGIC, 2**64 - 1),
    "no pickle": header(MAGIC, 5) + b"hello",
    "nothing": header(MAGIC, 0),
    "half a pickle": header(MAGIC, 10) + pickle.dumps(JOB)[:10],
    "a class that is not there": header(MAGIC, 18) + b"cnostall\nNothing\n.",
    "a descriptor that did not come": encode(Call("1"), 1),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_what_is_no_message_is_a_protocol_error(kind: str, wire: Wire) -> None:
    """Refused as soon as it is known, without waiting for the length it claims."""
    ours, theirs = wire
    ours.sendall(GARBAGE[kind])
    with pytest.raises(ProtocolError):
        Receiver(theirs).receive()


def test_a_message_that_a_process_does_not_expect_is_a_protocol_error(wire: Wire) -> None:
    """A writer process that is told what another process should be told ends."""
    with pytest.raises(ProtocolError, match="Call"):
        _Writer(wire[0]).take(Call("1"), [])


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 62])
def test_a_job_in_memory_that_is_not_there_fails(wire: Wire, nbytes: int) -> None:
    """Also an empty file's, and before room is made for as many chunks as it claims to have."""
    writer = _Writer(wire[0])
    with pytest.raises(ProtocolError, match="outside of the memory"):
        writer._images(JOB._replace(files=(IMAGE._replace(nbytes=nbytes),)))


def test_a_message_in_pieces_is_put_together(wire: Wire) -> None:
    """A timeout within a message loses none of it, nor are names that are no UTF-8 changed."""
    ours, theirs = wire
    theirs.settimeout(0.001)
    receiver = Receiver(theirs)
    raw = encode(Cancel(NO_UTF8))
    for sent in range(1, len(raw)):
        ours.sendall(raw[:sent])
        with pytest.raises(TimeoutError):
            receiver.receive()
        ours.sendall(raw[sent:])
        assert receiver.receive() == (Cancel(NO_UTF8), [])


@pytest.mark.parametrize("rest", [b"", encode(Ready())[:-3]], ids=["between", "within"])
def test_the_end_of_the_stream_is_no_message(rest: bytes, wire: Wire) -> None:
    """A peer that is gone, even in the middle of a message, is ``None``, not an error."""
    ours, theirs = wire
    ours.sendall(rest)
    ours.close()
    assert Receiver(theirs).receive() is None


def test_descriptors_arrive_with_their_message(wire: Wire) -> None:
    """Each of several messages in a row comes with its own descriptors, in order."""
    ours, theirs = wire
    counts = [1, 0, 1, 1, 0, 0, 1]
    sent: list[int] = []
    for number, count in enumerate(counts):
        descriptors = tuple(os.memfd_create(f"test-{number}-{n}") for n in range(count))
        for n, fd in enumerate(descriptors):
            os.write(fd, f"{number}.{n}".encode())
        send(ours, MapBlock(number, 1), descriptors)
        sent += descriptors
    receiver = Receiver(theirs)
    for number, count in enumerate(counts):
        received = receiver.receive()
        assert received is not None
        message, descriptors_here = received
        assert message == MapBlock(number, 1)
        contents = [os.pread(fd, 10, 0).decode() for fd in descriptors_here]
        assert contents == [f"{number}.{n}" for n in range(count)]
        sent += descriptors_here
    for fd in sent:
        os.close(fd)


PEER = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[2]))
sock.recv(1)
sock.sendall(bytes.fromhex(sys.argv[1]))
sock.recv(1 << 16)
sock.recv(1)
"""


class Peer(ChildProcess[Failure | str]):
    """A process that answers the first request with given bytes, whatever it was."""

    kind = "peer"

    def __init__(self, said: bytes) -> None:
        super().__init__(["-c", PEER, said.hex()], cpu_priority=None, io_priority=None)

    def ask(self) -> Failure | str:
        return self._ask("mine", lambda failure: failure, [(Cancel("mine"), ())]).result(60)


def test_an_answer_that_nobody_waits_for_is_ignored() -> None:
    """A save that was aborted may still be answered; the others are not disturbed."""
    peer = Peer(encode(Answer("aborted", "late")) + encode(Answer("mine", "done")))
    assert peer.ask() == "done"
    peer.close()


@pytest.mark.parametrize(
    "said",
    [b"Traceback (most recent call last):", encode(Call("mine")), encode(Wrote("mine", 1))],
    ids=["no message", "a message to a worker", "an event of another process"],
)
def test_a_process_that_says_what_it_should_not_is_killed(said: bytes) -> None:
    """Whoever waits for it gets a typed failure."""
    peer = Peer(said)
    failure = peer.ask()
    assert isinstance(failure, Failure)
    assert failure.kind == "ProtocolError"
    assert not peer.alive


def test_a_confused_process_of_another_user_fails_its_requests() -> None:
    """It cannot be killed, and the socket may be closed already; nobody waits for ever."""
    with (
        patch("subprocess.Popen.kill", side_effect=PermissionError),
        patch("socket.socket.shutdown", side_effect=OSError),
        patch(f"{__name__}.PEER", PEER.removesuffix("sock.recv(1)\n")),  # ends by itself
    ):
        failure = Peer(b"Traceback (most recent call last):").ask()
    assert isinstance(failure, Failure)
    assert failure.kind == "ProtocolError"
