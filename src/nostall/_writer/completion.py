"""The content of a completion record: what the trainer has sent with the job, and the report.

The trainer's part comes first, then a line of JSON with all the rest, and the CRC-32 of both.
Nothing here imports torch, or trusts its input.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

from nostall._model import checksum
from nostall._model.jobs import Completion, RankWritten, WriteWork
from nostall._writer.framing import Message
from nostall._writer.messages import report_from_message, report_to_message
from nostall.errors import DamagedCheckpointError, ProtocolError

_FORMAT = 1
_SUM_NBYTES = 8


class CompletionRecord(NamedTuple):
    """What a rank has left."""

    began_s: float
    """When the save was planned, in seconds since the epoch, by the clock of the rank's host."""
    results: bytes
    """Pickled metadata that say where the rank's items are, under the planned names of files."""
    metadata: bytes
    """From the coordinator: the pickled metadata of the checkpoint, without places; else empty."""
    report: RankWritten
    """Of all its files, linked ones too."""


def encoded(completion: Completion, written: RankWritten) -> tuple[bytes, ...]:
    """The content of the record of a rank that has written its files."""
    receipts = (*completion.linked, *written.receipts)
    bare = tuple(each._replace(work=WriteWork(), failed_attempts=()) for each in receipts)
    line = {
        **report_to_message("", written._replace(receipts=bare)),
        "format": _FORMAT,
        "name": completion.name,
        "began": completion.began_s,
        "results_nbytes": len(completion.results),
    }
    pieces = (completion.results, completion.metadata, b"\n", json.dumps(line).encode())
    return (*pieces, b"%08x" % _sum(pieces))


def decoded(content: bytes, name: str, *, path: str) -> CompletionRecord:
    """The record with this content.

    Args:
        content: All of the file.
        name: Its name.
        path: For errors.

    Raises:
        DamagedCheckpointError: It is not what was written under this name.
    """
    try:
        if int(content[-_SUM_NBYTES:], 16) != _sum([content[:-_SUM_NBYTES]]):
            raise ValueError("the checksum differs")
        first, _, line = content[:-_SUM_NBYTES].rpartition(b"\n")
        plain: Message = json.loads(line)
        if plain["format"] != _FORMAT or plain["name"] != name:
            raise ValueError(f"format {plain['format']!r:.80}, name {plain['name']!r:.80}")
        began_s, nbytes = float(plain["began"]), int(plain["results_nbytes"])
        report = report_from_message(plain)
        if not (math.isfinite(began_s) and isinstance(report, RankWritten)):
            raise ValueError("it has no time, or reports a failure")
    except (ArithmeticError, LookupError, ProtocolError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(
            f"the record of a rank's files is damaged: {error!r:.200}",
            phase="read",
            path=path,
            hint="the save that it belongs to is lost; an older checkpoint stays",
        ) from error
    results, metadata = first[:nbytes], first[nbytes:]
    return CompletionRecord(began_s=began_s, results=results, metadata=metadata, report=report)


def _sum(pieces: Iterable[bytes]) -> int:
    return reduce(lambda crc32, piece: checksum.crc32(piece, crc32), pieces, 0)
