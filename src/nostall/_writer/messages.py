"""Messages between trainer and writer process, as values and as plain data, checked field by field.

Every message about a save carries its job id; a receiver drops messages about unknown jobs. All
functions that decode raise :class:`ProtocolError` if a field is missing or of the wrong type.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nostall._model.jobs import (
    MOST_IO_THREADS,
    MOST_NBYTES,
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
from nostall._writer.framing import Message
from nostall.errors import ProtocolError

_MOST_CRC32 = (1 << 32) - 1
_MOST_HASH = (1 << 64) - 1


class UnknownSealsError(Exception):
    """A job refers to seal tables that were not sent, or were forgotten."""


@contextmanager
def _decoding(what: str) -> Iterator[None]:
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ProtocolError(f"{what} is malformed: {error!r:.200}") from error


def seals_to_message(number: int, tables: Sequence[SealTable]) -> Message:
    """The seal tables of a job's files as a separate message, which many jobs refer to."""
    return {
        "type": "seals",
        "number": number,
        "tables": [
            {
                "templates": [
                    [offset, nbytes, None if seal is None else _seal_to_plain(seal)]
                    for offset, nbytes, seal in table.templates
                ],
                "blob_offsets": _packed("Q", table.blob_offsets),
                "template_of_slot": _packed("I", table.template_of_slot),
            }
            for table in tables
        ],
    }


@_decoding("a message of seal tables")
def seals_from_message(message: Message) -> tuple[int, tuple[SealTable, ...]]:
    """The number and the tables in a message."""
    number = _count(message["number"])
    return number, tuple(_table_from_plain(plain) for plain in message["tables"])


def job_to_message(job: WriteJob, seals: int) -> Message:
    """A write job as a message; ``seals`` is the number of its seal tables at the receiver."""
    files = [
        {
            "name": image.name,
            "nbytes": image.nbytes,
            "block": image.block,
            "block_offset": image.block_offset,
        }
        for image in job.files
    ]
    stream = None if job.stream is None else b64encode(job.stream).decode()
    changed = {"files": files, "seals": seals, "stream": stream}
    return {**job._asdict(), **changed, "type": "write"}


@_decoding("a write job")
def job_from_message(message: Message, known: Mapping[int, Sequence[SealTable]]) -> WriteJob:
    """The write job in a message.

    Args:
        message: The message.
        known: The seal tables received before.

    Raises:
        UnknownSealsError: It refers to others; the message has a job and a rank to answer for.
    """
    return WriteJob(
        job=_of(str, message["job"]),
        rank=_count(message["rank"]),
        directory=_of(str, message["directory"]),
        files=tuple(
            _image_from_plain(plain, table)
            for plain, table in zip(
                message["files"], _tables_of(message["seals"], known), strict=True
            )
        ),
        sync_files=_of(bool, message["sync_files"]),
        io_threads=_count(message["io_threads"], MOST_IO_THREADS),
        chunk_nbytes=_count(message["chunk_nbytes"]),
        direct=_of(bool, message["direct"]),
        checksum_files=_of(bool, message["checksum_files"]),
        retries=_count(message["retries"]),
        stream=None if message["stream"] is None else b64decode(message["stream"]),
        sys_path=tuple(_of(str, path) for path in _of(list, message["sys_path"])),
        faults=tuple(_of(dict, fault) for fault in _of(list, message["faults"])),
    )


def report_to_message(job: str, report: RankReport) -> Message:
    """A rank's report as a message."""
    plain: Message
    if isinstance(report, RankFailed):
        kind, plain = "failed", {"failure": report.failure._asdict()}
    else:
        kind, plain = "written", {"receipts": [_receipt_to_plain(each) for each in report.receipts]}
    return {"type": kind, "job": job, "report": {"rank": report.rank, **plain}}


@_decoding("a report")
def report_from_message(message: Message) -> RankReport:
    """The report in a message."""
    plain = message["report"]
    rank = _count(plain["rank"])
    if message["type"] == "failed":
        return RankFailed(rank=rank, failure=failure_from_plain(plain["failure"]))
    return RankWritten(rank=rank, receipts=tuple(map(_receipt_from_plain, plain["receipts"])))


@_decoding("a failure")
def failure_from_plain(plain: Any) -> Failure:
    """The failure in a message."""
    failure = Failure(**plain)
    for value in (failure.kind, failure.message, failure.phase, failure.traceback):
        _of(str, value)
    for text in (failure.path, failure.hint):
        _of(str, text or "")
    for code in (failure.errno, failure.exit_code):
        _of(int, code or 0)
    return failure


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _count(value: Any, most: int = MOST_NBYTES) -> int:
    if not 0 <= _of(int, value) <= most:
        raise ValueError("a number out of range")
    return int(value)


def _seconds(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError("not a time")
    return float(value)


def progress_to_message(job: str, nbytes: int) -> Message:
    """The number of bytes of a job written so far, as a message."""
    return {"type": "progress", "job": job, "nbytes": nbytes}


@_decoding("the progress of a job")
def progress_from_message(message: Message) -> tuple[str, int]:
    """The job and the number of its bytes written so far."""
    return _of(str, message["job"]), _count(message["nbytes"])


def created_to_message(job: str, name: str) -> Message:
    """The name of a file made for a job, as a message."""
    return {"type": "created", "job": job, "name": name}


@_decoding("the name of a new file")
def created_from_message(message: Message) -> tuple[str, str]:
    """The job and the name of a file made for it, which does not lead out of the directory."""
    return _of(str, message["job"]), _file_name(message["name"])


def _file_name(value: Any) -> str:
    name: str = _of(str, value)
    if not is_shard_name(name):
        raise ValueError(f"{name!r:.80} leads out of the directory")
    return name


def _receipt_to_plain(receipt: FileReceipt) -> Message:
    return {**receipt._asdict(), "work": receipt.work._asdict()}


def _receipt_from_plain(plain: Message) -> FileReceipt:
    extents, work = plain["extents"], plain["work"]
    crc32 = plain["crc32_of_file"]
    return FileReceipt(
        name=_file_name(plain["name"]),
        planned_name=_of(str, plain["planned_name"]),
        nbytes=_count(plain["nbytes"]),
        crc32_of_file=None if crc32 is None else _count(crc32, _MOST_CRC32),
        extents=None
        if extents is None
        else tuple((_count(offset), _count(length)) for offset, length in extents),
        started_s=_seconds(plain["started_s"]),
        finished_s=_seconds(plain["finished_s"]),
        fsynced=_of(bool, plain["fsynced"]),
        work=WriteWork(
            checksum_s=_seconds(work["checksum_s"]),
            write_s=_seconds(work["write_s"]),
            fsync_s=_seconds(work["fsync_s"]),
            spans=tuple(map(_span_from_plain, work["spans"])),
        ),
        failed_attempts=tuple(_of(str, why) for why in _of(list, plain["failed_attempts"])),
    )


def _span_from_plain(plain: list[Any]) -> tuple[str, int, float, float]:
    phase, thread, begin_s, end_s = plain
    return _of(str, phase), _count(thread), _seconds(begin_s), _seconds(end_s)


def _seal_to_plain(seal: Seal) -> Message:
    return {**seal._asdict(), "id_names": seal.id_names.decode("ascii")}


def _packed(kind: str, numbers: Sequence[int]) -> str:
    return b64encode(array(kind, numbers).tobytes()).decode()


def _unpacked(kind: str, text: str) -> tuple[int, ...]:
    numbers = array(kind)
    numbers.frombytes(b64decode(text, validate=True))
    return tuple(numbers)


def _tables_of(number: int, known: Mapping[int, Sequence[SealTable]]) -> Sequence[SealTable]:
    if _count(number) not in known:
        raise UnknownSealsError(f"unknown seal tables: number {number}")
    return known[number]


def _table_from_plain(plain: Message) -> SealTable:
    return SealTable(
        templates=tuple(
            (_count(offset), _count(nbytes), None if seal is None else _seal_from_plain(seal))
            for offset, nbytes, seal in plain["templates"]
        ),
        blob_offsets=_unpacked("Q", plain["blob_offsets"]),
        template_of_slot=_unpacked("I", plain["template_of_slot"]),
    )


def _image_from_plain(plain: Message, seals: SealTable) -> FileImage:
    return FileImage(
        name=_of(str, plain["name"]),
        nbytes=_count(plain["nbytes"]),
        block=_count(plain["block"]),
        block_offset=_count(plain["block_offset"]),
        seals=seals,
    )


def _seal_from_plain(plain: Message) -> Seal:
    first, second = plain["payload_crc_at"]
    id_first, id_second = plain["id_crc_at"]
    return Seal(
        payload_crc_at=(_count(first), _count(second)),
        hash_before=_count(plain["hash_before"], _MOST_HASH),
        crcs_after=tuple(_count(crc32, _MOST_CRC32) for crc32 in plain["crcs_after"]),
        id_at=_count(plain["id_at"]),
        id_names=_of(str, plain["id_names"]).encode("ascii"),
        id_crc_at=(_count(id_first), _count(id_second)),
    )
