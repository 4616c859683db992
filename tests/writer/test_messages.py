"""Messages between trainer and writer arrive as they were sent, or are a typed error."""

from __future__ import annotations

import copy
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nostall._model.jobs import (
    Failure,
    FileImage,
    FileReceipt,
    RankFailed,
    RankReport,
    RankWritten,
    Seal,
    SealTable,
    WriteJob,
    WriteWork,
)
from nostall._model.names import is_shard_name
from nostall._writer.framing import MAX_MESSAGE_NBYTES, Message, Receiver, encode, send
from nostall._writer.handle import SEALS_KEPT, SealsSent
from nostall._writer.main import _Writer
from nostall._writer.messages import (
    UnknownSealsError,
    job_from_message,
    job_to_message,
    report_from_message,
    report_to_message,
    seals_from_message,
    seals_to_message,
)
from nostall.errors import ProtocolError
from support.messages import example_messages, example_table, over_the_wire

TEXT = st.text(max_size=20)
NUMBERS = st.integers(0, 2**40)
CRCS = st.integers(0, 2**32 - 1)
RANKS = st.integers(0, 5000)
SECONDS = st.floats(allow_nan=False)
PATHS = TEXT | st.binary(max_size=8).map(os.fsdecode)


def tuples(of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=3).map(tuple)


def built(kind: Any, **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values with every field drawn, by its type but for special ones; none keeps its default."""
    by_type: dict[str, Any] = dict.fromkeys(kind._fields, ...)
    return st.builds(kind, **{**by_type, **special})


FAILURES = built(Failure)
WORK = built(
    WriteWork,
    **dict.fromkeys(("checksum_s", "write_s", "fsync_s"), SECONDS),
    spans=tuples(st.tuples(TEXT, NUMBERS, SECONDS, SECONDS)),
)
RECEIPTS = built(
    FileReceipt,
    name=TEXT.filter(is_shard_name),
    nbytes=NUMBERS,
    crc32_of_file=st.none() | CRCS,
    extents=st.none() | tuples(st.tuples(NUMBERS, NUMBERS)),
    started_s=SECONDS,
    finished_s=SECONDS,
    work=WORK,
)
REPORTS = built(RankFailed, rank=RANKS, failure=FAILURES) | built(
    RankWritten, rank=RANKS, receipts=tuples(RECEIPTS)
)
SEALS = built(
    Seal,
    payload_crc_at=st.tuples(NUMBERS, NUMBERS),
    hash_before=st.integers(0, 2**64 - 1),
    crcs_after=tuples(CRCS),
    id_at=NUMBERS,
    id_names=st.text("0123456789", min_size=20, max_size=20).map(str.encode),
    id_crc_at=st.tuples(NUMBERS, NUMBERS),
)
SEAL_TABLES = built(
    SealTable,
    templates=tuples(st.tuples(NUMBERS, NUMBERS, st.none() | SEALS)),
    blob_offsets=tuples(NUMBERS),
    template_of_slot=tuples(st.integers(0, 3)),
)
IMAGES = built(
    FileImage, name=PATHS, nbytes=NUMBERS, block=NUMBERS, block_offset=NUMBERS, seals=SEAL_TABLES
)
JOBS = built(
    WriteJob,
    rank=RANKS,
    directory=PATHS,
    files=tuples(IMAGES),
    io_threads=st.integers(1, 64),
    chunk_nbytes=NUMBERS,
    retries=NUMBERS,
    sys_path=tuples(PATHS),
    faults=tuples(st.dictionaries(TEXT, NUMBERS | TEXT, max_size=2)),
)


@settings(max_examples=60)
@given(job=JOBS)
def test_a_job_arrives_as_it_was_sent(job: WriteJob) -> None:
    """Every field, names that are no UTF-8 and user callables' bytes, too; seal tables first."""
    tables = tuple(image.seals for image in job.files)
    number, arrived = seals_from_message(over_the_wire(seals_to_message(7, tables)))
    assert (number, arrived) == (7, tables)
    there = job_from_message(over_the_wire(job_to_message(job, 7)), {7: arrived})
    assert there == job
    assert repr(there) == repr(job)  # named tuples of other classes are equal


@given(report=REPORTS)
def test_a_report_arrives_as_it_was_sent(report: RankReport) -> None:
    """Receipts and failures, with each optional field present or not."""
    message = over_the_wire(report_to_message("j/0/1", report))
    assert message["job"] == "j/0/1"
    arrived = report_from_message(message)
    assert arrived == report
    assert repr(arrived) == repr(report)  # named tuples of other classes are equal


TABLE_LISTS = st.lists(SEAL_TABLES, min_size=1, max_size=3).map(tuple)


@given(data=st.data(), lists=st.lists(TABLE_LISTS, min_size=1, max_size=SEALS_KEPT + 3))
def test_a_writer_always_has_the_tables_that_a_job_refers_to(
    data: st.DataObject, lists: list[tuple[SealTable, ...]]
) -> None:
    """Whatever the order of jobs; tables are sent once while they are in use, and few are kept."""
    sent = SealsSent()
    held: dict[int, tuple[SealTable, ...]] = {}
    recent: list[int] = []
    for which in data.draw(st.lists(st.sampled_from(range(len(lists))), max_size=60)):
        number, messages = sent.refer(lists[which])
        for message in messages:
            if message["type"] == "forget_seals":
                del held[message["number"]]
            else:
                held.update([seals_from_message(over_the_wire(message))])
        assert held[number] == lists[which]
        assert len(held) <= SEALS_KEPT
        assert (not messages) == (which in recent)
        recent = [*(one for one in recent if one != which), which][-SEALS_KEPT:]


def test_equal_tables_are_distinguished_by_identity() -> None:
    """A table is kept alive while it is known, so that no other one can get its address."""
    sent = SealsSent()
    numbers = set()
    for _ in range(SEALS_KEPT):
        table = SealTable(templates=((0, 9, None),), blob_offsets=(0,), template_of_slot=(0,))
        number, messages = sent.refer((table,))
        assert [message["type"] for message in messages] == ["seals"]
        numbers.add(number)
    assert len(numbers) == SEALS_KEPT


def test_a_job_with_unknown_tables_is_answered_as_failed(
    wire: tuple[socket.socket, socket.socket],
) -> None:
    """The writer process says so and goes on; it neither ends nor writes anything."""
    ours, theirs = wire
    writer = _Writer(ours)
    (job, *_) = example_messages()
    seals: Message = {"type": "seals", "number": 3, "tables": []}
    for told in ([], [seals, {"type": "forget_seals", "number": 3}]):
        for message in (*told, job):
            writer.take(copy.deepcopy(message), [])
        received = Receiver(theirs).receive()
        assert received is not None
        report = report_from_message(received[0])
        assert received[0]["job"] == "j"
        assert isinstance(report, RankFailed)
        assert (report.failure.kind, report.failure.path) == ("ProtocolError", "/d")
        assert "3" in report.failure.message


def test_a_job_with_another_number_of_tables_is_a_protocol_error() -> None:
    """A file without a table, or the other way round, is not guessed at."""
    (job, *_) = example_messages()
    with pytest.raises(ProtocolError):
        job_from_message(job, {3: ()})


def read(message: dict[str, Any]) -> object:
    """What the message says, by the function that its receiver uses."""
    match message["type"]:
        case "write":
            return job_from_message(message, {3: (example_table(),)})
        case "seals":
            return seals_from_message(message)
        case _:
            return report_from_message(message)


def damaged(message: Any) -> Iterator[Any]:
    """The message with one part of it missing or replaced, for every part."""
    parts: list[Any] = []
    if isinstance(message, dict):
        parts = list(message)
    elif isinstance(message, list):
        parts = list(range(len(message)))
    for part in parts:
        without = copy.copy(message)
        del without[part]
        yield without
        others: list[Any] = [None, 17, "text", [], {}, [1], ["x"], [[1]]]
        for other in [*others, *damaged(message[part])]:
            changed = copy.copy(message)
            changed[part] = other
            yield changed


def test_a_damaged_message_is_a_protocol_error() -> None:
    """Whatever part is missing or of another kind: it is read, or refused as one typed error."""
    for message in example_messages():
        read(copy.deepcopy(message))
        for changed in damaged({key: message[key] for key in message if key != "type"}):
            with suppress(ProtocolError, UnknownSealsError):
                read({**copy.deepcopy(changed), "type": message["type"]})


def test_a_message_without_a_field_is_a_protocol_error() -> None:
    """No field of a job, of seal tables or of a receipt has a silent default."""
    job, written, _, seals = example_messages()
    for message in (job, seals):
        for name in set(message) - {"type", "descriptors"}:
            with pytest.raises(ProtocolError):
                read({key: value for key, value in message.items() if key != name})
    for name in written["report"]["receipts"][0]:
        damaged_report = copy.deepcopy(written)
        del damaged_report["report"]["receipts"][0][name]
        with pytest.raises(ProtocolError):
            report_from_message(damaged_report)


@pytest.fixture
def wire() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(30)
    with ours, theirs:
        yield ours, theirs


def header(magic: bytes, nbytes: int) -> bytes:
    return struct.pack("<4sQ", magic, nbytes)


MAGIC = encode({})[:4]
GARBAGE = {
    "foreign magic": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(64),
    "a longer message than any": header(MAGIC, MAX_MESSAGE_NBYTES + 1),
    "an absurd length": header(MAGIC, 2**64 - 1),
    "not JSON": header(MAGIC, 5) + b"hello",
    "not text": header(MAGIC, 4) + b"\xff\xfe\xfd\x80",
    "no object": header(MAGIC, 7) + b"[1,2,3]",
    "a number": header(MAGIC, 1) + b"7",
    "nothing": header(MAGIC, 0),
    "no type": header(MAGIC, 11) + b'{"job":"x"}',
    "a type that is no text": header(MAGIC, 10) + b'{"type":1}',
    "nested too deep": header(MAGIC, 100_000) + b"[" * 100_000,
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_what_is_no_message_is_a_protocol_error(
    kind: str, wire: tuple[socket.socket, socket.socket]
) -> None:
    """Refused as soon as it is known, without waiting for the length it claims."""
    ours, theirs = wire
    ours.sendall(GARBAGE[kind])
    with pytest.raises(ProtocolError):
        Receiver(theirs).receive()


@given(garbage=st.binary(min_size=12, max_size=100))
def test_random_bytes_are_never_taken_for_a_message(garbage: bytes) -> None:
    """Bytes that do not begin like a message are refused whatever they are."""
    assume(not garbage.startswith(MAGIC))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(30)
        ours.sendall(garbage)
        with pytest.raises(ProtocolError):
            Receiver(theirs).receive()


def test_a_message_in_pieces_is_put_together(wire: tuple[socket.socket, socket.socket]) -> None:
    """A timeout in the middle of a message loses nothing of it, wherever it is cut."""
    ours, theirs = wire
    theirs.settimeout(0.001)
    receiver = Receiver(theirs)
    raw = encode({"type": "ready", "pid": 7})
    for sent in range(1, len(raw)):
        ours.sendall(raw[:sent])
        assert not receiver.buffered()
        with pytest.raises(TimeoutError):
            receiver.receive()
        ours.sendall(raw[sent:])
        assert receiver.receive() == ({"type": "ready", "pid": 7}, [])


def test_a_receiver_that_does_not_wait_says_so(wire: tuple[socket.socket, socket.socket]) -> None:
    """Half a message is as good as none; the rest completes it."""
    ours, theirs = wire
    theirs.settimeout(None)
    receiver = Receiver(theirs, wait=False)
    raw = encode({"type": "t"})
    for piece in (b"", raw[:5], raw[5:-1]):
        ours.sendall(piece)
        with pytest.raises(BlockingIOError):
            receiver.receive()
    ours.sendall(raw[-1:])
    assert receiver.receive() == ({"type": "t"}, [])


def test_messages_sent_together_are_taken_one_by_one(
    wire: tuple[socket.socket, socket.socket],
) -> None:
    """Also where several arrive at once; the receiver then knows that one is here already."""
    ours, theirs = wire
    receiver = Receiver(theirs)
    ours.sendall(b"".join(encode({"type": "t", "n": n}) for n in range(3)))
    for n in range(3):
        received = receiver.receive()
        assert received is not None
        assert received[0]["n"] == n
        assert receiver.buffered() == (n < 2)


@pytest.mark.parametrize("rest", [b"", encode({"type": "t"})[:-3]], ids=["between", "within"])
def test_the_end_of_the_stream_is_no_message(
    rest: bytes, wire: tuple[socket.socket, socket.socket]
) -> None:
    """A peer that is gone, even in the middle of a message, is ``None``, not an error."""
    ours, theirs = wire
    ours.sendall(rest)
    ours.close()
    assert Receiver(theirs).receive() is None


def test_descriptors_arrive_with_their_message(wire: tuple[socket.socket, socket.socket]) -> None:
    """Of several messages in a row, each comes with its own descriptors, in order."""
    ours, theirs = wire
    counts = [1, 0, 1, 1, 0, 0, 1]
    sent: list[int] = []
    for number, count in enumerate(counts):
        descriptors = tuple(os.memfd_create(f"test-{number}-{n}") for n in range(count))
        for n, fd in enumerate(descriptors):
            os.write(fd, f"{number}.{n}".encode())
        send(ours, {"type": "map", "number": number}, descriptors)
        sent += descriptors
    receiver = Receiver(theirs)
    for number, count in enumerate(counts):
        received = receiver.receive()
        assert received is not None
        message, descriptors_here = received
        assert message == {"type": "map", "number": number}
        contents = [os.pread(fd, 10, 0).decode() for fd in descriptors_here]
        assert contents == [f"{number}.{n}" for n in range(count)]
        sent += descriptors_here
    for fd in sent:
        os.close(fd)


def test_sending_to_a_peer_that_is_gone_is_an_error(
    wire: tuple[socket.socket, socket.socket],
) -> None:
    """It does not end in silence: a waiter learns that there will be no answer."""
    ours, theirs = wire
    theirs.close()
    with pytest.raises(OSError):
        send(ours, {"type": "write"})
