"""The content of a completion record: what the trainer has sent with the job, and the report.

The trainer's part comes first, the line of JSON with all the rest last, so that neither has to be
copied. Nothing here imports torch, or trusts its input.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nostall._model import checksum
from nostall._model.jobs import Completion, RankWritten
from nostall._writer.framing import Message
from nostall._writer.messages import report_from_message, report_to_message
from nostall.errors import DamagedCheckpointError, ProtocolError

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRecord:
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
    pieces = (completion.results, completion.metadata)
    report = replace(written, receipts=(*completion.linked, *written.receipts))
    line = {
        **report_to_message("", report),
        "format": _FORMAT,
        "began": completion.began_s,
        "pieces": [[len(piece), checksum.crc32(piece)] for piece in pieces],
    }
    return (*pieces, b"\n", json.dumps(line).encode())


def decoded(content: bytes, *, path: str) -> CompletionRecord:
    """The record with this content.

    Args:
        content: All of the file.
        path: For errors.

    Raises:
        DamagedCheckpointError: It is not what was written.
    """
    first, _, line = content.rpartition(b"\n")
    try:
        plain: Message = json.loads(line)
        if plain["format"] != _FORMAT:
            raise ValueError(f"unknown format {plain['format']!r:.80}")
        results, metadata = _pieces(first, plain["pieces"])
        began_s = float(plain["began"])
        report = report_from_message(plain)
    except (ArithmeticError, LookupError, ProtocolError, TypeError, ValueError) as error:
        raise _damaged(repr(error), path) from error
    if not isinstance(report, RankWritten):
        raise _damaged("it reports a failure", path)
    return CompletionRecord(began_s=began_s, results=results, metadata=metadata, report=report)


def _pieces(content: bytes, parts: Sequence[tuple[int, int]]) -> list[bytes]:
    found, begin = [], 0
    for nbytes, crc32 in parts:
        piece = content[begin : begin + nbytes]
        if len(piece) != nbytes or checksum.crc32(piece) != crc32:
            raise ValueError("the checksum differs")
        found.append(piece)
        begin += nbytes
    if begin != len(content) or len(found) != 2:
        raise ValueError("the length differs")
    return found


def _damaged(why: str, path: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"the record of a rank's files is damaged: {why:.200}",
        phase="read",
        path=path,
        hint="the save that it belongs to is lost; an older checkpoint stays",
    )
