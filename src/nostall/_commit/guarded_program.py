"""Pickles as programs, changed so that each dangerous step is checked before it is done.

Python's unpickler in C allocates any memo index and hashes any tuple as a key: 9 bytes take
gigabytes, 1 KiB keeps it busy indefinitely, and 1 MiB ends the process
(docs/decisions/0025-guarded-program.md). So a program may have only the instructions in pickles of
metadata, with lengths and memo indices that the file's length allows. Where it would make a tuple,
call a function, or set the state of an object, it calls ``persistent_load`` with the objects and a
:class:`Check` instead. C code makes only texts, numbers, lists, dictionaries, and instances without
state.
"""

from __future__ import annotations

import pickle
import re
import struct
import sys
from enum import IntEnum
from functools import lru_cache
from typing import Final, NoReturn

from nostall.errors import UnknownMetadataError, UntrustedMetadataError

HINT = (
    "a newer torch or a planner may have written it; if you trust it, read it with torch's own"
    " FileSystemReader"
)


def guarded(content: bytes) -> bytes:
    """The program at the beginning of ``content``, changed as above, in a single frame.

    Raises:
        UnknownMetadataError: It has an instruction that pickles of DCP metadata do not have.
        UntrustedMetadataError: It is not complete.
    """
    if content[:1] != pickle.PROTO or int.from_bytes(content[1:2], "little") not in _PROTOCOLS:
        _damaged("has a pickle protocol that DCP does not use")
    # A memo entry takes 16 bytes of memory, and the instruction that fills it 5 bytes of the file.
    match = _run_of_harmless(max(16, (len(content) // 5).bit_length())).match
    program = bytearray(content[:_PROTO_NBYTES] + pickle.FRAME + bytes(8))
    begin = at = _PROTO_NBYTES
    while True:
        end = match(content, at).end()  # type: ignore[union-attr]  # an empty one is a match
        op = content[end : end + 1]
        if op in _GUARDED:
            program += content[begin:end]
            program += _GUARDED[op]
            begin = at = end + 1
        elif op == pickle.STOP:
            program += content[begin : end + 1]
            struct.pack_into("<Q", program, _FRAME_AT, len(program) - _FRAME_AT - 8)
            return bytes(program)
        elif op in _SIZED:
            at = _end_of_sized(content, end)
        elif end > at:
            at = end  # a match has a limited length
        elif len(content) - end < _LENGTHS.get(op, 0):
            _damaged("is cut off")
        else:
            raise UnknownMetadataError(
                f"the metadata has the instruction {content[end : end + 5]!r}, which is not part of"
                " DCP metadata",
                phase="read",
                hint=HINT,
            )


def _damaged(what: str) -> NoReturn:
    raise UntrustedMetadataError(f"the metadata {what}", phase="read")


def _end_of_sized(content: bytes, at: int) -> int:
    begin = at + 1 + _SIZED[content[at : at + 1]]
    end = begin + int.from_bytes(content[at + 1 : begin], "little")
    if end > len(content):
        _damaged("is cut off, or has a length beyond its end")
    return end


@lru_cache
def _run_of_harmless(index_nbits: int) -> re.Pattern[bytes]:
    """A pattern for instructions that are safe in C, with memo indices of ``index_nbits`` bits."""
    nbytes, nbits = divmod(index_nbits, 8)
    index = [b"."] * nbytes + [rb"[\0-\x%02x]" % ((1 << nbits) - 1)] + [rb"\0"] * 4
    put = rb"\x94|q.|r" + b"".join(index[:4])
    number = rb"(?:K.|M..|J....)"
    instructions = (
        # Tuples of numbers only, and argument tuples, which are checked with the call.
        number + rb"(?:\x85|%s(?:\x86|%s\x87)?)?" % (number, number),
        rb"\(%s{1,64}t" % number,
        rb"[\x85\x86\x87t](?:%s)?(?=R)" % put,
        rb"\)\x81",  # an instance without arguments
        put,
        rb"[N\x88\x89)}\](0eausl\x93]|h.|j....|G.{8}|\x95.{8}",
        rb"c[^\n]{1,255}\n[^\n]{1,255}\n",
        *(_sized(pickle.BINUNICODE, 256), _sized(pickle.SHORT_BINUNICODE, 256)),
        _sized(pickle.LONG1, 9),
    )
    return re.compile(b"(?:%s)%s" % (b"|".join(instructions), _MANY), re.DOTALL)


def _sized(op: bytes, many: int) -> bytes:
    """A pattern for an instruction with less than ``many`` bytes; matches in a few steps."""
    high = rb"\0" * (_SIZED[op] - 1)
    sixteens = []
    for least in range(0, many, 16):
        lengths = range(least, min(least + 16, many))
        each = b"|".join(rb"\x%02x%s.{%d}" % (length, high, length) for length in lengths)
        sixteens.append(rb"(?=[\x%02x-\x%02x])(?:%s)" % (least, lengths[-1], each))
    return rb"\x%02x(?:%s)" % (op[0], b"|".join(sixteens))


_MANY: Final = b"*+" if sys.version_info >= (3, 12) else b"{0,1000}"
"""Any number; a limited one on Python versions where each repetition takes memory. Python 3.11.2
matches wrongly with ``*+`` and a lookahead: half of a row of tuples would pass unchecked."""
_PROTOCOLS: Final = range(2, 6)
_PROTO_NBYTES: Final = 2
_FRAME_AT: Final = 3
"""Offset of the length of the frame."""
_LENGTHS: Final = {
    b"": 1,
    **dict.fromkeys((pickle.BININT1, pickle.BINGET, pickle.BINPUT), 2),
    pickle.BININT2: 3,
    **dict.fromkeys((pickle.BININT, pickle.LONG_BINGET, pickle.LONG_BINPUT), 5),
    **dict.fromkeys((pickle.BINFLOAT, pickle.FRAME), 9),
    pickle.GLOBAL: 513,
}
"""Largest length of an instruction, in bytes; with fewer bytes left, the pickle is cut off."""
_SIZED: Final = {
    pickle.SHORT_BINUNICODE: 1,
    pickle.BINUNICODE: 4,
    pickle.BINUNICODE8: 8,
    pickle.SHORT_BINBYTES: 1,
    pickle.BINBYTES: 4,
    pickle.BINBYTES8: 8,
    pickle.LONG1: 1,
}
"""Instructions that push a text, bytes or a number: the length of their length field."""


class Check(IntEnum):
    """What ``persistent_load`` is given with a pair of operands and this number."""

    TUPLE = 0
    """A new tuple."""
    CALL = 1
    """A function and a tuple of its arguments."""
    STATE = 2
    """An instance and its state."""


def _checked(check: Check) -> bytes:
    return pickle.BININT1 + bytes([check]) + pickle.TUPLE2 + pickle.BINPERSID


_GUARDED: Final = {
    pickle.TUPLE1: pickle.TUPLE1 + _checked(Check.TUPLE),
    pickle.TUPLE2: pickle.TUPLE2 + _checked(Check.TUPLE),
    pickle.TUPLE3: pickle.TUPLE3 + _checked(Check.TUPLE),
    pickle.TUPLE: pickle.TUPLE + _checked(Check.TUPLE),
    pickle.REDUCE: pickle.TUPLE2 + _checked(Check.CALL),
    pickle.BUILD: pickle.TUPLE2 + _checked(Check.STATE),
}
"""Replacements: C pairs the operands with a number, and passes the pair to ``persistent_load``."""
